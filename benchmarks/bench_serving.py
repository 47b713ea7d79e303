"""How many tokens a second does the serving loop generate, beside vLLM's CPU build and transformers' own ways?

The bound is arithmetic: the model's matrix products alone, over the tokens that have to be computed at least (what
several share once), in batches as large as the engine's. For each shape it takes the fastest of the products that this
machine has, by a measurement in the same run: serving_bound.py lists them. Workloads:

    separate      requests without a common prefix, of 32 to 255 tokens
    shared        requests that arrive together, one prefix of 1,024 tokens and tails of 16 to 64 of their own
    multi-turn    16 conversations of 4 turns, each of 384 new tokens after all that was before, answers included

The peers, over the same weights:

    vllm              vLLM's CPU build with --vllm PYTHON, in a process of its own with tcmalloc and Intel's OpenMP
                      preloaded, as its guide says, where they are there
    kvpage_preloaded  kvpage in a process of its own with the libraries of --preload
    generate          `model.generate` on the left-padded batch (SDPA)
    generate_prefix   the same over the shared prefix's DynamicCache, which is computed once and repeated for each row
    generate_copies   a `generate` for each request, over the prefix's cache; nothing of it is copied
    generate_kept     one batch a turn, whose DynamicCache is kept from turn to turn
    generate_batch    continuous batching, where this transformers has it; it computes every prefix again

Each generates the same number of tokens a request, greedily, and starts with an empty cache. Before anything counts the
answers are compared. Where two part, a forward of the request alone in fp32 says how far each token's logit is from the
best. kvpage's must lie within rounding; a peer's distance is shown: serving_tokens.py. Then all take turns. The time is
that of the calls that answer, in the process that answers. A process that waits sleeps. Medians with their quartiles.
In bf16 torch's products are slow on a CPU without AVX-512: ask for few requests, or leave peers out.

    python benchmarks/bench_serving.py [--model small] [--dtype fp32] [--workload separate shared] [--rounds N]
        [--threads N] [--quick] [--without NAME ...] [--vllm PYTHON] [--preload LIBRARY ...] [--plot PATH]
"""

import argparse
import functools
import gc
import platform
import time
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from kvpage.benchmarks.arguments import positive
from kvpage.benchmarks.figure import Figure, dumps
from kvpage.benchmarks.serving_bound import ProductsBound
from kvpage.benchmarks.serving_contenders import Contender, local_contenders
from kvpage.benchmarks.serving_peers import ServingPeer, serving_peers
from kvpage.benchmarks.serving_tokens import TokenJudge, compare_answers
from kvpage.benchmarks.serving_workloads import (
    DTYPES,
    MODELS,
    VOCAB,
    Served,
    Workload,
    batches_of,
    make_model,
    make_workload,
)

CHOICE_ROUNDS = 3  # of the products among which the bound takes the fastest
QUICK = {"rounds": 1, "requests": 8, "conversations": 4, "turns": 2}
SLOW = ["generate_batch", "generate_copies"]  # left out by --quick


def run_bound(bound: ProductsBound) -> Served:
    before = time.perf_counter()
    bound.run()
    return Served([], time.perf_counter() - before)


def take_turns(runs: dict[str, Contender], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each in each round."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, run in runs.items():
                taken[name].append(run().seconds)
    finally:
        gc.enable()
    return taken


def measure(
    model: tf.PreTrainedModel,
    judge: TokenJudge,
    workload: Workload,
    options: argparse.Namespace,
    peers: dict[str, ServingPeer],
) -> dict[str, Any]:
    runs = local_contenders(model, workload, options.tokens)
    for name, peer in peers.items():
        peer.prepare(workload, options.tokens)
        runs[name] = functools.partial(peer.serve, workload, options.tokens)
    runs = {name: run for name, run in runs.items() if name not in options.without}
    compared = compare_answers(judge, workload, {name: run() for name, run in runs.items()})
    bound = ProductsBound(model, batches_of(workload, options.tokens), CHOICE_ROUNDS)
    runs = {"bound": functools.partial(run_bound, bound), **runs}
    times = take_turns(runs, options.rounds)
    num_tokens = workload.num_answers * options.tokens
    return {
        "workload": workload.name,
        "requests": workload.num_answers,
        "tokens_per_s": {name: Figure.rate(num_tokens, taken) for name, taken in times.items()},
        "kvpage_over": {name: Figure.ratio(taken, times["kvpage"]) for name, taken in times.items()},
        "parted": {name: one.num_parted for name, one in compared.items()},
        "max_gap": {name: one.max_gap for name, one in compared.items()},
        "max_rounding": judge.max_rounding,
        "products": bound.chosen,
        "seconds": times,
    }


def show(result: dict[str, Any]) -> None:
    print(f"\n{result['workload']:16} {'tokens/s':>22} {'kvpage is':>22} {'parted':>8} {'by at most':>12}")
    for name, speed in result["tokens_per_s"].items():
        over, parted = f"{result['kvpage_over'][name]:.2f}", result["parted"].get(name, "")
        gap = f"{result['max_gap'][name]:.1e}" if name in result["max_gap"] else ""
        print(f"  {name:16} {f'{speed:.1f}':>22} {over:>22} {parted:>8} {gap:>12}")
    print("  products of the bound: " + "; ".join(f"{shape}: {name}" for shape, name in result["products"].items()))


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
    pyplot.close(figure)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    workloads = ["separate", "shared", "multi-turn"]
    parser.add_argument("--model", choices=MODELS, default="small", help="33 million parameters, or 197 million")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--workload", nargs="+", choices=workloads, default=workloads[:2])
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--requests", type=positive, default=64, help="of a workload of one turn")
    parser.add_argument("--prefix", type=int, default=1024, help="tokens of the shared prefix")
    parser.add_argument("--conversations", type=positive, default=16)
    parser.add_argument("--turns", type=positive, default=4)
    parser.add_argument("--turn-tokens", type=positive, default=384, help="new ones of each turn")
    parser.add_argument("--tokens", type=positive, default=32, help="to generate for each request")
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    parser.add_argument("--without", nargs="+", default=[], metavar="NAME", help="contenders to leave out")
    parser.add_argument("--quick", action="store_true", help="one round of few requests, beside the fastest peers")
    parser.add_argument("--vllm", metavar="PYTHON", type=Path, help="an interpreter that has vLLM's CPU build")
    parser.add_argument("--preload", nargs="+", default=[], metavar="LIBRARY", type=Path, help="for kvpage_preloaded")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    if options.quick:
        vars(options).update(QUICK, without=[*options.without, *SLOW])
    if "kvpage" in options.without:
        parser.error("--without must leave kvpage in, with whose tokens all are compared")
    return options


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    tf.logging.set_verbosity_error()
    model = make_model(MODELS[options.model], DTYPES[options.dtype], VOCAB)
    judge = TokenJudge(model)
    with serving_peers(model, options.threads, options.vllm, options.preload) as peers:
        results = []
        for name in options.workload:
            num = options.conversations if name == "multi-turn" else options.requests
            workload = make_workload(name, num, options.prefix, options.turn_tokens, options.turns, VOCAB)
            results.append(measure(model, judge, workload, options, peers))
            show(results[-1])
        versions = {"vllm": peers["vllm"].hello["vllm"] if "vllm" in peers else None}
    if options.plot:
        plot(results, options.plot)
    versions |= {"torch": torch.__version__, "transformers": tf.__version__, "machine": platform.machine()}
    names = ("model", "dtype", "rounds", "prefix", "turn_tokens", "tokens", "threads")
    settings = {name: getattr(options, name) for name in names} | {"preload": [path.name for path in options.preload]}
    print(dumps({"benchmark": "serving", **versions, **settings, "results": results}))


if __name__ == "__main__":
    main()
