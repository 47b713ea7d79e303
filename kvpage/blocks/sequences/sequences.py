"""Sequences: the state and the block table of every sequence of a BlockManager, and the check of their blocks.

device tier = free + cached in the tree + owned by sequences        host tier the same, by swapped sequences
"""

from collections import Counter
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from kvpage._C import Match, PrefixTree, SequenceRows
from kvpage.blocks.sequence_state import COMPANION, Allocation, Ids, SeqId, SequenceState, Slots, SwappedState
from kvpage.blocks.space import BlockSpace
from kvpage.checks.errors import OutOfBlocks
from kvpage.checks.values import as_list, as_positions

Rows = npt.NDArray[np.int64] | Sequence[int]


class Sequences:
    """Sequences by id. A sequence is either on the device, in a row of `rows`, or swapped out.

    Attributes:
        space: Where their blocks are.
        rows: Those on the device.
        is_caching: Whether they share blocks.
    """

    def __init__(self, space: BlockSpace, is_caching: bool) -> None:
        self.space = space
        self.rows = SequenceRows(space.tree, is_caching)
        self.is_caching = is_caching
        self.block_size = space.block_size
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

    def num_written(self, seq_id: SeqId) -> int:
        """Return how many tokens of a sequence on the device are written."""
        return self.rows.num_written(self.on_device[seq_id])

    def resume(
        self,
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
        fresh = pending, host_ids, num_left, num_spare, num_tokens, num_written, namespace, is_private, is_hit
        try:
            return self.rows.resume(self.on_device, seq_id, match, *fresh, *self.space.native)
        except OutOfBlocks as shortage:
            if not len(self.space.pins):
                raise
            self.space.check_room(shortage.needed, 0)
            return self.rows.resume(self.on_device, seq_id, match, *fresh, *self.space.native)

    def fork(self, seq_id: SeqId, new_seq_id: SeqId, num_tokens: int) -> None:
        """Begin a sequence with the first tokens of another, in the same blocks; see SequenceRows.fork."""
        try:
            self.rows.fork(self.on_device, new_seq_id, self.on_device[seq_id], num_tokens)
        except BaseException:  # Ctrl-C, after the sequence was made
            self.discard(new_seq_id)
            raise

    def commit(self, seq_id: SeqId, tokens: Ids) -> None:
        """Note that tokens are written. Blocks that are full now are copied to the host, where that is done at once."""
        row = self.on_device[seq_id]
        num_cached = self.rows.commit(row, tokens)
        if num_cached and self.space.writes_at_once:
            self.write_out(row)

    def give_back_room(self, seq_id: SeqId) -> None:
        """Free the blocks after the committed tokens."""
        self.rows.give_back_room(self.on_device[seq_id])

    def release(self, seq_id: SeqId) -> None:
        """End a sequence in either tier. On the device, its match and its own blocks are released."""
        if seq_id in self.swapped:
            self.forget_swapped(seq_id)
        else:
            self.rows.remove(self.on_device, seq_id)

    def discard(self, seq_id: SeqId) -> None:
        """End a sequence on the device if there is one of that id."""
        if seq_id in self.on_device:
            self.rows.remove(self.on_device, seq_id)

    def write_out(self, row: int) -> None:
        """Have the cached blocks of a row copied to the host."""
        match = self.rows.pin(row)
        try:
            self.space.write_out(match)
        finally:
            self.space.tree.release(match)

    # --- off the device and back ---

    def swap_out(self, seq_id: SeqId) -> None:
        """Move own blocks with committed tokens to host blocks of the sequence's own. The tree keeps the cached ones.

        Raise OutOfBlocks, and change nothing, if the host lacks room.
        """
        seq = self.state(seq_id)
        written = self.ids(seq_id)[seq.first_own : self.blocks_for(seq.num_written)]
        host_ids = self.space.take_host(len(written))
        self.space.add_move("swap_out", zip(written.tolist(), host_ids.tolist(), strict=True))
        self.swapped[seq_id] = SwappedState(
            seq.num_cached_blocks,
            host_ids,
            seq.num_written,
            seq.namespace,
            seq.priority,
            seq.num_left,
            seq.is_private,
        )
        self.rows.remove(self.on_device, seq_id)

    def most_found(self, seq_id: SeqId, num_tokens: int) -> int:
        """Return how many of its first `num_tokens` tokens a sequence that is swapped out may find cached.

        Others may have cached more than it had committed. One that was not is left to compute.
        """
        swapped = self.swapped[seq_id]
        if not self.is_caching:
            return 0
        return swapped.first_block * self.block_size if swapped.is_private else max(swapped.num_written, num_tokens - 1)

    def own_host_ids(self, seq_id: SeqId, num_found: int) -> Ids | None:
        """Return the host blocks with which a sequence has all that was committed; None where something is gone.

        num_found: How many blocks are still cached.
        """
        swapped = self.swapped[seq_id]
        return None if num_found < swapped.first_block else swapped.host_ids[num_found - swapped.first_block :]

    def swap_in(self, seq_id: SeqId, tokens: Ids, match: Match, num_spare: int) -> Allocation:
        """Bring back all that was committed, after the blocks of a match, which passes to the sequence."""
        swapped, num_cached = self.swapped[seq_id], match.num_tokens
        num_written, is_shared = max(num_cached, swapped.num_written), self.is_caching and not swapped.is_private
        block_ids = self.resume(
            seq_id,
            match,
            num_tokens=len(tokens),
            num_written=num_written,
            pending=tokens[num_cached : num_written if is_shared else num_cached],
            namespace=swapped.namespace,
            host_ids=swapped.host_ids[match.num_blocks - swapped.first_block :],
            num_left=swapped.num_left,
            num_spare=num_spare,
            is_private=swapped.is_private,
        )
        return Allocation(num_written, block_ids)

    def forget_swapped(self, seq_id: SeqId) -> None:
        """Free the host blocks of a sequence that is swapped out, which is on the device again, or ends."""
        self.space.release_host(self.swapped.pop(seq_id).host_ids)

    # --- questions ---

    def ids(self, seq_id: SeqId) -> Ids:
        """Return a copy of all block ids of the sequence."""
        return self.rows.ids(self.on_device[seq_id])

    def path(self, seq_id: SeqId, with_companions_from: int | None = None) -> Ids:
        """Return the tree's rows of the sequence's cached blocks, int32 [3, num_blocks], as Match.tier_block_ids.

        with_companions_from: From this block on, those without companions are given some; None for no block.
        """
        match = self.rows.pin(self.on_device[seq_id])
        try:
            if with_companions_from is not None:
                self.space.give_companions(match, with_companions_from, match.num_blocks)
            return match.tier_block_ids()
        finally:
            self.space.tree.release(match)

    def companion(self, seq_id: SeqId, block: int) -> int:
        """Return the companion of one of the sequence's cached blocks, which is given one if it has none."""
        match = self.rows.pin(self.on_device[seq_id])
        try:
            self.space.give_companions(match, block, block + 1)
            return int(match.tier_block_ids(block)[COMPANION, 0])
        finally:
            self.space.tree.release(match)

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

    def check(self) -> None:
        """Raise RuntimeError, with the numbers, if an invariant of pools, tree or ownership is broken."""
        space = self.space
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
