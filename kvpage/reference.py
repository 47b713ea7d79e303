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
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    layout: CacheLayout,
    seq_starts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of seq_lens[i] tokens of each table from seq_starts[i] on, packed: [total, heads, head_size]."""
    parts = []
    starts = torch.zeros_like(seq_lens) if seq_starts is None else seq_starts
    for table, start, length in zip(block_tables.long(), starts.tolist(), seq_lens.tolist(), strict=True):
        positions = torch.arange(start, start + length, device=cache.device)
        parts.append(table[positions // layout.block_size] * layout.block_size + positions % layout.block_size)
    slots = torch.cat(parts) if parts else torch.empty(0, dtype=torch.long, device=cache.device)
    key, value = layout.split_kv(cache)
    block_ids, offsets = slots // layout.block_size, slots % layout.block_size
    return key[block_ids, offsets], value[block_ids, offsets]


def gather_into(
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_starts: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor],
    layout: CacheLayout,
) -> None:
    """gather_cache into `out`, packed or padded; rows past a sequence stay as they are."""
    for rows, gathered in zip(out, gather_cache(cache, block_tables, seq_lens, layout, seq_starts), strict=True):
        gathered = gathered[..., : rows.shape[-1]]
        if rows.dim() == 3:
            rows.copy_(gathered)
            continue
        for padded, part in zip(rows, gathered.split(seq_lens.tolist()), strict=True):
            padded[: len(part)] = part


def paged_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    layout: CacheLayout,
    scale: float | None = None,
    query_lens: torch.Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    value_size: int | None = None,
) -> torch.Tensor:
    """Softmax attention of each sequence's last query_lens[i] tokens to its seq_lens[i] tokens, all in fp32."""
    _, num_heads, key_size = query.shape
    group_size = num_heads // layout.num_kv_heads
    query_lens = torch.ones_like(seq_lens) if query_lens is None else query_lens
    outputs = [query.new_empty(0, num_heads, value_size or layout.head_size)]
    queries = query.float().split(query_lens.tolist())
    for rows, table, length in zip(queries, block_tables, seq_lens.tolist(), strict=True):
        key, value = gather_cache(cache, table[None], torch.tensor([length]), layout)
        key = key[..., :key_size].float().repeat_interleave(group_size, 1)  # [length, num_heads, key_size]
        value = value[..., :value_size].float().repeat_interleave(group_size, 1)
        scores = torch.einsum("qhd,khd->hqk", rows, key) * (key_size**-0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        positions = torch.arange(length - len(rows), length, device=query.device)[:, None]
        seen = torch.arange(length, device=query.device) <= positions
        if sliding_window is not None:
            seen &= torch.arange(length, device=query.device) > positions - sliding_window
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            sink = sinks.float()[:, None, None].expand(-1, len(rows), 1)
            scores = torch.cat([scores, sink], 2)
        weights = scores.softmax(2)[..., :length]
        outputs.append(torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype))
    return torch.cat(outputs)
