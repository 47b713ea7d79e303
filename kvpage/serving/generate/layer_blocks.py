"""LayerBlocks: one layer's K and V, from transformers' tensors into blocks and back."""

from dataclasses import dataclass

import torch

from kvpage import ops
from kvpage.layout.layer_shape import LayerShape
from kvpage.ops import BoundCache


@dataclass(frozen=True, slots=True)
class LayerBlocks:
    """The blocks of one layer. K and V are [num_rows, num_heads, num_tokens, size] here, as in transformers' caches.

    cache: the layer's cache of the device tier.
    is_latent: the layout has no value part. A row then holds a token's latent, followed by its rotary part.
    shape: of the K and V that the model hands over.
    """

    cache: BoundCache
    is_latent: bool
    shape: LayerShape

    def write(self, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Write the tokens of all rows into their slots, one row after the other."""
        parts = (torch.cat([key, value], dim=3),) if self.is_latent else (key, value)
        rows = [part.to(self._row_dtype(key.dtype)).transpose(1, 2).flatten(0, 1) for part in parts]
        ops.reshape_and_cache(rows[0], None if self.is_latent else rows[1], self.cache, slot_mapping)

    def read(
        self, block_tables: torch.Tensor, num_tokens: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of the first tokens of each row, contiguous, in `dtype`. block_tables: see RowSlots."""
        shape = block_tables.shape[0], self.shape.num_kv_heads, num_tokens
        keys, values = (
            torch.empty(*shape, size, dtype=self._row_dtype(dtype), device=self.cache.device)
            for size in (self.shape.head_size, self.shape.value_size or self.shape.head_size)
        )
        self.read_into(keys, values, block_tables)
        return keys.to(dtype), values.to(dtype)

    def read_into(self, keys: torch.Tensor, values: torch.Tensor, block_tables: torch.Tensor) -> None:
        """Copy the rows' first tokens, as many as fit, into `keys` and `values`.

        Both have the cache's dtype or, where it quantises, a dtype that can be computed with.
        """
        lengths = [keys.shape[2]] * keys.shape[0]
        if not self.is_latent:
            out = keys.transpose(1, 2), values.transpose(1, 2)
            ops.gather_cache(self.cache, block_tables, lengths, out=out)
            return
        latent_size = keys.shape[3]
        latents = keys.new_empty(*keys.shape[:3], latent_size + values.shape[3])
        rows_out = latents.transpose(1, 2), None
        ops.gather_cache(self.cache, block_tables, lengths, out=rows_out)
        keys.copy_(latents[..., :latent_size])
        values.copy_(latents[..., latent_size:])

    def keeps(self, dtype: torch.dtype) -> bool:
        """Whether a read returns, bit by bit, rows of `dtype` that were written."""
        layout = self.cache.layout
        return layout.dtype == dtype and not layout.is_quantized

    def _row_dtype(self, dtype: torch.dtype) -> torch.dtype:
        dtypes = self.cache.row_dtypes
        return dtype if dtype in dtypes else dtypes[0]
