"""BlockTables: the block ids of many sequences as rows of one array, so that a step reads all of them in one call.

    row 0   [ 17  4  9  .  .  .  .  . ]   3 blocks: token p has slot ids[p // B] * B + p % B
    row 1   [  .  .  .  .  .  .  .  . ]   free
    row 2   [ 17  4 21  8  .  .  .  . ]   shares its first two blocks with row 0

Entries after a row's last block are left over from earlier and mean nothing.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Slots = npt.NDArray[np.int64]


class BlockTables:
    """Rows of block ids that `add_row` hands out and `remove_row` takes back. They grow by doubling both ways."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._ids = np.zeros((8, 64), np.int32)
        self._lengths = np.zeros(8, np.int64)
        self._free_rows = list(range(7, -1, -1))

    def add_row(self, block_ids: Ids) -> int:
        """Return a new row that holds `block_ids`."""
        if not self._free_rows:
            num_rows = len(self._ids)
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._lengths = np.concatenate([self._lengths, np.zeros_like(self._lengths)])
            self._free_rows = list(range(2 * num_rows - 1, num_rows - 1, -1))
        row = self._free_rows.pop()
        self._lengths[row] = 0
        self.extend(row, block_ids)
        return row

    def remove_row(self, row: int) -> None:
        """Take a row back."""
        self._lengths[row] = 0
        self._free_rows.append(row)

    def extend(self, row: int, block_ids: Ids) -> None:
        """Add `block_ids` after the row's last."""
        begin = int(self._lengths[row])
        end = begin + len(block_ids)
        width = self._ids.shape[1]
        if end > width:
            wider = np.zeros((len(self._ids), max(end, 2 * width)), np.int32)
            wider[:, :width] = self._ids
            self._ids = wider
        self._ids[row, begin:end] = block_ids
        self._lengths[row] = end

    def shorten(self, row: int, num_blocks: int) -> None:
        """Keep the row's first `num_blocks` blocks, of at least as many."""
        self._lengths[row] = num_blocks

    def replace(self, row: int, begin: int, block_ids: Ids) -> None:
        """Put `block_ids` in place of as many from index `begin` on."""
        self._ids[row, begin : begin + len(block_ids)] = block_ids

    def ids(self, row: int) -> Ids:
        """Return the row's block ids: a view, valid until the next change."""
        return self._ids[row, : self._lengths[row]]

    def num_blocks(self, row: int) -> int:
        """Return the number of blocks in the row."""
        return int(self._lengths[row])

    def tables(self, rows: Sequence[int]) -> Ids:
        """Return a copy of several rows, as wide as the longest: int32 [len(rows), max_blocks]."""
        width = int(self._lengths[rows].max()) if len(rows) else 0
        return self._ids[rows, :width]

    def slots(self, rows: Sequence[int], starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> Slots:
        """Return the slots of the positions [starts[i], ends[i]) of each row, int64, one row after the other."""
        counts = ends - starts
        first = np.repeat(starts - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
        positions = first + np.arange(len(first))
        blocks = self._ids[np.repeat(np.asarray(rows, np.int64), counts), positions // self.block_size]
        return blocks.astype(np.int64) * self.block_size + positions % self.block_size
