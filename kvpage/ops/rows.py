"""Operations on tokens: writing them into blocks, gathering them out of blocks, attending over blocks.

Each validates what needs a tensor (shapes, dtypes, devices, strides), then calls C++ for tensors on the CPU and Triton
for tensors on a CUDA device. Block ids and slots on the host are checked before anything is written; those on a device
are checked there, without waiting for it: a bad one is skipped, and `check_device` raises from it later.
"""

import numbers
import operator

import torch

import kvpage._C as _C
from kvpage.checks.tensors import check_writable, readable
from kvpage.checks.values import as_integer
from kvpage.layout.cache_layout import CacheLayout
from kvpage.layout.kv_scales import KVScales
from kvpage.layout.kv_view import KVView
from kvpage.ops.cuda import attention as attention_ops_cuda
from kvpage.ops.cuda import rows as token_ops_cuda
from kvpage.ops.token_args import (
    CODECS,
    COMPUTE_DTYPES,
    ROW_TYPES,
    Lengths,
    check_cache,
    check_device_lengths,
    check_dtype,
    check_open_out,
    check_out_pair,
    check_pair,
    check_rows,
    check_scales,
    check_size,
    check_tensor,
    fp32_number,
    host_lengths,
    length_bound,
    native_blocks,
    native_parts,
    native_tables,
    out_offsets,
    row_dtypes,
    row_view,
)


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor | None,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: CacheLayout,
    scales: KVScales | None = None,
) -> None:
    """Writes row i of `key` and `value` into slot `slot_mapping[i]` of `cache`.

    key, value: [num_tokens, num_kv_heads, size], any strides with the last dimension contiguous, on the cache's device.
        `size` may be under the layout's head_size, and differ between the two: the rest of a cache row stays. Of the
        cache's dtype; where the layout quantises, fp32, bf16 or fp16 (or the 8-bit float itself, copied as it is).
        value is None where the layout has no value part (MLA).
    slot_mapping: int64 [num_tokens], block_id * block_size + offset; -1 is padding and written nowhere.
    scales: of 8-bit floats; None means 1. What is too large saturates.

    Raises ValueError for anything else (TypeError for what is no tensor), for a slot out of range, and for one named
    twice; on the host nothing has then been written. On a CUDA device a slot out of range is skipped and reported by
    `check_device`, and of tokens that share a slot any may win. `key` and `value` must not share memory with `cache`.
    """
    is_cuda = isinstance(cache, torch.Tensor) and cache.is_cuda
    if is_cuda and token_ops_cuda.reshape_as_before(key, value, cache, slot_mapping, layout, scales):
        return
    check_cache(cache, layout)
    check_scales(scales, cache, layout)
    check_writable("cache", cache)
    key, slot_mapping = readable("key", key), readable("slot_mapping", slot_mapping)
    value = None if value is None else readable("value", value)
    views = layout.views(cache)
    check_pair("", key, value, views[1] is not None)
    check_rows("key", key, None, cache, layout)
    if value is not None:
        check_rows("value", value, key.shape[0], cache, layout)
    check_tensor("slot_mapping", slot_mapping, torch.int64, (key.shape[0],), cache.device)
    slots = slot_mapping.contiguous()  # held until the call is over
    if cache.is_cuda:
        token_ops_cuda.reshape_and_cache(key, value, cache, slots, layout, scales)
        return
    _C.reshape_and_cache(
        native_parts(views, (key, value), scales),
        slots.data_ptr(),
        key.shape[0],
        layout.num_kv_heads,
        views[0].num_blocks,
        layout.block_size,
        torch.get_num_threads(),
    )


def gather_cache(
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: Lengths,
    layout: CacheLayout,
    seq_starts: Lengths | None = None,
    out: tuple[torch.Tensor, torch.Tensor | None] | None = None,
    scales: KVScales | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Copies the keys and values of `seq_lens[i]` tokens of each sequence, from `seq_starts[i]` on, out of its blocks.

    block_tables: int32 [num_seqs, max_blocks] on the cache's device; entries that no wanted token lies in are not read.
    seq_lens, seq_starts: [num_seqs] integers on the host (a list, or an int32 or int64 tensor); starts default to 0. Or
        both int32 or int64 tensors on the cache's CUDA device, with `out` given: nobody waits for them, so that the
        call may be captured in a graph. `out` may then be larger than they say; what does not fit is skipped.
    out: (key, value) to write into, on the cache's device, any strides with the last dimension contiguous; `size` may
        be under head_size: so much of each row is read. Either [total_tokens, num_kv_heads, size], one sequence after
        the other, or [num_seqs, max_len, num_kv_heads, size], where the rows past a sequence stay as they are. Without
        `out`, new contiguous tensors [total_tokens, num_kv_heads, head_size] of `dtype`. value is None where the layout
        has no value part (MLA).
    scales: of 8-bit floats; None means 1.
    dtype: the cache's; where the layout quantises, fp32 (the default), bf16 or fp16, or the 8-bit float itself.

    Returns (key, value): `out` where given. Raises ValueError for anything else (TypeError for what is no tensor, or no
    integer), and for a needed table entry that names no block; on the host nothing has then been written. On a CUDA
    device the tokens of such a block are skipped, as are sequences that do not fit, and `check_device` reports it. The
    two of `out` must not share memory with each other or with `cache`.
    """
    check_cache(cache, layout)
    check_scales(scales, cache, layout)
    block_tables = readable("block_tables", block_tables)
    views = layout.views(cache)
    tables = native_tables(cache, block_tables, layout)
    num_seqs = block_tables.shape[0]
    if isinstance(seq_lens, torch.Tensor) and seq_lens.is_cuda:
        rows = check_device_lengths(seq_lens, seq_starts, num_seqs, cache)
        out = check_open_out(out, num_seqs, views[1] is not None, cache, layout)
        token_ops_cuda.gather_cache_by_device_lengths(cache, block_tables, *rows, out, layout, scales)
        return out
    capacity = block_tables.shape[1] * layout.block_size
    lengths = host_lengths("seq_lens", seq_lens, num_seqs, capacity)
    starts = host_lengths("seq_starts", [0] * num_seqs if seq_starts is None else seq_starts, num_seqs, capacity)
    last = max(map(operator.add, starts, lengths), default=0)
    if last > capacity:
        raise ValueError(f"seq_starts + seq_lens must be at most {capacity}, got {last}")
    if out is None:
        out = _new_rows(sum(lengths), views, cache, layout, dtype)
    check_out_pair(out, views[1] is not None)
    key_offsets = out_offsets("key", out[0], lengths, cache, layout)
    value_offsets = [] if out[1] is None else out_offsets("value", out[1], lengths, cache, layout)
    if out[1] is not None and (out[0].dim(), out[0].dtype) != (out[1].dim(), out[1].dtype):
        kinds = f"{out[0].dim()} of {out[0].dtype} and {out[1].dim()} of {out[1].dtype}"
        raise ValueError(f"key and value must have as many dimensions and one dtype, got {kinds}")
    if cache.is_cuda:
        token_ops_cuda.gather_cache(cache, block_tables, lengths, starts, out, layout, scales)
        return out
    _C.gather_cache(
        native_parts(views, out, scales),
        tables,
        starts,
        lengths,
        [key_offsets, value_offsets],
        layout.num_kv_heads,
        torch.get_num_threads(),
    )
    return out


def _new_rows(
    num_tokens: int,
    views: tuple[KVView, KVView | None],
    cache: torch.Tensor,
    layout: CacheLayout,
    dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    dtype = dtype or (torch.float32 if layout.is_quantized else layout.dtype)
    if dtype not in row_dtypes(layout):
        raise ValueError(f"dtype must be {' or '.join(map(str, row_dtypes(layout)))}, got {dtype}")
    shape = (num_tokens, layout.num_kv_heads, layout.head_size)
    key = cache.new_empty(shape, dtype=dtype)
    return key, None if views[1] is None else cache.new_empty(shape, dtype=dtype)


def paged_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: Lengths,
    layout: CacheLayout,
    scale: float | None = None,
    query_lens: Lengths | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    value_size: int | None = None,
    out: torch.Tensor | None = None,
    scales: KVScales | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    query_positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of each sequence's last tokens to all of its tokens, read in place from their blocks.

    query: [num_tokens, num_heads, key_size], the queries of one sequence after those of the other; any strides with the
        last dimension contiguous; the cache's dtype (fp32, bf16 or fp16), or fp32; where the layout quantises, any of
        these. num_heads is a multiple of the layout's num_kv_heads; neighbours share a KV head. key_size <= head_size.
    block_tables: int32 [num_seqs, max_blocks]; entries that no visible token lies in are not read.
    seq_lens: [num_seqs], the tokens of each sequence in the cache, those of its queries included. On the host; for a
        CUDA device also int32 or int64 there, as query_lens, and then read when the kernel runs: see below.
    query_lens: [num_seqs], default 1 each. Query j of a sequence is its token seq_len - query_len + j, and sees the
        tokens up to that; with `sliding_window` only as many of them as that, its own included.
    query_positions: int64 [num_tokens], on the CPU or the cache's device: of each query in its sequence, ascending in
        each sequence; default the last ones. A query sees the keys up to its own.
    scale: of the products, default key_size ** -0.5, finite. softcap: scores become softcap * tanh(score / softcap); a
        positive number that is normal in fp32.
    sinks: [num_heads], one more logit in each head's softmax, that adds nothing to the sum; not scaled, not capped.
    value_size: of V's heads and of the output, default head_size. Where the layout has no value part (MLA), V is the
        first value_size elements of each key.
    scales: of 8-bit floats; None means 1.
    max_query_len, max_seq_len: bounds of lengths that are on the device; by default as much as fits into query, and
        into a table.
    out: [num_tokens, num_heads, value_size] to write into, of the query's dtype, last dimension contiguous. It must not
        share memory with the others.

    Returns the output in the query's dtype; all sums are in fp32. Raises ValueError for anything else (TypeError for
    what is no tensor, integer or number), and for a needed table entry that names no block, before anything is written.
    On a CPU it is made for few queries a sequence; for whole prompts it is about as fast as gathering and torch's
    scaled_dot_product_attention (benchmarks/bench_paged_attention_cpu.py).

    On a CUDA device nothing is waited for, and the keys of a block that does not exist count as not there;
    `check_device` reports them. Lengths on the device are not checked: a sequence longer than its table ends there and
    is reported as well, a query that no key is left for (as of a sequence of length 0) gives zeros, and rows of query
    beyond the sum of query_lens leave their rows of `out` as they are. Captured in a graph, which needs all lengths on
    the device, a replay takes what the tensors hold then; no length may exceed its bound. Positions are not checked
    either: one beyond its sequence counts as that of its last token.
    """
    check_cache(cache, layout)
    check_scales(scales, cache, layout)
    query, block_tables = readable("query", query), readable("block_tables", block_tables)
    key_size, group_size = _check_query(query, cache, layout)
    tables = native_tables(cache, block_tables, layout)
    num_seqs, max_blocks = block_tables.shape
    value_size = layout.head_size if value_size is None else _checked_value_size(value_size, layout)
    window = _EVERY_KEY if sliding_window is None else _checked_window(sliding_window)
    scale = key_size**-0.5 if scale is None else fp32_number("scale", scale)
    softcap = 0.0 if softcap is None else _checked_softcap(softcap)
    if out is None:
        out = query.new_empty(*query.shape[:2], value_size)
    check_writable("out", out)
    check_tensor("out", out, query.dtype, (*query.shape[:2], value_size), cache.device)
    check_size("out", out, layout)
    if sinks is not None:
        sinks = readable("sinks", sinks)
        check_tensor("sinks", sinks, sinks.dtype, (query.shape[1],), cache.device)
        sinks = sinks.float().contiguous()
    if query_positions is not None:
        query_positions = _checked_positions(query_positions, query.shape[0], cache.device)
    if cache.is_cuda:
        attention_ops_cuda.paged_attention(
            query,
            cache,
            block_tables,
            seq_lens,
            query_lens,
            query_positions,
            (max_query_len, max_seq_len),
            layout,
            (scale, sliding_window, softcap or None, sinks),
            out,
            scales,
        )
        return out
    lengths = host_lengths("seq_lens", seq_lens, num_seqs, max_blocks * layout.block_size)
    queries = host_lengths("query_lens", [1] * num_seqs if query_lens is None else query_lens, num_seqs, query.shape[0])
    length_bound("max_query_len", max_query_len, queries, query.shape[0])
    length_bound("max_seq_len", max_seq_len, lengths, max_blocks * layout.block_size)
    key_view, value_view = layout.views(cache)
    key_scale, value_scale = (None, None) if scales is None else (scales.key, scales.value)
    if value_view is None:
        value_scale = key_scale
    _C.paged_attention(
        row_view(query),
        row_view(out),
        native_blocks(key_view),
        native_blocks(value_view or key_view),
        (ROW_TYPES[query.dtype], ROW_TYPES.get(cache.dtype, 0), CODECS.get(cache.dtype, 0)),
        (*_address_and_stride(key_scale), *_address_and_stride(value_scale)),
        tables,
        lengths,
        queries,
        0 if query_positions is None else query_positions.data_ptr(),
        (query.shape[0], layout.num_kv_heads, group_size, key_size, value_size),
        window,
        scale,
        softcap,
        0 if sinks is None else sinks.data_ptr(),
        torch.get_num_threads(),
    )
    return out


_EVERY_KEY = 2**62


def _checked_positions(positions: torch.Tensor, num_tokens: int, device: torch.device) -> torch.Tensor:
    """Contiguous, on the CPU or on `device`; their values are checked where they are read on the CPU."""
    is_host = isinstance(positions, torch.Tensor) and positions.device.type == "cpu"
    check_tensor("query_positions", positions, torch.int64, (num_tokens,), torch.device("cpu") if is_host else device)
    return positions.contiguous()


def _address_and_stride(scale: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if scale is None else (scale.data_ptr(), int(len(scale) > 1))


def _check_query(query: torch.Tensor, cache: torch.Tensor, layout: CacheLayout) -> tuple[int, int]:
    """Checks the queries of paged_attention; the size of their heads, and how many share a KV head."""
    if query.dim() != 3:
        raise ValueError(f"query must be [num_tokens, num_heads, size], got shape {tuple(query.shape)}")
    if cache.dtype not in COMPUTE_DTYPES and not layout.is_quantized:
        raise ValueError(f"cache.dtype must be one of {', '.join(map(str, COMPUTE_DTYPES))}, got {cache.dtype}")
    check_dtype("query", query, COMPUTE_DTYPES if layout.is_quantized else (cache.dtype, torch.float32))
    if query.shape[1] == 0 or query.shape[1] % layout.num_kv_heads:
        raise ValueError(f"query's heads must be a multiple of {layout.num_kv_heads}, got {query.shape[1]}")
    check_size("query", query, layout)
    check_tensor("query", query, query.dtype, tuple(query.shape), cache.device)
    return query.shape[2], query.shape[1] // layout.num_kv_heads


def _checked_value_size(value_size: int, layout: CacheLayout) -> int:
    if not 1 <= (size := as_integer("value_size", value_size)) <= layout.head_size:
        raise ValueError(f"value_size must be in [1, {layout.head_size}], got {size}")
    return size


def _checked_window(sliding_window: int) -> int:
    if not 1 <= (window := as_integer("sliding_window", sliding_window)) <= _EVERY_KEY:
        raise ValueError(f"sliding_window must be at least 1, got {window}")
    return window


def _checked_softcap(softcap: float) -> float:
    """The scores are divided by it: a subnormal one may be taken for zero, and has no precision."""
    fp32 = torch.finfo(torch.float32)
    if isinstance(softcap, numbers.Real) and not fp32.tiny <= softcap <= fp32.max:
        raise ValueError(f"softcap must be positive and a normal number of fp32, got {softcap}")
    return fp32_number("softcap", softcap)
