"""Cells and tables for models with states: hits of prefixes, speed of serving, the cost of a checkpoint."""

from collections.abc import Callable
from typing import Any

from kvpage.benchmarks.number_cells import Result, row_of, text
from kvpage.benchmarks.runs import SERVED

Cells = tuple[Callable[[Result], str], Callable[[Result], str]]


def requests_hit(trace: str) -> Cells:
    """Requests that find any token, beside those that do without marks, and by states at block borders."""

    def beside(result: Result) -> str:
        borders, unmarked = _hits(result, trace, "borders_hits"), _hits(result, trace, "hits", marked=False)
        return f"{borders}: states at block borders, as vLLM keeps them; {unmarked}: without the authors' marks"

    return lambda result: _hits(result, trace, "hits"), beside


def tokens_found(trace: str) -> Cells:
    """The part of the ideal that a tenth of the budget finds, beside its bound."""

    def measured(result: Result) -> str:
        return f"{100 * _row(result, trace)['tenth']:.1f} %"

    def beside(result: Result) -> str:
        row = _row(result, trace)
        said = {"bound": "no policy finds more", "borders_all_tenth": "states at all block borders"}
        return "; ".join(f"{100 * row[name]:.1f} %: {words}" for name, words in said.items())

    return measured, beside


def _row(result: Result, trace: str, marked: bool = True) -> Result:
    return row_of(result, "rows", trace=trace, marked=marked)


def _hits(result: Result, trace: str, name: str, marked: bool = True) -> str:
    row = _row(result, trace, marked)
    return f"{row[name]} of {row['requests']}"


HYBRID_ROWS: list[tuple[str, Cells]] = [
    ("prompts that find their system prompt of 1,600 tokens", requests_hit("aligned")),
    ("the same, shifted by 100 tokens against blocks of 528", requests_hit("shifted")),
    *(
        (f"{trace}, a tenth of the checkpoints: tokens found, of an oracle's that keeps all", tokens_found(trace))
        for trace in ("shifted", "short", "chats", "agents")
    ),
]

SERVING_COLUMNS = {
    "kvpage": "kvpage",
    "generate": "`generate`, one by one",
    "generate_padded": "`generate`, a padded batch",
    "forward": "the model's own forward",
}
NOT_MEASURED = "Not measured yet."


def requests_served(family: str) -> Cells:
    """Tokens a second of one family, beside the peers and what packing gains."""

    def measured(result: Result) -> str:
        return f"{_speed(_family(result, family), 'kvpage')} tokens/s"

    def beside(result: Result) -> str:
        row = _family(result, family)
        peers = [f"{_speed(row, name)}: {words}" for name, words in SERVING_COLUMNS.items() if name != "kvpage"]
        return "; ".join([*peers, f"kvpage has {_gain(row, 'pieces')} times that without packed mixers"])

    return measured, beside


def serving_table(results: dict[str, Result]) -> str:
    """Return the tokens a second of each family, and how much of it comes of packing.

    Args:
        results: the line of JSON of each run, by name.
    """
    rows = [row for run in SERVED if run in results for row in results[run]["families"]]
    if not rows:
        return NOT_MEASURED
    names = [*SERVING_COLUMNS.values(), "packed mixers gain"]
    lines = [f"| tokens/s of | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for row in rows:
        speeds = [_speed(row, name) for name in SERVING_COLUMNS]
        cells = [f"`{row['family']}`: {row['states']}", *speeds, _gain(row, "pieces")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def checkpoints_table(results: dict[str, Result]) -> str:
    """Return what a checkpoint costs, of each kind of state.

    Args:
        results: the line of JSON of each run, by name.
    """
    if "state_checkpoints" not in results:
        return NOT_MEASURED
    result = results["state_checkpoints"]
    names = (f"prefill of {result['prompt_tokens']:,} tokens", "a checkpoint adds", "to decoding", "a restore")
    lines = [f"| state | {' | '.join(names)}, and a copy of as many bytes |", "|---" * (len(names) + 1) + "|"]
    for row in result["families"]:
        state, prefill = f"{row['states']}, {row['slot_bytes'] / 2**20:.2f} MiB", row["prefill"]["without"]["median"]
        added = [_percent(row[name]) for name in ("prefill_added", "decode_added")]
        restore = f"{row['restore_us']['median']:.0f} us, {row['bound_us']['median']:.0f} us"
        lines.append(f"| {state} | {1e3 * prefill:,.0f} ms | {' | '.join(added)} | {restore} |")
    return "\n".join(lines)


def _family(result: Result, family: str) -> Result:
    return row_of(result, "families", family=family)


def _speed(row: Result, name: str) -> str:
    if name not in row["tokens_per_s"]:
        return "not run"
    wrong = ", wrong tokens" if name in row["wrong"] else ""
    return text(row["tokens_per_s"][name], 0) + wrong


def _gain(row: Result, name: str) -> str:
    return text(row["kvpage_over"][name], 2)


def _percent(figure: dict[str, Any]) -> str:
    median, low, high = (100 * figure[name] for name in ("median", "low", "high"))
    return f"{median:.1f} % ({low:.1f} to {high:.1f})"
