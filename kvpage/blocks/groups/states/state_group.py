"""StateGroup: the layers that keep a state. Each sequence has a slot for it, and begins at a checkpoint.

    allocate ─► reserve ─► do_moves ─► the step: on its way, states go to the reserved slots of marks
                    ▲                                       │
                    └────────────── keep ◄── commit ◄───────┤
                                                            ├──► keep_end ──► release             at the end
                                                            └──► give_up_marks ──► release        after a failed step

    cached blocks     [ . . . . | . . . . | . . . . | . . . . ]          how far K and V reach: the prompt diverges here
    checkpoints            ^              | . . ^                 ^: an exact position, with the K and V of its tail
                                                t: the sequence begins here

A checkpoint's state is copied to the sequence's slot, never handed out. The tokens of its last, not whole block come
from the checkpoint's tail blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvpage._C import Match
from kvpage.blocks.explain import Ending, GroupReach
from kvpage.blocks.groups.group import Claim, GroupManager, Prompt
from kvpage.blocks.groups.states.checkpoint import Checkpoint, MarkKind, num_common
from kvpage.blocks.groups.states.held_checkpoints import HeldCheckpoints
from kvpage.blocks.groups.states.marks import MIN_SAVED, Mark, marks_of_prompt
from kvpage.blocks.groups.states.reach import reach_of_state, with_tails
from kvpage.blocks.groups.states.sequence_states import SequenceStates
from kvpage.blocks.groups.states.state_space import States, StateSpace
from kvpage.blocks.groups.window_group import WindowGroup
from kvpage.blocks.moves import BlockMove
from kvpage.blocks.sequence_state import Ids, PathIds, SeqId
from kvpage.blocks.sequences.sequences import Sequences
from kvpage.blocks.space import BlockSpace
from kvpage.checks.errors import OutOfSlots
from kvpage.checks.interrupts import uninterrupted
from kvpage.checks.tokens import Tokens, some_tokens
from kvpage.checks.values import as_integer, check_namespace


@dataclass(frozen=True, slots=True)
class StateClaim(Claim):
    """A checkpoint to begin at.

    Attributes:
        checkpoint: It; None to begin at the first token.
        diverged_at: How many tokens have K and V in cached blocks.
    """

    checkpoint: Checkpoint | None = None
    diverged_at: int = 0

    @property
    def middle(self) -> int:
        """The middle of the tokens that have K and V, and are computed again for want of a state; 0 for a few.

        A prompt that parts from these earlier goes on from there. So each one computes half as many at most.
        """
        num_again = self.diverged_at - self.num_tokens
        return self.num_tokens + num_again // 2 if num_again >= 2 * MIN_SAVED else 0


class StateGroup(GroupManager[StateClaim]):
    """The slots of sequences and of checkpoints, in both tiers.

    Attributes:
        options: As given.
        space: Slots, checkpoints, and the moves of slots.
    """

    def __init__(
        self,
        options: States,
        space: BlockSpace,
        sequences: Sequences,
        is_caching: bool,
        windows: Sequence[WindowGroup] = (),
    ) -> None:
        self.options = options
        self.space = StateSpace(space, options, [space, *(window.blocks for window in windows)])
        self._blocks = space
        self._sequences = sequences
        self._is_caching = is_caching
        self._windows = windows
        self._states = SequenceStates(self.space, sequences, is_caching, self._blocks_at)

    # --- the states of a step ---

    def do_moves(self, do_move: Callable[[BlockMove], object]) -> None:
        """Make all moves of states in order, before the next step.

        Args:
            do_move: Makes one move of slots, such as StateCache's. If it raises, that move and those after it stay, and
                come first in the next call.
        """
        self.space.moves.do(do_move)

    def slot_of(self, seq_id: SeqId) -> int:
        """Return the slot of a sequence on the device.

        Args:
            seq_id: The sequence.

        Raises:
            ValueError: A checkpoint has it, since keep_end, or a failed step may have spoiled the state.
        """
        return self._states.slot("slot_of", seq_id)

    def has_state(self, seq_id: SeqId) -> bool:
        """Return whether `slot_of` returns a slot.

        Args:
            seq_id: A sequence on the device.
        """
        self._sequences.on_device[seq_id]  # KeyError
        running = self._states.running[seq_id]
        return running.slot is not None and not running.is_spoiled

    @uninterrupted
    def reserve(self, seq_id: SeqId, start: int, end: int) -> list[tuple[int, int]]:
        """Reserve slots for the marks of a portion that is computed next.

        Checkpoints may be evicted for them: the moves come after this call, and before the step.

        Args:
            seq_id: The sequence.
            start: Tokens that its state has seen.
            end: Tokens that it will have seen.

        Returns:
            (position, slot) in order, with start < position <= end: the state after that many tokens goes to that slot.
            Marks for which there is no slot are left out.

        Raises:
            ValueError: The positions are out of range.
        """
        num_tokens = self._sequences.state(seq_id).num_tokens
        start, end = as_integer("start", start), as_integer("end", end)
        if not 0 <= start <= end <= num_tokens:
            raise ValueError(f"positions must be in [0, {num_tokens}], got ({start}, {end}]")
        return self._states.reserve(seq_id, start, end)

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether there is a slot for a checkpoint, in either tier."""
        return self._is_caching and self.space.most_kept + self.space.host.num_slots > 0

    @uninterrupted
    def hold(self, tokens: Tokens, namespace: bytes = b"") -> HeldCheckpoints:
        """Keep the checkpoints of a prompt where they are, with the blocks before them, to read them beside steps.

        Due moves of blocks and of states come first.

        Args:
            tokens: The prompt.
            namespace: Where to look.

        Returns:
            The checkpoints, which are held until their release.
        """
        check_namespace(namespace)
        return HeldCheckpoints(self._blocks, self.space, some_tokens(tokens), namespace)

    # --- beginning ---

    def claim(self, ids: PathIds, prompt: Prompt, most: int) -> StateClaim:
        """Return the longest checkpoint of a prompt."""
        checkpoint = next(self.space.all_of(ids, prompt.tokens, prompt.namespace, most), None)
        return StateClaim(checkpoint.num_tokens if checkpoint else 0, checkpoint)

    def look_beyond(self, match: Match, prompt: Prompt, claim: StateClaim) -> StateClaim:
        """Return the claim with the number of cached tokens, in blocks or in a tail."""
        if claim.checkpoint is not None and claim.num_tokens >= prompt.most:
            return StateClaim(claim.num_tokens, claim.checkpoint, prompt.most)
        num_after = self._num_tail_tokens(match, prompt)
        part = self._blocks.tree.match_part(match, prompt.tokens, prompt.num_left_over)
        if part is not None:
            self._blocks.tree.release(part.match)
            num_after = max(num_after, part.num_tokens)
        return StateClaim(claim.num_tokens, claim.checkpoint, match.num_tokens + num_after)

    def check_begin(self, ids: PathIds, claim: StateClaim) -> None:
        """Raise OutOfSlots where neither a slot nor that of the checkpoint itself can be had."""
        checkpoint = claim.checkpoint
        if self.space.can_take(checkpoint):
            return
        if checkpoint is None or checkpoint.is_on_host or self.space.is_held(checkpoint):
            raise OutOfSlots(1, 0)

    def begin(self, seq_id: SeqId, prompt: Prompt, ids: PathIds, claim: StateClaim, own_ids: Ids) -> None:
        """Take a slot, and have the checkpoint copied to it, with its tails."""
        slot = self._restore(seq_id, claim, own_ids)
        if seq_id in self._states.running:
            self._states.replace(seq_id, slot, on_host=False)
            self._states.running[seq_id].last = claim.checkpoint
            return
        marks = self._marks(prompt, claim) if self._is_caching else {}
        self._states.add(seq_id, slot, prompt.priority, claim.checkpoint, marks, prompt.tokens)

    # --- while it runs ---

    def committing(self, seq_id: SeqId, tokens: Ids) -> dict[int, bytes]:
        """Return the tails of marks that the commit of these tokens passes. They stand for the committed tokens."""
        return self._states.tails(seq_id, tokens)

    def committed(self, seq_id: SeqId, note: dict[int, bytes]) -> None:
        """Note the tails."""
        self._states.set_tails(seq_id, note)

    def keep(self, seq_id: SeqId) -> None:
        """Make the reserved slots checkpoints. Those of positions that are not committed are freed."""
        self._states.keep(seq_id)

    def mark(self, seq_id: SeqId, num_tokens: int) -> None:
        """Have a prompt keep its state at one more position that it has not passed."""
        if self._is_caching and num_tokens > self._sequences.num_written(seq_id):
            self._states.mark(seq_id, num_tokens)

    def keep_end(self, seq_id: SeqId, goes_on: bool) -> bool:
        """Make the slot a checkpoint at the committed tokens. A private or spoiled state is not kept."""
        return self._states.keep_end(seq_id, goes_on)

    def give_up_marks(self, seq_id: SeqId) -> None:
        """Free the reserved slots, and note that the state may be spoiled."""
        self._states.give_up(seq_id)

    def first_forkable(self, seq_id: SeqId, num_tokens: int) -> int:
        """Return all tokens: a state cannot be shortened."""
        return num_tokens

    def check_fork(self, seq_id: SeqId) -> None:
        """Raise ValueError where the state is gone, OutOfSlots without a slot for a copy."""
        self._states.slot("fork", seq_id)
        if not self.space.can_take():
            raise OutOfSlots(1, 0)

    def fork(self, seq_id: SeqId, new_seq_id: SeqId, num_tokens: int) -> None:
        """Copy the state to a slot of the new sequence."""
        slot, running = self._states.slot("fork", seq_id), self._states.running[seq_id]
        copy = self.space.take()
        self.space.add_move("copy", slot, copy)
        self._states.add(new_seq_id, copy, running.priority, running.last, {}, running.prompt)

    def release(self, seq_id: SeqId) -> None:
        """Free the sequence's slots, unless a checkpoint has them."""
        self._states.remove(seq_id)

    # --- off the device and back ---

    def check_swap_out(self, seq_id: SeqId) -> None:
        """Raise ValueError where the state is gone, OutOfSlots without a slot on the host."""
        self._states.slot("swap_out", seq_id)
        if not self.space.can_take_host():
            raise OutOfSlots(1, 0)

    def swap_out(self, seq_id: SeqId) -> None:
        """Move the state to the host."""
        self._states.move(seq_id, self.space.take_host(), on_host=True)

    def can_return(self, seq_id: SeqId, ids: PathIds) -> bool:
        """Return True: the state on the host stands for all committed tokens."""
        return True

    def check_return(self, seq_id: SeqId, ids: PathIds) -> None:
        """Raise OutOfSlots without a slot on the device."""
        if not self.space.can_take():
            raise OutOfSlots(1, 0)

    def return_to_device(self, seq_id: SeqId, ids: PathIds) -> None:
        """Move the state to a slot of the device."""
        self._states.move(seq_id, self.space.take(), on_host=False)

    # --- the tree's blocks ---

    def blocks_gone(self, companions: Sequence[int]) -> None:
        """Forget the checkpoints on them."""
        self.space.blocks_gone(companions)

    def blocks_dropped(self, tokens: Ids, namespace: bytes) -> None:
        """Forget the checkpoints of tokens that no other prompt shares."""
        self.space.blocks_dropped(tokens, namespace)

    def blocks_cleared(self) -> None:
        """Forget all checkpoints."""
        self.space.blocks_cleared()

    # --- questions ---

    def explain(self, ids: PathIds, prompt: Prompt, attention: GroupReach) -> GroupReach:
        """Return how far checkpoints reach."""
        reach = reach_of_state(self._blocks, self.space, prompt.tokens, prompt.namespace)
        if reach.ending is Ending.NO_CHECKPOINT and attention.ending is Ending.KV_EVICTED:
            return replace(reach, ending=Ending.GONE)
        return reach

    def amend(self, attention: GroupReach, ids: PathIds, prompt: Prompt, begins_at: int) -> GroupReach:
        """Return the reach of blocks, or of a checkpoint's tail that has more."""
        return with_tails(attention, begins_at, self._blocks, self.space, prompt.tokens, prompt.namespace)

    def check(self, on_device: Sequence[SeqId], swapped: Sequence[SeqId]) -> None:
        """Raise RuntimeError where a slot or a checkpoint has no place, or two."""
        self._states.check()

    # --- inside ---

    def _blocks_at(self, seq_id: SeqId, block_index: int) -> list[int]:
        """Return the blocks of a sequence at a place, of the full layers and of each window."""
        full = int(self._sequences.ids(seq_id)[block_index])
        return [full, *(window.block_at(seq_id, block_index) for window in self._windows)]

    def _num_tail_tokens(self, match: Match, prompt: Prompt) -> int:
        """Return how many tokens after a match are a checkpoint's tail."""
        ids, start = match.tier_block_ids(max(match.num_blocks - 1, 0)), match.num_tokens
        anchor = self.space.anchors.last(ids, prompt.namespace)
        if anchor is None:
            return 0
        rest = prompt.tokens[start : min(prompt.most, start + self._blocks.block_size)].tobytes()
        return num_common(anchor.nearest(rest), rest)

    def _restore(self, seq_id: SeqId, claim: StateClaim, own_ids: Ids) -> int:
        """Return a slot into which the checkpoint is copied: its own where there is no other."""
        checkpoint = claim.checkpoint
        if checkpoint is None:
            return self.space.take()
        tails: list[int] = []
        if checkpoint.tail:
            block_index = claim.num_tokens // self._blocks.block_size
            tails = [int(own_ids[0]), *(window.block_at(seq_id, block_index) for window in self._windows)]
        self.space.touch(checkpoint)
        self.space.counts["restored"] += 1
        if not self.space.can_take(checkpoint):
            return self.space.take_over(checkpoint, tails)
        slot = self.space.take(checkpoint)
        self.space.restore(checkpoint, slot, tails)
        return slot

    def _marks(self, prompt: Prompt, claim: StateClaim) -> dict[int, Mark]:
        """Return the positions at which the prompt keeps its state for others."""
        positions = [(position, MarkKind.CALLER) for position in prompt.cache_at]
        positions += (claim.middle, MarkKind.REGULAR), (claim.diverged_at, MarkKind.SPLIT)
        positions += ((len(prompt.tokens) - prompt.num_to_compute, MarkKind.END),)
        return marks_of_prompt(len(prompt.tokens), positions, claim.num_tokens, self.options.checkpoint_every)
