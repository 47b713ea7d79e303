"""HybridManager: BlockManager for models with recurrent states. It also gives each sequence a state slot.

    allocate ─► marks_of ─► do_moves, do_state_moves ─► the step: on its way, states go to the marks' slots
                    ▲                                       │
                    └────────────── keep ◄── commit ◄───────┤
                                                            ├──► keep_end ──► release      at the end
                                                            └──► give_up_marks, release    after a failed step

A sequence begins at an exact position: where a checkpoint has its state, and blocks have its K and V. A checkpoint's
state is copied to the sequence's working slot, never handed out.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvpage.blocks.explain import Explanation
from kvpage.blocks.hybrid.beginning import Beginnings, Found, Prompt
from kvpage.blocks.hybrid.checkpoint import MarkKind
from kvpage.blocks.hybrid.looks.explaining import explain_hybrid, num_begun
from kvpage.blocks.hybrid.looks.held import HeldCheckpoints
from kvpage.blocks.hybrid.looks.slot_stats import slot_stats
from kvpage.blocks.hybrid.marks import Mark, as_cache_at, marks_of_prompt
from kvpage.blocks.hybrid.sequence_states import SequenceStates
from kvpage.blocks.hybrid.state_check import check_slots
from kvpage.blocks.hybrid.state_space import StateSpace
from kvpage.blocks.hybrid.swaps import SwapsIn
from kvpage.blocks.lives.growth import tokens_left_over
from kvpage.blocks.load_or_compute import LoadOrCompute
from kvpage.blocks.manager import BlockManager
from kvpage.blocks.moves import BlockMove
from kvpage.blocks.space import HostPolicy
from kvpage.blocks.states import Allocation, SeqId
from kvpage.blocks.stats import BlockStats
from kvpage.checks.errors import OutOfSlots
from kvpage.checks.interrupts import uninterrupted
from kvpage.checks.tokens import Tokens, as_tokens, some_tokens
from kvpage.checks.values import as_integer, check_at_least, check_namespace


class HybridManager(BlockManager):
    """Block tables and state slots of sequences, over the pools and the prefix tree of one rank.

    Its rules are those of BlockManager. Sequences and checkpoints have their slots of one pool. Slot i has a tail block
    for the K and V after its last whole block: block num_blocks + i. So the cache needs num_blocks + num_slots blocks
    on the device, and num_host_blocks + num_host_slots on the host.

    Args:
        num_blocks: Blocks of the device tier, without the tail blocks.
        block_size: Tokens of a block.
        enable_prefix_caching: Whether sequences share blocks and states.
        num_slots: State slots of the device tier.
        num_host_slots: State slots of the host tier.
        num_checkpoints: How many slots of the device are checkpoints at most; None for all that sequences leave.
        checkpoint_every: A checkpoint is taken every so many tokens of a prompt, as far as slots are free; None: not.
        num_host_blocks: Blocks of the host tier, without the tail blocks.
        host_policy: When cached blocks are copied to the host.
        rule: Whether cached blocks on the host are worth their way back; None loads all of them.
        pin_quota: How many blocks `space.pin` may keep. Checkpoints on them are evicted last.
        shares_answers: Whether generated tokens leave the K, V and states of the same prompt. Callers hide them if not.

    Raises:
        ValueError: A number is out of range.
        TypeError: An argument is of another type.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        *,
        num_slots: int,
        num_host_slots: int = 0,
        num_checkpoints: int | None = None,
        checkpoint_every: int | None = None,
        num_host_blocks: int = 0,
        host_policy: HostPolicy | None = None,
        rule: LoadOrCompute | None = None,
        pin_quota: int = 0,
        shares_answers: bool = True,
    ) -> None:
        if checkpoint_every is not None:
            check_at_least("checkpoint_every", checkpoint_every, 1)
        super().__init__(
            num_blocks,
            block_size,
            enable_prefix_caching,
            num_host_blocks=num_host_blocks,
            share_parts=False,
            host_policy=host_policy,
            rule=rule,
            pin_quota=pin_quota,
        )
        self.checkpoint_every, self.shares_answers = checkpoint_every, shares_answers
        self.states = StateSpace(self.space, num_slots, num_host_slots, num_checkpoints)
        self._states_of = SequenceStates(self.states, self._sequences, enable_prefix_caching)
        parts = self.space, self._sequences, self.states
        self._beginnings = Beginnings(*parts)
        self._swaps_in = SwapsIn(*parts, self._states_of, self._beginnings, enable_prefix_caching)

    def do_state_moves(self, do_move: Callable[[BlockMove], object]) -> None:
        """Make all moves of states in order, before the next step.

        Args:
            do_move: Makes one move of slots, such as StateCache's. If it raises, that move and those after it stay, and
                come first in the next call.
        """
        self.states.moves.do(do_move)

    # --- a sequence's life -------------------------------------------------------------------------------------------

    @uninterrupted
    def allocate(
        self,
        seq_id: SeqId,
        tokens: Tokens,
        namespace: bytes = b"",
        priority: int = 0,
        max_cached_tokens: int | None = None,
        num_left_over: int = 1,
        cache_at: Sequence[int] = (),
        *,
        num_spare: int = 0,
        is_counted: bool = True,
    ) -> Allocation:
        """Give blocks and a state slot to a new sequence, which begins at the longest position with K, V and a state.

        Args:
            seq_id: An id that is not in use.
            tokens: The prompt, at least one token.
            namespace: Prefixes are shared within one namespace only.
            priority: 0 to 7. Blocks and checkpoints of a sequence of higher priority are evicted later.
            max_cached_tokens: The longest prefix to share; None for no limit.
            num_left_over: At least so many tokens are left to compute. 0 where the last logits are not needed.
            cache_at: Positions of the prompt, 1 to its length, at which to keep the state for others.
            num_spare: As for BlockManager.
            is_counted: As for BlockManager.

        Returns:
            The exact number of tokens that need no computation once the moves are done, and the blocks of the prompt.

        Raises:
            OutOfBlocks: The blocks do not fit, or no slot can be had (OutOfSlots).
            ValueError: The id is in use, there are no tokens, or a number is out of range.
            TypeError: An argument is of another type.
        """
        check_namespace(namespace)
        self._sequences.check_new(seq_id)
        tokens = some_tokens(tokens)
        named, is_caching = as_cache_at(cache_at, len(tokens)), self.enable_prefix_caching
        left = tokens_left_over(len(tokens), max_cached_tokens, num_left_over, is_caching)
        prompt = Prompt(tokens, namespace, priority, left, False, num_spare, is_counted)
        allocation, found, slot = self._beginnings.begin(seq_id, prompt)
        marks = self._marks(prompt, found, named, int(num_left_over > 0)) if is_caching else {}
        self._states_of.add(seq_id, slot, priority, found.checkpoint, marks, tokens)
        return allocation

    def slot_of(self, seq_id: SeqId) -> int:
        """Return the working slot of a sequence on the device.

        Raises:
            ValueError: A checkpoint has it, since keep_end, or a failed step may have spoiled the state.
        """
        return self._states_of.slot("slot_of", seq_id)

    @uninterrupted
    def marks_of(self, seq_id: SeqId, start: int, end: int) -> list[tuple[int, int]]:
        """Reserve slots for the marks of a portion that is computed next.

        Checkpoints may be evicted for them: the moves come after this call, and before the step.

        Args:
            seq_id: The sequence.
            start: Tokens that its state has seen.
            end: Tokens that it will have seen.

        Returns:
            (position, slot) in order, with start < position <= end: the state after so many tokens goes to that slot.
            Marks for which there is no slot are left out.

        Raises:
            ValueError: The positions are out of range.
        """
        num_tokens = self._sequences.state(seq_id).num_tokens
        start, end = as_integer("start", start), as_integer("end", end)
        if not 0 <= start <= end <= num_tokens:
            raise ValueError(f"positions must be in [0, {num_tokens}], got ({start}, {end}]")
        return self._states_of.reserve(seq_id, start, end)

    @uninterrupted
    def mark(self, seq_id: SeqId, num_tokens: int) -> None:
        """Have a running prompt keep its state at one more position, where another that waits parts from it.

        Args:
            seq_id: A sequence on the device.
            num_tokens: The position. One that is committed changes nothing.

        Raises:
            ValueError: It is out of range.
        """
        seq, num_tokens = self._sequences.state(seq_id), as_integer("num_tokens", num_tokens)
        if not 1 <= num_tokens <= seq.num_tokens:
            raise ValueError(f"num_tokens must be in [1, {seq.num_tokens}], got {num_tokens}")
        if self.enable_prefix_caching and num_tokens > seq.num_written:
            self._states_of.mark(seq_id, num_tokens)

    @uninterrupted
    def commit(self, seq_id: SeqId, tokens: Tokens) -> None:
        """Record that K and V of `tokens` have been written, as BlockManager does, and the state after them.

        Checkpoints at marks stand for the tokens that are committed here, whatever the prompt was.

        Args:
            seq_id: The sequence.
            tokens: Token ids, as many as there is room for at most.

        Raises:
            ValueError: There is no room for so many tokens.
        """
        tokens = as_tokens(tokens)
        tails = self._states_of.tails(seq_id, tokens)
        super().commit(seq_id, tokens)
        self._states_of.set_tails(seq_id, tails)

    @uninterrupted
    def keep(self, seq_id: SeqId) -> None:
        """Make the reserved slots checkpoints, once the step has filled them and its tokens are committed.

        Those of positions that are not committed are freed.

        Args:
            seq_id: A sequence on the device.

        Raises:
            KeyError: There is no such sequence.
        """
        self._states_of.keep(seq_id)

    @uninterrupted
    def give_up_marks(self, seq_id: SeqId) -> None:
        """Free the reserved slots after a failed step, which may have spoiled the state.

        Args:
            seq_id: A sequence on the device, to be released. Its state can be neither forked, swapped out nor kept.

        Raises:
            KeyError: There is no such sequence.
        """
        self._states_of.give_up(seq_id)

    @uninterrupted
    def keep_end(self, seq_id: SeqId, goes_on: bool = False) -> bool:
        """Make the working slot a checkpoint at the committed tokens. The sequence is to be released next.

        It is for a request's end, and for one that will be begun again. Nothing is copied but the tail.

        Args:
            seq_id: The sequence. Its state has seen its committed tokens, and no more.
            goes_on: Whether a sequence is about to begin there. Beyond the budget, other checkpoints are evicted first.

        Returns:
            Whether it was kept. A private sequence's state is not, nor one that a failed step may have spoiled.
        """
        return self._states_of.keep_end(seq_id, goes_on)

    @uninterrupted
    def fork(self, seq_id: SeqId, new_seq_id: SeqId, num_tokens: int | None = None) -> None:
        """Make a second sequence with the same tokens, in the same blocks, with a copy of the state.

        Args:
            seq_id: A sequence whose tokens are all committed.
            new_seq_id: An id that is not in use.
            num_tokens: All tokens, or None: a state cannot be shortened.

        Raises:
            OutOfBlocks: No slot can be had (OutOfSlots).
            ValueError: A token with room is not committed, num_tokens is another, or the state is gone.
        """
        num_all = self.first_forkable(seq_id)
        if num_tokens is not None and as_integer("num_tokens", num_tokens) != num_all:
            raise ValueError(f"num_tokens must be all {num_all} of a hybrid model's sequence, got {num_tokens}")
        slot, running = self._states_of.slot("fork", seq_id), self._states_of.running[seq_id]
        if not self.states.can_take():
            raise OutOfSlots(1, 0)
        super().fork(seq_id, new_seq_id)
        copy = self.states.take()
        self.states.add_move("copy", slot, copy)
        self._states_of.add(new_seq_id, copy, running.priority, running.last, {}, running.prompt)

    def first_forkable(self, seq_id: SeqId) -> int:
        """Return the number of tokens that `fork` takes of the sequence: all."""
        return self._sequences.state(seq_id).num_tokens

    @uninterrupted
    def release(self, seq_id: SeqId) -> None:
        """End a sequence, also one that is swapped out. Its slot is free, unless a checkpoint has it.

        Its cached blocks and checkpoints can be found until they are evicted. Its other blocks are free.
        """
        super().release(seq_id)
        self._states_of.remove(seq_id)

    # --- off the device and back -------------------------------------------------------------------------------------

    @uninterrupted
    def swap_out(self, seq_id: SeqId) -> None:
        """Free the sequence's device blocks and its slot. The state goes to a host slot.

        Raises:
            OutOfBlocks: The host lacks room for the blocks, or for the state (OutOfSlots).
            ValueError: The state is gone.
        """
        self._states_of.slot("swap_out", seq_id)
        if not self.states.can_take_host():
            raise OutOfSlots(1, 0)
        super().swap_out(seq_id)
        self._states_of.move(seq_id, self.states.take_host(), on_host=True)

    @uninterrupted
    def swap_in(self, seq_id: SeqId, tokens: Tokens, *, num_spare: int = 0) -> Allocation:
        """Give device blocks and a slot to a sequence that is swapped out, with their contents.

        Args:
            seq_id: A sequence that is swapped out.
            tokens: All of its tokens, at least the committed ones.
            num_spare: As for BlockManager.

        Returns:
            The blocks. num_cached_tokens is the number of tokens committed before. Where cached blocks were evicted
            meanwhile, the state is of no use, and it is the longest checkpoint's position. The rest is computed again.

        Raises:
            OutOfBlocks: The device lacks room for the blocks, or for the state (OutOfSlots).
            ValueError: There are fewer tokens than committed ones.
        """
        return self._swaps_in.swap_in(seq_id, some_tokens(tokens), num_spare)

    # --- beside a store ----------------------------------------------------------------------------------------------

    @uninterrupted
    def hold_checkpoints(self, tokens: Tokens, namespace: bytes = b"") -> HeldCheckpoints:
        """Keep the checkpoints of a prompt where they are, with the blocks before them, to read them beside steps.

        Moves that are due come first: do_moves, do_state_moves.

        Args:
            tokens: The prompt.
            namespace: Where to look.

        Returns:
            The checkpoints, which are held until their release.
        """
        check_namespace(namespace)
        return HeldCheckpoints(self.space, self.states, some_tokens(tokens), namespace)

    def num_cached(self, tokens: Tokens, namespace: bytes = b"") -> int:
        """Return the position at which a sequence with these tokens would begin. Nothing is changed.

        Args:
            tokens: The prompt.
            namespace: Where to look.
        """
        check_namespace(namespace)
        return num_begun(self.space, self.states, some_tokens(tokens), namespace)

    # --- questions ---------------------------------------------------------------------------------------------------

    def explain(self, tokens: Tokens, namespace: bytes = b"") -> Explanation:
        """Return how far blocks and states reach into a prompt, and why not further. Nothing is changed.

        Args:
            tokens: A prompt.
            namespace: Where to look.
        """
        check_namespace(namespace)
        tokens = some_tokens(tokens)
        if not self.enable_prefix_caching:
            return super().explain(tokens, namespace)
        return explain_hybrid(self.space, self.states, tokens, namespace)

    def stats(self) -> BlockStats:
        """Return the counters, and the state of the blocks and slots now."""
        return replace(super().stats(), slots=slot_stats(self.states))

    def check(self) -> None:
        """Raise RuntimeError if an invariant is broken: of BlockManager, or of slots and checkpoints. For tests."""
        super().check()
        check_slots(self.states, self._states_of.running, self._sequences)

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether there is a slot for a checkpoint, in either tier."""
        return self.enable_prefix_caching and self.states.most_kept + self.states.host.num_slots > 0

    # --- inside ------------------------------------------------------------------------------------------------------

    def _marks(self, prompt: Prompt, found: Found, named: list[int], num_left_over: int) -> dict[int, Mark]:
        wanted = [*((position, MarkKind.CALLER) for position in named), (found.middle, MarkKind.REGULAR)]
        wanted += (found.diverged_at, MarkKind.SPLIT), (len(prompt.tokens) - num_left_over, MarkKind.END)
        return marks_of_prompt(len(prompt.tokens), wanted, found.num_tokens, self.checkpoint_every)
