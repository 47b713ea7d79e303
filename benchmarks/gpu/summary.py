"""The table that a run ends with: how the parts went, and beside each prediction and target what a device says.

Predictions follow from machine code and bytes, for a copy of 4.3 TB/s and products of 790 TFLOP/s.
docs/notes/machine_code.md explains them, and has the same table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..paths import value_at
from .part import Outcome


@dataclass(frozen=True, slots=True)
class Target:
    """A row of the summary: a case, and the path of its figures in the JSON of a part, of which the least counts.

    predicted: a range, and its unit if it is no share of the bound. at_least: the target. at_most: likewise, of a time.
    """

    name: str
    predicted: str
    part: str
    path: str
    at_least: float | None = None
    at_most: float | None = None

    def find(self, result: dict[str, Any]) -> float | None:
        """Return the least figure, of medians where it has quartiles; None where the case was not reached."""
        values = value_at(result, self.path) or []
        return min((float(one["median"] if isinstance(one, dict) else one) for one in values), default=None)

    @property
    def bound(self) -> str:
        """The target in words."""
        if self.at_least is not None:
            return f"at least {self.at_least:g}"
        return "" if self.at_most is None else f"at most {self.at_most:g}"

    def verdict(self, measured: float | None) -> str:
        """Return met or MISSED, and nothing without a target or a figure."""
        if measured is None or not self.bound:
            return ""
        low, high = self.at_least or 0.0, float("inf") if self.at_most is None else self.at_most
        return "met" if low <= measured <= high else "MISSED"


PAGED, ROWS, SWAP, SERVING = "bench_paged_attention", "bench_reshape_gather", "bench_swap", "bench_serving_gpu"
SHARED = "bench_shared_prefix"
LLAMA = "results[*;model=llama 3 8B;"
DECODE, PREFILL = f"{LLAMA}kind=decode;queries=1;", f"{LLAMA}kind=prefill;dtype=bfloat16;seqs=1;keys=8192;"
MLA = "results[*;dtype=bfloat16;kind=decode;queries=1;seqs=64;keys=8192;model=deepseek mla"
WRITE = "results[*;operation=reshape_and_cache;case=llama NHD bfloat16;"
GATHER = "results[*;operation=gather_cache;tokens=65536;case=llama NHD "
STORE = "results[*;operation=store_chunk device;case=llama NHD bfloat16;tokens=2048]"
MOVES = "rows[*;direction!~copy;"
STEP = "decode[*;seqs=64;context=1024]"
TARGETS = (
    Target("decode bf16, 64 x 8192", "0.80 to 0.88", PAGED, f"{DECODE}dtype~bfloat;seqs=64;keys=8192].of bound", 0.85),
    Target("decode bf16, 1 x 8192", "0.45 to 0.55", PAGED, f"{DECODE}dtype~bfloat;seqs=1;keys=8192].of bound"),
    Target("decode bf16, 64 x 512", "0.55 to 0.65", PAGED, f"{DECODE}dtype~bfloat;seqs=64;keys=512].of bound"),
    Target("decode e4m3, 64 x 8192", "0.60 to 0.75", PAGED, f"{DECODE}dtype~e4m3;seqs=64;keys=8192].of bound", 0.7),
    Target("decode int8, 64 x 8192", "0.40 to 0.55", PAGED, f"{DECODE}dtype=int8;seqs=64;keys=8192].of bound"),
    Target("decode MLA, 16 heads", "0.45 to 0.55", PAGED, f"{MLA}, 16 heads].of bound", 0.5),
    Target("decode MLA, 128 heads", "0.27 to 0.35", PAGED, f"{MLA}].of bound"),
    Target("prefill bf16, 8192", "300 to 380 TFLOP/s", PAGED, f"{PREFILL}queries=8192].TFLOP/s"),
    Target("prefill bf16, 256 after 8k", "180 to 260 TFLOP/s", PAGED, f"{PREFILL}queries=256].TFLOP/s"),
    Target("decode, 32 share 4096 of 4224", "3 to 5 times apart", SHARED, "results[*;seqs=32;shared=4096].times"),
    Target("reshape_and_cache, 64 tokens", "3 us", ROWS, f"{WRITE}tokens=64].us"),
    Target("reshape_and_cache, 4096", "0.85 to 0.95", ROWS, f"{WRITE}tokens=4096].of copy"),
    Target("gather bf16, 65536", "0.85 to 0.95", ROWS, f"{GATHER}bfloat16].of copy"),
    Target("gather e4m3, 65536", "0.40 to 0.55", ROWS, f"{GATHER}float8_e4m3].of copy"),
    Target("store_chunk bf16, 2048", "0.85 to 0.95", ROWS, f"{STORE}.of copy"),
    Target("swap, pieces of 2 MiB", "0.95", SWAP, f"{MOVES}piece_bytes=2097152;num_pieces>31].of_bound", 0.95),
    Target("swap, pieces of 32 KiB", "0.75 to 0.90", SWAP, f"{MOVES}piece_bytes=32768;num_pieces>2047].of_bound", 0.9),
    Target("swap, pieces of 8 KiB", "0.65 to 0.85", SWAP, f"{MOVES}piece_bytes=8192;num_pieces>8191].of_bound", 0.6),
    Target("step of Qwen3-0.6B, 64 x 1024", "3.2 to 4.0 ms", SERVING, f"{STEP}.step ms"),
    Target("the same, over its bytes", "1.6 to 2.0", SERVING, f"{STEP}.over bytes", at_most=1.5),
)
"""Of swaps those that move 64 MiB at least: they take as long as their bytes, not as their launch."""


def summary_of(outcomes: Sequence[Outcome]) -> str:
    """Return the table of parts and targets, which ends in a newline."""
    parts = [f"{outcome.part:24}{outcome.seconds:8.1f} s  {_end_of(outcome)}" for outcome in outcomes]
    return "\n".join([*parts, "", *target_lines(outcomes), ""])


def target_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a line a target, after the header: shares are of the bound unless a unit is given."""
    results = {outcome.part: outcome.result or {} for outcome in outcomes}
    header = f"{'':32}{'predicted':22}{'measured':>12}  bound"
    return [header, *(_line(target, target.find(results.get(target.part, {}))) for target in TARGETS)]


def _line(target: Target, measured: float | None) -> str:
    figure = "not measured" if measured is None else f"{measured:.2f}"
    line = f"{target.name:32}{target.predicted:22}{figure:>12}  {target.bound:14}{target.verdict(measured)}"
    return line.rstrip()


def _end_of(outcome: Outcome) -> str:
    if outcome.code is None:
        return "no time left"
    return f"FAILED with exit code {outcome.code}: {outcome.last_line[:120]}" if outcome.has_failed else "passed"
