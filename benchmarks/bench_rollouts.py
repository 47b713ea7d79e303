"""How fast are GRPO's rollouts by kvpage, beside TRL's plain generation?

A batch has some prompts, and a group of completions for each. TRL's plain generation is one `model.generate` over the
left-padded batch, in which each prompt is as often as its group is large. kvpage computes each prompt once: see
PolicyEngine. The cache is empty at the beginning of every batch, as after an update of the weights. Contenders:

    bound            arithmetic: the model's matrix products alone over the tokens that must be computed at least, by
                     the fastest products of this machine (serving_bound.py)
    kvpage           PolicyEngine.sample
    generate         the call of `model.generate` that GRPOTrainer makes
    generate_batch   transformers' continuous batching, which GRPOTrainer has as an option

First all complete greedily. The tokens must be those of kvpage, or lie within rounding of the best logit
(serving_tokens.py). Then all draw tokens, as GRPO does, and take turns. No completion ends early. Medians with their
quartiles count.

    python benchmarks/bench_rollouts.py [--prompts N] [--group N] [--prompt-tokens N] [--tokens N] [--model small]
                                        [--rounds N] [--threads N] [--without NAME ...] [--plot PATH]
"""

import argparse
import functools
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from kvpage import CacheConfig
from kvpage.benchmarks.arguments import positive
from kvpage.benchmarks.figure import Figure, dumps, in_turns
from kvpage.benchmarks.serving_bound import ProductsBound
from kvpage.benchmarks.serving_tokens import TokenJudge, compare_answers
from kvpage.benchmarks.serving_workloads import (
    BATCHED_TOKENS,
    MODELS,
    VOCAB,
    Prompts,
    Served,
    Tokens,
    Workload,
    batches_of,
    make_model,
)
from kvpage.integrations.trl import PolicyEngine
from kvpage.serving import EngineConfig, SamplingParams

BLOCK_SIZE, CHOICE_ROUNDS, PAD = 16, 3, 0
Contender = Callable[[bool], Tokens]
"""Completes all prompts, with drawn tokens (True) or the likeliest ones (False)."""


def make_prompts(num: int, group: int, num_tokens: int) -> Prompts:
    rows = torch.randint(1, VOCAB, (num, num_tokens), generator=torch.Generator().manual_seed(0)).tolist()
    return [row for row in rows for _ in range(group)]


def engine_config(prompts: Prompts, max_tokens: int) -> EngineConfig:
    num_blocks = sum(-(-(len(prompt) + max_tokens) // BLOCK_SIZE) + 1 for prompt in prompts)
    return EngineConfig(CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=num_blocks), max_num_seqs=len(prompts))


def paged_contender(model: tf.PreTrainedModel, prompts: Prompts, max_tokens: int) -> Contender:
    policy = PolicyEngine(model, engine_config(prompts, max_tokens))

    def complete(draws: bool) -> Tokens:
        params = SamplingParams(max_tokens=max_tokens, temperature=1.0 if draws else 0.0, top_k=0)
        return [sample.token_ids for sample in policy.sample(prompts, params)]

    return complete


def generation_config(max_tokens: int, draws: bool) -> tf.GenerationConfig:
    """As GRPOTrainer's own."""
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0} if draws else {}
    return tf.GenerationConfig(max_new_tokens=max_tokens, do_sample=draws, pad_token_id=PAD, **sampling)


@torch.no_grad()
def complete_by_generate(model: Any, prompts: Prompts, max_tokens: int, draws: bool) -> Tokens:
    width = max(map(len, prompts))
    rows = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    config = generation_config(max_tokens, draws)
    found: Tokens = model.generate(rows, attention_mask=mask, generation_config=config)[:, width:].tolist()
    return found


@torch.no_grad()
def complete_by_generate_batch(model: Any, prompts: Prompts, max_tokens: int, draws: bool) -> Tokens:
    num_blocks = engine_config(prompts, max_tokens).cache_config.num_gpu_blocks
    batching = tf.ContinuousBatchingConfig(
        page_size=BLOCK_SIZE, num_blocks=num_blocks, max_batch_tokens=BATCHED_TOKENS, use_async_batching=False
    )
    config = generation_config(max_tokens, draws)
    config.eos_token_id = -1
    outputs = model.generate_batch(prompts, generation_config=config, continuous_batching_config=batching, warmup=False)
    return [list(output.generated_tokens) for output in outputs.values()]


def contenders(model: tf.PreTrainedModel, options: argparse.Namespace, prompts: Prompts) -> dict[str, Contender]:
    found: dict[str, Contender] = {
        "kvpage": paged_contender(model, prompts, options.tokens),
        "generate": functools.partial(complete_by_generate, model, prompts, options.tokens),
    }
    if hasattr(tf, "ContinuousBatchingConfig"):
        found["generate_batch"] = functools.partial(complete_by_generate_batch, model, prompts, options.tokens)
    return {name: run for name, run in found.items() if name not in options.without}


def measure(model: tf.PreTrainedModel, options: argparse.Namespace) -> dict[str, Any]:
    prompts = make_prompts(options.prompts, options.group, options.prompt_tokens)
    workload = Workload("rollouts", [prompts])
    runs = contenders(model, options, prompts)
    judge = TokenJudge(model)
    compared = compare_answers(judge, workload, {name: Served([run(False)], 0.0) for name, run in runs.items()})
    bound = ProductsBound(model, batches_of(workload, options.tokens), CHOICE_ROUNDS)
    calls: dict[str, Callable[[], object]] = {"bound": bound.run}
    calls |= {name: functools.partial(run, True) for name, run in runs.items()}
    times = in_turns(calls, options.rounds)
    return {
        "tokens_per_s": {name: Figure.rate(len(prompts) * options.tokens, taken) for name, taken in times.items()},
        "kvpage_over": {name: Figure.ratio(taken, times["kvpage"]) for name, taken in times.items()},
        "parted": {name: one.num_parted for name, one in compared.items()},
        "max_gap": {name: one.max_gap for name, one in compared.items()},
        "max_rounding": judge.max_rounding,
        "products": bound.chosen,
        "seconds": times,
    }


def show(result: dict[str, Any]) -> None:
    print(f"{'':18} {'tokens/s':>22} {'kvpage is':>22} {'parted':>8} {'by at most':>12}")
    for name, speed in result["tokens_per_s"].items():
        over, parted = f"{result['kvpage_over'][name]:.2f}", result["parted"].get(name, "")
        gap = f"{result['max_gap'][name]:.1e}" if name in result["max_gap"] else ""
        print(f"  {name:16} {f'{speed:.1f}':>22} {over:>22} {parted:>8} {gap:>12}")


def plot(result: dict[str, Any], path: Path) -> None:
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 3.5))
    speeds = result["tokens_per_s"]
    axis.barh(list(speeds), [speed.median for speed in speeds.values()])
    axis.invert_yaxis()
    axis.set(title="rollouts", xlabel="generated tokens/s")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="small", help="33 million parameters, or 197 million")
    parser.add_argument("--prompts", type=positive, default=4, help="distinct ones")
    parser.add_argument("--group", type=positive, default=8, help="completions of each prompt")
    parser.add_argument("--prompt-tokens", type=positive, default=512)
    parser.add_argument("--tokens", type=positive, default=64, help="of each completion")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    parser.add_argument("--without", nargs="+", default=[], metavar="NAME", help="contenders to leave out")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    if "kvpage" in options.without:
        parser.error("--without must leave kvpage in, with whose tokens all are compared")
    return options


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    tf.logging.set_verbosity_error()
    model = make_model(MODELS[options.model], torch.float32, VOCAB)
    result = measure(model, options)
    show(result)
    if options.plot:
        plot(result, options.plot)
    names = ("model", "prompts", "group", "prompt_tokens", "tokens", "rounds", "threads")
    settings = {name: getattr(options, name) for name in names}
    versions = {"torch": torch.__version__, "transformers": tf.__version__, "machine": platform.machine()}
    print(dumps({"benchmark": "rollouts", **versions, **settings, **result}))


if __name__ == "__main__":
    main()
