"""Sequences: the state and the block table of every sequence of a BlockManager, and the check of their blocks.

device tier = free + cached in the tree + owned by sequences        host tier the same, by swapped sequences
"""

from collections import Counter
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from kvpage._C import Match, PrefixTree, SequenceRows
from kvpage.blocks.sequence_state import Ids, SeqId, SequenceState, Slots, SwappedState
from kvpage.blocks.space import BlockSpace
from kvpage.checks.values import as_list, as_positions

Rows = npt.NDArray[np.int64] | Sequence[int]


class Sequences:
    """Sequences by id. A sequence is either on the device, in a row of `rows`, or swapped out."""

    def __init__(self, tree: PrefixTree, is_caching: bool) -> None:
        self.rows = SequenceRows(tree, is_caching)
        self.block_size = tree.block_size
        self._tree = tree
        self.on_device: dict[SeqId, int] = {}  # rows
        self.swapped: dict[SeqId, SwappedState] = {}

    def __len__(self) -> int:
        return len(self.on_device) + len(self.swapped)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def check_new(self, seq_id: SeqId) -> None:
        """Raise ValueError if the id is in use."""
        if seq_id in self.on_device or seq_id in self.swapped:
            raise ValueError(f"seq_id must not be in use, {seq_id!r} is")

    def rows_of(self, seq_ids: Sequence[SeqId]) -> list[int]:
        """Return the rows of sequences on the device."""
        return [self.on_device[seq_id] for seq_id in as_list("seq_ids", seq_ids)]

    def state(self, seq_id: SeqId) -> SequenceState:
        """Return a copy of the sequence's state."""
        return SequenceState(*self.rows.state(self.on_device[seq_id]))

    def resume(
        self,
        space: BlockSpace,
        seq_id: SeqId,
        match: Match,
        *,
        num_tokens: int,
        num_written: int,
        pending: Ids,
        namespace: bytes,
        host_ids: Sequence[int] | Ids = (),
        num_left: int = 0,
        num_spare: int = 0,
        is_private: bool = False,
        is_hit: bool = False,
    ) -> Ids:
        """Begin a sequence after the blocks of a match, which passes to it, and return its blocks.

        See SequenceRows.resume. Raise OutOfBlocks without room, beside `num_spare` blocks. Pins end if that helps.
        """
        num_blocks = max(self.blocks_for(num_tokens) - num_left, match.num_blocks)
        space.check_room(num_blocks - match.num_device_blocks, num_spare)
        moves, host = space.native
        row = self.rows.resume(
            self.on_device,
            seq_id,
            match=match,
            pending=pending,
            host_ids=host_ids,
            num_left=num_left,
            num_tokens=num_tokens,
            num_written=num_written,
            namespace=namespace,
            is_private=is_private,
            is_hit=is_hit,
            moves=moves,
            host=host,
        )
        return self.rows.ids(row)

    def forget_swapped(self, space: BlockSpace, seq_id: SeqId) -> None:
        """Free the host blocks of a sequence that is swapped out, which is on the device again, or ends."""
        space.release_host(self.swapped.pop(seq_id).host_ids)

    def fork(self, seq_id: SeqId, new_seq_id: SeqId, num_tokens: int) -> None:
        """Begin a sequence with the first tokens of another, in the same blocks; see SequenceRows.fork."""
        self.rows.fork(self.on_device, new_seq_id, self.on_device[seq_id], num_tokens)

    def remove(self, seq_id: SeqId) -> None:
        """End a sequence on the device: release its own blocks and its match, and free its row."""
        self.rows.remove(self.on_device, seq_id)

    def commit(self, space: BlockSpace, row: int, tokens: Ids) -> None:
        """Note that tokens are written. Blocks that are full now are copied to the host, where that is done at once."""
        num_cached = self.rows.commit(row, tokens)
        if num_cached and space.writes_at_once:
            self.write_out(space, row)

    def end(self, space: BlockSpace, seq_id: SeqId) -> None:
        """End a sequence in either tier."""
        if seq_id in self.swapped:
            self.forget_swapped(space, seq_id)
        else:
            self.remove(seq_id)

    def discard(self, seq_id: SeqId) -> None:
        """End a sequence on the device if there is one of that id."""
        if seq_id in self.on_device:
            self.remove(seq_id)

    def write_out(self, space: BlockSpace, row: int) -> None:
        """Have the cached blocks of a row copied to the host."""
        match = self.rows.pin(row)
        try:
            space.write_out(match)
        finally:
            space.tree.release(match)

    def ids(self, seq_id: SeqId) -> Ids:
        """Return a copy of all block ids of the sequence."""
        return self.rows.ids(self.on_device[seq_id])

    def path(self, seq_id: SeqId) -> Ids:
        """Return the tree's ids of the sequence's cached blocks, int32 [2, num_blocks], as Match.tier_block_ids."""
        match = self.rows.pin(self.on_device[seq_id])
        try:
            return match.tier_block_ids()
        finally:
            self._tree.release(match)

    def own_ids(self, seq_id: SeqId) -> Ids:
        """Return a copy of the ids to which the sequence itself holds a reference."""
        return self.ids(seq_id)[self.state(seq_id).first_own :]

    def slots(self, seq_ids: Sequence[SeqId], starts: Sequence[int], ends: Sequence[int]) -> Slots:
        """Return the slots of the positions [starts[i], ends[i]) of each sequence, one sequence after the other."""
        seq_ids = as_list("seq_ids", seq_ids)
        rows = self.rows_of(seq_ids)
        first, last = as_positions("starts", starts, len(seq_ids)), as_positions("ends", ends, len(seq_ids))
        try:
            return self.rows.slots(rows, first, last)
        except ValueError as error:
            self._refuse_positions(error, seq_ids, first, last)

    def _refuse_positions(self, error: ValueError, seq_ids: list[SeqId], first: Slots, last: Slots) -> NoReturn:
        """Say which sequence it is."""
        for seq_id, start, end in zip(seq_ids, first.tolist(), last.tolist(), strict=True):
            most = self.state(seq_id).num_tokens
            if not 0 <= start <= end <= most:
                raise ValueError(f"positions of {seq_id!r} must be in [0, {most}], got [{start}, {end}]") from error
        raise error

    def check(self, space: BlockSpace) -> None:
        """Raise RuntimeError, with the numbers, if an invariant of pools, tree or ownership is broken."""
        space.pool.check()
        space.tree.check()
        if self.rows.num_rows != len(self.on_device):
            raise RuntimeError(f"{self.rows.num_rows} rows are in use by {len(self.on_device)} sequences")
        for seq_id in self.on_device:
            self._check_sequence(space.tree, seq_id)
        holders = Counter(block_id for seq_id in self.on_device for block_id in self.own_ids(seq_id).tolist())
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

    def _check_sequence(self, tree: PrefixTree, seq_id: SeqId) -> None:
        ids, seq = self.ids(seq_id), self.state(seq_id)
        if len(ids) != self.blocks_for(seq.num_tokens):
            raise RuntimeError(f"sequence {seq_id!r} has {len(ids)} blocks for {seq.num_tokens} tokens")
        match = self.rows.pin(self.on_device[seq_id])
        try:
            if not np.array_equal(ids[: seq.num_cached_blocks], match.block_ids):
                raise RuntimeError(f"sequence {seq_id!r} and the tree differ in its cached blocks")
        finally:
            tree.release(match)
