"""The table of right answers after blending, of the result of the run `blend_quality`."""

from kvpage.benchmarks.number_cells import Result, right

BLENDING = [
    ("tokens chosen by warmed segments", "behind itself", (0,)),
    ("tokens chosen as if the outcome were known", "oracle deviation", (1,)),
    ("tokens chosen by a check layer", "v at seams", (1,)),
    ("the same without `seam`, as in the paper", "v", (1,)),
]


def answers_table(results: dict[str, Result]) -> str:
    """Return the share of right answers after blending, by method and ratio.

    Args:
        results: the line of JSON of each run, by name.
    """
    result = results["blend_quality"]
    lines = ["| method | right answers at 15 % | at 30 % |", "|---|---|---|"]
    for what, method, check in BLENDING:
        lines.append(f"| {what} | {' | '.join(right(method, ratio, check)(result) for ratio in (0.15, 0.3))} |")
    full, plain = right("v", 1.0)(result), right("v", 0.0)(result)
    return "\n".join([*lines, f"| a full prefill | {full} | {full} |", f"| plain reuse | {plain} | {plain} |"])
