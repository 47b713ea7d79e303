"""Every operation in plain torch: the specification that the fast ones are compared with, bit by bit.

Arguments and results as in kvpage.ops; nothing is validated here, and nothing is fast.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from kvpage.layout.attention import Attention
from kvpage.layout.cache_layout import CacheLayout
from kvpage.layout.kv_scales import FP8_DTYPES, KVScales
from kvpage.layout.kv_view import KVView
from kvpage.layout.rotation import Rotation
from kvpage.layout.row_norm import RowNorm
from kvpage.ops.reference.sampling import sample_rows as sample_rows


def swap_blocks(src: torch.Tensor, dst: torch.Tensor, block_mapping: torch.Tensor, layout: CacheLayout) -> None:
    """dst's block d becomes src's block s, for each (s, d) of block_mapping [num_pairs, 2]."""
    src_ids, dst_ids = block_mapping.unbind(1)
    dim = layout.block_dim
    src, dst = _bits(src), _bits(dst)
    dst.index_copy_(dim, dst_ids.to(dst.device), src.index_select(dim, src_ids.to(src.device)).to(dst.device))


def copy_blocks(caches: Sequence[torch.Tensor], block_mapping: torch.Tensor, layout: CacheLayout) -> None:
    """In each layer's cache, block d becomes block s, for each (s, d); all are read before any is written."""
    for cache in caches:
        swap_blocks(cache, cache, block_mapping, layout)


def quantize_fp8(rows: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """rows [num_tokens, num_heads, size] over scale [1] or [num_heads], rounded to nearest even, saturating."""
    most = torch.finfo(dtype).max
    return (rows.float() / scale[:, None]).clamp(-most, most).to(dtype)


def dequantize_fp8(rows: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The product in fp32, then rounded to `dtype`."""
    return (rows.float() * scale[:, None]).to(dtype)


def quantize_int8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [num_tokens, num_heads, size] as int8, and a scale each [num_tokens, num_heads]: the largest becomes 127.

    A row of zeros has the scale 0. A row with an infinity or a NaN has a scale that is none, and so stays no number.
    """
    rows = rows.float()
    scales = rows.abs().amax(2) / rows.new_full((1,), 127.0)  # a plain number would be multiplied with on CUDA
    steps = torch.where(scales > 0, scales, torch.ones_like(scales))[..., None]
    return (rows / steps).round().clamp(-127, 127).nan_to_num(0).to(torch.int8), scales


def dequantize_int8(rows: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The product in fp32, then rounded to `dtype`."""
    return (rows.float() * scales[..., None]).to(dtype)


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor | None,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: CacheLayout,
    scales: KVScales | None = None,
) -> None:
    """Writes row i of key and value [num_tokens, num_heads, size] to slot_mapping[i]; -1 is padding, goes nowhere."""
    real = slot_mapping >= 0
    places = slot_mapping[real] // layout.block_size, slot_mapping[real] % layout.block_size
    for rows, view, scale in _parts((key, value), cache, layout, scales):
        write_view(view, places, rows[real], scale)


def gather_cache(
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    layout: CacheLayout,
    seq_starts: torch.Tensor | None = None,
    scales: KVScales | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """K and V of seq_lens[i] tokens of each table from seq_starts[i] on, packed: [total, heads, size].

    dtype: of the result; that of an 8-bit float's cache gives its bits as they are.
    """
    parts = []
    starts = torch.zeros_like(seq_lens) if seq_starts is None else seq_starts
    for table, start, length in zip(block_tables.long(), starts.tolist(), seq_lens.tolist(), strict=True):
        positions = torch.arange(start, start + length, device=cache.device)
        parts.append(table[positions // layout.block_size] * layout.block_size + positions % layout.block_size)
    slots = torch.cat(parts) if parts else torch.empty(0, dtype=torch.long, device=cache.device)
    places = slots // layout.block_size, slots % layout.block_size
    dtype = dtype or (torch.float32 if layout.is_quantized else layout.dtype)
    sizes = layout.head_size, layout.head_size_v
    parts_of_cache = _parts((None, None), cache, layout, scales)
    rows = [
        read_view(view, places, size, scale, dtype)
        for (_, view, scale), size in zip(parts_of_cache, sizes, strict=False)
    ]
    return rows[0], rows[1] if len(rows) == 2 else None


def write_view(
    view: KVView, places: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor, scale: torch.Tensor | None
) -> None:
    """Writes rows [num_places, num_heads, size] at (block ids, offsets), quantised as the view asks for."""
    dtype = view.rows.dtype
    if view.scales is not None:
        rows, token_scales = quantize_int8(rows)
        view.scales[places] = token_scales
    elif dtype in FP8_DTYPES and rows.dtype != dtype:
        rows = quantize_fp8(rows, rows.new_ones(1, dtype=torch.float32) if scale is None else scale, dtype)
    view.write(*places, rows.to(dtype))


def read_view(
    view: KVView,
    places: tuple[torch.Tensor, torch.Tensor],
    size: int,
    scale: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Rows [num_places, num_heads, size] at (block ids, offsets), in `dtype`."""
    rows = view.read(*places, size)
    if view.scales is not None:
        return dequantize_int8(rows, view.scales[places], dtype)
    if rows.dtype in FP8_DTYPES and dtype != rows.dtype:
        return dequantize_fp8(rows, torch.ones(1, device=rows.device) if scale is None else scale, dtype)
    return rows.to(dtype)


def _parts(
    rows: tuple[torch.Tensor | None, torch.Tensor | None],
    cache: torch.Tensor,
    layout: CacheLayout,
    scales: KVScales | None,
) -> list[tuple[Any, KVView, torch.Tensor | None]]:
    """(rows, view, scale) of K and of V; of K alone where there is no value part."""
    views = layout.views(cache)
    part_scales = (None, None) if scales is None else (scales.key, scales.value)
    return [(row, view, scale) for row, view, scale in zip(rows, views, part_scales, strict=True) if view is not None]


def gather_into(
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_starts: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor | None],
    layout: CacheLayout,
    scales: KVScales | None = None,
) -> None:
    """gather_cache into `out`, packed or padded; rows past a sequence stay as they are."""
    gathered_parts = gather_cache(cache, block_tables, seq_lens, layout, seq_starts, scales, out[0].dtype)
    for rows, gathered in zip(out, gathered_parts, strict=True):
        if rows is None or gathered is None:
            continue
        rows, gathered = _bits(rows), _bits(gathered[..., : rows.shape[-1]])
        if rows.dim() == 3:
            rows.copy_(gathered)
            continue
        for padded, part in zip(rows, torch.split(gathered, seq_lens.tolist()), strict=True):
            padded[: len(part)] = part


def _bits(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(torch.uint8) if rows.element_size() == 1 else rows


def store_chunk(
    caches: Sequence[torch.Tensor],
    block_ids: torch.Tensor,
    start: int,
    chunk: torch.Tensor,
    layout: CacheLayout,
    scales: Sequence[KVScales] | None = None,
) -> None:
    """chunk [num_layers, parts, num_tokens, num_heads, size] becomes the tokens from `start` on of a sequence's blocks.

    parts: 2, or 1 where there is no value part. Other orders of the chunk's dimensions are views of this one. Of a
    cache with token scales an int8 chunk holds what the cache does: padded_head_size and the scale's 4 bytes.
    """
    places = _places(block_ids, start, chunk.shape[2], layout)
    for layer, cache in enumerate(caches):
        layer_scales = None if scales is None else scales[layer]
        for part, (_, view, scale) in enumerate(_parts((None, None), cache, layout, layer_scales)):
            if chunk.dtype == torch.int8 and view.scales is not None:
                chunk[layer, part, ..., :-4] = view.read(*places, chunk.shape[4] - 4)
                chunk[layer, part, ..., -4:] = view.scales[places].unsqueeze(2).view(torch.int8)
            else:
                chunk[layer, part] = read_view(view, places, chunk.shape[4], scale, chunk.dtype)


def load_chunk(
    caches: Sequence[torch.Tensor],
    block_ids: torch.Tensor,
    start: int,
    chunk: torch.Tensor,
    layout: CacheLayout,
    scales: Sequence[KVScales] | None = None,
) -> None:
    """The tokens from `start` on of a sequence's blocks become chunk's; see store_chunk."""
    places = _places(block_ids, start, chunk.shape[2], layout)
    for layer, cache in enumerate(caches):
        layer_scales = None if scales is None else scales[layer]
        for part, (_, view, scale) in enumerate(_parts((None, None), cache, layout, layer_scales)):
            rows = chunk[layer, part].to(cache.device)
            if rows.dtype == torch.int8 and view.scales is not None:
                view.write(*places, rows[..., :-4])
                view.scales[places] = rows[..., -4:].contiguous().view(torch.float32).squeeze(2)
            else:
                write_view(view, places, rows, scale)


def _places(
    block_ids: torch.Tensor, start: int, num_tokens: int, layout: CacheLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.arange(start, start + num_tokens, device=block_ids.device)
    return block_ids.long()[positions // layout.block_size], positions % layout.block_size


def paged_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    layout: CacheLayout,
    attention: Attention | None = None,
    *,
    query_lens: torch.Tensor | None = None,
    scales: KVScales | None = None,
    **options: Any,
) -> torch.Tensor:
    """Softmax attention of query_lens[i] tokens of each sequence to the keys that they see of its seq_lens[i] tokens.

    All in fp32. The options come in `attention`, or by name.
    """
    attention = Attention.of(attention, options)
    query_lens = torch.ones_like(seq_lens) if query_lens is None else query_lens
    counts, lengths = query_lens.tolist(), seq_lens.tolist()
    outputs = [query.new_empty(0, query.shape[1], attention.value_size or layout.head_size_v)]
    queries, places = torch.split(query.float(), counts), _query_positions(attention, lengths, counts)
    for rows, positions, table, length in zip(queries, places, block_tables, lengths, strict=True):
        key, value = gather_cache(
            cache, table[None], torch.tensor([length]), layout, scales=scales, dtype=torch.float32
        )
        value = key if value is None else value  # latents: V is the first part of K
        output = _attend(rows, key, value[..., : attention.value_size], positions.to(query.device), attention)
        outputs.append(output.to(query.dtype))
    return torch.cat(outputs)


def _query_positions(attention: Attention, lengths: list[int], counts: list[int]) -> Sequence[torch.Tensor]:
    """The position of each query in its sequence, a tensor a sequence."""
    if attention.query_positions is not None:
        return torch.split(attention.query_positions, counts)
    return [torch.arange(length - count, length) for length, count in zip(lengths, counts, strict=True)]


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor, attention: Attention
) -> torch.Tensor:
    """Attention of one sequence: query [num_queries, num_heads, key_size]; key, value [num_keys, num_kv_heads, ...]."""
    num_keys, num_kv_heads, _ = key.shape
    num_heads, key_size = query.shape[1:]
    key, value = (rows.repeat_interleave(num_heads // num_kv_heads, 1) for rows in (key[..., :key_size], value))
    scale = key_size**-0.5 if attention.scale is None else attention.scale
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if attention.softcap is not None:
        scores = attention.softcap * torch.tanh(scores / attention.softcap)
    keys = torch.arange(num_keys, device=query.device)
    seen = keys <= positions[:, None]
    if attention.sliding_window is not None:
        seen &= keys > positions[:, None] - attention.sliding_window
    scores = scores.masked_fill(~seen, float("-inf"))
    if attention.sinks is not None:
        sink = attention.sinks.float()[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat([scores, sink], 2)
    weights = scores.softmax(2)[..., :num_keys]
    return torch.einsum("hqk,khd->qhd", weights, value)


def mix_rows(
    rows: torch.Tensor,
    out: torch.Tensor,
    rotation: Rotation | None = None,
    fresh: torch.Tensor | None = None,
    fresh_rows: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    out_slots: torch.Tensor | None = None,
) -> None:
    """out[i] = rows[i], rotated, or fresh[fresh_rows[i]]; of rows and out the slots, where given."""
    mixed = rows.clone() if slots is None else rows[slots // rows.shape[1], slots % rows.shape[1]]
    if rotation is not None:
        mixed = rotated(mixed, rotation)
    if fresh is not None and fresh_rows is not None:
        is_fresh = fresh_rows >= 0
        mixed[is_fresh] = fresh[fresh_rows[is_fresh]]
    if out_slots is None:
        out.copy_(mixed)
        return
    used_slots = out_slots[out_slots >= 0]
    out[used_slots // out.shape[1], used_slots % out.shape[1]] = mixed[out_slots >= 0]


def rotated(rows: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """rows [num_rows, heads, size], rotated in fp32, in their own dtype."""
    pairs = rows[..., rotation.first : rotation.first + 2 * rotation.num_pairs].float()
    half = rotation.num_pairs
    x, y = (pairs[..., 0::2], pairs[..., 1::2]) if rotation.is_interleaved else (pairs[..., :half], pairs[..., half:])
    cos, sin = rotation.cos[:, None], rotation.sin[:, None]
    both = x * cos - y * sin, y * cos + x * sin
    joined = torch.stack(both, -1).flatten(-2) if rotation.is_interleaved else torch.cat(both, -1)
    out = rows.clone()
    out[..., rotation.first : rotation.first + 2 * rotation.num_pairs] = joined.to(rows.dtype)
    return out


def row_deviation(fresh: torch.Tensor, retrieved: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """The mean squared difference of each valid row in fp32; 0 for the others."""
    # Masked before any arithmetic: NaN times 0 is NaN.
    difference = (fresh.float() - retrieved.float()).masked_fill(~valid[:, None, None], 0.0)
    return difference.square().flatten(1).mean(dim=1)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Products and sums in fp32, then rounded."""
    result = x.float() @ weight.float().T
    return (result if bias is None else result + bias.float()).to(x.dtype)


def gated_linear(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """The same for activation(x @ gate.T) * (x @ up.T), rounded once."""
    gates, ups = x.float() @ gate.float().T, x.float() @ up.float().T
    activated = F.silu(gates) if activation == "silu" else F.gelu(gates, approximate="tanh")
    return (activated * ups).to(x.dtype)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float = 0.0,
    rounds_before_weight: bool = True,
) -> torch.Tensor:
    """The mean square in fp32; the normalised numbers are rounded before the product with the weight, or after it."""
    wide = x.float()
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if rounds_before_weight:
        normal = normal.to(x.dtype).float()
    return (normal * (weight.float() + weight_offset)).to(x.dtype)


def add_norm(
    x: torch.Tensor, residual: torch.Tensor, x_norm: RowNorm | None, sum_norm: RowNorm | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """residual + x, or residual + norm(x), rounded to the dtype; then the norm of this sum, if there is any."""
    total = residual + (x if x_norm is None else rms_norm(x, *x_norm))
    return total, None if sum_norm is None else rms_norm(total, *sum_norm)


def write_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    norms: tuple[RowNorm, RowNorm] | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    layout: CacheLayout,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """Norm and rotate heads [tokens, heads, size], each step rounded; write K and V to slots, and return queries."""
    if norms is not None:
        query, key = rms_norm(query, *norms[0]), rms_norm(key, *norms[1])
    query, key = (_with_turned_halves(rows, cos[:, None], sin[:, None]) for rows in (query, key))
    reshape_and_cache(key, value, cache, slots, layout, scales)
    return query


def _with_turned_halves(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x cos - y sin, y cos + x sin of the halves x and y of each head."""
    x, y = rows.chunk(2, -1)
    return rows * cos + torch.cat([-y, x], -1) * sin
