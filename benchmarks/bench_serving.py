"""How many tokens a second does the serving loop generate, beside transformers' own ways over the same model?

The bound is arithmetic: the model's linear layers alone, over the tokens that have to be computed at least (a shared
prefix once) in batches as large as the engine's, with torch's own matrix products, measured in the same run. Two
workloads:

    shared      64 requests that arrive together, one prefix of 1,024 tokens and tails of 16 to 64 of their own
    separate    64 requests without a common prefix, of 32 to 255 tokens

against `model.generate` on the left-padded batch (SDPA) and `model.generate_batch` (continuous batching, SDPA), where
this transformers has it. Each generates the same number of tokens a request, greedily. Before anything counts the
tokens must be equal, but for ties, which are counted: requests that part where two tokens' logits are equal up to
rounding. Then the contenders take turns, each round with a cache that starts empty. Medians.

    python benchmarks/bench_serving.py [--workload shared separate] [--rounds N] [--threads N] [--plot PATH]
"""

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers as tf

from kvpage import CacheConfig
from kvpage.serving import Engine, SamplingParams

MAX_TIE = 1e-4  # of logits around 4 in fp32, which differ by 1e-5 with the batch that a token is computed in
VOCAB, BLOCK_SIZE, BATCHED_TOKENS = 8192, 16, 2048
Prompts = list[list[int]]
Tokens = list[list[int]]


def make_model() -> tf.PreTrainedModel:
    config = tf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.05, pad_token_id=0, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return tf.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def make_prompts(workload: str, num_requests: int, prefix_len: int) -> Prompts:
    rng = np.random.default_rng(0)

    def tokens(length: int) -> list[int]:
        return rng.integers(1, VOCAB, length).tolist()

    if workload == "separate":
        return [tokens(int(rng.integers(32, 256))) for _ in range(num_requests)]
    prefix = tokens(prefix_len)
    return [prefix + tokens(int(rng.integers(16, 65))) for _ in range(num_requests)]


def run_kvpage(model: tf.PreTrainedModel, prompts: Prompts, max_tokens: int) -> Tokens:
    num_blocks = sum(-(-(len(prompt) + max_tokens) // BLOCK_SIZE) for prompt in prompts)
    config = CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=num_blocks)
    engine = Engine.from_model(model, config, max_num_batched_tokens=BATCHED_TOKENS)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return [output.token_ids for output in engine.generate(prompts, params)]


def run_generate(model: tf.PreTrainedModel, prompts: Prompts, max_tokens: int) -> Tokens:
    width = max(map(len, prompts))
    rows = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    tokens = model.generate(rows, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False)
    return tokens[:, width:].tolist()


def run_generate_batch(model: tf.PreTrainedModel, prompts: Prompts, max_tokens: int) -> Tokens:
    num_blocks = sum(-(-(len(prompt) + max_tokens) // BLOCK_SIZE) for prompt in prompts)
    batching = tf.ContinuousBatchingConfig(
        page_size=BLOCK_SIZE, num_blocks=num_blocks, max_batch_tokens=BATCHED_TOKENS, use_async_batching=False
    )
    generation = tf.GenerationConfig(max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    outputs = model.generate_batch(
        prompts, generation_config=generation, continuous_batching_config=batching, warmup=False
    )
    return [list(output.generated_tokens) for output in outputs.values()]


def run_bound(model: tf.PreTrainedModel, prompts: Prompts, max_tokens: int) -> Tokens:
    """The linear layers over the distinct prompt tokens in batches, then over one token a request and step."""
    weights = [module.weight for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    layers = [weight for weight in weights if weight is not model.lm_head.weight]
    distinct = num_distinct_prefixes(prompts)
    batches = [BATCHED_TOKENS] * (distinct // BATCHED_TOKENS) + [distinct % BATCHED_TOKENS]
    batches += [len(prompts)] * (max_tokens - 1)
    inputs = {size: torch.randn(max(batches), size) for size in {weight.shape[1] for weight in weights}}
    with torch.no_grad():
        for num_tokens in batches:
            for weight in layers:
                F.linear(inputs[weight.shape[1]][:num_tokens], weight)
            F.linear(inputs[model.lm_head.weight.shape[1]][: len(prompts)], model.lm_head.weight)
    return []


def num_distinct_prefixes(prompts: Prompts) -> int:
    """The nodes of a trie of the prompts: tokens that differ in themselves or in what stands before them."""
    nodes: dict[tuple[int, int], int] = {}
    for prompt in prompts:
        node = 0
        for token in prompt:
            node = nodes.setdefault((node, token), len(nodes) + 1)
    return len(nodes)


def contenders() -> dict[str, Callable[[tf.PreTrainedModel, Prompts, int], Tokens]]:
    found = {"bound": run_bound, "kvpage": run_kvpage, "generate": run_generate}
    if hasattr(tf, "ContinuousBatchingConfig"):
        found["generate_batch"] = run_generate_batch
    else:
        print(f"generate_batch is left out: transformers {tf.__version__} has no ContinuousBatchingConfig")
    return found


def check_tokens(model: tf.PreTrainedModel, prompts: Prompts, max_tokens: int, names: list[str]) -> int:
    """The contenders' tokens must be equal, or nothing is timed; returns how often they part at a tie."""
    found = {name: contenders()[name](model, prompts, max_tokens) for name in names}
    num_ties = 0
    for name, tokens in found.items():
        for number, (prompt, theirs, ours) in enumerate(zip(prompts, tokens, found["kvpage"], strict=True)):
            if theirs != ours:
                gap = gap_where_they_part(model, prompt, theirs, ours)
                if gap > MAX_TIE:
                    raise SystemExit(f"{name} and kvpage differ in request {number}, by {gap:.1e} in its logits")
                num_ties += 1
    return num_ties


def gap_where_they_part(model: tf.PreTrainedModel, prompt: list[int], first: list[int], second: list[int]) -> float:
    """How far the logits of the first two tokens that differ lie apart, in a forward of the request alone."""
    index = next(index for index, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + first[:index]])).logits[0, -1]
    return float((logits[first[index]] - logits[second[index]]).abs())


def measure(model: tf.PreTrainedModel, workload: str, options: argparse.Namespace) -> dict:
    prompts = make_prompts(workload, options.requests, options.prefix)
    runs = contenders()
    num_ties = check_tokens(model, prompts, options.tokens, [name for name in runs if name != "bound"])
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.rounds):
        for name, run in runs.items():
            gc.collect()
            before = time.perf_counter()
            run(model, prompts, options.tokens)
            times[name].append(time.perf_counter() - before)
    seconds = {name: statistics.median(taken) for name, taken in times.items()}
    num_tokens = len(prompts) * options.tokens
    speeds = {name: num_tokens / taken for name, taken in seconds.items()}
    ratios = {name: statistics.median(map(lambda a, b: a / b, taken, times["kvpage"])) for name, taken in times.items()}
    return {"workload": workload, "tokens_per_s": speeds, "kvpage_over": ratios, "ties": num_ties, "seconds": times}


def show(result: dict) -> None:
    print(f"\n{result['workload']:16} {'tokens/s':>10} {'kvpage is':>10}")
    for name, speed in result["tokens_per_s"].items():
        print(f"  {name:14} {speed:10.1f} {result['kvpage_over'][name]:9.2f}x")


def plot(results: list[dict], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(results), figsize=(5 * len(results), 3.5), squeeze=False)
    for axis, result in zip(axes[0], results, strict=True):
        axis.bar(list(result["tokens_per_s"]), list(result["tokens_per_s"].values()))
        axis.set_title(f"64 requests, {result['workload']} prefixes")
        axis.set_ylabel("generated tokens/s")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", choices=["shared", "separate"], default=["shared", "separate"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prefix", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=32, help="to generate for each request")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tf.logging.set_verbosity_error()
    model = make_model()
    results = [measure(model, workload, options) for workload in options.workload]
    for result in results:
        show(result)
    if options.plot:
        plot(results, options.plot)
    versions = {"torch": torch.__version__, "transformers": tf.__version__, "machine": platform.machine()}
    settings = {name: getattr(options, name) for name in ("rounds", "requests", "prefix", "tokens", "threads")}
    print(json.dumps({"benchmark": "serving", **versions, **settings, "results": results}))


if __name__ == "__main__":
    main()
