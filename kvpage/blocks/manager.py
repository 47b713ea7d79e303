"""BlockManager: which blocks each sequence has. It owns the pools and the prefix tree of both tiers; no tensors.

A sequence's table has two parts:

    blocks   [ 17   4   9 | 30  12 ]
               cached       own
               the tree's,  this sequence's own references (shared after a fork
               pinned by    only in the last, partly filled block, which append
               the match    replaces by a copy before it is written)

`commit` moves the border: blocks that the step has filled pass to the tree, under the id that the tree already has for
the same tokens if there is one. Nothing that is not committed can be found by another sequence.

What has to be copied, between the tiers or within one, gathers in the manager, in order; `do_moves` has it done, by
CacheEngine.do_move, before each step:

    allocate, append, swap_in, ... ─► do_moves ─► CacheEngine.do_move ─► the step writes K and V ─► commit
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvpage._C import PartMatch
from kvpage.blocks.check import check_blocks, own_ids
from kvpage.blocks.load_or_compute import LoadOrCompute
from kvpage.blocks.moves import BlockMove, BlockMoves
from kvpage.blocks.sequence import SequenceState, SwappedState
from kvpage.blocks.space import BlockSpace, HostPolicy
from kvpage.blocks.stats import BlockStats
from kvpage.blocks.table import BlockTables, Ids, Slots
from kvpage.checks.errors import OutOfBlocks
from kvpage.checks.tokens import Tokens, as_tokens
from kvpage.checks.values import as_counts, as_integer, as_list, as_positions, check_flag, check_namespace

SeqId = Hashable


class Allocation(NamedTuple):
    """What a sequence was given.

    num_cached_tokens: its leading tokens whose K and V are in the blocks already, once the moves are done; at least one
        is left to compute unless `allocate` was told otherwise.
    block_ids: int32, all of its blocks.
    """

    num_cached_tokens: int
    block_ids: Ids


class BlockManager:
    """Sequences' block tables over the pools and the prefix tree of one rank.

    num_blocks, num_host_blocks: of the device tier and of the host tier.
    enable_prefix_caching: without it every sequence's blocks are its own.
    share_parts: a new sequence also gets the longest part of the next block that a cached one shares, by a copy.
    host_policy: when cached blocks are copied to the host. rule: whether they are worth their way back.
    pin_quota: how many blocks `pin` may keep.

    Each method gives all or nothing: one that raises (OutOfBlocks, ValueError, TypeError, KeyError for an unknown
    sequence) has changed nothing but how recently a cached prefix was used, and pins whose time was over. Not
    thread-safe: one manager, one loop.
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
        self._tables = BlockTables(block_size)
        self._sequences: dict[SeqId, SequenceState] = {}
        self._swapped: dict[SeqId, SwappedState] = {}

    def take_moves(self) -> BlockMoves:
        """What has to be copied before the next step, in order, for CacheEngine.move. Each is handed out once: if it is
        not done, what the blocks hold is not what the manager takes them for. `do_moves` keeps it until it is.
        """
        return self.space.take_moves()

    def due_moves(self) -> Iterator[BlockMove]:
        """Return the copies that are due before the next step, in order. Each is done when the next is asked for.

        A loop that ends early, for example by an exception, leaves its last move due, whole, and those after it.
        """
        return self.space.due_moves()

    def do_moves(self, each: Callable[[BlockMove], object]) -> None:
        """Has what is to be copied done, one move after the other. What `each` raises comes through; then that move and
        those behind it stay, and come first the next time.
        """
        self.space.do_moves(each)

    # --- a sequence's life -------------------------------------------------------------------------------------------

    def allocate(
        self,
        seq_id: SeqId,
        tokens: Tokens,
        namespace: bytes = b"",
        priority: int = 0,
        max_cached_tokens: int | None = None,
        num_left_over: int = 1,
    ) -> Allocation:
        """Blocks for all of `tokens`, of which the longest cached prefix is shared: whole blocks, and by a copy the
        longest part of the next one.

        priority: 0 to 7; what is cached by a sequence of a higher one is evicted later.
        max_cached_tokens: share no longer prefix than this.
        num_left_over: as many tokens at least are left to compute. 0, where nobody asks for the last one's logits.

        Raises OutOfBlocks if the rest does not fit, ValueError for a seq_id in use, no tokens, or max_cached_tokens or
        num_left_over under 0, TypeError for a namespace that is not bytes.
        """
        check_namespace(namespace)
        self._check_new(seq_id)
        tokens = _some_tokens(tokens)
        num_left_over = self._num_left_over(len(tokens), max_cached_tokens, num_left_over)
        match = self.space.match(tokens, namespace, priority, num_left_over)
        part = self.space.tree.match_part(match, tokens, num_left_over) if self.share_parts else None
        num_blocks = self._blocks_for(len(tokens))
        try:
            taken = self._with_or_without(part, lambda: self.space.give(match, num_blocks))
        except BaseException:
            self.tree.release(match)
            raise
        num_part = self.space.copy_part(part, taken) if part and not part.match.is_released else 0
        num_cached = match.num_tokens + num_part
        row = self._tables.add_row(match.block_ids)
        self._tables.extend(row, taken)
        pending = tokens[match.num_tokens : num_cached].copy()
        self._sequences[seq_id] = SequenceState(
            row, match, len(tokens), num_cached, pending, False, namespace, priority
        )
        self.space.count_query(len(tokens), num_part)
        return Allocation(num_cached, self.block_ids(seq_id))

    def append(self, seq_ids: Sequence[SeqId], num_new_tokens: Sequence[int] | int = 1) -> None:
        """Room for so many more tokens in each sequence, each named once.

        A last block that a fork shares is replaced by a copy (copy-on-write) for all but its last holder.
        """
        seq_ids = as_list("seq_ids", seq_ids)
        counts = as_counts("num_new_tokens", num_new_tokens, len(seq_ids))
        self._check_append(seq_ids, counts)
        sequences = [self._sequences[seq_id] for seq_id in seq_ids]
        copied = self._to_copy([seq for seq, count in zip(sequences, counts, strict=True) if count])
        added = [
            self._blocks_for(seq.num_tokens + count) - self._tables.num_blocks(seq.row)
            for seq, count in zip(sequences, counts, strict=True)
        ]
        fresh = self.space.take(len(copied) + sum(added))
        self._copy_on_write(copied, fresh[: len(copied)])
        begin = len(copied)
        for seq, count, num_added in zip(sequences, counts, added, strict=True):
            if num_added:
                self._tables.extend(seq.row, fresh[begin : begin + num_added])
                begin += num_added
            seq.num_tokens += count

    def commit(self, seq_id: SeqId, tokens: Tokens) -> None:
        """Says that K and V of `tokens`, which follow what was cached or committed before, have been written.

        Blocks that are now full become findable. They may change their ids: where the tree has the same tokens already,
        its block stands in the table from now on and this sequence's own is released.
        """
        seq, tokens = self._sequences[seq_id], as_tokens(tokens)
        if seq.num_written + len(tokens) > seq.num_tokens:
            raise ValueError(
                f"commit must not exceed the {seq.num_tokens} tokens that there is room for, "
                f"got {seq.num_written} + {len(tokens)}"
            )
        pending = np.concatenate([seq.pending, tokens]) if len(seq.pending) else tokens
        num_full = len(pending) // self.block_size if self._is_shared(seq) else 0
        if num_full:
            self._insert(seq, pending[: num_full * self.block_size], num_full)
        seq.pending = pending[num_full * self.block_size :].copy() if self._is_shared(seq) else pending[:0]
        seq.num_written += len(tokens)

    def fork(self, seq_id: SeqId, new_seq_id: SeqId, num_tokens: int | None = None) -> None:
        """A second sequence with the same tokens, or the first `num_tokens` of them, in the same blocks. Whichever
        grows first into a block that both hold gets a copy of it.

        ValueError if not every token that there is room for is committed, and for a num_tokens that ends within what
        the sequence has cached or given back: those blocks are `allocate`'s to find.
        """
        seq = self._sequences[seq_id]
        self._check_new(new_seq_id)
        if seq.num_written != seq.num_tokens:
            raise ValueError(f"fork needs all {seq.num_tokens} tokens to be committed, {seq.num_written} are")
        num_tokens = seq.num_tokens if num_tokens is None else as_integer("num_tokens", num_tokens)
        fewest = self.first_forkable(seq_id)
        if not fewest <= num_tokens <= seq.num_tokens:
            raise ValueError(f"num_tokens must be in [{fewest}, {seq.num_tokens}], got {num_tokens}")
        ids = self._tables.ids(seq.row)[: self._blocks_for(num_tokens)].copy()
        self.pool.share(ids[seq.match.num_blocks + seq.num_left :])
        seq.is_forked = True
        self._sequences[new_seq_id] = SequenceState(
            self._tables.add_row(ids),
            self.tree.pin(seq.match),
            num_tokens,
            num_tokens,
            seq.pending[: num_tokens - seq.match.num_tokens],
            True,
            seq.namespace,
            seq.priority,
            seq.num_left,
            seq.is_private,
        )

    def make_private(self, seq_id: SeqId) -> None:
        """What the sequence writes from now on is found by nobody: K and V that its tokens alone do not determine."""
        seq = self._sequences[seq_id]
        seq.is_private, seq.pending = True, seq.pending[:0]

    def first_forkable(self, seq_id: SeqId) -> int:
        """The fewest tokens that `fork` takes of the sequence."""
        seq = self._sequences[seq_id]
        return min(max((seq.match.num_blocks + seq.num_left) * self.block_size, 1), seq.num_tokens)

    def give_back_room(self, seq_id: SeqId) -> None:
        """The sequence has room for its committed tokens only: what was allocated or appended beyond them is free."""
        seq = self._sequences[seq_id]
        num_blocks = self._blocks_for(seq.num_written)
        self.pool.release(self._tables.ids(seq.row)[num_blocks:])
        self._tables.shorten(seq.row, num_blocks)
        seq.num_tokens = seq.num_written

    def release(self, seq_id: SeqId) -> None:
        """Ends a sequence, also one that is swapped out. Its cached blocks can be found until they are evicted; its
        others are free.
        """
        if seq_id in self._swapped:
            self.space.release_host(self._swapped.pop(seq_id).host_ids)
            return
        seq = self._sequences.pop(seq_id)
        self.pool.release(self._own_ids(seq))
        self.tree.release(seq.match)
        self._tables.remove_row(seq.row)

    def release_before(self, seq_id: SeqId, num_tokens: int) -> int:
        """Gives the sequence's own blocks back that hold only tokens before the `num_tokens`th, for models all of whose
        layers attend within a sliding window. Cached blocks stay; returns how many blocks became its own no more.

        Their entries of the table stay and mean nothing. ValueError beyond what is committed.
        """
        seq, num_tokens = self._sequences[seq_id], as_integer("num_tokens", num_tokens)
        if not 0 <= num_tokens <= seq.num_written:
            raise ValueError(f"num_tokens must be in [0, {seq.num_written}] committed ones, got {num_tokens}")
        num_left = max(num_tokens // self.block_size - seq.match.num_blocks, seq.num_left)
        ids = self._tables.ids(seq.row)[seq.match.num_blocks + seq.num_left : seq.match.num_blocks + num_left]
        if self._is_shared(seq) or not len(ids):
            return 0
        self.pool.release(ids)
        seq.num_left = num_left
        return len(ids)

    def reset_prefix_cache(self) -> None:
        """Forgets all that is cached, in both tiers, and ends all pins: for K and V that are out of date, as after the
        model's weights have changed.

        RuntimeError, and nothing is forgotten, while a sequence has blocks, on the device or off it, or while somebody
        holds a match of the tree: what they hold would be found again.
        """
        num_left = len(self._sequences) + len(self._swapped)
        if num_left:
            raise RuntimeError(f"reset_prefix_cache needs all sequences to be released, {num_left} are not")
        self.space.clear()

    # --- off the device and back -------------------------------------------------------------------------------------

    def swap_out(self, seq_id: SeqId) -> None:
        """Frees the sequence's device blocks: what is committed and not cached goes to host blocks of its own; what is
        cached is left to the tree, which may find it again, on either tier.

        OutOfBlocks if the host lacks room.
        """
        seq = self._sequences[seq_id]
        own = self._own_ids(seq)
        written = own[: self._blocks_for(seq.num_written) - seq.match.num_blocks - seq.num_left].copy()
        host_ids = self.space.take_host(len(written))
        self.space.move("swap_out", zip(written.tolist(), host_ids.tolist(), strict=True))
        self._swapped[seq_id] = SwappedState(
            seq.match.num_blocks,
            host_ids,
            seq.num_written,
            seq.pending,
            seq.namespace,
            seq.priority,
            seq.num_left,
            seq.is_private,
        )
        self.pool.release(own)
        self.tree.release(seq.match)
        self._tables.remove_row(seq.row)
        del self._sequences[seq_id]

    def swap_in(self, seq_id: SeqId, tokens: Tokens) -> Allocation:
        """Blocks again for a sequence that is swapped out, whose tokens are `tokens`, and what was in them.

        num_cached_tokens is what was committed before, or less where cached blocks were evicted meanwhile: the rest is
        to be computed again. OutOfBlocks if the device lacks room.
        """
        swapped = self._swapped[seq_id]
        tokens = _some_tokens(tokens)
        if len(tokens) < swapped.num_written:
            raise ValueError(f"tokens must be at least the {swapped.num_written} committed ones, got {len(tokens)}")
        # A prefix of whole blocks may have been committed to its last token: none is left over then.
        fewest_left = int(len(tokens) > swapped.num_written)
        most_found = swapped.first_block * self.block_size if swapped.is_private else None
        num_left_over = self._num_left_over(len(tokens), most_found, fewest_left)
        match = self.space.match(tokens, swapped.namespace, swapped.priority, num_left_over)
        try:
            taken = self.space.give(match, max(self._blocks_for(len(tokens)) - swapped.num_left, match.num_blocks))
        except BaseException:
            self.tree.release(match)
            raise
        num_blocks = match.num_blocks
        num_written, pending = match.num_tokens, tokens[:0]
        if num_blocks >= swapped.first_block:
            kept = swapped.host_ids[num_blocks - swapped.first_block :]
            self.space.move("swap_in", zip(kept.tolist(), taken.tolist(), strict=False))
            if match.num_tokens < swapped.num_written:
                num_written = swapped.num_written
                is_shared = self.enable_prefix_caching and not swapped.is_private
                pending = tokens[match.num_tokens : num_written].copy() if is_shared else pending
        self.space.release_host(swapped.host_ids)
        row = self._tables.add_row(match.block_ids)
        self._tables.extend(row, np.zeros(swapped.num_left, np.int32))
        self._tables.extend(row, taken)
        del self._swapped[seq_id]
        self._sequences[seq_id] = SequenceState(
            row,
            match,
            len(tokens),
            num_written,
            pending,
            False,
            swapped.namespace,
            swapped.priority,
            swapped.num_left,
            swapped.is_private,
        )
        return Allocation(num_written, self.block_ids(seq_id))

    # --- what a step needs -------------------------------------------------------------------------------------------

    def block_ids(self, seq_id: SeqId) -> Ids:
        """A copy of the sequence's block ids."""
        return self._tables.ids(self._sequences[seq_id].row).copy()

    def block_tables(self, seq_ids: Sequence[SeqId]) -> Ids:
        """Several sequences' tables: [len(seq_ids), max_blocks]; entries behind a sequence's last mean nothing.

        RuntimeError, as in slot_mappings, while there are moves that were not taken.
        """
        self._check_moved()
        return self._tables.tables([self._sequences[seq_id].row for seq_id in as_list("seq_ids", seq_ids)])

    def slot_mapping(self, seq_id: SeqId, start: int, end: int) -> Slots:
        """The slots of the sequence's positions [start, end)."""
        return self.slot_mappings([seq_id], [start], [end])

    def slot_mappings(self, seq_ids: Sequence[SeqId], starts: Sequence[int], ends: Sequence[int]) -> Slots:
        """The slots of the positions [starts[i], ends[i]) of each sequence, one sequence after the other.

        RuntimeError while there are moves that were not taken: whoever wrote now would be overwritten by them.
        """
        self._check_moved()
        seq_ids = as_list("seq_ids", seq_ids)
        sequences = [self._sequences[seq_id] for seq_id in seq_ids]
        first, last = as_positions("starts", starts, len(seq_ids)), as_positions("ends", ends, len(seq_ids))
        for seq_id, seq, start, end in zip(seq_ids, sequences, first.tolist(), last.tolist(), strict=True):
            if not 0 <= start <= end <= seq.num_tokens:
                raise ValueError(f"positions of {seq_id!r} must lie in [0, {seq.num_tokens}], got [{start}, {end}]")
        return self._tables.slots([seq.row for seq in sequences], first, last)

    # --- questions ---------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out: free ones, and cached ones in nobody's use."""
        return self.space.num_free

    @property
    def usage(self) -> float:
        """The part of the blocks that sequences hold, 0 to 1."""
        return 1 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0

    def is_swapped(self, seq_id: SeqId) -> bool:
        """Whether the sequence is off the device."""
        return seq_id in self._swapped

    def has_room(self, num_blocks: int) -> bool:
        return as_integer("num_blocks", num_blocks) <= self.num_free_blocks

    def stats(self) -> BlockStats:
        space = self.space.stats()
        return BlockStats(
            num_blocks=self.num_blocks,
            num_free_blocks=self.pool.num_free,
            num_evictable_blocks=self.tree.num_evictable,
            num_used_blocks=self.num_blocks - self.num_free_blocks,
            num_sequences=len(self._sequences),
            query_tokens=space.query_tokens,
            hit_tokens=space.device_hit_tokens + space.host_hit_tokens + space.part_hit_tokens,
            evicted_blocks=space.evicted_blocks,
            space=space,
        )

    def check(self) -> None:
        """Raises RuntimeError if an invariant is broken: of the pool, the tree, or of who owns which block."""
        check_blocks(self.space, self._tables, self._sequences, self._swapped)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _num_left_over(self, num_tokens: int, max_cached_tokens: int | None, num_left_over: int) -> int:
        """How many of a sequence's tokens not to look up, at its end: all of them without prefix caching."""
        num_left_over = as_integer("num_left_over", num_left_over)
        most = num_tokens if max_cached_tokens is None else as_integer("max_cached_tokens", max_cached_tokens)
        for name, number in (("max_cached_tokens", most), ("num_left_over", num_left_over)):
            if number < 0:
                raise ValueError(f"{name} must not be negative, got {number}")
        return max(num_left_over, num_tokens - most) if self.enable_prefix_caching else num_tokens

    def _is_shared(self, seq: SequenceState) -> bool:
        return self.enable_prefix_caching and not seq.is_private

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _with_or_without(self, part: PartMatch | None, give: Callable[[], Ids]) -> Ids:
        """What `give` gives. A part of a block is not worth a request: without room its block need not stay."""
        if part is None:
            return give()
        try:
            return give()
        except OutOfBlocks:
            self.tree.release(part.match)
            return give()
        except BaseException:
            self.tree.release(part.match)
            raise

    def _own_ids(self, seq: SequenceState) -> Ids:
        return own_ids(self._tables, seq)

    def _insert(self, seq: SequenceState, tokens: Ids, num_full: int) -> None:
        begin = seq.match.num_blocks
        seq.match = self.tree.insert(tokens, self._own_ids(seq)[:num_full], after=seq.match)
        self._tables.replace(seq.row, begin, seq.match.block_ids_from(begin))
        self.space.inserted(seq.match)

    def _check_moved(self) -> None:
        if self.space.has_moves:
            raise RuntimeError("do_moves must be called before a step")

    def _check_new(self, seq_id: SeqId) -> None:
        if seq_id in self._sequences or seq_id in self._swapped:
            raise ValueError(f"seq_id must not be in use, {seq_id!r} is")

    def _check_append(self, seq_ids: Sequence[SeqId], counts: list[int]) -> None:
        if len(set(seq_ids)) != len(seq_ids):
            raise ValueError(f"seq_ids must be distinct, got {list(seq_ids)}")
        if len(counts) != len(seq_ids):
            raise ValueError(f"num_new_tokens must be one per sequence, got {len(counts)} for {len(seq_ids)}")
        for seq_id, count in zip(seq_ids, counts, strict=True):
            if seq_id not in self._sequences:
                raise KeyError(seq_id)
            if count < 0:
                raise ValueError(f"num_new_tokens must not be negative, got {count} for {seq_id!r}")

    def _to_copy(self, sequences: list[SequenceState]) -> list[SequenceState]:
        """Those whose partly filled last block another sequence reads too, but for the last holder of each block."""
        holders: dict[int, int] = {}
        copied = []
        for seq in sequences:
            if not seq.is_forked or seq.num_tokens % self.block_size == 0:
                continue
            block_id = int(self._tables.ids(seq.row)[-1])
            left = holders.setdefault(block_id, self.pool.ref_count(block_id))
            if left > 1:
                copied.append(seq)
                holders[block_id] = left - 1
        return copied

    def _copy_on_write(self, sequences: list[SequenceState], fresh: Ids) -> None:
        old = [int(self._tables.ids(seq.row)[-1]) for seq in sequences]
        for seq, block_id in zip(sequences, fresh, strict=True):
            self._tables.replace(seq.row, self._tables.num_blocks(seq.row) - 1, np.array([block_id], np.int32))
            seq.is_forked = False
        self.space.move("copy", zip(old, fresh.tolist(), strict=True))
        self.pool.release(old)


def _some_tokens(tokens: Tokens) -> Ids:
    array = as_tokens(tokens)
    if len(array) == 0:
        raise ValueError("tokens must hold at least one token, got none")
    return array
