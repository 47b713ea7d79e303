"""Memory of a device: copies of the host's regions, that are written back when the launch is done.

host      ....[region]..........[region]....          addresses of the process
arena     [region][gap][region][gap]                  bytes here; all else is out of bounds
"""

import ctypes
from collections.abc import Iterable

import numpy as np
from support.ptx.machine.access_log import AccessLog, Clock
from support.ptx.scalars import UNSIGNED, PtxError
from support.ptx.source.program import aligned

Region = tuple[int, int]  # address, bytes
_LINE = 16  # as aligned as a region is in the process, up to this


class GlobalMemory:
    """regions: what a launch may touch; those that touch each other are one."""

    def __init__(self, regions: Iterable[Region]) -> None:
        self.regions = _merged(regions)
        self.starts = np.array([start for start, _ in self.regions] or [0], np.uint64)
        self.ends = np.array([end for _, end in self.regions] or [0], np.uint64)
        self.places: list[int] = []
        place = _LINE
        for start, end in self.regions:
            self.places.append(place + start % _LINE)
            place = aligned(self.places[-1] + end - start + 1, _LINE)
        self.bytes = np.zeros(place + _LINE, np.uint8)
        self.words = {size: self.bytes.view(UNSIGNED[8 * size]) for size in (1, 2, 4, 8)}
        self.offsets = np.array(self.places or [0], np.int64)
        self.log: AccessLog | None = None
        self._copy(to_host=False)

    def watch(self, clock: Clock, unit: int) -> None:
        """Check accesses from now on for races, by places of so many bytes."""
        self.log = AccessLog(len(self.bytes), unit, clock)

    def write_back(self) -> None:
        self._copy(to_host=True)

    def _copy(self, to_host: bool) -> None:
        for place, (start, end) in zip(self.places, self.regions, strict=True):
            host = np.frombuffer((ctypes.c_uint8 * (end - start)).from_address(start), np.uint8)
            mine = self.bytes[place : place + end - start]
            if not to_host:
                mine[:] = host
            elif not np.array_equal(host, mine):  # what is unchanged may be read-only
                host[:] = mine

    def place(self, addresses: np.ndarray, num_bytes: int, what: object) -> np.ndarray:
        """Return where in the arena accesses of so many bytes begin.

        Raises:
            PtxError: one is out of bounds, or not aligned to its size.
        """
        index = np.searchsorted(self.starts, addresses, "right").astype(np.int64) - 1
        wrong = (index < 0) | (addresses + np.uint64(num_bytes) > self.ends[np.maximum(index, 0)])
        if wrong.any():
            raise PtxError(f"out of bounds: {num_bytes} bytes at {int(addresses[wrong][0]):#x}: {what}")
        if (addresses & np.uint64(num_bytes - 1)).any():
            raise PtxError(f"misaligned: {num_bytes} bytes at {int(addresses.max()):#x}: {what}")
        return (addresses - self.starts[index]).astype(np.int64) + self.offsets[index]


def _merged(regions: Iterable[Region]) -> list[tuple[int, int]]:
    """Return the starts and ends of the regions, in order."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted((start, start + size) for start, size in regions if size):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged
