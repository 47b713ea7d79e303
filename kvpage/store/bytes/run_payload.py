"""RunPayload: runs of memory as the payload of one record, to be written or read without a copy in between.

memory    [ run | run ]   [ run ]   [ run | run ]
payload   [ stretch      | stretch      | str.. ]         of one size, whatever the runs are
"""

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpage.store.bytes.pieces import Pieces
from kvpage.store.tiers.stretches import Runs, gather_stretches, scatter_stretches

STRETCH_BYTES = 1 << 18  # of every record: who reads it may have other runs than who wrote it
MIN_RUN_BYTES = 4096  # of memory that is written to a file directly; shorter runs are copied into one piece first
STREAM_BYTES = 1 << 20  # of bytes written past the CPU's cache: the caller of a smaller read may find its bytes there


class RunPayload:
    """A source and a sink.

    runs: none is empty. One at address 0 takes no bytes, and is in no source. owner: keeps the memory alive.
    """

    stretch_bytes = STRETCH_BYTES
    piece_ends = None

    def __init__(self, runs: Runs, owner: Any = None) -> None:
        self._runs, self._owner = runs, owner
        self.num_bytes = int(runs[:, 1].sum())

    @classmethod
    def of(cls, pieces: Pieces) -> "RunPayload":
        """Return the payload of a record's memory."""
        return cls(pieces.runs, pieces.owners)

    def check_source(self) -> None:
        """Raise ValueError if there are bytes that no memory holds: they can be skipped, and not be stored."""
        if len(self._runs) and not self._runs[:, 0].all():
            raise ValueError("pieces must be whole where they are put, got some from a later start, or without a page")

    def fill(self, begin: int, buffer: memoryview, num_threads: int, streaming: bool) -> bytes:
        runs = self._cut(begin, len(buffer))
        return gather_stretches(runs, buffer, self.stretch_bytes, num_threads, streaming)

    def runs(self) -> Runs | None:
        """Return the memory; None for a payload without bytes, and for short runs."""
        return self._runs if 0 < len(self._runs) * MIN_RUN_BYTES <= self.num_bytes else None

    def take(self, begin: int, piece: memoryview, num_threads: int) -> bytes:
        runs, streaming = self._cut(begin, len(piece)), self.num_bytes >= STREAM_BYTES
        return scatter_stretches(piece, runs, self.stretch_bytes, num_threads, streaming)

    @functools.cached_property
    def _ends(self) -> npt.NDArray[np.int64]:
        """Return the bytes up to the end of each run. Several threads may make it: it is the same."""
        return np.cumsum(self._runs[:, 1])

    def _cut(self, begin: int, num_bytes: int) -> Runs:
        """Return the runs of the bytes from `begin` on."""
        if num_bytes == self.num_bytes:
            return self._runs
        end, ends = begin + num_bytes, self._ends
        first = int(np.searchsorted(ends, begin, side="right"))
        last = int(np.searchsorted(ends, end, side="left"))
        runs = self._runs[first : last + 1].copy()
        skipped = begin - (int(ends[first]) - int(runs[0, 1]))
        runs[-1, 1] -= int(ends[last]) - end
        runs[0, 1] -= skipped
        runs[0, 0] += skipped if runs[0, 0] else 0
        return runs
