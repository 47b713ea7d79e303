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
"""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path

import torch
import transformers as tf

from kvpage.benchmarks.cells import Row
from kvpage.benchmarks.figure import result, seconds
from kvpage.benchmarks.pictures import bars
from kvpage.benchmarks.script import VLLM, WITHOUT, finish, option, parse
from kvpage.benchmarks.serving_bound import ProductsBound
from kvpage.benchmarks.serving_contenders import Contender, local_contenders
from kvpage.benchmarks.serving_peers import ServingPeer, serving_peers
from kvpage.benchmarks.serving_tokens import TokenJudge, contest, show_contest
from kvpage.benchmarks.serving_workloads import (
    DTYPES,
    MODELS,
    VOCAB,
    Workload,
    batches_of,
    make_model,
    make_workload,
)  # fmt: skip

CHOICE_ROUNDS = 3  # of the products among which the bound takes the fastest
WORKLOADS = ("separate", "shared", "multi-turn")
Peers = dict[str, ServingPeer]
QUICK = {"rounds": 1, "requests": 8, "conversations": 4, "turns": 2}
SLOW = ["generate_batch", "generate_copies"]  # left out by --quick


def own_seconds(run: Contender) -> float:
    return run().seconds


def measure(
    model: tf.PreTrainedModel, judge: TokenJudge, workload: Workload, options: argparse.Namespace, peers: Peers
) -> Row:
    runs = local_contenders(model, workload, options.tokens)
    for name, peer in peers.items():
        peer.prepare(workload, options.tokens)
        runs[name] = functools.partial(peer.serve, workload, options.tokens)
    runs = {name: run for name, run in runs.items() if name not in options.without}
    answers = {name: run() for name, run in runs.items()}
    bound = ProductsBound(model, batches_of(workload, options.tokens), CHOICE_ROUNDS)
    calls: dict[str, Callable[[], float]] = {"bound": lambda: seconds(bound.run)}
    calls |= {name: functools.partial(own_seconds, run) for name, run in runs.items()}
    num_tokens = workload.num_answers * options.tokens
    figures = contest(judge, workload, answers, calls, num_tokens, options.rounds, measure=result, warmups=0)
    return {"workload": workload.name, "requests": workload.num_answers, **figures, "products": bound.chosen}


def show(row: Row) -> None:
    print(f"\n{row['workload']}")
    show_contest(row)
    print("  products of the bound: " + "; ".join(f"{shape}: {name}" for shape, name in row["products"].items()))


def serving_options() -> argparse.Namespace:
    options = parse(
        "serving",
        __doc__,
        rounds=5,
        threads=torch.get_num_threads(),
        model=option("small", "33 million parameters, or 197 million", choices=MODELS),
        dtype=option("fp32", choices=DTYPES),
        workload=option(list(WORKLOADS[:2]), choices=WORKLOADS),
        requests=option(64, "of a workload of one turn"),
        prefix=option(1024, "tokens of the shared prefix", type=int),
        conversations=16,
        turns=4,
        turn_tokens=option(384, "new ones of each turn"),
        tokens=option(32, "to generate for each request"),
        quick=option(False, "one round of few requests, beside the fastest peers"),
        vllm=VLLM,
        preload=option([], "for kvpage_preloaded", metavar="LIBRARY", type=Path),
        without=WITHOUT,
    )
    if options.quick:
        vars(options).update(QUICK, without=[*options.without, *SLOW])
    return options


def main() -> None:
    options = serving_options()
    tf.logging.set_verbosity_error()
    model = make_model(MODELS[options.model], DTYPES[options.dtype], VOCAB)
    judge, results = TokenJudge(model), []
    with serving_peers(model, options.threads, options.vllm, options.preload) as peers:
        for name in options.workload:
            num = options.conversations if name == "multi-turn" else options.requests
            workload = make_workload(name, num, options.prefix, options.turn_tokens, options.turns, VOCAB)
            results.append(measure(model, judge, workload, options, peers))
            show(results[-1])
        version = peers["vllm"].hello["vllm"] if "vllm" in peers else None
    options.preload = [path.name for path in options.preload]
    speeds = {f"{one['workload']}: {name}": speed for one in results for name, speed in one["tokens_per_s"].items()}
    finish(options, lambda path: bars(path, speeds, "generated tokens/s"), vllm=version, results=results)


if __name__ == "__main__":
    main()
