"""Sequences: the state and the block table of every sequence of a BlockManager, and the check of their blocks.

device tier = free + cached in the tree + owned by sequences        host tier the same, by swapped sequences
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from kvpage.blocks.space import BlockSpace
from kvpage.blocks.states import SeqId, SequenceState, SwappedState
from kvpage.blocks.table import BlockTables, Ids, Slots
from kvpage.checks.values import as_list, as_positions


class Sequences:
    """Sequences by id. A sequence is either on the device or swapped out."""

    def __init__(self, block_size: int) -> None:
        self.tables = BlockTables(block_size)
        self.on_device: dict[SeqId, SequenceState] = {}
        self.swapped: dict[SeqId, SwappedState] = {}

    def __len__(self) -> int:
        return len(self.on_device) + len(self.swapped)

    def __getitem__(self, seq_id: SeqId) -> SequenceState:
        return self.on_device[seq_id]

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold so many tokens."""
        return -(-num_tokens // self.tables.block_size)

    def check_new(self, seq_id: SeqId) -> None:
        """Raise ValueError if the id is in use."""
        if seq_id in self.on_device or seq_id in self.swapped:
            raise ValueError(f"seq_id must not be in use, {seq_id!r} is")

    def remove(self, seq_id: SeqId) -> None:
        """Forget a sequence on the device, and free its row of the tables."""
        self.tables.remove_row(self.on_device.pop(seq_id).row)

    def ids(self, seq: SequenceState) -> Ids:
        """Return all block ids of the sequence: a view, valid until its next change."""
        return self.tables.ids(seq.row)

    def own_ids(self, seq: SequenceState) -> Ids:
        """Return the blocks to which the sequence itself holds a reference: a view, valid until its next change."""
        return self.ids(seq)[seq.match.num_blocks + seq.num_left :]

    def block_tables(self, seq_ids: Sequence[SeqId]) -> Ids:
        """Return the tables of several sequences, int32 [num_seqs, max_blocks]."""
        return self.tables.tables([self.on_device[seq_id].row for seq_id in as_list("seq_ids", seq_ids)])

    def slots(self, seq_ids: Sequence[SeqId], starts: Sequence[int], ends: Sequence[int]) -> Slots:
        """Return the slots of the positions [starts[i], ends[i]) of each sequence, one sequence after the other."""
        seq_ids = as_list("seq_ids", seq_ids)
        sequences = [self.on_device[seq_id] for seq_id in seq_ids]
        first, last = as_positions("starts", starts, len(seq_ids)), as_positions("ends", ends, len(seq_ids))
        for seq_id, seq, start, end in zip(seq_ids, sequences, first.tolist(), last.tolist(), strict=True):
            if not 0 <= start <= end <= seq.num_tokens:
                raise ValueError(f"positions of {seq_id!r} must be in [0, {seq.num_tokens}], got [{start}, {end}]")
        return self.tables.slots([seq.row for seq in sequences], first, last)

    def check(self, space: BlockSpace) -> None:
        """Raise RuntimeError, with the numbers, if an invariant of pools, tree or ownership is broken."""
        space.pool.check()
        space.tree.check()
        for seq_id, seq in self.on_device.items():
            self._check_sequence(seq_id, seq)
        holders = Counter(block_id for seq in self.on_device.values() for block_id in self.own_ids(seq).tolist())
        for block_id, num_holders in holders.items():
            if space.pool.ref_count(block_id) != num_holders:
                raise RuntimeError(
                    f"block {block_id} has {space.pool.ref_count(block_id)} references and {num_holders} holders"
                )
        space.check_host([host_id for seq in self.swapped.values() for host_id in seq.host_ids.tolist()])
        if space.pool.num_free + space.tree.num_cached + len(holders) != space.pool.num_blocks:
            raise RuntimeError(
                f"{space.pool.num_free} free + {space.tree.num_cached} cached + {len(holders)} owned "
                f"is not {space.pool.num_blocks}"
            )

    def _check_sequence(self, seq_id: object, seq: SequenceState) -> None:
        ids = self.ids(seq)
        if len(ids) != self.blocks_for(seq.num_tokens):
            raise RuntimeError(f"sequence {seq_id!r} has {len(ids)} blocks for {seq.num_tokens} tokens")
        if not np.array_equal(ids[: seq.match.num_blocks], seq.match.block_ids):
            raise RuntimeError(f"sequence {seq_id!r} and the tree differ in its cached blocks")
