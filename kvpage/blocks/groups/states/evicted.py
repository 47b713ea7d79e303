"""EvictedCheckpoints: the last checkpoints that were evicted, so that `explain` can tell of them."""

from collections import deque
from collections.abc import Collection
from typing import NamedTuple

from kvpage.blocks.groups.states.checkpoint import Checkpoint
from kvpage.blocks.sequence_state import COMPANION, Ids

MOST_REMEMBERED = 1024


class Evicted(NamedTuple):
    """What a checkpoint stood for, and the companion of its last whole block."""

    namespace: bytes
    num_blocks: int
    tail: bytes
    num_tokens: int
    companion: int


class EvictedCheckpoints:
    """A bounded record. A checkpoint is recognised as long as its last whole block stays cached."""

    def __init__(self) -> None:
        self._last: deque[Evicted] = deque(maxlen=MOST_REMEMBERED)

    def add(self, checkpoint: Checkpoint) -> None:
        """Remember a checkpoint that is about to be dropped for room."""
        anchor, tail = checkpoint.anchor, checkpoint.tail
        self._last.append(Evicted(anchor.namespace, anchor.num_blocks, tail, checkpoint.num_tokens, anchor.companion))

    def blocks_gone(self, companions: Collection[int]) -> None:
        """Forget those on blocks that are gone."""
        if self._last:
            last = [evicted for evicted in self._last if not evicted.num_blocks or evicted.companion not in companions]
            self._last = deque(last, MOST_REMEMBERED)

    def clear(self) -> None:
        """Forget all."""
        self._last.clear()

    def positions(self, ids: Ids, tokens: Ids, namespace: bytes, block_size: int) -> list[int]:
        """Return the positions of a prompt's evicted checkpoints."""
        return [
            evicted.num_tokens
            for evicted in self._last
            if evicted.namespace == namespace
            and tokens[evicted.num_blocks * block_size : evicted.num_tokens].tobytes() == evicted.tail
            and self._is_on_path(evicted, ids)
        ]

    def _is_on_path(self, evicted: Evicted, ids: Ids) -> bool:
        block_index = evicted.num_blocks - 1
        if block_index < 0 or block_index >= ids.shape[1]:
            return block_index < 0
        return bool(ids[COMPANION, block_index] == evicted.companion)
