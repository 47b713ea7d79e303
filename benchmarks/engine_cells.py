"""Cells of the tables of numbers about the engine's own time: see number_cells.py for the others."""

from collections.abc import Callable
from typing import Any

from kvpage.benchmarks.number_cells import Result, row_of, span, text

Cell = Callable[[Result], str]
NO_ROWS: Result = {"rows": []}
SHOWN_STEPS = [
    ("64 sequences, greedy", {"seqs": 64, "mode": "greedy"}),
    ("256, greedy", {"seqs": 256, "mode": "greedy"}),
    ("256, greedy, while 1,000 requests wait", {"seqs": 256, "mode": "greedy", "waiting": 1000}),
    ("256, sampled", {"seqs": 256, "mode": "sampled"}),
    ("256, sampled with penalties", {"seqs": 256, "mode": "penalties"}),
]


def step_row(result: Result, **wanted: Any) -> Result:
    """Return a step of bench_engine_overhead; of 1,024 logits and without waiting requests, if nothing else is said."""
    return row_of(result, "rows", operation="decode", **{"vocab": 1024, "waiting": 0, **wanted})


def step(**wanted: Any) -> Cell:
    return lambda result: f"{text(step_row(result, **wanted)['kvpage us'], 0)} us"


def step_beside(**wanted: Any) -> Cell:
    return lambda result: _beside(step_row(result, **wanted), "argmax alone", "vLLM's scheduler and KV manager alone")


def admission(given: str) -> tuple[Cell, Cell]:
    def row(result: Result) -> Result:
        return row_of(result, "rows", operation="admit", given=given)

    return lambda r: f"{text(row(r)['kvpage us'], 0)} us", lambda r: _beside(row(r), "", "vLLM's")


def _beside(row: Result, bound: str, peer: str) -> str:
    found = [f"{text(row['argmax us'], 0)} us: {bound}"] if "argmax us" in row else []
    found += [f"{text(row['vllm us'], 0)} us: {peer}"] if "vllm us" in row else []
    return "; ".join(found)


def layer(model: str, dtype: str, num_seqs: int) -> tuple[Cell, Cell]:
    """Return the cells of bench_layer_overhead: besides the native calls, and these."""

    def row(result: Result) -> Result:
        return row_of(result, "rows", model=model, dtype=dtype, seqs=num_seqs)

    return (
        lambda r: f"{text(row(r)['besides us'], 1)} us",
        lambda r: f"{text(row(r)['native us'], 1)} us: the native calls",
    )


def products(dtype: str, num_rows: int) -> tuple[Cell, Cell]:
    """Return the cells of bench_linear over all shapes: GF/s; shares of the bound and of torch's speed."""

    def rows(result: Result) -> list[Result]:
        return [row for row in result["rows"] if row["dtype"] == dtype and row["rows"] == num_rows]

    def beside(result: Result) -> str:
        found = [f"{span(row['of bound'] for row in rows(result))} of the bound"]
        found += [f"{span(row['of torch'] for row in rows(result))} times as fast as `F.linear`"]
        return "; ".join(found)

    return lambda result: f"{span((row['kvpage GF/s'] for row in rows(result)), 0)} GF/s", beside


def parts_table(results: dict[str, Result]) -> str:
    """Return the parts of the engine's own time in a decode step, us on the wall.

    Args:
        results: the line of JSON of each run, by name.
    """
    if "engine_overhead" not in results:
        return "Not measured yet."
    rows = [(what, step_row(results["engine_overhead"], **wanted)) for what, wanted in SHOWN_STEPS]
    parts = list(rows[0][1]["parts us"])
    lines = [f"| us of a step | {' | '.join(parts)} |", "|---" * (len(parts) + 1) + "|"]
    lines += [f"| {what} | {' | '.join(_parts(row, parts))} |" for what, row in rows]
    return "\n".join(lines)


def step_parts_table(results: dict[str, Result]) -> str:
    """Return the parts of whole steps of a model, before and after: us on the wall, and shares.

    Args:
        results: the line of JSON of each run, by name.
    """
    runs = {"step_parts_before": ", before", "step_parts": ""}
    rows = [
        row | {"step": row["step"] + when} for run, when in runs.items() for row in results.get(run, NO_ROWS)["rows"]
    ]
    if not rows:
        return "Not measured yet."
    lines = [
        f"| a step of | in all | {' | '.join(rows[0]['parts us'])} |",
        "|---" * (len(rows[0]["parts us"]) + 2) + "|",
    ]
    for row in rows:
        whole = row["us"]["median"]
        cells = (f"{part['median']:,.0f} us, {100 * part['median'] / whole:.0f} %" for part in row["parts us"].values())
        lines.append(f"| {row['step']} | {whole:,.0f} us | {' | '.join(cells)} |")
    return "\n".join(lines)


def _parts(row: Result, parts: list[str]) -> list[str]:
    return [f"{row['parts us'][part]['median']:,.0f}" for part in parts]
