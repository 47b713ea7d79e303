"""The way back of a sequence of a hybrid model to the device: with all its tokens, or from a checkpoint again.

The state on the host stands for all committed tokens. Where K and V of some of them are gone, it is of no use.
"""

from kvpage.blocks.hybrid.beginning import Beginnings, Prompt
from kvpage.blocks.hybrid.sequence_states import SequenceStates
from kvpage.blocks.hybrid.state_space import StateSpace
from kvpage.blocks.lives.sequences import Sequences
from kvpage.blocks.lives.swaps import resume
from kvpage.blocks.space import BlockSpace
from kvpage.blocks.states import Allocation, Ids, SeqId
from kvpage.checks.errors import OutOfSlots


class SwapsIn:
    """Brings sequences back. Each method gives all or nothing."""

    def __init__(
        self,
        space: BlockSpace,
        sequences: Sequences,
        states: StateSpace,
        sequence_states: SequenceStates,
        beginnings: Beginnings,
        is_caching: bool,
    ) -> None:
        self._space = space
        self._sequences = sequences
        self._states = states
        self._sequence_states = sequence_states
        self._beginnings = beginnings
        self._is_caching = is_caching

    def swap_in(self, seq_id: SeqId, tokens: Ids, num_spare: int) -> Allocation:
        """Give device blocks and a slot to a sequence that is swapped out; see HybridManager.swap_in."""
        swapped = self._sequences.swapped[seq_id]
        if len(tokens) < swapped.num_written:
            raise ValueError(f"tokens must be at least the {swapped.num_written} committed ones, got {len(tokens)}")
        num_shared = swapped.num_written if self._is_caching else 0
        if swapped.is_private:
            num_shared = swapped.first_block * self._sequences.block_size
        num_left = len(tokens) - num_shared
        prompt = Prompt(tokens, swapped.namespace, swapped.priority, num_left, swapped.is_private, num_spare)
        return self._resume(seq_id, prompt) or self._begin_again(seq_id, prompt)

    def _resume(self, seq_id: SeqId, prompt: Prompt) -> Allocation | None:
        """Bring back the blocks and the state; None, and nothing is changed, where some blocks are gone."""
        swapped, tree = self._sequences.swapped[seq_id], self._space.tree
        match = tree.match(prompt.tokens, prompt.namespace, prompt.priority, prompt.num_left_over, is_hit=False)
        if match.num_blocks < swapped.first_block:
            tree.release(match)
            return None
        try:
            if not self._states.can_take():
                raise OutOfSlots(1, 0)
            num_blocks = self._sequences.blocks_for(len(prompt.tokens)) - swapped.num_left
            taken = self._space.give(match, max(num_blocks, match.num_blocks), prompt.num_spare)
        except BaseException:
            tree.release(match)
            raise
        num_written = resume(self._space, self._sequences, seq_id, prompt.tokens, match, taken, self._is_caching)
        self._sequence_states.move(seq_id, self._states.take(), on_host=False)
        return Allocation(num_written, self._sequences.ids(seq_id))

    def _begin_again(self, seq_id: SeqId, prompt: Prompt) -> Allocation:
        """Begin the sequence at a checkpoint, and give up its blocks and its slot on the host."""
        allocation, found, slot = self._beginnings.begin(seq_id, prompt)
        self._space.release_host(self._sequences.swapped.pop(seq_id).host_ids)
        self._sequence_states.replace(seq_id, slot, on_host=False)
        self._sequence_states.running[seq_id].last = found.checkpoint
        return allocation
