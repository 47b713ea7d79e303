"""BlockManager: the blocks of each sequence. It owns the pools and the prefix tree of both tiers, and no tensors.

A sequence's table has two parts:

    blocks   [ 17   4   9 | 30  12 ]
               cached       own
               the tree's,  this sequence's own references (shared after a fork
               pinned by    only in the last, partly filled block, which append
               the match    replaces by a copy before it is written)

`commit` moves the border. Blocks that the step has filled pass to the tree. If the tree already has the same tokens,
its id for them is taken. No other sequence finds a block that is not committed.

Copies between the tiers or within one gather in the manager as moves, in order. They are done before each step:

    allocate, append, swap_in, ... ─► do_moves ─► CacheEngine.do_move ─► the step writes K and V ─► commit

Layers that keep less than all tokens are groups, which hold what they need beside these blocks: see groups/group.py.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from kvpage.blocks.config import BlockConfig
from kvpage.blocks.explain import Ending, Explanation, GroupReach, Searched, explain_attention
from kvpage.blocks.groups.all_groups import AllGroups
from kvpage.blocks.groups.group import Prompt
from kvpage.blocks.groups.held_blocks import HeldBlocks, hold
from kvpage.blocks.groups.kinds import GroupOptions, checked_options, make_groups
from kvpage.blocks.groups.states.marks import as_cache_at
from kvpage.blocks.load_or_compute import LoadOrCompute
from kvpage.blocks.moves import BlockMove, BlockMoves
from kvpage.blocks.rows import MANY_TOKENS, SequenceSteps
from kvpage.blocks.sequence_state import Allocation, Ids, SeqId, SequenceState, Slots
from kvpage.blocks.sequences.growth import append, begin, tokens_left_over
from kvpage.blocks.sequences.sequences import Sequences
from kvpage.blocks.space import BlockSpace
from kvpage.blocks.stats import BlockStats
from kvpage.checks.interrupts import uninterrupted
from kvpage.checks.tokens import Tokens, as_tokens, some_tokens
from kvpage.checks.values import as_counts, as_integer, as_list, check_namespace


class BlockManager:
    """Block tables of sequences, over the pools and the prefix tree of one rank.

    Each method gives all or nothing. A call that raises has changed nothing, except for how recently a cached prefix
    was used, and for pins whose time was over. Every method raises KeyError for an unknown sequence. Not thread-safe:
    one manager belongs to one loop.

    Args:
        num_blocks: As of BlockConfig. So are block_size and enable_prefix_caching.
        rule: Whether blocks on the host are worth their way back; None loads all of them.
        groups: The layers that keep less: a Window for each size of window, and States for those with states. With
            groups no parts of blocks are shared.
        options: The other options of BlockConfig, by name.

    Attributes:
        windows: The groups of windows, in the order of `groups`. It makes room in them for each step.
        states: The group of states; None without one.

    Raises:
        ValueError: A number is out of range, or there are two groups of states.
        TypeError: An argument is of another type.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        *,
        rule: LoadOrCompute | None = None,
        groups: Sequence[GroupOptions] = (),
        **options: Any,
    ) -> None:
        kinds = checked_options(groups)
        config = BlockConfig(num_blocks, block_size, enable_prefix_caching, **options)
        self.block_size = block_size
        self.enable_prefix_caching = is_caching = enable_prefix_caching
        self.share_parts = config.share_parts and is_caching and not kinds
        self.space = space = BlockSpace(config, rule)
        self.pool, self.tree = space.pool, space.tree
        self._sequences = sequences = Sequences(space, is_caching)
        self.rows = SequenceSteps(sequences)
        self.windows, self.states, self._groups = make_groups(kinds, space, sequences, is_caching)
        self._all_groups = AllGroups(sequences, self._groups, self.states is not None)
        # Who commits, forks, shortens and ends a sequence. Without groups its blocks are all that it has.
        self._holder: Sequences | AllGroups = self._all_groups if self._groups else sequences

    @classmethod
    def of(
        cls, config: BlockConfig, rule: LoadOrCompute | None = None, groups: Sequence[GroupOptions] = ()
    ) -> "BlockManager":
        """Return a manager with the options of a config.

        Args:
            config: The options.
            rule: As for the class.
            groups: As for the class.
        """
        options = {field.name: getattr(config, field.name) for field in fields(config)}
        return cls(**options, rule=rule, groups=groups)

    def take_moves(self) -> BlockMoves:
        """Return the moves to make before the next step, in order. Each is handed over once, and taken as made."""
        return self.space.take_moves()

    def due_moves(self) -> Iterator[BlockMove]:
        """Return an iterator over the moves in order, for a loop that makes them; see BlockMoves.due."""
        return self.space.due_moves()

    def do_moves(self, do_move: Callable[[BlockMove], object]) -> None:
        """Make all moves in order.

        Args:
            do_move: Makes one move, such as CacheEngine.do_move. If it raises, that move and later ones stay.
        """
        self.space.do_moves(do_move)

    # --- a sequence's life -------------------------------------------------------------------------------------------

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
        """Give blocks to a new sequence. The longest cached prefix is shared: whole blocks, and a part by a copy.

        With groups it is the longest prefix that all of them serve: whole blocks, or with states an exact position.
        Windows get no room yet: `windows.open` makes it for the tokens of a step.

        Args:
            seq_id: An id that is not in use.
            tokens: The prompt, at least one token.
            namespace: Prefixes are shared within one namespace only.
            priority: 0 to 7. Blocks cached by a sequence of higher priority are evicted later.
            max_cached_tokens: The longest prefix to share; None for no limit.
            num_left_over: At least that many tokens are left to compute. 0 where the last logits are not needed.
            cache_at: Positions of the prompt, 1 to its length, at which to keep the state for others, if there is one.
            num_spare: How many more blocks are to be left, free or evictable. This is checked before anything changes.
            is_counted: Whether the prompt, and all that is found of it, counts in the statistics. False for one that
                was counted before: it was preempted, for example, and finds its own blocks again.

        Returns:
            The blocks of the whole prompt.

        Raises:
            OutOfBlocks: The rest does not fit beside the spare blocks, or no state slot can be had (OutOfSlots).
            ValueError: The id is in use, there are no tokens, or a number is out of range.
            TypeError: An argument is of another type.
        """
        check_namespace(namespace)
        self._sequences.check_new(seq_id)
        tokens = some_tokens(tokens)
        is_caching, num_to_compute = self.enable_prefix_caching, num_left_over
        if type(num_left_over) is not int or num_left_over != 1 or max_cached_tokens is not None or not is_caching:
            num_left_over = tokens_left_over(len(tokens), max_cached_tokens, num_left_over, is_caching)
        if not self._groups:
            return begin(
                self._sequences,
                seq_id,
                tokens,
                namespace,
                priority,
                num_left_over,
                share_parts=self.share_parts,
                num_spare=num_spare,
                is_counted=is_counted,
            )
        marks, num_last = as_cache_at(cache_at, len(tokens)), int(num_to_compute > 0)
        prompt = Prompt(tokens, namespace, priority, num_left_over, False, num_spare, is_counted, num_last, marks)
        return self._all_groups.begin(seq_id, prompt)

    def append(self, seq_ids: Sequence[SeqId], num_new_tokens: Sequence[int] | int = 1) -> None:
        """Make room for more tokens in each sequence.

        A last block that a fork shares is replaced by a copy (copy-on-write) for all but its last holder.

        Args:
            seq_ids: Distinct sequences.
            num_new_tokens: One number for each sequence, or one for all.

        Raises:
            OutOfBlocks: The tokens do not fit.
            ValueError: Ids repeat, a number is negative, or there is another number of numbers.
        """
        seq_ids = as_list("seq_ids", seq_ids)
        on_device = self._sequences.on_device
        rows = [on_device[seq_id] for seq_id in seq_ids]
        if len(set(seq_ids)) != len(seq_ids):
            raise ValueError(f"seq_ids must be distinct, got {seq_ids}")
        if type(num_new_tokens) is int and num_new_tokens == 1:
            append(self._sequences, rows, 1)
            return
        counts = as_counts("num_new_tokens", num_new_tokens, len(seq_ids))
        if len(counts) != len(seq_ids):
            raise ValueError(f"num_new_tokens must be one per sequence, got {len(counts)} for {len(seq_ids)}")
        for seq_id, count in zip(seq_ids, counts, strict=True):
            if count < 0:
                raise ValueError(f"num_new_tokens must not be negative, got {count} for {seq_id!r}")
        append(self._sequences, rows, [min(count, MANY_TOKENS) for count in counts])

    def commit(self, seq_id: SeqId, tokens: Tokens) -> None:
        """Record that K and V of `tokens` have been written. They follow the tokens cached or committed before.

        Other sequences find the blocks that are now full. Ids in the table may change: where the tree has the same
        tokens already, its block takes the place of this sequence's own, which is released. Commits by rows are of the
        layers that attend to all tokens; windows follow later.

        Args:
            seq_id: The sequence.
            tokens: Token ids, as many as there is room for at most.

        Raises:
            ValueError: There is no room for that many tokens, or windows are not opened for them. Or they are fewer
                than `windows.skip_to` has made room for.
        """
        self._holder.commit(seq_id, as_tokens(tokens))

    def fork(self, seq_id: SeqId, new_seq_id: SeqId, num_tokens: int | None = None) -> None:
        """Make a second sequence with the same first tokens, in the same blocks.

        The first of the two that grows into a block which both hold gets a copy of it.

        Args:
            seq_id: A sequence whose tokens are all committed.
            new_seq_id: An id that is not in use.
            num_tokens: How many tokens the new sequence has; None for all. At least first_forkable(seq_id): shorter
                prefixes consist of cached blocks, which `allocate` finds.

        Raises:
            OutOfBlocks: No slot can be had for a copy of the state (OutOfSlots).
            ValueError: A token with room is not committed, num_tokens is out of range, or the state is gone.
        """
        seq = self._sequences.state(seq_id)
        self._sequences.check_new(new_seq_id)
        if seq.num_written != seq.num_tokens:
            raise ValueError(f"fork needs all {seq.num_tokens} tokens to be committed, {seq.num_written} are")
        num_tokens = seq.num_tokens if num_tokens is None else as_integer("num_tokens", num_tokens)
        fewest = self.first_forkable(seq_id)
        if not fewest <= num_tokens <= seq.num_tokens:
            raise ValueError(f"num_tokens must be in [{fewest}, {seq.num_tokens}], got {num_tokens}")
        self._holder.fork(seq_id, new_seq_id, num_tokens)

    def make_private(self, seq_id: SeqId) -> None:
        """Hide all further tokens of the sequence from others: its tokens alone do not determine their K and V."""
        self._sequences.rows.make_private(self._sequences.on_device[seq_id])

    def first_forkable(self, seq_id: SeqId) -> int:
        """Return the smallest number of tokens that `fork` takes of the sequence."""
        seq = self._sequences.state(seq_id)
        fewest = min(max(seq.first_own * self.block_size, 1), seq.num_tokens)
        if not self._groups:
            return fewest
        return max(fewest, *(group.first_forkable(seq_id, seq.num_tokens) for group in self._groups))

    def give_back_room(self, seq_id: SeqId) -> None:
        """Free the blocks that the sequence has beyond its committed tokens, in all groups.

        Raises:
            ValueError: `windows.skip_to` has made room, and what comes there is not committed.
        """
        self._holder.give_back_room(seq_id)

    def release(self, seq_id: SeqId) -> None:
        """End a sequence, also one that is swapped out.

        Its cached blocks and checkpoints can be found until they are evicted. All else that it has is free.
        """
        self._holder.release(seq_id)

    def release_before(self, seq_id: SeqId, num_tokens: int) -> int:
        """Give back the sequence's own blocks that hold only tokens before the `num_tokens`th. Cached blocks stay.

        It is for models whose layers all have a sliding window. The table's entries stay and mean nothing.

        Args:
            seq_id: The sequence.
            num_tokens: At most the committed tokens.

        Returns:
            How many blocks were given back.

        Raises:
            ValueError: num_tokens is out of range.
        """
        row, num_tokens = self._sequences.on_device[seq_id], as_integer("num_tokens", num_tokens)
        return self._sequences.rows.release_before(row, num_tokens)

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks, in both tiers, and end all pins: as after a change of the model's weights.

        Raises:
            RuntimeError: A sequence is not released, or a match of the tree. Nothing is forgotten.
        """
        if len(self._sequences):
            raise RuntimeError(f"reset_prefix_cache needs all sequences to be released, {len(self._sequences)} are not")
        self.space.clear()

    # --- what groups keep --------------------------------------------------------------------------------------------

    def mark(self, seq_id: SeqId, num_tokens: int) -> None:
        """Have a running prompt keep its state at one more position, where another that waits parts from it.

        Args:
            seq_id: A sequence on the device.
            num_tokens: The position. One that is committed changes nothing.

        Raises:
            ValueError: It is out of range.
        """
        most, num_tokens = self.state(seq_id).num_tokens, as_integer("num_tokens", num_tokens)
        if not 1 <= num_tokens <= most:
            raise ValueError(f"num_tokens must be in [1, {most}], got {num_tokens}")
        self._all_groups.each(seq_id, lambda group: group.mark(seq_id, num_tokens))

    def keep(self, seq_id: SeqId) -> None:
        """Let others find the states that a step has left at marks, once its tokens are committed.

        Args:
            seq_id: A sequence on the device.
        """
        self._all_groups.each(seq_id, lambda group: group.keep(seq_id))

    def keep_end(self, seq_id: SeqId, goes_on: bool = False) -> bool:
        """Make the sequence's state a checkpoint at the committed tokens. The sequence is to be released next.

        It is for a request's end, and for one that will be begun again. Nothing is copied but the tail.

        Args:
            seq_id: The sequence. Its state has seen its committed tokens, and no more.
            goes_on: Whether a sequence is about to begin there. Beyond the budget, other checkpoints are evicted first.

        Returns:
            Whether it was kept. A private sequence's state is not, nor one that a failed step may have spoiled.
        """
        return self._all_groups.each(seq_id, lambda group: group.keep_end(seq_id, goes_on))

    def give_up_marks(self, seq_id: SeqId) -> None:
        """Forget the states of a failed step, which may have spoiled them.

        Args:
            seq_id: A sequence on the device, to be released. Its state can be neither forked, swapped out nor kept.

        Raises:
            KeyError: There is no such sequence.
        """
        self._all_groups.each(seq_id, lambda group: group.give_up_marks(seq_id))

    # --- off the device and back -------------------------------------------------------------------------------------

    def swap_out(self, seq_id: SeqId) -> None:
        """Free what the sequence has on the device, in all groups.

        Committed tokens that are not cached go to host blocks of the sequence's own, and its state to a host slot.
        Cached blocks are left to the tree, which may find them again, on either tier.

        Raises:
            OutOfBlocks: The host lacks room in a group.
            ValueError: The state is gone, or `windows.skip_to` has made room, and what comes there is not committed.
        """
        self._all_groups.swap_out(seq_id)

    def swap_in(self, seq_id: SeqId, tokens: Tokens, *, num_spare: int = 0) -> Allocation:
        """Give device blocks to a sequence that is swapped out, with their contents in all groups.

        Args:
            seq_id: A sequence that is swapped out.
            tokens: All of its tokens, at least the committed ones.
            num_spare: As for `allocate`.

        Returns:
            The blocks. num_cached_tokens is the number of tokens committed before. Where cached blocks were evicted
            meanwhile, or `rule` expects that computing is faster than loading, it is less: the longest position that
            all groups serve. The rest has to be computed again. It does not count as found in the statistics.

        Raises:
            OutOfBlocks: The device lacks room in a group.
            ValueError: There are fewer tokens than committed ones.
        """
        swapped = self._sequences.swapped[seq_id]
        tokens = some_tokens(tokens)
        if len(tokens) < swapped.num_written:
            raise ValueError(f"tokens must be at least the {swapped.num_written} committed ones, got {len(tokens)}")
        return self._all_groups.swap_in(seq_id, tokens, num_spare)

    # --- beside a store ----------------------------------------------------------------------------------------------

    def num_cached(self, tokens: Tokens, namespace: bytes = b"") -> int:
        """Return how many tokens of a prompt a sequence need not compute. Nothing is changed, or counts as used.

        Args:
            tokens: The prompt, at least one token, of which one is left over.
            namespace: Where to look.

        Returns:
            Tokens that all groups have, and that are worth their way back from the host. Parts of blocks are not
            counted.
        """
        check_namespace(namespace)
        tokens = some_tokens(tokens)
        if not self.enable_prefix_caching:
            return 0
        ids = self.tree.look(tokens[:-1], namespace)[0]
        if not self._groups and self.space.rule is None:
            return int(ids.shape[1]) * self.block_size
        return self._all_groups.position(ids, Prompt(tokens, namespace, 0, 1))

    @uninterrupted
    def hold_cached(self, tokens: Tokens, namespace: bytes = b"") -> HeldBlocks:
        """Hold the blocks of a prefix that are cached on the device, in all groups, until `release` of the result.

        Of a window's blocks those of the last window are held, and those in use. Of the others that a window has
        cached, the last ones are: a quarter of its group stays free.

        Args:
            tokens: The prefix, as far as it is cached.
            namespace: Where to look.

        Returns:
            The blocks. Their `release` is to be called once.
        """
        tokens = as_tokens(tokens)
        check_namespace(namespace)
        match = self.tree.match(tokens, namespace, num_left_over=0, is_hit=False)
        self.tree.trim(match)
        return hold(self.tree, match, self.windows)

    # --- arguments of a step -----------------------------------------------------------------------------------------

    def block_ids(self, seq_id: SeqId) -> Ids:
        """Return a copy of the sequence's block ids, int32 [num_blocks]."""
        return self._sequences.ids(seq_id)

    def block_tables(self, seq_ids: Sequence[SeqId]) -> Ids:
        """Return the tables of several sequences, int32 [num_seqs, max_blocks].

        Entries after a sequence's last block are 0.

        Raises:
            RuntimeError: There are moves to make.
        """
        self._check_moved()
        return self.rows.tables(self._sequences.rows_of(seq_ids))

    def slot_mapping(self, seq_id: SeqId, start: int, end: int) -> Slots:
        """Return the slots of the sequence's positions [start, end), int64. Raise as `slot_mappings` does."""
        return self.slot_mappings([seq_id], [start], [end])

    def slot_mappings(self, seq_ids: Sequence[SeqId], starts: Sequence[int], ends: Sequence[int]) -> Slots:
        """Return the slots of the positions [starts[i], ends[i]) of each sequence, int64, one sequence after the other.

        Raises:
            RuntimeError: There are moves to make. They would overwrite tokens that are written now.
            ValueError: A position is out of range.
        """
        self._check_moved()
        return self._sequences.slots(seq_ids, starts, ends)

    # --- questions ---------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the device tier."""
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that can be handed out: free ones, and cached ones that are not in use."""
        return self.space.num_free

    @property
    def usage(self) -> float:
        """The part of the device's blocks that sequences hold, 0 to 1."""
        return 1 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0

    def explain(self, tokens: Tokens, namespace: bytes = b"", searched: Searched = "all") -> Explanation:
        """Return how far each group reaches into a prompt, and why not further. Nothing is changed.

        The tree remembers its last evictions. Of earlier ones it is not known whether a block was evicted or never
        computed.

        Args:
            tokens: A prompt, at least one token.
            namespace: Where to look.
            searched: Where a longer match is searched: "all" namespaces; the caller's "own", by other weights; "none".
        """
        check_namespace(namespace)
        tokens = some_tokens(tokens)
        if not self.enable_prefix_caching:
            return Explanation(len(tokens), 0, (GroupReach("attention", 0, Ending.OFF),))
        if not self._groups:
            return explain_attention(self.space, tokens, namespace, self.share_parts, searched)
        return self._all_groups.explain(tokens, namespace, searched)

    def state(self, seq_id: SeqId) -> SequenceState:
        """Return a copy of the state of a sequence on the device."""
        return self._sequences.state(seq_id)

    def __contains__(self, seq_id: SeqId) -> bool:
        """Whether a sequence has the id, on the device or off it."""
        return seq_id in self._sequences.on_device or self.is_swapped(seq_id)

    def is_swapped(self, seq_id: SeqId) -> bool:
        """Return whether the sequence is off the device."""
        return seq_id in self._sequences.swapped

    def has_room(self, num_blocks: int) -> bool:
        """Return whether `num_blocks` blocks can be handed out."""
        return as_integer("num_blocks", num_blocks) <= self.num_free_blocks

    def stats(self) -> BlockStats:
        """Return the counters, and the state of the blocks and slots now."""
        slots = None if self.states is None else self.states.space.stats()
        return BlockStats.of(self.pool, self.tree, self.space.stats(), len(self._sequences.on_device), slots)

    def check(self) -> None:
        """Raise RuntimeError if an invariant is broken: of the pool, the tree, owners of blocks, groups. For tests."""
        self._sequences.check()
        for group in self._groups:
            group.check([*self._sequences.on_device], [*self._sequences.swapped])

    # --- inside ------------------------------------------------------------------------------------------------------

    def _check_moved(self) -> None:
        if self.space.has_moves:
            raise RuntimeError("do_moves must be called before a step")
