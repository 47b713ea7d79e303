"""KVView: K or V of one layer, whatever the backend, as the operations on tokens see it.

one head of one token    element d is in run d // run_size, at d % run_size

  flash, flashinfer, mla   [ 0 1 2 ... head_size )                                   one run
  paged, K                 [ 0 .. x )   [ x .. 2x )   ...    block_size * x apart    runs of x = 16 bytes
  paged, V                 [ 0 ]  [ 1 ]  ...                 block_size apart        runs of one element
"""

from dataclasses import dataclass

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class KVView:
    """Views into one layer's cache. They copy nothing: writing to them writes to the cache.

    Args:
        rows: Strided [num_blocks, block_size, num_kv_heads, num_runs, run_size], the last dimension contiguous. A head
            has at least head_size elements; elements past head_size are padding.
        scales: fp32, strided [num_blocks, block_size, num_kv_heads]; None where the cache keeps no scale a token.
    """

    rows: torch.Tensor
    scales: torch.Tensor | None = None

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the cache."""
        return self.rows.shape[0]

    @property
    def run_size(self) -> int:
        """Elements of a head that are next to each other in memory."""
        return self.rows.shape[4]

    def columns(self, begin: int, end: int) -> "KVView":
        """Return a view of the elements [begin, end) of each head.

        Args:
            begin: First element, from 0.
            end: The element after the last one.

        Raises:
            ValueError: A head is not one run of memory.
        """
        if self.rows.shape[3] != 1:
            raise ValueError(f"columns need heads that are one run, got {self.rows.shape[3]} runs")
        return KVView(self.rows[..., begin:end], self.scales)

    def read(self, block_ids: torch.Tensor, offsets: torch.Tensor, size: int) -> torch.Tensor:
        """Copy the first elements of each head at some places, bit by bit.

        Args:
            block_ids: Integers [num_places], the block of each place.
            offsets: Integers [num_places], the token of each place in its block.
            size: Elements to copy of each head.

        Returns:
            Rows [num_places, num_kv_heads, size] of the cache's dtype.
        """
        bits = self._bits()[block_ids, offsets].flatten(2)[..., :size]
        return bits.contiguous().view(self.rows.dtype)

    def write(self, block_ids: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows to some places. Elements after the rows' size stay.

        Args:
            block_ids: Integers [num_places], the block of each place.
            offsets: Integers [num_places], the token of each place in its block.
            rows: [num_places, num_kv_heads, size] of the cache's dtype.
        """
        bits = self._bits()
        places = bits[block_ids, offsets].flatten(2)
        places[..., : rows.shape[-1]] = rows.contiguous().view(bits.dtype)
        bits[block_ids, offsets] = torch.unflatten(places, 2, self.rows.shape[3:])

    def _bits(self) -> torch.Tensor:
        """Return the rows as integers: torch indexes no fp8, and integers keep every bit of a NaN."""
        return self.rows.view(_BITS[self.rows.element_size()])
