"""WindowTable: the blocks of one sequence in one window's group: a run of places that moves on with the sequence.

places     0   1   2   3   4   5   6
ids        .   .   .   7   2   9   .        behind the window they are given back; room is made before each step
                   ^ first_block(num_written)
"""

from typing import NamedTuple

import numpy as np

from kvpage.blocks.groups.window_blocks import WindowBlocks
from kvpage.blocks.sequence_state import NO_BLOCK, Ids, PathIds, SeqId, Slots


class SwappedWindow(NamedTuple):
    """The blocks of a sequence off the device: those that were not cached. host_ids: at the places from `first` on."""

    first: int
    host_ids: list[int]


class WindowTable:
    """The blocks at the places [first, end) of a sequence."""

    def __init__(self, blocks: WindowBlocks, first: int, ids: list[int]) -> None:
        self._blocks = blocks
        self.first = first
        self.ids = ids
        self.num_cached = first + len(ids)  # places whose blocks have been looked at by `cache`
        self.num_arriving = 0  # tokens before which the last window comes from elsewhere

    @classmethod
    def after(cls, blocks: WindowBlocks, path: PathIds, num_tokens: int) -> "WindowTable":
        """Return the table of a sequence that goes on after `num_tokens` tokens.

        path: the tree's ids of the whole blocks of these. Tokens after them have a new block, into which a copy goes.
        """
        first = min(blocks.first_block(num_tokens), path.shape[1])
        table = cls(blocks, first, blocks.use(path[:, first:]))
        table.ids += blocks.take(int(num_tokens % blocks.block_size > 0))
        return table

    @classmethod
    def back(cls, blocks: WindowBlocks, path: PathIds, num_written: int, swapped: SwappedWindow) -> "WindowTable":
        """Return the table of a sequence that comes back with all of its tokens; see `needs_back`."""
        first = _first_back(blocks, num_written, swapped)
        table = cls(blocks, first, blocks.use(path[:, first : swapped.first]))
        device_ids = blocks.take(len(swapped.host_ids))
        blocks.moves.add("swap_in", zip(swapped.host_ids, device_ids, strict=True))
        blocks.host_pool.release(swapped.host_ids)
        table.ids += device_ids
        return table

    @property
    def end(self) -> int:
        """The place after the last block."""
        return self.first + len(self.ids)

    def cache(self, path: PathIds) -> None:
        """Cache the blocks beside the tree's, of which there are more than before."""
        for block_index in range(max(self.num_cached, self.first), min(path.shape[1], self.end)):
            index = block_index - self.first
            self.ids[index] = self._blocks.cache(path[:, block_index : block_index + 1], self.ids[index])
        self.num_cached = max(self.num_cached, path.shape[1])

    def leave(self, num_written: int) -> None:
        """Give back the blocks that no token attends to any more, nor one after the last whole block: it is cached."""
        num_whole = num_written // self._blocks.block_size * self._blocks.block_size
        num_left = min(self._blocks.first_block(num_whole) - self.first, len(self.ids))
        if num_left > 0:
            self._blocks.release(self.ids[:num_left])
            del self.ids[:num_left]
            self.first += num_left

    def shorten(self, end: int) -> None:
        """Give back the blocks from the place `end` on."""
        num_kept = max(end - self.first, 0)
        self._blocks.release(self.ids[num_kept:])
        del self.ids[num_kept:]

    def num_to_extend(self, num_written: int, end: int) -> int:
        """Return how many blocks `extend` takes."""
        return max(end - self.end, 0) + int(self._is_shared(num_written))

    def most_tokens(self, num_written: int) -> int:
        """Return how many tokens the sequence can have written with all blocks that are free."""
        num_free = self._blocks.num_free - int(self._is_shared(num_written))
        return max(self.end + num_free, 0) * self._blocks.block_size if num_free >= 0 else num_written

    def extend(self, num_written: int, end: int) -> None:
        """Make room up to the place `end`. A partly filled block that a fork shares is replaced by a copy."""
        if self._is_shared(num_written):
            index = num_written // self._blocks.block_size - self.first
            shared_id, (own_id,) = self.ids[index], self._blocks.take(1)
            self._blocks.moves.add("copy", [(shared_id, own_id)])
            self._blocks.release([shared_id])
            self.ids[index] = own_id
        self.ids += self._blocks.take(max(end - self.end, 0))

    def num_to_skip(self, num_tokens: int) -> int:
        """Return how many blocks `skip_to` takes."""
        return max(num_tokens // self._blocks.block_size - max(self.end, self._first_before(num_tokens)), 0)

    def skip_to(self, num_tokens: int) -> None:
        """Hold only the last window before `num_tokens` tokens: whole blocks, written from elsewhere if missing."""
        end, first = num_tokens // self._blocks.block_size, self._first_before(num_tokens)
        num_passed = min(max(first - self.first, 0), len(self.ids))
        self._blocks.release(self.ids[:num_passed])
        self.ids = self.ids[num_passed:]
        self.first = first if not self.ids else self.first + num_passed
        self.ids += self._blocks.take(max(end - self.end, 0))
        self.num_cached, self.num_arriving = max(self.num_cached, self.first), num_tokens

    def num_own(self, num_written: int, num_in_tree: int = 0) -> int:
        """Return how many blocks with committed tokens are not cached, nor before the window.

        num_in_tree: The tree's blocks, of which `cache` has maybe not been told yet.
        """
        size = self._blocks.block_size
        first = self._blocks.first_block(num_written // size * size)
        return max(min(-(-num_written // size), self.end) - max(self.num_cached, num_in_tree, self.first, first), 0)

    def swap_out(self, num_written: int) -> SwappedWindow:
        """Give all blocks back. Those that are not cached go to the host, where there is room for them."""
        first = max(self.num_cached, self.first)
        own_ids = self.ids[first - self.first :][: self.num_own(num_written)]
        host_ids = self._blocks.take_host(len(own_ids))
        self._blocks.moves.add("swap_out", zip(own_ids, host_ids, strict=True))
        self.release()
        return SwappedWindow(first, host_ids)

    @property
    def first_forkable(self) -> int:
        """The fewest tokens, at least 1, whose window begins in the table's blocks."""
        return self.first * self._blocks.block_size + self._blocks.window.num_tokens - 1 if self.first else 1

    def fork(self, num_tokens: int) -> "WindowTable":
        """Return a table of the same blocks, as far as they hold the first `num_tokens` tokens."""
        ids = self.ids[: max(-(-num_tokens // self._blocks.block_size) - self.first, 0)]
        self._blocks.pool.share(ids)
        other = WindowTable(self._blocks, self.first, ids)
        other.num_cached = min(self.num_cached, max(num_tokens // self._blocks.block_size, self.first))
        return other

    def release(self) -> None:
        """Give all blocks back."""
        self.shorten(self.first)

    def block_at(self, place: int) -> int:
        """Return the id of the block at a place; -1 where the table has none."""
        return self.ids[place - self.first] if self.first <= place < self.end else NO_BLOCK

    def row(self, width: int) -> Ids:
        """Return the ids by place, int32 [width], with 0 where there is no block."""
        row = np.zeros(width, np.int32)
        row[self.first : self.end] = self.ids
        return row

    def slots(self, start: int, end: int) -> Slots:
        """Return the slots of the positions [start, end), which have blocks, int64."""
        size = self._blocks.block_size
        if end == start + 1:  # a decode
            return np.array([self.ids[start // size - self.first] * size + start % size], np.int64)
        places, offsets = np.divmod(np.arange(start, end), size)
        slots: Slots = np.array(self.ids, np.int64)[places - self.first] * size + offsets
        return slots

    def check_has(self, seq_id: SeqId, start: int, end: int) -> None:
        """Raise ValueError unless there are blocks for the positions [start, end) of the sequence."""
        least, most = self.first * self._blocks.block_size, self.end * self._blocks.block_size
        if not least <= start <= end <= most:
            raise ValueError(f"positions of {seq_id!r} must be in [{least}, {most}], got [{start}, {end}]")

    def check(self, num_written: int) -> None:
        """Raise RuntimeError unless there are blocks for all that the next token attends to. For tests."""
        first = self._blocks.first_block(max(num_written, self.num_arriving))
        end = -(-num_written // self._blocks.block_size)
        if self.first > first or self.end < end:
            raise RuntimeError(f"a sequence needs blocks [{first}, {end}), has [{self.first}, {self.end})")

    def _first_before(self, num_tokens: int) -> int:
        """Return the place of the first block of the last window before `num_tokens` tokens, whole blocks."""
        return min(self._blocks.first_block(num_tokens), num_tokens // self._blocks.block_size)

    def _is_shared(self, num_written: int) -> bool:
        """Whether the next token goes into a block that another sequence has, too."""
        block_index, offset = divmod(num_written, self._blocks.block_size)
        if offset == 0 or not self.first <= block_index < self.end:
            return False
        return self._blocks.pool.ref_count(self.ids[block_index - self.first]) > 1


def needs_back(blocks: WindowBlocks, path: PathIds, num_written: int, swapped: SwappedWindow) -> PathIds | None:
    """Return the part of a path beside which `WindowTable.back` uses blocks; None if some of these are gone.

    path: the tree's ids of the sequence's cached blocks, int32 [2, num_blocks].
    """
    needed = path[:, _first_back(blocks, num_written, swapped) : swapped.first]
    num_needed = max(swapped.first - _first_back(blocks, num_written, swapped), 0)
    return needed if needed.shape[1] == num_needed and blocks.has(needed).all() else None


def _first_back(blocks: WindowBlocks, num_written: int, swapped: SwappedWindow) -> int:
    """Return the place of the first block that a sequence needs that comes back."""
    whole = num_written // blocks.block_size * blocks.block_size
    return min(blocks.first_block(whole), swapped.first)
