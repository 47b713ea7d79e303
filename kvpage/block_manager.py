"""BlockManager: which blocks each sequence has. It owns the pool and the prefix tree of the device tier; no tensors.

A sequence's table has two parts:

    blocks   [ 17   4   9 | 30  12 ]
               cached       own
               the tree's,  this sequence's own references (shared after a fork
               pinned by    only in the last, partly filled block, which append
               the match    replaces by a copy before it is written)

`commit` moves the border: blocks that the step has filled pass to the tree, under the id that the tree already has for
the same tokens if there is one. Nothing that is not committed can be found by another sequence.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpage._C import BlockPool, Match, PrefixTree
from kvpage.block_table import BlockTables, Ids, Slots
from kvpage.errors import OutOfBlocks
from kvpage.sequence_args import as_counts, as_positions, check_namespace
from kvpage.tokens import Tokens, as_tokens

SeqId = Hashable
Copies = npt.NDArray[np.int64]
"""[num_pairs, 2]: (from, to) block ids, for CacheEngine.copy, before anything else is written or allocated."""


class Allocation(NamedTuple):
    """What a sequence was given.

    num_cached_tokens: its leading tokens whose K and V are in the blocks already; at least one is left to compute.
    block_ids: int32, all of its blocks.
    copies: to be done before the step.
    """

    num_cached_tokens: int
    block_ids: Ids
    copies: Copies


@dataclass(frozen=True, slots=True)
class BlockStats:
    """Counters since the manager was made, and the state of the blocks now.

    num_used_blocks: held by sequences, whether their own or pinned in the tree.
    num_evictable_blocks: cached, in nobody's use.
    """

    num_blocks: int
    num_free_blocks: int
    num_evictable_blocks: int
    num_used_blocks: int
    num_sequences: int
    query_tokens: int
    hit_tokens: int
    evicted_blocks: int

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0


@dataclass(slots=True)
class _Sequence:
    row: int  # in BlockTables
    match: Match  # pins the cached part
    num_tokens: int  # that there is room for
    num_written: int  # cached or committed
    pending: Ids  # committed tokens of the last, not yet full block
    is_forked: bool  # its last own block may be shared


class BlockManager:
    """Sequences' block tables over one pool and one prefix tree.

    Each method gives all or nothing: one that raises (OutOfBlocks, ValueError, TypeError, KeyError for an unknown
    sequence) has changed nothing but how recently a cached prefix was used. Not thread-safe: one manager, one loop.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self.tree = PrefixTree(self.pool, block_size)
        self._tables = BlockTables(block_size)
        self._sequences: dict[SeqId, _Sequence] = {}
        self._query_tokens = self._hit_tokens = self._evicted_blocks = 0

    # --- a sequence's life -------------------------------------------------------------------------------------------

    def allocate(self, seq_id: SeqId, tokens: Tokens, namespace: bytes = b"") -> Allocation:
        """Blocks for all of `tokens`, of which the longest cached prefix (whole blocks) is shared.

        Raises OutOfBlocks if the rest does not fit, ValueError for a seq_id in use or no tokens, TypeError for a
        namespace that is not bytes.
        """
        check_namespace(namespace)
        if seq_id in self._sequences:
            raise ValueError(f"seq_id must not be in use, {seq_id!r} is")
        tokens = as_tokens(tokens)
        if len(tokens) == 0:
            raise ValueError("tokens must hold at least one token, got none")
        match = self.tree.match(tokens if self.enable_prefix_caching else tokens[:0], namespace)
        try:
            own = self._take(self._blocks_for(len(tokens)) - match.num_blocks)
        except OutOfBlocks:
            self.tree.release(match)
            raise
        row = self._tables.add_row(match.block_ids)
        self._tables.extend(row, own)
        num_cached = match.num_tokens
        self._sequences[seq_id] = _Sequence(row, match, len(tokens), num_cached, tokens[:0], False)
        self._query_tokens += len(tokens)
        self._hit_tokens += num_cached
        return Allocation(num_cached, self.block_ids(seq_id), np.empty((0, 2), np.int64))

    def append(self, seq_ids: Sequence[SeqId], num_new_tokens: Sequence[int] | int = 1) -> Copies:
        """Room for so many more tokens in each sequence, each named once; returns the copies to do before the step.

        A last block that a fork shares is replaced by a copy (copy-on-write) for all but its last holder.
        """
        counts = as_counts("num_new_tokens", num_new_tokens, len(seq_ids))
        self._check_append(seq_ids, counts)
        sequences = [self._sequences[seq_id] for seq_id in seq_ids]
        copied = self._to_copy([seq for seq, count in zip(sequences, counts, strict=True) if count])
        added = [
            self._blocks_for(seq.num_tokens + count) - self._tables.num_blocks(seq.row)
            for seq, count in zip(sequences, counts, strict=True)
        ]
        fresh = self._take(len(copied) + sum(added))
        copies = self._copy_on_write(copied, fresh[: len(copied)])
        begin = len(copied)
        for seq, count, num_added in zip(sequences, counts, added, strict=True):
            if num_added:
                self._tables.extend(seq.row, fresh[begin : begin + num_added])
                begin += num_added
            seq.num_tokens += count
        return copies

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
        num_full = len(pending) // self.block_size if self.enable_prefix_caching else 0
        if num_full:
            self._insert(seq, pending[: num_full * self.block_size], num_full)
        seq.pending = pending[num_full * self.block_size :].copy() if self.enable_prefix_caching else pending[:0]
        seq.num_written += len(tokens)

    def fork(self, seq_id: SeqId, new_seq_id: SeqId) -> None:
        """A second sequence with the same tokens and blocks. Every token that there is room for must be committed."""
        seq = self._sequences[seq_id]
        if new_seq_id in self._sequences:
            raise ValueError(f"new_seq_id must not be in use, {new_seq_id!r} is")
        if seq.num_written != seq.num_tokens:
            raise ValueError(f"fork needs all {seq.num_tokens} tokens to be committed, {seq.num_written} are")
        self.pool.share(self._own_ids(seq))
        seq.is_forked = True
        row = self._tables.add_row(self._tables.ids(seq.row).copy())
        self._sequences[new_seq_id] = _Sequence(
            row, self.tree.pin(seq.match), seq.num_tokens, seq.num_written, seq.pending, True
        )

    def release(self, seq_id: SeqId) -> None:
        """Ends a sequence. Its cached blocks can be found until they are evicted; its others are free."""
        seq = self._sequences.pop(seq_id)
        self.pool.release(self._own_ids(seq))
        self.tree.release(seq.match)
        self._tables.remove_row(seq.row)

    # --- what a step needs -------------------------------------------------------------------------------------------

    def block_ids(self, seq_id: SeqId) -> Ids:
        """A copy of the sequence's block ids."""
        return self._tables.ids(self._sequences[seq_id].row).copy()

    def block_tables(self, seq_ids: Sequence[SeqId]) -> Ids:
        """Several sequences' tables: [len(seq_ids), max_blocks]; entries behind a sequence's last mean nothing."""
        return self._tables.tables([self._sequences[seq_id].row for seq_id in seq_ids])

    def slot_mapping(self, seq_id: SeqId, start: int, end: int) -> Slots:
        """The slots of the sequence's positions [start, end)."""
        return self.slot_mappings([seq_id], [start], [end])

    def slot_mappings(self, seq_ids: Sequence[SeqId], starts: Sequence[int], ends: Sequence[int]) -> Slots:
        """The slots of the positions [starts[i], ends[i]) of each sequence, one sequence after the other."""
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
        return self.pool.num_free + self.tree.num_evictable

    @property
    def usage(self) -> float:
        """The part of the blocks that sequences hold, 0 to 1."""
        return 1 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0

    def has_room(self, num_blocks: int) -> bool:
        return num_blocks <= self.num_free_blocks

    def stats(self) -> BlockStats:
        return BlockStats(
            num_blocks=self.num_blocks,
            num_free_blocks=self.pool.num_free,
            num_evictable_blocks=self.tree.num_evictable,
            num_used_blocks=self.num_blocks - self.num_free_blocks,
            num_sequences=len(self._sequences),
            query_tokens=self._query_tokens,
            hit_tokens=self._hit_tokens,
            evicted_blocks=self._evicted_blocks,
        )

    def check(self) -> None:
        """Raises RuntimeError if an invariant is broken: of the pool, the tree, or of who owns which block."""
        self.pool.check()
        self.tree.check()
        owned: dict[int, int] = {}
        for seq_id, seq in self._sequences.items():
            self._check_sequence(seq_id, seq)
            for block_id in self._own_ids(seq).tolist():
                owned[block_id] = owned.get(block_id, 0) + 1
        for block_id, num_holders in owned.items():
            if self.pool.ref_count(block_id) != num_holders:
                raise RuntimeError(
                    f"block {block_id} has {self.pool.ref_count(block_id)} references and {num_holders} holders"
                )
        if self.pool.num_free + self.tree.num_cached + len(owned) != self.num_blocks:
            raise RuntimeError(
                f"{self.pool.num_free} free + {self.tree.num_cached} cached + {len(owned)} owned "
                f"is not {self.num_blocks}"
            )

    # --- inside ------------------------------------------------------------------------------------------------------

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _take(self, num_blocks: int) -> Ids:
        """Free blocks, evicting what lacks. OutOfBlocks before anything is evicted."""
        lacking = num_blocks - self.pool.num_free
        if lacking > self.tree.num_evictable:
            raise OutOfBlocks(num_blocks, self.num_free_blocks)
        if lacking > 0:
            self._evicted_blocks += self.tree.evict(lacking)
        return self.pool.allocate(num_blocks)

    def _own_ids(self, seq: _Sequence) -> Ids:
        return self._tables.ids(seq.row)[seq.match.num_blocks :]

    def _insert(self, seq: _Sequence, tokens: Ids, num_full: int) -> None:
        begin = seq.match.num_blocks
        seq.match = self.tree.insert(tokens, self._own_ids(seq)[:num_full], after=seq.match)
        self._tables.replace(seq.row, begin, seq.match.block_ids_from(begin))

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

    def _to_copy(self, sequences: list[_Sequence]) -> list[_Sequence]:
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

    def _copy_on_write(self, sequences: list[_Sequence], fresh: Ids) -> Copies:
        old = [int(self._tables.ids(seq.row)[-1]) for seq in sequences]
        for seq, block_id in zip(sequences, fresh, strict=True):
            self._tables.replace(seq.row, self._tables.num_blocks(seq.row) - 1, np.array([block_id], np.int32))
            seq.is_forked = False
        self.pool.release(old)
        return np.stack([np.array(old, np.int64), fresh.astype(np.int64)], axis=1)

    def _check_sequence(self, seq_id: SeqId, seq: _Sequence) -> None:
        ids = self._tables.ids(seq.row)
        if len(ids) != self._blocks_for(seq.num_tokens):
            raise RuntimeError(f"sequence {seq_id!r} has {len(ids)} blocks for {seq.num_tokens} tokens")
        if not np.array_equal(ids[: seq.match.num_blocks], seq.match.block_ids):
            raise RuntimeError(f"sequence {seq_id!r} and the tree differ in its cached blocks")
