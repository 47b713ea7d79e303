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
"""

from collections.abc import Callable, Iterator, Sequence

from kvpage._C import Match
from kvpage.blocks.explain import Explanation, explain_attention
from kvpage.blocks.lives import swaps
from kvpage.blocks.lives.growth import append, begin, tokens_left_over
from kvpage.blocks.lives.sequences import Sequences
from kvpage.blocks.load_or_compute import LoadOrCompute
from kvpage.blocks.moves import BlockMove, BlockMoves
from kvpage.blocks.rows import MANY_TOKENS, SequenceSteps
from kvpage.blocks.space import BlockSpace, HostPolicy
from kvpage.blocks.states import Allocation, Ids, SeqId, SequenceState, Slots
from kvpage.blocks.stats import BlockStats
from kvpage.checks.tokens import Tokens, as_tokens, some_tokens
from kvpage.checks.values import as_counts, as_integer, as_list, check_flag, check_namespace


class BlockManager:
    """Block tables of sequences, over the pools and the prefix tree of one rank.

    Each method gives all or nothing. A call that raises has changed nothing, except for how recently a cached prefix
    was used, and for pins whose time was over. Every method raises KeyError for an unknown sequence. Not thread-safe:
    one manager belongs to one loop.

    Args:
        num_blocks: Blocks of the device tier.
        block_size: Tokens of a block.
        enable_prefix_caching: Whether sequences share blocks. Without it every sequence has blocks of its own.
        num_host_blocks: Blocks of the host tier.
        share_parts: Whether a new sequence also gets a copy of the longest part of the next block that a cached block
            shares.
        host_policy: When cached blocks are copied to the host.
        rule: Whether cached blocks on the host are worth their way back; None loads all of them.
        pin_quota: How many blocks `space.pin` may keep.

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
        num_host_blocks: int = 0,
        share_parts: bool = True,
        host_policy: HostPolicy | None = None,
        rule: LoadOrCompute | None = None,
        pin_quota: int = 0,
    ) -> None:
        check_flag("enable_prefix_caching", enable_prefix_caching)
        check_flag("share_parts", share_parts)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.share_parts = share_parts and enable_prefix_caching
        self.space = BlockSpace(num_blocks, block_size, num_host_blocks, host_policy, rule, pin_quota)
        self.pool, self.tree = self.space.pool, self.space.tree
        self._sequences = Sequences(self.tree, enable_prefix_caching)
        self.rows = SequenceSteps(self.space, self._sequences)

    def take_moves(self) -> BlockMoves:
        """Return the moves to make before the next step, in order. Each is handed over once, and taken as made."""
        return self.space.take_moves()

    def due_moves(self) -> Iterator[BlockMove]:
        """Return an iterator over the moves in order, for a loop that makes them.

        Returns:
            The moves. Each counts as made when the next one is asked for. A loop that ends early, as by an exception,
            leaves its last move, and those after it, for the next time.
        """
        return self.space.due_moves()

    def do_moves(self, do_move: Callable[[BlockMove], object]) -> None:
        """Make all moves in order.

        Args:
            do_move: Makes one move, such as CacheEngine.do_move. If it raises, that move and those after it stay, and
                come first in the next call.
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
        *,
        num_spare: int = 0,
        is_counted: bool = True,
    ) -> Allocation:
        """Give blocks to a new sequence. The longest cached prefix is shared: whole blocks, and a part by a copy.

        Args:
            seq_id: An id that is not in use.
            tokens: The prompt, at least one token.
            namespace: Prefixes are shared within one namespace only.
            priority: 0 to 7. Blocks cached by a sequence of higher priority are evicted later.
            max_cached_tokens: The longest prefix to share; None for no limit.
            num_left_over: At least so many tokens are left to compute. 0 where the last logits are not needed.
            num_spare: How many more blocks are to be left, free or evictable. This is checked before anything changes.
            is_counted: Whether the prompt, and all that is found of it, counts in the statistics. False for one that
                was counted before: it was preempted, for example, and finds its own blocks again.

        Returns:
            The blocks of the whole prompt.

        Raises:
            OutOfBlocks: The rest does not fit beside the spare blocks.
            ValueError: The id is in use, there are no tokens, or a number is out of range.
            TypeError: An argument is of another type.
        """
        check_namespace(namespace)
        self._sequences.check_new(seq_id)
        tokens = some_tokens(tokens)
        is_caching, parts = self.enable_prefix_caching, self.share_parts
        if type(num_left_over) is not int or num_left_over != 1 or max_cached_tokens is not None or not is_caching:
            num_left_over = tokens_left_over(len(tokens), max_cached_tokens, num_left_over, is_caching)
        about = tokens, namespace, priority, num_left_over, parts, num_spare, is_counted
        return begin(self.space, self._sequences, seq_id, *about)

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
        rows = self._sequences.rows_of(seq_ids)
        if len(set(seq_ids)) != len(seq_ids):
            raise ValueError(f"seq_ids must be distinct, got {seq_ids}")
        if type(num_new_tokens) is int and num_new_tokens == 1:
            append(self.space, self._sequences, rows, 1)
            return
        counts = as_counts("num_new_tokens", num_new_tokens, len(seq_ids))
        if len(counts) != len(seq_ids):
            raise ValueError(f"num_new_tokens must be one per sequence, got {len(counts)} for {len(seq_ids)}")
        for seq_id, count in zip(seq_ids, counts, strict=True):
            if count < 0:
                raise ValueError(f"num_new_tokens must not be negative, got {count} for {seq_id!r}")
        append(self.space, self._sequences, rows, [min(count, MANY_TOKENS) for count in counts])

    def commit(self, seq_id: SeqId, tokens: Tokens) -> None:
        """Record that K and V of `tokens` have been written. They follow the tokens cached or committed before.

        Other sequences find the blocks that are now full. Ids in the table may change: where the tree has the same
        tokens already, its block takes the place of this sequence's own, which is released.

        Args:
            seq_id: The sequence.
            tokens: Token ids, as many as there is room for at most.

        Raises:
            ValueError: There is no room for so many tokens.
        """
        row = self._sequences.on_device[seq_id]
        num_cached = self._sequences.rows.commit(row, as_tokens(tokens))
        if num_cached and self.space.writes_at_once:
            self._sequences.write_out(self.space, row)

    def fork(self, seq_id: SeqId, new_seq_id: SeqId, num_tokens: int | None = None) -> None:
        """Make a second sequence with the same first tokens, in the same blocks.

        The first of the two that grows into a block which both hold gets a copy of it.

        Args:
            seq_id: A sequence whose tokens are all committed.
            new_seq_id: An id that is not in use.
            num_tokens: How many tokens the new sequence has; None for all. At least first_forkable(seq_id): shorter
                prefixes consist of cached blocks, which `allocate` finds.

        Raises:
            ValueError: A token with room is not committed, or num_tokens is out of range.
        """
        seq = self._sequences.state(seq_id)
        self._sequences.check_new(new_seq_id)
        if seq.num_written != seq.num_tokens:
            raise ValueError(f"fork needs all {seq.num_tokens} tokens to be committed, {seq.num_written} are")
        num_tokens = seq.num_tokens if num_tokens is None else as_integer("num_tokens", num_tokens)
        fewest = self.first_forkable(seq_id)
        if not fewest <= num_tokens <= seq.num_tokens:
            raise ValueError(f"num_tokens must be in [{fewest}, {seq.num_tokens}], got {num_tokens}")
        rows, row = self._sequences.rows, self._sequences.on_device[seq_id]
        try:
            rows.fork(self._sequences.on_device, new_seq_id, row, num_tokens)
        except BaseException:  # Ctrl-C, after the sequence was made
            self._sequences.discard(new_seq_id)
            raise

    def make_private(self, seq_id: SeqId) -> None:
        """Hide all further tokens of the sequence from others: its tokens alone do not determine their K and V."""
        self._sequences.rows.make_private(self._sequences.on_device[seq_id])

    def first_forkable(self, seq_id: SeqId) -> int:
        """Return the smallest number of tokens that `fork` takes of the sequence."""
        seq = self._sequences.state(seq_id)
        return min(max(seq.first_own * self.block_size, 1), seq.num_tokens)

    def give_back_room(self, seq_id: SeqId) -> None:
        """Free the blocks that the sequence has beyond its committed tokens."""
        self._sequences.rows.give_back_room(self._sequences.on_device[seq_id])

    def release(self, seq_id: SeqId) -> None:
        """End a sequence, also one that is swapped out.

        Its cached blocks can be found until they are evicted. Its other blocks are free.
        """
        if seq_id in self._sequences.swapped:
            self.space.release_host(self._sequences.swapped.pop(seq_id).host_ids)
            return
        self._sequences.remove(seq_id)

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

    # --- off the device and back -------------------------------------------------------------------------------------

    def swap_out(self, seq_id: SeqId) -> None:
        """Free the sequence's device blocks.

        Committed tokens that are not cached go to host blocks of the sequence's own. Cached blocks are left to the
        tree, which may find them again, on either tier.

        Raises:
            OutOfBlocks: The host lacks room.
        """
        swaps.swap_out(self.space, self._sequences, seq_id)

    def swap_in(self, seq_id: SeqId, tokens: Tokens, *, num_spare: int = 0) -> Allocation:
        """Give device blocks to a sequence that is swapped out, with their contents.

        Args:
            seq_id: A sequence that is swapped out.
            tokens: All of its tokens, at least the committed ones.
            num_spare: As for `allocate`.

        Returns:
            The blocks. num_cached_tokens is the number of tokens committed before, or less where cached blocks were
            evicted meanwhile. The rest has to be computed again. It does not count as found in the statistics.

        Raises:
            OutOfBlocks: The device lacks room.
            ValueError: There are fewer tokens than committed ones.
        """
        swapped = self._sequences.swapped[seq_id]
        tokens = some_tokens(tokens)
        if len(tokens) < swapped.num_written:
            raise ValueError(f"tokens must be at least the {swapped.num_written} committed ones, got {len(tokens)}")
        # A prefix of whole blocks may have been committed to its last token: none is left over then.
        fewest_left = int(len(tokens) > swapped.num_written)
        most_found = swapped.first_block * self.block_size if swapped.is_private else None
        is_caching = self.enable_prefix_caching
        num_left_over = tokens_left_over(len(tokens), most_found, fewest_left, is_caching)
        about = tokens, num_left_over, is_caching, num_spare
        num_written = swaps.swap_in(self.space, self._sequences, seq_id, *about, lambda match: self._fit(seq_id, match))
        return Allocation(num_written, self.block_ids(seq_id))

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

    def explain(self, tokens: Tokens, namespace: bytes = b"") -> Explanation:
        """Return how far cached blocks reach into a prompt, and why not further. Nothing is changed.

        The tree remembers its last evictions. Of earlier ones, and of those before which more was evicted or added in
        another way, it is not known whether a block was evicted or never computed.

        Args:
            tokens: A prompt, at least one token.
            namespace: Where to look.
        """
        check_namespace(namespace)
        tokens = some_tokens(tokens)
        tree = self.tree if self.enable_prefix_caching else None
        return explain_attention(tree, tokens, namespace, self.share_parts, self.space.rule)

    def state(self, seq_id: SeqId) -> SequenceState:
        """Return a copy of the state of a sequence on the device."""
        return self._sequences.state(seq_id)

    def is_swapped(self, seq_id: SeqId) -> bool:
        """Return whether the sequence is off the device."""
        return seq_id in self._sequences.swapped

    def has_room(self, num_blocks: int) -> bool:
        """Return whether `num_blocks` blocks can be handed out."""
        return as_integer("num_blocks", num_blocks) <= self.num_free_blocks

    def stats(self) -> BlockStats:
        """Return the counters, and the state of the blocks now."""
        return BlockStats.of(self.pool, self.tree, self.space.stats(), len(self._sequences.on_device))

    def check(self) -> None:
        """Raise RuntimeError if an invariant is broken: of the pool, the tree, or the owners of blocks. For tests."""
        self._sequences.check(self.space)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _fit(self, seq_id: SeqId, match: Match) -> None:
        """Shorten the match of a sequence that comes back to what all groups have."""

    def _check_moved(self) -> None:
        if self.space.has_moves:
            raise RuntimeError("do_moves must be called before a step")
