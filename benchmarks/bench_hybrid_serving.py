"""How fast does Engine serve models with states, beside `model.generate`? And what does it gain by packing?

    forward           a bound: the model's own forward over as many tokens, in a rectangle: prompts of one length, then
                      a step for all of them at once. No padding, no choice of tokens, no cache to keep
    kvpage            Engine, all requests at once
    pieces            the same, but each call of a mixer computes one sequence; other layers compute all at once
    alone             the same, but each step computes one sequence
    generate          `model.generate`, one request after the other
    generate_padded   `model.generate` over one left-padded batch

First all answer greedily, and the answers must be right: each token of kvpage is that of `generate`, or lies within
rounding of the best logit of the model's own forward. Then so must those of the padded batch be, or the table says
"wrong". Then all take turns, beginning with the next one each time. Medians with their quartiles count.
"""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf

from kvpage.benchmarks.contest import contest, show_contest
from kvpage.benchmarks.hybrid_contenders import CONTENDERS, own_forward
from kvpage.benchmarks.pictures import drawn
from kvpage.benchmarks.runs import SERVED
from kvpage.benchmarks.script import Options, finish
from kvpage.benchmarks.serving_tokens import TokenJudge
from kvpage.benchmarks.serving_workloads import Prompts, Served, Workload
from kvpage.benchmarks.state_families import FAMILIES, VOCAB, Shape, make_family

DEFAULT = [family for families in SERVED.values() for family in families]
BOUND = "forward"


def make_prompts(num: int, num_tokens: int) -> Prompts:
    """Return prompts of half to one and a half times so many tokens, in a mixed order; the mean is that many."""
    rng = np.random.default_rng(0)
    lengths = np.linspace(0.5, 1.5, num) * num_tokens if num > 1 else np.array([num_tokens])
    return [rng.integers(1, VOCAB, max(int(length), 1)).tolist() for length in rng.permutation(lengths)]


def measure(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    model = make_family(kind, Shape(options.hidden, options.layers))
    prompts = make_prompts(options.requests, options.prompt_tokens)
    calls: dict[str, Callable[[], Any]] = {
        name: make(model, prompts, options.tokens) for name, make in CONTENDERS.items() if name not in options.without
    }
    answers = {name: Served([run()], 0.0) for name, run in calls.items()}
    calls[BOUND] = own_forward(model, len(prompts), sum(map(len, prompts)) // len(prompts), options.tokens)
    workload, num_tokens = Workload(kind, [prompts]), len(prompts) * options.tokens
    found = contest(TokenJudge(model), workload, answers, calls, num_tokens, options.rounds, rotates=True)
    num_parameters = sum(one.numel() for one in model.parameters())
    return {"family": kind, "states": FAMILIES[kind][0], "parameters": num_parameters, **found}


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    names = list(rows[0]["tokens_per_s"])
    with drawn(path, size=(8, 4)) as axis:
        for place, name in enumerate(names):
            speeds = [row["tokens_per_s"][name] for row in rows]
            spread = [[one.median - one.low for one in speeds], [one.high - one.median for one in speeds]]
            at = [number + 0.8 * place / len(names) for number in range(len(rows))]
            axis.bar(at, [one.median for one in speeds], 0.75 / len(names), yerr=spread, label=name)
        families = [row["family"] for row in rows]
        axis.set_xticks([number + 0.35 for number in range(len(rows))], families, fontsize="small")
        axis.set(ylabel="generated tokens/s", ylim=(0, None))
        axis.legend(ncols=3, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, 1.2))


def parse() -> argparse.Namespace:
    parser = Options("hybrid_serving", __doc__, rounds=5, threads=torch.get_num_threads())
    parser.add("--families", DEFAULT, choices=FAMILIES)
    parser.add("--hidden", 512)
    parser.add("--layers", 4)
    parser.add("--requests", 8, help="at once")
    parser.add("--prompt-tokens", 256, help="the mean")
    parser.add("--tokens", 32, help="of each answer")
    parser.add_without()
    return parser.parse()


def main() -> None:
    options = parse()
    tf.logging.set_verbosity_error()
    rows = []
    for kind in options.families:
        rows.append(measure(kind, options))
        print("\n{family}: {states}, {parameters:,} parameters".format(**rows[-1]))
        show_contest(rows[-1])
    finish(options, functools.partial(plot, rows), families=rows)


if __name__ == "__main__":
    main()
