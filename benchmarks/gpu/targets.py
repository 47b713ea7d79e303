"""What an H200 is predicted to reach, and what it should: summary.py puts beside it what a device says.

Predictions follow from machine code and bytes, for a copy of 4.3 TB/s and products of 790 TFLOP/s. docs/gpu.md explains
them, and has the same table.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Result = dict[str, Any]
Row = dict[str, Any]
SETTLED_BYTES = 64 << 20
"""A swap of so many bytes takes as long as its bytes, not as its launch."""


@dataclass(frozen=True, slots=True)
class Target:
    """A row of the summary.

    Args:
        name: The case.
        predicted: A range, and its unit if it is no share of the bound.
        part: Whose JSON has the figure.
        find: Takes this JSON, and gives the figure, or None where the case was not reached.
        at_least: The target; None without one.
        at_most: Likewise, of a time.
    """

    name: str
    predicted: str
    part: str
    find: Callable[[Result], float | None]
    at_least: float | None = None
    at_most: float | None = None

    @property
    def bound(self) -> str:
        """The target in words."""
        if self.at_least is not None:
            return f"at least {self.at_least:g}"
        return "" if self.at_most is None else f"at most {self.at_most:g}"

    def verdict(self, measured: float | None) -> str:
        """Return met or MISSED, and nothing without a target or a figure.

        Args:
            measured: The figure.
        """
        if measured is None or not self.bound:
            return ""
        low, high = self.at_least or 0.0, float("inf") if self.at_most is None else self.at_most
        return "met" if low <= measured <= high else "MISSED"


def number_of(value: Any) -> float:
    """Return a figure's number: the median where it has quartiles.

    Args:
        value: A number, or the JSON of a Figure.
    """
    return float(value["median"] if isinstance(value, dict) else value)


def figure(rows: str, name: str, **where: Any) -> Callable[[Result], float | None]:
    """Return what finds a figure in a table: the least of the rows that fit.

    Args:
        rows: The key of the table.
        name: The key of the figure.
        **where: Keys of a row and their values.
    """

    def find(result: Result) -> float | None:
        found = [row for row in result.get(rows, []) if _fits(row, where)]
        return min((number_of(row[name]) for row in found), default=None)

    return find


def _fits(row: Row, where: dict[str, Any]) -> bool:
    return all(row.get(key) == value for key, value in where.items())


def attention(name: str, kind: str, model: str, dtype: str, seqs: int, keys: int, queries: int = 1) -> Any:
    """Return what finds a figure of bench_paged_attention.

    Args:
        name: The key of the figure.
        kind: decode or prefill.
        model: Its name there.
        dtype: Of the cache.
        seqs: Sequences.
        keys: Of each.
        queries: Of each.
    """
    return figure("results", name, kind=kind, model=model, dtype=dtype, seqs=seqs, keys=keys, queries=queries)


def swap(piece_bytes: int) -> Callable[[Result], float | None]:
    """Return what finds the worse direction of swaps by pieces of a size, of as many bytes as settle.

    Args:
        piece_bytes: Of a piece.
    """

    def find(result: Result) -> float | None:
        rows = [row for row in result.get("rows", []) if row["direction"] in ("in", "out")]
        rows = [row for row in rows if row["piece_bytes"] == piece_bytes]
        settled = [row for row in rows if row["piece_bytes"] * row["num_pieces"] >= SETTLED_BYTES]
        return min((float(row["of_bound"]) for row in settled), default=None)

    return find


def rows(name: str, operation: str, case: str, tokens: int) -> Callable[[Result], float | None]:
    """Return what finds a figure of bench_reshape_gather.

    Args:
        name: The key of the figure.
        operation: Its name there.
        case: Likewise.
        tokens: Of the call.
    """
    return figure("results", name, operation=operation, case=case, tokens=tokens)


def step(name: str) -> Callable[[Result], float | None]:
    """Return what finds a figure of bench_serving_gpu's decode step.

    Args:
        name: The key of the figure.
    """
    return figure("decode", name, seqs=64, context=1024)


LLAMA, MLA, MLA_16 = "llama 3 8B", "deepseek mla", "deepseek mla, 16 heads"
BF16, E4M3, INT8 = "bfloat16", "float8_e4m3fn", "int8"
LLAMA_ROWS, LLAMA_FP8_ROWS = "llama NHD bfloat16", "llama NHD float8_e4m3"
PAGED, ROWS, SWAP, SERVING = "bench_paged_attention", "bench_reshape_gather", "bench_swap", "bench_serving_gpu"
SHARE, RATE = "of bound", "TFLOP/s"

TARGETS = (
    Target("decode bf16, 64 x 8192", "0.80 to 0.88", PAGED, attention(SHARE, "decode", LLAMA, BF16, 64, 8192), 0.85),
    Target("decode bf16, 1 x 8192", "0.45 to 0.55", PAGED, attention(SHARE, "decode", LLAMA, BF16, 1, 8192)),
    Target("decode bf16, 64 x 512", "0.55 to 0.65", PAGED, attention(SHARE, "decode", LLAMA, BF16, 64, 512)),
    Target("decode e4m3, 64 x 8192", "0.60 to 0.75", PAGED, attention(SHARE, "decode", LLAMA, E4M3, 64, 8192), 0.7),
    Target("decode int8, 64 x 8192", "0.40 to 0.55", PAGED, attention(SHARE, "decode", LLAMA, INT8, 64, 8192)),
    Target("decode MLA, 16 heads", "0.45 to 0.55", PAGED, attention(SHARE, "decode", MLA_16, BF16, 64, 8192), 0.5),
    Target("decode MLA, 128 heads", "0.27 to 0.35", PAGED, attention(SHARE, "decode", MLA, BF16, 64, 8192)),
    Target(
        "prefill bf16, 8192", "300 to 380 TFLOP/s", PAGED, attention(RATE, "prefill", LLAMA, BF16, 1, 8192, 8192)
    ),
    Target(
        "prefill bf16, 256 after 8k", "180 to 260 TFLOP/s", PAGED, attention(RATE, "prefill", LLAMA, BF16, 1, 8192, 256)
    ),
    Target("reshape_and_cache, 64 tokens", "3 us", ROWS, rows("us", "reshape_and_cache", LLAMA_ROWS, 64)),
    Target("reshape_and_cache, 4096", "0.85 to 0.95", ROWS, rows("of copy", "reshape_and_cache", LLAMA_ROWS, 4096)),
    Target("gather bf16, 65536", "0.85 to 0.95", ROWS, rows("of copy", "gather_cache", LLAMA_ROWS, 65536)),
    Target("gather e4m3, 65536", "0.40 to 0.55", ROWS, rows("of copy", "gather_cache", LLAMA_FP8_ROWS, 65536)),
    Target("store_chunk bf16, 2048", "0.85 to 0.95", ROWS, rows("of copy", "store_chunk device", LLAMA_ROWS, 2048)),
    Target("swap, pieces of 2 MiB", "0.95", SWAP, swap(2 << 20), 0.95),
    Target("swap, pieces of 32 KiB", "0.75 to 0.90", SWAP, swap(32 << 10), 0.9),
    Target("swap, pieces of 8 KiB", "0.65 to 0.85", SWAP, swap(8 << 10), 0.6),
    Target("step of Qwen3-0.6B, 64 x 1024", "5.5 to 6.5 ms", SERVING, step("step ms")),
    Target("the same, over its bytes", "2.7 to 3.2", SERVING, step("over bytes"), at_most=1.5),
)  # fmt: skip
