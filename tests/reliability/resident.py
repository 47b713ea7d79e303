"""Resident: how a process's memory grows while it works, without what only the allocator keeps.

    second quarter of the samples ── median ─┐
                                              ├──► grown, in all and by hour
    last quarter of the samples ──── median ─┘

glibc gives threads heaps of their own ("arenas"), and each keeps the most that its threads have ever used: threads that
come and go make that grow for a long time, though what is in use does not. So there is one heap here, and what is free
in it goes back to the system before it is looked at. Pages of libraries are resident from the first time they are used.
"""

import ctypes
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

M_ARENA_MAX = -8  # of malloc.h
MALLINFO2 = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
)  # fmt: skip
SECONDS_AN_HOUR = 3600.0
SHORTEST = 3600.0  # seconds: less says little about an hour


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in MALLINFO2]


@dataclass(frozen=True, slots=True)
class Sample:
    """seconds: of a clock. resident_kib: of the process, trimmed. live_kib: what malloc has given out."""

    seconds: float
    resident_kib: float
    live_kib: float


@dataclass(slots=True)
class Resident:
    """Takes samples. Where the C library is not glibc, nothing is trimmed and live_kib is 0."""

    samples: list[Sample] = field(default_factory=list)
    _libc: ctypes.CDLL = field(default_factory=lambda: ctypes.CDLL(None))

    def __post_init__(self) -> None:
        if self._is_glibc:
            self._libc.mallopt(M_ARENA_MAX, 1)
            self._libc.mallinfo2.restype = _Mallinfo2

    def sample(self) -> None:
        live = 0
        if self._is_glibc:
            self._libc.malloc_trim(0)
            info = self._libc.mallinfo2()
            live = info.uordblks + info.hblkhd
        self.samples.append(Sample(time.monotonic(), _resident_kib(), live / 1024))

    def figures(self) -> dict[str, int | float]:
        """max_..., as the runner adds figures up. Growth by hour only if there was an hour."""
        quarter = len(self.samples) // 4
        figures: dict[str, int | float] = {"max_resident_mib": int(max(s.resident_kib for s in self.samples)) // 1024}
        if quarter == 0:
            return figures
        before, after = self.samples[quarter : 2 * quarter], self.samples[-quarter:]
        hours = (_middle(after, "seconds") - _middle(before, "seconds")) / SECONDS_AN_HOUR
        for name in ("resident", "live"):
            grown = _middle(after, f"{name}_kib") - _middle(before, f"{name}_kib")
            figures[f"max_{name}_grown_kib"] = round(grown)
            if self.samples[-1].seconds - self.samples[0].seconds >= SHORTEST:
                figures[f"max_{name}_kib_an_hour"] = round(grown / hours)
        return figures

    @property
    def _is_glibc(self) -> bool:
        return hasattr(self._libc, "mallinfo2")


def _resident_kib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4


def _middle(samples: list[Sample], name: str) -> float:
    return statistics.median(getattr(sample, name) for sample in samples)
