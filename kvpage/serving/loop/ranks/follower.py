"""Follower: the loop of every rank but 0. It does what rank 0 has decided, over the blocks of its own heads.

rank 0's messages ─► moves of a group ► RankCaches
                     a step ──────────► ModelRunner, which meets the other ranks in the model's collectives
                     calls of stores ─► StoreFollower, in other threads
"""

import logging

from kvpage.blocks.moves import BlockMove
from kvpage.blocks.moves import Kind as MoveKind
from kvpage.serving.loop.ranks.message import Kind, Message
from kvpage.serving.loop.ranks.rank_caches import RankCaches
from kvpage.serving.loop.ranks.rank_lost import RankLost
from kvpage.serving.loop.ranks.ranked_store import STORE_CALLS, StoreFollower
from kvpage.serving.loop.ranks.ranks import Ranks
from kvpage.serving.loop.ranks.step_plan import StepPlan
from kvpage.serving.model.runner import ModelRunner

logger = logging.getLogger(__name__)
MOVES: dict[Kind, MoveKind] = {Kind.SWAP_OUT: "swap_out", Kind.SWAP_IN: "swap_in", Kind.COPY: "copy"}


class Follower:
    """One rank's model over its caches. store: of its heads; None where rank 0 has none."""

    def __init__(self, ranks: Ranks, runner: ModelRunner, caches: RankCaches, store: StoreFollower | None) -> None:
        self._ranks, self._runner, self._caches, self._store = ranks, runner, caches, store

    def run(self) -> None:
        """Follow until rank 0 closes its engine.

        Raises RankLost if rank 0 is gone, and the model's own error if this rank had it alone.
        """
        try:
            while (message := self._receive()).kind is not Kind.CLOSE:
                self._do(message)
        except BaseException:
            self._ranks.abandon()
            raise
        if self._store is not None:
            self._store.close()
        self._ranks.leave()

    def _receive(self, seconds: float | None = None) -> Message:
        with self._ranks.watch.waiting():
            return self._ranks.control.receive(seconds)

    def _do(self, message: Message) -> None:
        if message.kind is Kind.STEP:
            self._compute(message)
        elif message.kind in MOVES:
            self._caches.do_move(*move_of(message))
        elif message.kind is Kind.SETTLE:  # this rank has not failed
            self._settle(None)
        else:
            self._do_beside(message)

    def _do_beside(self, message: Message) -> bool:
        """Do what disturbs no step; return whether the message was of this kind."""
        if message.kind in STORE_CALLS and self._store is not None:
            self._store.begin(message)
            return True
        return message.kind is Kind.BEAT

    def _compute(self, message: Message) -> None:
        plan = StepPlan.of_message(message)
        step = self._caches.step(plan)
        try:
            with self._ranks.watch.waiting():
                self._runner.forward(plan.packed, step)
        except Exception as error:  # the model's: rank 0 may have had the same
            self._await_settlement(error)

    def _await_settlement(self, error: Exception) -> None:
        """Wait for rank 0 to ask about an error. Raise it if this rank had it alone."""
        try:
            message = self._receive(self._ranks.settle_seconds)
            while self._do_beside(message):
                message = self._receive(self._ranks.settle_seconds)
        except RankLost as lost:
            raise RankLost(f"a step failed, and the ranks cannot go on: {error}") from lost
        if message.kind is not Kind.SETTLE:
            raise error
        self._settle(error)

    def _settle(self, error: Exception | None) -> None:
        if not self._ranks.all_failed_alike(error is not None):
            raise error or RankLost("a step failed on some ranks, and the ranks cannot go on")
        logger.warning("a step raised on all ranks", exc_info=error)


def move_of(message: Message) -> tuple[int, BlockMove]:
    """Return the group and the move that a message tells. ValueError for a part that is none."""
    group, pairs = message.parts
    if len(group) != 1 or len(pairs) % 2:
        raise ValueError(f"a move must have a group and pairs, got sizes {len(group)} and {len(pairs)}")
    return int(group[0]), BlockMove(MOVES[message.kind], pairs.reshape(-1, 2))
