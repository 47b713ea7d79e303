"""Traffic: pages and speed of each call, for SGLang's metrics of its storage."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvpage.store.bytes.pieces import Pieces

Number = TypeVar("Number", int, float)
MAX_CALLS = 4096
"""Calls that are kept until SGLang asks. It asks in every step of its scheduler, if its metrics are on."""


@dataclass(slots=True)
class Traffic:
    """The calls since the last `taken`. Threads append; each deque is safe for that.

    Attributes:
        read_pages: Pages of each call that found some.
        read_speeds: GB/s of these calls.
        written_pages: Pages of each call that stored some.
        write_speeds: GB/s of these calls.
    """

    read_pages: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_CALLS))
    read_speeds: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_CALLS))
    written_pages: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_CALLS))
    write_speeds: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_CALLS))

    def read(self, flags: Sequence[bool], buffers: Sequence[Any], seconds: float) -> None:
        """Count a call that read pages.

        Args:
            flags: Which were found.
            buffers: Their memory, as tensors or Pieces.
            seconds: Of the call.
        """
        _count(self.read_pages, self.read_speeds, flags, buffers, seconds)

    def wrote(self, flags: Sequence[bool], buffers: Sequence[Any], seconds: float) -> None:
        """Count a call that stored pages.

        Args:
            flags: Which were stored.
            buffers: As for `read`.
            seconds: Of the call.
        """
        _count(self.written_pages, self.write_speeds, flags, buffers, seconds)

    def taken(self) -> tuple[list[int], list[float], list[int], list[float]]:
        """Return the pages and speeds of reads, and of writes, and forget them."""
        return _take(self.read_pages), _take(self.read_speeds), _take(self.written_pages), _take(self.write_speeds)


def _count(
    pages: deque[int], speeds: deque[float], flags: Sequence[bool], buffers: Sequence[Any], seconds: float
) -> None:
    moved = sum(_num_bytes(buffer) for flag, buffer in zip(flags, buffers, strict=True) if flag)
    if moved:
        pages.append(sum(flags))
        speeds.append(moved / max(seconds, 1e-9) / 1e9)


def _num_bytes(buffer: Any) -> int:
    return int(buffer.runs[:, 1].sum()) if isinstance(buffer, Pieces) else buffer.nbytes


def _take(values: deque[Number]) -> list[Number]:
    return [values.popleft() for _ in range(len(values))]
