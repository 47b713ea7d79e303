"""Launching attention over blocks: one kernel, and the merging one where keys are split. Waits for nothing."""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvpage.kernels.attention import paged_attention_kernel
from kvpage.kernels.attention_constants import SEARCH, AttentionConstants
from kvpage.kernels.attention_merge import MERGED, merge_splits_kernel
from kvpage.kernels.attention_plan import Sizes, Tile, choose_splits, choose_tile, min_keys_of_split
from kvpage.layout.attention import Attention

_COMPUTE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_STORED = {torch.int8: "int8", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


class Rows(NamedTuple):
    """K or V of one layer. data: [num_blocks, block_size, num_kv_heads, num_runs, run_size]. scales: fp32, None, of the
    first three dimensions, or of num_kv_heads alone."""

    data: torch.Tensor
    scales: torch.Tensor | None


class DeviceSequences(NamedTuple):
    """All on the device but the bounds. seq_lens, query_lens: [num_seqs], the latter None for one each.
    num_keys: of all sequences, or a bound."""

    block_tables: torch.Tensor  # int32 [num_seqs, max_blocks]
    seq_lens: torch.Tensor
    query_lens: torch.Tensor | None
    max_seq_len: int
    max_query_len: int
    num_keys: int


class Device(NamedTuple):
    """What the launch has to know of where it runs. error: int32 [1]; gets BAD_BLOCK."""

    error: torch.Tensor
    num_multiprocessors: int
    capability: int  # 10 * major + minor


class Plan(NamedTuple):
    """How a launch is cut into thread blocks; see kvpage.kernels.attention_plan."""

    sizes: Sizes
    tile: Tile
    tile_tokens: int
    num_tiles: int  # of queries
    head_tiles: int
    num_splits: int  # of the keys


def plan_of(
    query: torch.Tensor,
    value_size: int,
    key: Rows,
    shares_rows: bool,
    sequences: DeviceSequences,
    device: Device,
) -> Plan:
    """Choose tiles and splits from the shapes and the bounds, without waiting for the device."""
    num_tokens, num_seqs = len(query), len(sequences.seq_lens)
    max_query_len = min(sequences.max_query_len, num_tokens)
    sizes = sizes_of(query, value_size, key, shares_rows)
    tile = choose_tile(sizes, sizes.group_size * min(max_query_len, -(-num_tokens // num_seqs)), device.capability)
    tile_tokens = tile.num_tokens(sizes.group_size, max_query_len)
    num_tiles = min(num_seqs * -(-max_query_len // tile_tokens), num_tokens // tile_tokens + num_seqs)
    head_tiles = key.data.shape[2] * -(-sizes.group_size // tile.rows)
    total_tiles = num_tiles * head_tiles
    num_keys = total_tiles * -(-sequences.num_keys // num_seqs)
    num_splits = choose_splits(total_tiles, sequences.max_seq_len, num_keys, tile, device.num_multiprocessors)
    return Plan(sizes, tile, tile_tokens, num_tiles, head_tiles, num_splits)


def paged_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, key_size]
    out: torch.Tensor,  # [num_tokens, num_heads, value_size]
    key: Rows,
    value: Rows | None,  # None: the first value_size elements of each key
    sequences: DeviceSequences,
    attention: Attention,  # scale is given, sinks are fp32, positions on the device
    device: Device,
) -> None:
    """Launch attention, and the merging of its splits if there are several."""
    num_tokens, num_heads, value_size = out.shape
    if num_tokens == 0 or len(sequences.seq_lens) == 0 or sequences.max_query_len == 0:
        return
    plan = plan_of(query, value_size, key, value is None, sequences, device)
    partial = sums = None
    if plan.num_splits > 1:
        partial = out.new_empty(num_tokens * num_heads, plan.num_splits, value_size, dtype=torch.float32)
        sums = out.new_empty(num_tokens * num_heads, plan.num_splits, 2, dtype=torch.float32)
    value_rows = key if value is None else value
    paged_attention_kernel[(plan.num_tiles * plan.head_tiles * plan.num_splits,)](
        *(query, out, _as_stored(key.data), _as_stored(value_rows.data), key.scales, value_rows.scales),
        *(attention.sinks, sequences.block_tables, sequences.seq_lens, sequences.query_lens),
        *(attention.query_positions, partial, sums, device.error),
        *_factors(attention),
        min(attention.sliding_window or 0, 2**31 - 1),
        *(plan.num_tiles, plan.num_splits, key.data.shape[2], len(sequences.seq_lens), num_tokens, len(key.data)),
        sequences.block_tables.shape[1] * key.data.shape[1],
        *(*query.stride()[:2], *out.stride()[:2], sequences.block_tables.stride(0)),
        *(*key.data.stride()[:4], *value_rows.data.stride()[:4]),
        *(*_scale_strides(key), *_scale_strides(value_rows)),
        constants_of(plan, query, key, value, attention, device.capability),
        num_warps=plan.tile.num_warps,
        num_stages=plan.tile.num_stages,
    )
    if partial is not None and sums is not None:
        _merge(out, partial, sums, sequences, plan.num_splits)


def _merge(
    out: torch.Tensor, partial: torch.Tensor, sums: torch.Tensor, sequences: DeviceSequences, num_splits: int
) -> None:
    num_tokens, num_heads, value_size = out.shape
    merge_splits_kernel[(num_tokens * num_heads,)](
        *(out, partial, sums, sequences.query_lens, len(sequences.seq_lens), num_heads, num_splits),
        *out.stride()[:2],
        VALUE_SIZE=value_size,
        VALUE_TILE=triton.next_power_of_2(value_size),
        SPLITS_TILE=triton.next_power_of_2(num_splits),
        MERGED=MERGED,
        SEARCH=SEARCH,
        num_warps=4,
    )


def sizes_of(query: torch.Tensor, value_size: int, key: Rows, shares_rows: bool) -> Sizes:
    group_size = query.shape[1] // key.data.shape[2]
    stored, computed = key.data.element_size(), query.element_size()
    return Sizes(group_size, query.shape[2], value_size, stored, computed, shares_rows, key.data.dtype == torch.int8)


def constants_of(
    plan: Plan,
    query: torch.Tensor,
    key: Rows,
    value: Rows | None,
    attention: Attention,
    capability: int,
) -> AttentionConstants:
    """Choose the kernel's constants."""
    sizes, tile = plan.sizes, plan.tile
    dtype, query_dtype = key.data.dtype, query.dtype
    stored = _STORED.get(dtype, "float")
    narrow = dtype in (torch.float8_e4m3fn, torch.float8_e5m2) and query_dtype != torch.float32
    return AttentionConstants(
        GROUP=sizes.group_size,
        KEY_SIZE=sizes.key_size,
        VALUE_SIZE=sizes.value_size,
        BLOCK_SIZE=key.data.shape[1],
        KEY_RUN=_run_size(key),
        VALUE_RUN=_run_size(key if value is None else value),
        QUERY_ALIGN=_alignment(query, 2),
        KEY_ALIGN=_alignment(key.data, 3),
        VALUE_ALIGN=_alignment((key if value is None else value).data, 3),
        STORED="e4m3 bits" if stored == "e4m3" and capability < 89 else stored,
        COMPUTE=tl.float16 if narrow else _COMPUTE[query_dtype],
        PRECISION=tile.precision,
        NORMALIZE=narrow and query_dtype != torch.float16,
        TOKEN_SCALES=dtype == torch.int8,
        SCALE_VALUES=dtype == torch.int8 and query_dtype == torch.float16,
        SHARED=sizes.shares_rows and sizes.value_size <= tile.key_tile,
        WINDOW=attention.sliding_window is not None,
        SOFTCAP=attention.softcap is not None,
        TILE_ROWS=tile.rows,
        TILE_TOKENS=plan.tile_tokens,
        HEADS=min(tile.rows, sizes.group_size),
        TILE_KEYS=tile.keys,
        KEY_TILE=tile.key_tile,
        KEY_TAIL=tile.key_tail,
        VALUE_TILE=tile.value_tile,
        MIN_SPLIT_TILES=-(-min_keys_of_split(tile) // tile.keys),
    )


def _run_size(rows: Rows) -> int:
    """One run, however long, needs no arithmetic."""
    return rows.data.shape[4] if rows.data.shape[3] > 1 else 2**20


def _alignment(rows: torch.Tensor, num_dims: int) -> int:
    """Elements, of 16 bytes at most, that divide the strides of the first dimensions: so many are loaded at once."""
    return math.gcd(16 // rows.element_size(), *rows.stride()[:num_dims])


def _as_stored(rows: torch.Tensor) -> torch.Tensor:
    """8-bit floats as bytes, which every device loads."""
    return rows.view(torch.uint8) if rows.dtype in _STORED and rows.dtype != torch.int8 else rows


def _scale_strides(rows: Rows) -> tuple[int, ...]:
    strides = () if rows.scales is None else rows.scales.stride()
    return (0,) * (3 - len(strides)) + strides


def _factors(attention: Attention) -> tuple[float, float]:
    """`factor` and `softcap` of the kernel: scores are in units of log 2 there."""
    assert attention.scale is not None, "kvpage.ops.attention gives it"
    if attention.softcap is None:
        return attention.scale * math.log2(math.e), 0.0
    return 2.0 * attention.scale / attention.softcap * math.log2(math.e), attention.softcap * math.log2(math.e)
