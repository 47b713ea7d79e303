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

    python benchmarks/bench_hybrid_serving.py [--families NAME ...] [--hidden N] [--layers N] [--requests N]
                                              [--prompt-tokens N] [--tokens N] [--rounds N] [--threads N]
                                              [--without NAME ...] [--plot PATH]
"""

import argparse
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf

from kvpage.benchmarks.arguments import positive
from kvpage.benchmarks.figure import Figure, dumps, in_turns
from kvpage.benchmarks.hybrid_contenders import CONTENDERS, own_forward
from kvpage.benchmarks.runs import SERVED
from kvpage.benchmarks.serving_tokens import TokenJudge, compare_answers
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
    names = [name for name in CONTENDERS if name not in options.without]
    answers = {name: CONTENDERS[name](model, prompts, options.tokens) for name in names}
    judge = TokenJudge(model)
    compared = compare_answers(
        judge, Workload(kind, [prompts]), {name: Served([run()], 0.0) for name, run in answers.items()}
    )
    calls: dict[str, Callable[[], object]] = dict(answers)
    calls[BOUND] = own_forward(model, len(prompts), sum(map(len, prompts)) // len(prompts), options.tokens)
    times = in_turns(calls, options.rounds, rotates=True)
    return {
        "family": kind,
        "states": FAMILIES[kind][0],
        "parameters": sum(one.numel() for one in model.parameters()),
        "tokens_per_s": {name: Figure.rate(len(prompts) * options.tokens, taken) for name, taken in times.items()},
        "kvpage_over": {name: Figure.ratio(taken, times["kvpage"]) for name, taken in times.items()},
        "parted": {name: one.num_parted for name, one in compared.items()},
        "max_gap": {name: one.max_gap for name, one in compared.items()},
        "wrong": [name for name, one in compared.items() if one.max_gap > judge.max_rounding],
        "seconds": times,
    }


def show(row: dict[str, Any]) -> None:
    print(f"{row['family']}: {row['states']}, {row['parameters'] / 1e6:.0f} million parameters")
    print(f"{'':18} {'tokens/s':>22} {'kvpage is':>22} {'parted':>8} {'by at most':>12}")
    for name, speed in row["tokens_per_s"].items():
        over, parted = f"{row['kvpage_over'][name]:.2f}", row["parted"].get(name, "")
        gap = f"{row['max_gap'][name]:.1e}" if name in row["max_gap"] else ""
        wrong = "wrong" if name in row["wrong"] else ""
        print(f"  {name:16} {f'{speed:.1f}':>22} {over:>22} {parted:>8} {gap:>12} {wrong}", flush=True)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 4))
    names = list(rows[0]["tokens_per_s"])
    for place, name in enumerate(names):
        speeds = [row["tokens_per_s"][name] for row in rows]
        spread = [[one.median - one.low for one in speeds], [one.high - one.median for one in speeds]]
        at = [number + 0.8 * place / len(names) for number in range(len(rows))]
        axis.bar(at, [one.median for one in speeds], 0.75 / len(names), yerr=spread, label=name)
    axis.set_xticks([number + 0.35 for number in range(len(rows))], [row["family"] for row in rows], fontsize="small")
    axis.set(ylabel="generated tokens/s", ylim=(0, None))
    axis.legend(ncols=3, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, 1.2))
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=DEFAULT)
    parser.add_argument("--hidden", type=positive, default=512)
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--requests", type=positive, default=8, help="at once")
    parser.add_argument("--prompt-tokens", type=positive, default=256, help="the mean")
    parser.add_argument("--tokens", type=positive, default=32, help="of each answer")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    parser.add_argument("--without", nargs="+", default=[], choices=list(CONTENDERS)[1:], metavar="NAME")
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    tf.logging.set_verbosity_error()
    rows = []
    for kind in options.families:
        rows.append(measure(kind, options))
        show(rows[-1])
    if options.plot:
        plot(rows, options.plot)
    names = ("hidden", "layers", "requests", "prompt_tokens", "tokens", "rounds", "threads")
    settings = {name: getattr(options, name) for name in names}
    versions = {"torch": torch.__version__, "transformers": tf.__version__, "machine": platform.machine()}
    print(dumps({"benchmark": "hybrid_serving", **versions, **settings, "families": rows}))


if __name__ == "__main__":
    main()
