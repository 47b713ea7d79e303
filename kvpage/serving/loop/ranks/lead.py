"""Lead: rank 0's side of the ranks. It tells the others whatever rank 0 does to blocks, and computes.

moves of each group ─────► SWAP_OUT, SWAP_IN, COPY ─┐
BatchRunner ── computing ─► STEP ───────────────────┤
RankedStore ── tell ──────► LOOKUP, LOAD, SAVE ─────┼─► the others do the same with their heads
its own thread ───────────► BEAT, while it is idle ─┤
Engine.close ─────────────► CLOSE ──────────────────┘
"""

import atexit
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np

from kvpage.blocks.moves import Kind as MoveKind
from kvpage.blocks.moves import Pairs
from kvpage.serving.loop.ranks.message import Kind, Part
from kvpage.serving.loop.ranks.rank_lost import RankLost
from kvpage.serving.loop.ranks.ranks import Ranks
from kvpage.serving.loop.ranks.step_plan import StepPlan

CLOSE_SECONDS = 5.0
MOVES: dict[MoveKind, Kind] = {"swap_out": Kind.SWAP_OUT, "swap_in": Kind.SWAP_IN, "copy": Kind.COPY}


class Lead:
    """The decisions of rank 0. Every method raises RankLost once the ranks cannot go on."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._why_closed: str | None = None
        self._sending = threading.RLock()  # held for all of a step: the others take nothing else while they compute
        self._closing = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="kvpage-beat", daemon=True)
        atexit.register(self.close)  # a program that ends without it leaves nobody waiting

    def tell(self, kind: Kind, *parts: Part, seconds: float | None = None) -> None:
        """Send the others a message, from any thread: after a step that is under way in another."""
        with self._sending:
            if self._why_closed is not None:
                raise RankLost(self._why_closed)
            try:
                self.ranks.control.send(kind, *parts, seconds=seconds)
            except RankLost as lost:
                self._why_closed = str(lost)
                raise

    def move(self, group: int, kind: MoveKind, pairs: Pairs) -> None:
        """Let the others move the same blocks, or slots. group: of RankCaches. pairs: int64 [num_pairs, 2]."""
        with self._abandoning(), self.ranks.watch.waiting():
            self.tell(MOVES[kind], np.array([group]), pairs.reshape(-1))

    @contextmanager
    def computing(self, plan: StepPlan) -> Iterator[None]:
        """Let the others compute the same step; inside, this rank does.

        An error of the model that all ranks have alike comes through, and the ranks go on. Any other is a RankLost.
        """
        with self._abandoning(), self.ranks.watch.waiting(), self._sending:
            self.tell(Kind.STEP, *plan.parts())
            with self._settling():
                yield

    def close(self) -> None:
        """End the others, and let go of them. Calling it again does nothing."""
        atexit.unregister(self.close)
        if self._closing.is_set() or not self.ranks.process.is_here:
            return
        self._closing.set()
        if self._beats.is_alive():
            self._beats.join()
        with suppress(RankLost):  # then there is nobody to tell
            self.tell(Kind.CLOSE, seconds=CLOSE_SECONDS)
        self._why_closed = self._why_closed or "the engine has been closed, and its other ranks have ended"
        self.ranks.leave()

    @contextmanager
    def assembling(self) -> Iterator[None]:
        """Inside, rank 0 makes its engine; then it waits for the others. If anything raises, they end with an error."""
        try:
            with self.ranks.together(), self.ranks.watch.waiting():
                yield
                self.ranks.meet()
            self._beats.start()
        except BaseException as error:
            self._why_closed = self._why_closed or f"the engine of rank 0 could not be made: {error}"
            self._closing.set()
            atexit.unregister(self.close)
            raise

    @contextmanager
    def _settling(self) -> Iterator[None]:
        """If anything raises inside, find out whether all ranks had the error. RankLost if not."""
        try:
            yield
        except Exception as error:
            try:
                self.tell(Kind.SETTLE, seconds=self.ranks.settle_seconds)
                is_settled = self.ranks.all_failed_alike(True)
            except RankLost as lost:
                raise RankLost(f"a step failed, and the ranks cannot go on: {error}; {lost}") from error
            if not is_settled:
                raise RankLost(f"a step failed on some ranks, and the ranks cannot go on: {error}") from error
            raise

    @contextmanager
    def _abandoning(self) -> Iterator[None]:
        """If the ranks are lost inside, close all groups, so that no other rank waits for this one."""
        try:
            yield
        except Exception as error:
            if isinstance(error, RankLost):
                self._abandon(str(error))
            raise
        except BaseException:  # a second Ctrl-C, amid a collective
            self._abandon("a step was interrupted, and the ranks cannot go on")
            raise

    def _abandon(self, why: str) -> None:
        self._why_closed = self._why_closed or why
        if not self._closing.is_set():
            self._closing.set()
            atexit.unregister(self.close)
            self.ranks.abandon()

    def _beat(self) -> None:
        """Tell the others from time to time that rank 0 lives, while it tells them nothing else."""
        while not self._closing.wait(self.ranks.watch.beat):
            if self._sending.acquire(blocking=False):  # else it tells them something, or computes with them
                try:
                    self.tell(Kind.BEAT)
                except RankLost:
                    return  # the next step raises it
                finally:
                    self._sending.release()
