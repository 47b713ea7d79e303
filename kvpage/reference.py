"""Every operation in plain torch: the specification that the fast ones are compared with, bit by bit.

Arguments and results as in kvpage.ops; nothing is validated here, and nothing is fast.
"""

from collections.abc import Sequence

import torch

from kvpage.layout import CacheLayout


def swap_blocks(src: torch.Tensor, dst: torch.Tensor, block_mapping: torch.Tensor, layout: CacheLayout) -> None:
    """dst's block d becomes src's block s, for each (s, d) of block_mapping [num_pairs, 2]."""
    src_ids, dst_ids = block_mapping.unbind(1)
    dim = layout.block_dim
    dst.index_copy_(dim, dst_ids.to(dst.device), src.index_select(dim, src_ids.to(src.device)).to(dst.device))


def copy_blocks(caches: Sequence[torch.Tensor], block_mapping: torch.Tensor, layout: CacheLayout) -> None:
    """In each layer's cache, block d becomes block s, for each (s, d); all are read before any is written."""
    for cache in caches:
        swap_blocks(cache, cache, block_mapping, layout)


def reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor, layout: CacheLayout
) -> None:
    """Writes row i of key and value [num_tokens, num_heads, size] to slot_mapping[i]; -1 is padding, goes nowhere."""
    real = slot_mapping >= 0
    block_ids, offsets = slot_mapping[real] // layout.block_size, slot_mapping[real] % layout.block_size
    for rows, blocks in zip((key, value), layout.split_kv(cache), strict=True):
        blocks[block_ids, offsets, :, : rows.shape[-1]] = rows[real].to(blocks.dtype)


def gather_cache(
    cache: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor, layout: CacheLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the first seq_lens[i] tokens of each table, one after the other: [total, heads, head_size]."""
    parts = []
    for table, length in zip(block_tables.long(), seq_lens.tolist(), strict=True):
        positions = torch.arange(length, device=cache.device)
        parts.append(table[positions // layout.block_size] * layout.block_size + positions % layout.block_size)
    slots = torch.cat(parts) if parts else torch.empty(0, dtype=torch.long, device=cache.device)
    key, value = layout.split_kv(cache)
    block_ids, offsets = slots // layout.block_size, slots % layout.block_size
    return key[block_ids, offsets], value[block_ids, offsets]
