"""The beginning of a sequence of a hybrid model: at the longest position that has K and V in blocks, and a state.

    cached blocks     [ . . . . | . . . . | . . . . | . . . . ]          how far K and V reach: the prompt diverges here
    checkpoints            ^              | . . ^                 ^: an exact position, with the K and V of its tail
                                                t: the sequence begins here

The match is shortened to the blocks before t. The tokens of its last, not whole block come from the checkpoint's tail.
"""

from typing import NamedTuple

from kvpage._C import Match
from kvpage.blocks.hybrid.checkpoint import Checkpoint, num_common
from kvpage.blocks.hybrid.marks import MIN_SAVED
from kvpage.blocks.hybrid.state_space import StateSpace
from kvpage.blocks.lives.sequences import Sequences
from kvpage.blocks.space import BlockSpace
from kvpage.blocks.states import Allocation, Ids, SeqId
from kvpage.blocks.stats import Query
from kvpage.checks.errors import OutOfSlots


class Prompt(NamedTuple):
    """What a sequence begins with.

    Attributes:
        tokens: Its tokens.
        namespace: Where to search.
        priority: 0 to 7.
        num_left_over: At least so many tokens are left to compute.
        is_private: Whether no other sequence finds its blocks.
        num_spare: How many more blocks are to be left over.
        is_counted: Whether the prompt counts in the statistics.
    """

    tokens: Ids
    namespace: bytes
    priority: int
    num_left_over: int
    is_private: bool = False
    num_spare: int = 0
    is_counted: bool = False

    @property
    def most(self) -> int:
        """The longest prefix to find, in tokens."""
        return max(len(self.tokens) - self.num_left_over, 0)


class Found(NamedTuple):
    """What is cached of a prompt.

    Attributes:
        match: The blocks before the checkpoint.
        checkpoint: The checkpoint to begin at; None to begin at the first token.
        diverged_at: How many tokens have K and V in cached blocks.
        num_refused: Host blocks that are likely computed faster than loaded.
    """

    match: Match
    checkpoint: Checkpoint | None
    diverged_at: int
    num_refused: int

    @property
    def num_tokens(self) -> int:
        """Tokens that need not be computed again."""
        return self.checkpoint.num_tokens if self.checkpoint else 0

    @property
    def middle(self) -> int:
        """The middle of the tokens that have K and V, and are computed again for want of a state; 0 for a few.

        A prompt that parts from these earlier goes on from there. So each one computes half as many at most.
        """
        num_again = self.diverged_at - self.num_tokens
        return self.num_tokens + num_again // 2 if num_again >= 2 * MIN_SAVED else 0


class Beginnings:
    """Begins sequences. Each method gives all or nothing."""

    def __init__(self, space: BlockSpace, sequences: Sequences, states: StateSpace) -> None:
        self._space = space
        self._sequences = sequences
        self._states = states

    def begin(self, seq_id: SeqId, prompt: Prompt) -> tuple[Allocation, Found, int]:
        """Give blocks and a slot to a sequence. No Ctrl-C may come meanwhile: its callers are uninterrupted.

        Returns:
            The blocks, what was found, and the slot. The moves that fill both are added.

        Raises:
            OutOfBlocks: The blocks do not fit, or there is no slot. Nothing is changed.
        """
        found = self.find(prompt)
        num_blocks, num_tail = self._sequences.blocks_for(len(prompt.tokens)), found.num_tokens - found.match.num_tokens
        query = Query(len(prompt.tokens), num_tail, found.num_refused) if prompt.is_counted else None
        try:
            takes_over = self._takes_over(found.checkpoint)
            taken = self._space.give(found.match, num_blocks, prompt.num_spare, query)
        except BaseException:
            self._space.tree.release(found.match)
            raise
        slot = self._restore(found.checkpoint, taken, takes_over)
        block_ids = self._add(seq_id, prompt, found, taken)
        return Allocation(found.num_tokens, block_ids), found, slot

    def find(self, prompt: Prompt) -> Found:
        """Return what is cached of a prompt. The match pins its blocks until it is released."""
        tree, size = self._space.tree, self._space.block_size
        match = tree.match(prompt.tokens, prompt.namespace, prompt.priority, prompt.num_left_over, is_hit=False)
        try:
            checkpoint, num_refused = self._checkpoint(match, prompt)
            diverged_at = self._diverged_at(match, prompt, checkpoint)
            tree.shorten(match, checkpoint.num_tokens // size if checkpoint else 0)
        except BaseException:
            tree.release(match)
            raise
        return Found(match, checkpoint, diverged_at, num_refused)

    def _diverged_at(self, match: Match, prompt: Prompt, checkpoint: Checkpoint | None) -> int:
        """Return how many tokens are cached, those of the block after the match included: in blocks or in a tail."""
        if checkpoint is not None and checkpoint.num_tokens >= prompt.most:
            return prompt.most
        num_after = self._num_tail_tokens(match, prompt)
        part = self._space.tree.match_part(match, prompt.tokens, prompt.num_left_over)
        if part is not None:
            self._space.tree.release(part.match)
            num_after = max(num_after, part.num_tokens)
        return match.num_tokens + num_after

    def _num_tail_tokens(self, match: Match, prompt: Prompt) -> int:
        ids, start = match.tier_block_ids(max(match.num_blocks - 1, 0)), match.num_tokens
        anchor = self._states.anchors.last(ids, prompt.namespace)
        if anchor is None:
            return 0
        rest = prompt.tokens[start : min(prompt.most, start + self._space.block_size)].tobytes()
        return num_common(anchor.nearest(rest), rest)

    def _checkpoint(self, match: Match, prompt: Prompt) -> tuple[Checkpoint | None, int]:
        """Return the longest checkpoint whose host blocks are worth their way back, and how many others were not."""
        num_on_device = match.num_device_blocks
        found = self._find(match, prompt, match.num_blocks)
        num_host = 0 if found is None else found.num_tokens // self._space.block_size - num_on_device
        if num_host > 0 and not self._space.should_load(num_host):
            return self._find(match, prompt, num_on_device), num_host
        return found, 0

    def _find(self, match: Match, prompt: Prompt, num_blocks: int) -> Checkpoint | None:
        return self._states.find(match, prompt.tokens, prompt.namespace, prompt.most, num_blocks)

    def _takes_over(self, checkpoint: Checkpoint | None) -> bool:
        """Return whether the checkpoint itself is the only slot that can be had.

        Raises:
            OutOfSlots: There is none at all.
        """
        if self._states.can_take(checkpoint):
            return False
        if checkpoint is None or checkpoint.is_on_host or self._states.is_held(checkpoint):
            raise OutOfSlots(1, 0)
        return True

    def _restore(self, checkpoint: Checkpoint | None, taken: Ids, takes_over: bool) -> int:
        if checkpoint is None:
            return self._states.take()
        tail_block = int(taken[0]) if checkpoint.tail else -1
        self._states.touch(checkpoint)
        self._states.counts["restored"] += 1
        if takes_over:
            return self._states.take_over(checkpoint, tail_block)
        slot = self._states.take(checkpoint)
        self._states.restore(checkpoint, slot, tail_block)
        return slot

    def _add(self, seq_id: SeqId, prompt: Prompt, found: Found, taken: Ids) -> Ids:
        num_pending = 0 if prompt.is_private else found.num_tokens - found.match.num_tokens
        row = self._sequences.rows.add(
            self._sequences.on_device,
            seq_id,
            match=found.match,
            own_ids=taken,
            pending=prompt.tokens[found.num_tokens - num_pending : found.num_tokens],
            num_left=0,
            num_tokens=len(prompt.tokens),
            num_written=found.num_tokens,
            namespace=prompt.namespace,
            is_private=prompt.is_private,
        )
        return self._sequences.rows.ids(row)
