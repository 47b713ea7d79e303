"""How many tokens a second does the serving loop generate, beside transformers' own ways over the same model?

The bound is arithmetic: the model's linear layers alone, over the tokens that have to be computed at least (a shared
prefix once) in batches as large as the engine's, with torch's own matrix products, measured in the same run. Two
workloads:

    shared      64 requests that arrive together, one prefix of 1,024 tokens and tails of 16 to 64 of their own
    separate    64 requests without a common prefix, of 32 to 255 tokens

against `model.generate` on the left-padded batch (SDPA) and `model.generate_batch` (continuous batching, SDPA), where
this transformers has it. The fair peers of the shared prefix compute it once, too: `generate_prefix` gives one
`generate` over the batch the prefix's DynamicCache, repeated for each row; `generate_copies` gives each request a
`generate` of its own with a copy of it. With --vllm PYTHON, an interpreter for which vLLM's CPU build is installed,
vLLM serves the same prompts in a process of its own, which sleeps while others run.

Each generates the same number of tokens a request, greedily. Before anything counts the tokens must be equal, but for
ties, which are counted: requests that part where two tokens' logits are equal up to rounding. Then the contenders take
turns, each round with a cache that starts empty. Medians with their quartiles.

    python benchmarks/bench_serving.py [--workload shared separate] [--rounds N] [--threads N] [--vllm PYTHON]
        [--plot PATH]
"""

import argparse
import contextlib
import copy
import functools
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers as tf

from kvpage import CacheConfig
from kvpage.benchmarks.figure import Figure, dumps, in_turns
from kvpage.benchmarks.vllm_process import VLLMProcess
from kvpage.serving import Engine, EngineConfig, SamplingParams

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
    engine = Engine.from_model(model, EngineConfig(config, max_num_batched_tokens=BATCHED_TOKENS))
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return [output.token_ids for output in engine.generate(prompts, params)]


def run_generate(model: Any, prompts: Prompts, max_tokens: int) -> Tokens:
    width = max(map(len, prompts))
    rows = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    tokens = model.generate(rows, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False)
    return tokens[:, width:].tolist()


def run_generate_prefix(model: Any, prompts: Prompts, max_tokens: int, prefix_len: int) -> Tokens:
    """One batch over one prefix: its cache is computed once and repeated; the tails are padded on their left."""
    prefix, tails = prompts[0][:prefix_len], [prompt[prefix_len:] for prompt in prompts]
    width = max(map(len, tails))
    rows = torch.tensor([prefix + [0] * (width - len(tail)) + tail for tail in tails])
    mask = torch.ones_like(rows)
    for row, tail in zip(mask, tails, strict=True):
        row[prefix_len : prefix_len + width - len(tail)] = 0
    cache = prefill(model, prefix)
    cache.batch_repeat_interleave(len(prompts))
    tokens = model.generate(
        rows, attention_mask=mask, past_key_values=cache, max_new_tokens=max_tokens, do_sample=False
    )
    return tokens[:, rows.shape[1] :].tolist()


def run_generate_copies(model: Any, prompts: Prompts, max_tokens: int, prefix_len: int) -> Tokens:
    """One request after the other, each with a copy of the prefix's cache."""
    cache, found = prefill(model, prompts[0][:prefix_len]), []
    for prompt in prompts:
        rows = torch.tensor([prompt])
        tokens = model.generate(
            rows, attention_mask=torch.ones_like(rows), past_key_values=copy.deepcopy(cache),
            max_new_tokens=max_tokens, do_sample=False,
        )  # fmt: skip
        found.append(tokens[0, len(prompt) :].tolist())
    return found


def prefill(model: tf.PreTrainedModel, tokens: list[int]) -> tf.DynamicCache:
    cache = tf.DynamicCache()
    with torch.no_grad():
        model(torch.tensor([tokens]), past_key_values=cache, logits_to_keep=1)
    return cache


def run_generate_batch(model: Any, prompts: Prompts, max_tokens: int) -> Tokens:
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
    """The nodes of a trie of the prompts: tokens that differ in themselves or in the tokens before them."""
    nodes: dict[tuple[int, int], int] = {}
    for prompt in prompts:
        node = 0
        for token in prompt:
            node = nodes.setdefault((node, token), len(nodes) + 1)
    return len(nodes)


def contenders(prefix_len: int) -> dict[str, Callable[[tf.PreTrainedModel, Prompts, int], Tokens]]:
    """prefix_len: of the prefix that all prompts share, or 0."""
    found: dict[str, Callable[[tf.PreTrainedModel, Prompts, int], Tokens]] = {
        "bound": run_bound, "kvpage": run_kvpage, "generate": run_generate,
    }  # fmt: skip
    if prefix_len:
        found["generate_prefix"] = functools.partial(run_generate_prefix, prefix_len=prefix_len)
        found["generate_copies"] = functools.partial(run_generate_copies, prefix_len=prefix_len)
    if hasattr(tf, "ContinuousBatchingConfig"):
        found["generate_batch"] = run_generate_batch
    else:
        print(f"generate_batch is left out: transformers {tf.__version__} has no ContinuousBatchingConfig")
    return found


def check_tokens(model: tf.PreTrainedModel, prompts: Prompts, found: dict[str, Tokens]) -> int:
    """The contenders' tokens must be equal, or nothing is timed; returns how often they part at a tie."""
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
    """Return the distance between the logits of the first two tokens that differ, in a forward of the request alone."""
    index = next(index for index, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + first[:index]])).logits[0, -1]
    return float((logits[first[index]] - logits[second[index]]).abs())


def measure(
    model: tf.PreTrainedModel, workload: str, options: argparse.Namespace, vllm: VLLMProcess | None
) -> dict[str, Any]:
    prompts = make_prompts(workload, options.requests, options.prefix)
    runs = {
        name: functools.partial(run, model, prompts, options.tokens)
        for name, run in contenders(options.prefix if workload == "shared" else 0).items()
    }
    if vllm:
        runs["vllm"] = functools.partial(vllm.generate, prompts, options.tokens)
    found = {name: run() for name, run in runs.items() if name != "bound"}
    num_ties = check_tokens(model, prompts, found)
    times = in_turns(runs, options.rounds, warmups=0)
    num_tokens = len(prompts) * options.tokens
    return {
        "workload": workload,
        "tokens_per_s": {name: Figure.rate(num_tokens, taken) for name, taken in times.items()},
        "kvpage_over": {name: Figure.ratio(taken, times["kvpage"]) for name, taken in times.items()},
        "ties": num_ties,
        "seconds": times,
    }


def show(result: dict[str, Any]) -> None:
    print(f"\n{result['workload']:16} {'tokens/s':>22} {'kvpage is':>22}")
    for name, speed in result["tokens_per_s"].items():
        print(f"  {name:16} {f'{speed:.1f}':>22} {result['kvpage_over'][name]:.2f}")


def plot(results: list[dict[str, Any]], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(results), figsize=(5 * len(results), 3.5), squeeze=False)
    for axis, result in zip(axes[0], results, strict=True):
        axis.barh(list(result["tokens_per_s"]), [speed.median for speed in result["tokens_per_s"].values()])
        axis.invert_yaxis()
        axis.set_title(f"{result['workload']} prompts")
        axis.set_xlabel("generated tokens/s")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", choices=["shared", "separate"], default=["shared", "separate"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prefix", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=32, help="to generate for each request")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--vllm", metavar="PYTHON", type=Path, help="an interpreter that has vLLM's CPU build")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tf.logging.set_verbosity_error()
    model = make_model()
    with VLLMProcess.start(options.vllm, model, options.threads) if options.vllm else contextlib.nullcontext() as vllm:
        results = [measure(model, workload, options, vllm) for workload in options.workload]
    for result in results:
        show(result)
    if options.plot:
        plot(results, options.plot)
    versions: dict[str, str | None] = {
        "torch": torch.__version__,
        "transformers": tf.__version__,
        "machine": platform.machine(),
    }
    versions["vllm"] = vllm.version if vllm else None
    settings = {name: getattr(options, name) for name in ("rounds", "requests", "prefix", "tokens", "threads")}
    print(dumps({"benchmark": "serving", **versions, **settings, "results": results}))


if __name__ == "__main__":
    main()
