"""Further tables of the pages: parts of steps, models with states, answers after blending."""

from typing import Any

from kvpage.benchmarks.cells import fill, markdown
from kvpage.benchmarks.number_table import SERVING_COLUMNS, Results, answered, family, step
from kvpage.benchmarks.runs import SERVED

NOT_MEASURED = "Not measured yet."
SHOWN_STEPS: list[tuple[str, dict[str, Any]]] = [
    ("64 sequences, greedy", {"seqs": 64, "mode": "greedy"}),
    ("256, greedy", {"seqs": 256, "mode": "greedy"}),
    ("256, greedy, while 1,000 requests wait", {"seqs": 256, "mode": "greedy", "waiting": 1000}),
    ("256, sampled", {"seqs": 256, "mode": "sampled"}),
    ("256, sampled with penalties", {"seqs": 256, "mode": "penalties"}),
]
BLENDING = [
    ("tokens chosen by warmed segments", "behind itself", (0,)),
    ("tokens chosen as if the outcome were known", "oracle deviation", (1,)),
    ("tokens chosen by a check layer", "v at seams", (1,)),
    ("the same without `seam`, as in the paper", "v", (1,)),
]
CHECKPOINTS = (
    "{states}, {slot_bytes/1048576:.2f} MiB",
    "{prefill[without].median*1000:,.0f} ms",
    *(
        f"{{{name}.median*100:.1f}} % ({{{name}.low*100:.1f}} to {{{name}.high*100:.1f}})"
        for name in ("prefill_added", "decode_added")
    ),
    "{restore_us.median:.0f} us, {bound_us.median:.0f} us",
)


def parts_table(results: Results) -> str:
    """Return the parts of the engine's own time in a decode step, us on the wall.

    Args:
        results: the line of JSON of each run, by name.
    """
    if "engine_overhead" not in results:
        return NOT_MEASURED
    rows = [(what, step(**wanted)(results["engine_overhead"])["parts us"]) for what, wanted in SHOWN_STEPS]
    cells = [[what, *(f"{part.median:,.0f}" for part in parts.values())] for what, parts in rows]
    return markdown(["us of a step", *rows[0][1]], cells)


def step_parts_table(results: Results) -> str:
    """Return the parts of whole steps of a model, before and after: us on the wall, and shares.

    Args:
        results: the line of JSON of each run, by name.
    """
    runs = {"step_parts_before": ", before", "step_parts": ""}
    rows = [(row["step"] + when, row) for run, when in runs.items() if run in results for row in results[run]["rows"]]
    if not rows:
        return NOT_MEASURED
    cells = []
    for what, row in rows:
        whole = row["us"].median
        parts = (f"{part.median:,.0f} us, {100 * part.median / whole:.0f} %" for part in row["parts us"].values())
        cells.append([what, f"{whole:,.0f} us", *parts])
    return markdown(["a step of", "in all", *rows[0][1]["parts us"]], cells)


def serving_table(results: Results) -> str:
    """Return the tokens a second of each family, and how much of it comes of packing.

    Args:
        results: the line of JSON of each run, by name.
    """
    measured = [run for run in SERVED if run in results]
    rows = [family(row["family"])(results[run]) for run in measured for row in results[run]["families"]]
    if not rows:
        return NOT_MEASURED
    cells = [
        [
            fill("`{family}`: {states}", row),
            *(_speed(row, name) for name in SERVING_COLUMNS),
            fill("{kvpage_over[pieces]:,.2f}", row),
        ]
        for row in rows
    ]
    return markdown(["tokens/s of", *SERVING_COLUMNS.values(), "packed mixers gain"], cells)


def _speed(row: dict[str, Any], name: str) -> str:
    if name not in row["tokens_per_s"]:
        return "not run"
    return fill(f"{{tokens_per_s[{name}]:,.0f}}{{wrong[{name}]}}", row)


def checkpoints_table(results: Results) -> str:
    """Return what a checkpoint costs, of each kind of state.

    Args:
        results: the line of JSON of each run, by name.
    """
    if "state_checkpoints" not in results:
        return NOT_MEASURED
    result = results["state_checkpoints"]
    titles = ["state", f"prefill of {result['prompt_tokens']:,} tokens", "a checkpoint adds", "to decoding"]
    rows = [[fill(template, row) for template in CHECKPOINTS] for row in result["families"]]
    return markdown([*titles, "a restore, and a copy of as many bytes"], rows)


def answers_table(results: Results) -> str:
    """Return the share of right answers after blending, by method and ratio.

    Args:
        results: the line of JSON of each run, by name.
    """

    def right(method: str, ratio: float, check: tuple[int, ...] = (1,)) -> str:
        return f"{100 * answered(results['blend_quality'], method, ratio, check)['all'][0]:.1f} %"

    rows = [[what, *(right(method, ratio, check) for ratio in (0.15, 0.3))] for what, method, check in BLENDING]
    ends = [["a full prefill", *[right("v", 1.0)] * 2], ["plain reuse", *[right("v", 0.0)] * 2]]
    return markdown(["method", "right answers at 15 %", "at 30 %"], [*rows, *ends])
