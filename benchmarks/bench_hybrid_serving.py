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
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers as tf

from kvpage.benchmarks.cells import Row
from kvpage.benchmarks.contest import contest, show_contest
from kvpage.benchmarks.hybrid_contenders import contenders, own_forward
from kvpage.benchmarks.pictures import grouped
from kvpage.benchmarks.runs import SERVED
from kvpage.benchmarks.script import WITHOUT, finish, option, parse
from kvpage.benchmarks.serving_tokens import TokenJudge
from kvpage.benchmarks.serving_workloads import Prompts, Served, Workload, random_prompts
from kvpage.benchmarks.state_families import FAMILIES, VOCAB, Shape, make_family

DEFAULT = [family for families in SERVED.values() for family in families]
BOUND = "forward"


def make_prompts(num: int, num_tokens: int) -> Prompts:
    """Return prompts of half to one and a half times so many tokens, in a mixed order; the mean is that many."""
    lengths = np.linspace(0.5, 1.5, num) * num_tokens if num > 1 else np.array([num_tokens])
    mixed = np.random.default_rng(0).permutation(lengths)
    return random_prompts((max(int(length), 1) for length in mixed), VOCAB)


def measure(kind: str, options: argparse.Namespace) -> Row:
    model = make_family(kind, Shape(options.hidden, options.layers))
    prompts = make_prompts(options.requests, options.prompt_tokens)
    calls: dict[str, Callable[[], Any]] = {
        name: make() for name, make in contenders(model, prompts, options.tokens).items() if name not in options.without
    }
    answers = {name: Served([run()], 0.0) for name, run in calls.items()}
    calls[BOUND] = own_forward(model, len(prompts), sum(map(len, prompts)) // len(prompts), options.tokens)
    workload, num_tokens = Workload(kind, [prompts]), len(prompts) * options.tokens
    found = contest(TokenJudge(model), workload, answers, calls, num_tokens, options.rounds, rotates=True)
    num_parameters = sum(one.numel() for one in model.parameters())
    return {"family": kind, "states": FAMILIES[kind][0], "parameters": num_parameters, **found}


def main() -> None:
    options = parse(
        "hybrid_serving",
        __doc__,
        rounds=5,
        threads=torch.get_num_threads(),
        families=option(DEFAULT, choices=FAMILIES),
        hidden=512,
        layers=4,
        requests=option(8, "at once"),
        prompt_tokens=option(256, "the mean"),
        tokens=option(32, "of each answer"),
        without=WITHOUT,
    )
    tf.logging.set_verbosity_error()
    rows = []
    for kind in options.families:
        rows.append(measure(kind, options))
        print("\n{family}: {states}, {parameters:,} parameters".format(**rows[-1]))
        show_contest(rows[-1])
    series = {name: [row["tokens_per_s"][name] for row in rows] for name in rows[0]["tokens_per_s"]}
    finish(options, lambda path: grouped(path, options.families, series, "generated tokens/s"), families=rows)


if __name__ == "__main__":
    main()
