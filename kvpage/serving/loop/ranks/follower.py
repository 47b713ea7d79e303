"""Follower: the loop of every rank but 0. It does what rank 0 has decided, over the blocks of its own heads.

rank 0's messages ─► moves of blocks ─► CacheEngine
                     a step ──────────► ModelRunner, which meets the other ranks in the model's collectives
                     calls of stores ─► StoreFollower, in other threads
"""

import logging

import numpy as np
import numpy.typing as npt
import torch

from kvpage.cache.cache_engine import CacheEngine
from kvpage.serving.loop.ranks.message import Kind, Message
from kvpage.serving.loop.ranks.rank_lost import RankLost
from kvpage.serving.loop.ranks.ranked_store import STORE_CALLS, StoreFollower
from kvpage.serving.loop.ranks.ranks import Ranks
from kvpage.serving.model.runner import ModelRunner
from kvpage.serving.model.step import PackedTokens, Step

logger = logging.getLogger(__name__)
MOVES = {Kind.SWAP_OUT: "swap_out", Kind.SWAP_IN: "swap_in", Kind.COPY: "copy"}


class Follower:
    """One rank's model over its cache. store: of its heads; None where rank 0 has none."""

    def __init__(self, ranks: Ranks, runner: ModelRunner, cache: CacheEngine, store: StoreFollower | None) -> None:
        self._ranks, self._runner, self._cache, self._store = ranks, runner, cache, store

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
            pairs = message.parts[0].reshape(-1, 2)
            getattr(self._cache, MOVES[message.kind])(torch.from_numpy(pairs))
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
        packed, slots, tables = step_of(message)
        step = Step.make(self._cache, slots, tables, packed.starts, packed.ends, packed)
        try:
            with self._ranks.watch.waiting():
                self._runner.forward(packed, step)
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


def step_of(message: Message) -> tuple[PackedTokens, npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Return the tokens, slots and block tables of a step's message. ValueError if they do not fit together."""
    flags, token_ids, starts, ends, wanted, slots, tables = message.parts
    num_tokens, num_seqs = len(token_ids), len(starts)
    if len(flags) != 2 or len(ends) != num_seqs or len(slots) != num_tokens or len(tables) != num_seqs * flags[1]:
        raise ValueError(f"the parts of a step must fit together, got sizes {[len(part) for part in message.parts]}")
    if num_seqs == 0 or (starts >= ends).any() or (ends - starts).sum() != num_tokens:
        raise ValueError(f"a step must compute {num_tokens} tokens, got {starts.tolist()} to {ends.tolist()}")
    if len(wanted) and not 0 <= wanted.min() <= wanted.max() < num_tokens:
        raise ValueError(f"wanted must be indices of {num_tokens} tokens, got {wanted.tolist()}")
    packed = PackedTokens(token_ids, starts, ends, wanted, is_decode=bool(flags[0]))
    return packed, slots, tables.reshape(num_seqs, -1)
