"""LayerBlocks: one layer's K and V, from transformers' tensors into blocks and back."""

from dataclasses import dataclass

import torch

from kvpage import ops
from kvpage.kv_scales import KVScales
from kvpage.layout import CacheLayout
from kvpage.serving.cached_rows import RowSlots
from kvpage.token_args import COMPUTE_DTYPES


@dataclass(frozen=True, slots=True)
class LayerBlocks:
    """cache: the layer's tensor of the device tier. Where the layout has no value part, a token's K and V lie in one
    row, one after the other: the latent, then its rotary part.

    K and V are [num_rows, num_heads, num_tokens, size] here, as transformers' caches have them.
    """

    cache: torch.Tensor
    layout: CacheLayout
    scales: KVScales | None
    is_latent: bool

    def write(self, key: torch.Tensor, value: torch.Tensor, slots: RowSlots) -> None:
        """Writes the tokens of all rows into their slots."""
        parts = (torch.cat([key, value], dim=3),) if self.is_latent else (key, value)
        rows = [part.to(self._row_dtype(key)).transpose(1, 2).flatten(0, 1) for part in parts]
        ops.reshape_and_cache(
            rows[0], None if self.is_latent else rows[1], self.cache, slots.slot_mapping, self.layout, self.scales
        )

    def read(self, key: torch.Tensor, value: torch.Tensor, slots: RowSlots) -> tuple[torch.Tensor, torch.Tensor]:
        """All K and V of the rows, with the heads, sizes and dtype of `key` and `value`, contiguous."""
        sizes = key.shape[3], value.shape[3]
        parts = [self._new(key, sum(sizes), slots)] if self.is_latent else [self._new(key, n, slots) for n in sizes]
        by_token = [part.transpose(1, 2) for part in parts]
        ops.gather_cache(
            self.cache,
            slots.block_tables,
            [slots.end] * key.shape[0],
            self.layout,
            out=(by_token[0], None if self.is_latent else by_token[1]),
            scales=self.scales,
        )
        keys, values = parts[0].split(sizes, dim=3) if self.is_latent else parts
        return keys.to(key.dtype).contiguous(), values.to(value.dtype).contiguous()

    def keeps(self, dtype: torch.dtype) -> bool:
        """Whether what is read is what was written, bit by bit."""
        return self.layout.dtype == dtype and not self.layout.is_quantized

    def _new(self, key: torch.Tensor, size: int, slots: RowSlots) -> torch.Tensor:
        return key.new_empty(*key.shape[:2], slots.end, size, dtype=self._row_dtype(key))

    def _row_dtype(self, key: torch.Tensor) -> torch.dtype:
        if not self.layout.is_quantized:
            return self.layout.dtype
        return key.dtype if key.dtype in COMPUTE_DTYPES else torch.float32
