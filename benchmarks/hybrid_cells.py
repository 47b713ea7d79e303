"""Cells of the tables for hits of hybrid models."""

from collections.abc import Callable

from kvpage.benchmarks.number_cells import Result, row_of

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
