"""RankWatch: notices a rank that is gone or hangs, also while this one waits for it in a collective.

    rank 0            rank 1
    thread ──────────► thread          each answers the other every few seconds; one thread for each pair
           ◄──────────

A closed socket shows at once that a process has ended. A process that hangs shows by its silence. Collectives of gloo
raise then. Those of other libraries wait. So a process that still waits some time after the loss is ended.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from kvpage.serving.loop.ranks.channel import connected_group
from kvpage.serving.loop.ranks.rank_lost import RankLost

BYE, BEAT, FAILED = 0, 1, 2
BEAT_SECONDS = 2.0
GRACE = 20.0
"""Seconds for which a wait may go on after a loss: its own error says more than the end of the process."""
POLL = 0.5
END_STATUS = 70


def end_process(reason: str) -> None:
    """Print the reason, and end this process at once: its main thread waits for a rank that is gone."""
    print(f"kvpage: {reason}; this rank still waits for it, and ends", file=sys.stderr, flush=True)
    os._exit(END_STATUS)


class RankWatch:
    """The watch of one rank: rank 0 and each other one watch each other.

    lost: why the ranks cannot go on; None while they can. timeout: seconds of silence after which a rank is lost.
    device: of the model. beat: seconds between two signs of life.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        timeout: float,
        device: torch.device,
        end: Callable[[str], object] = end_process,
        grace: float = GRACE,
    ) -> None:
        """Connect. All ranks call it at once."""
        self.lost: str | None = None
        self._rank, self._timeout, self._device, self._end, self._grace = rank, timeout, device, end, grace
        self.beat = min(BEAT_SECONDS, timeout / 4)
        self._is_waiting = False
        self._leaving, self._farewell = threading.Event(), BYE
        self._group = connected_group(timeout)
        others = range(1, size) if rank == 0 else (0,)
        self._threads = [
            threading.Thread(target=self._watch, args=(other,), name=f"kvpage-rank-{other}", daemon=True)
            for other in others
        ]
        for thread in self._threads:
            thread.start()

    def check(self) -> None:
        """Raise RankLost if a rank is gone."""
        if self.lost is not None:
            raise RankLost(self.lost)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, this rank waits for the others: if one of them is lost, it must not wait for long."""
        self.check()
        self._is_waiting = True
        try:
            yield
        finally:
            self._is_waiting = False

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Inside, this rank lets go of the others. If that takes longer than the grace, the process is ended."""
        timer = threading.Timer(self._grace, self._end, [self.lost or "another rank is lost"])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def leave(self, has_failed: bool = False) -> None:
        """Tell the others that this rank goes, or that it has failed, and watch no more."""
        self._farewell = FAILED if has_failed else BYE
        self._leaving.set()
        for thread in self._threads:
            thread.join(2 * self.beat)

    def _watch(self, other: int) -> None:
        try:
            while self._exchange(other):
                pass
        except (RuntimeError, ValueError) as error:  # ValueError: the program has closed its groups
            if not self._leaving.is_set():
                self._lose(f"rank {other} is gone, or has been silent for {self._timeout:g} s ({_first_line(error)})")

    def _exchange(self, other: int) -> bool:
        """Hear of the other, and tell it of this rank. False once either has gone."""
        if self._rank == 0:
            return self._hears(other) and self._tells(other)
        return self._tells(other) and self._hears(other)

    def _tells(self, other: int) -> bool:
        if self._rank == 0:
            self._leaving.wait(self.beat)
        is_leaving = self._leaving.is_set()
        dist.send(torch.tensor([self._farewell if is_leaving else BEAT]), other, group=self._group)
        return not is_leaving

    def _hears(self, other: int) -> bool:
        told = torch.zeros(1, dtype=torch.int64)
        dist.recv(told, other, group=self._group)
        if int(told) == FAILED:
            self._lose(f"rank {other} has failed")
        return int(told) == BEAT

    def _lose(self, reason: str) -> None:
        """Note the loss, and see to it that this rank does not wait for ever."""
        self.lost, end = self.lost or reason, time.monotonic() + self._grace
        while not self._leaving.wait(POLL):
            if not self._is_stuck():
                end = time.monotonic() + self._grace
            elif time.monotonic() > end:
                self._end(reason)
                return

    def _is_stuck(self) -> bool:
        """Whether the main thread, or its device, may be in a collective."""
        if self._is_waiting or self._device.type != "cuda":
            return self._is_waiting
        return not torch.cuda.current_stream(self._device).query()


def _first_line(error: Any) -> str:
    return str(error).split("\n")[0].split(". ")[0]
