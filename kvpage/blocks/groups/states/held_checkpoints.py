"""HeldCheckpoints: the checkpoints of a prompt, kept where they are while a store reads them in a thread."""

from operator import attrgetter
from typing import NamedTuple

import numpy as np

from kvpage.blocks.groups.states.checkpoint import Checkpoint
from kvpage.blocks.groups.states.state_space import StateSpace
from kvpage.blocks.sequence_state import Ids
from kvpage.blocks.space import BlockSpace


class HeldCheckpoint(NamedTuple):
    """A checkpoint on the device, for a reader.

    Attributes:
        num_tokens: The position.
        slot: The device slot with the state.
        block_ids: int32, the device blocks of the tokens before it. The last one may be the slot's tail block.
    """

    num_tokens: int
    slot: int
    block_ids: Ids


class HeldCheckpoints:
    """The checkpoints of a prompt on the device, with their blocks, until `release`.

    Attributes:
        each: Those whose blocks are on the device, too, the shortest first.
    """

    def __init__(self, space: BlockSpace, states: StateSpace, tokens: Ids, namespace: bytes) -> None:
        self._space, self._states = space, states
        self._match = space.tree.match(tokens, namespace, num_left_over=0, is_hit=False)
        if self._match.num_device_blocks < self._match.num_blocks:
            space.tree.trim(self._match)
        checkpoints = sorted(
            states.each_of(self._match.tier_block_ids(), tokens, namespace), key=attrgetter("num_tokens")
        )
        self._held = [checkpoint for checkpoint in checkpoints if not checkpoint.is_on_host]
        for checkpoint in self._held:
            states.hold(checkpoint)
        self.each = [self._held_one(checkpoint) for checkpoint in self._held]

    def release(self) -> None:
        """Let go of blocks and slots."""
        for checkpoint in self._held:
            self._states.let_go(checkpoint)
        self._held = []
        self._space.tree.release(self._match)

    def _held_one(self, checkpoint: Checkpoint) -> HeldCheckpoint:
        ids = self._match.block_ids[: checkpoint.anchor.num_blocks]
        tail = [self._states.tail_block(checkpoint.slot)] if checkpoint.tail else []
        return HeldCheckpoint(checkpoint.num_tokens, checkpoint.slot, np.array([*ids, *tail], np.int32))
