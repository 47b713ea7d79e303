"""Rows of tokens: writing them into blocks, and gathering them out of blocks.

Each operation validates what needs a tensor (shapes, dtypes, devices, strides), then calls C++ for tensors on the CPU
and Triton for tensors on a CUDA device. Block ids and slots on the host are checked before anything is written; those
on a device are checked there, without waiting for it: a bad one is skipped, and `check_device` raises from it later.
"""

import operator
from collections.abc import Mapping
from typing import Any

import torch

import kvpage._C as _C
from kvpage.checks.tensors import readable
from kvpage.layout.cache_layout import CacheLayout
from kvpage.layout.kv_scales import KVScales
from kvpage.ops.args.bound_cache import BoundCache, bound
from kvpage.ops.args.tokens import (
    Lengths,
    check_device_lengths,
    check_dtype,
    check_open_out,
    check_out,
    check_out_pair,
    check_pair,
    check_size,
    check_tensor,
    host_lengths,
    native_tables,
    out_offsets,
    row_dtypes,
)
from kvpage.ops.cpu.rows import native_parts
from kvpage.ops.cuda import rows as cuda


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor | None,
    cache: torch.Tensor | BoundCache,
    slot_mapping: torch.Tensor,
    layout: CacheLayout | None = None,
    scales: KVScales | None = None,
) -> None:
    """Write row i of `key` and `value` into slot `slot_mapping[i]` of `cache`.

    On a CUDA device a slot out of range is skipped and reported by `check_device`, and of tokens that share a slot any
    may win. `key` and `value` must not share memory with `cache`. 8-bit floats saturate.

    Args:
        key: [num_tokens, num_kv_heads, size] on the cache's device, any strides with the last dimension contiguous.
            `size` may be under the layout's size of K; the rest of a cache row stays. Of the cache's dtype; where the
            layout quantises, fp32, bf16 or fp16, or the 8-bit float itself, copied as it is.
        value: As key, of a size of its own. None where the layout has no value part (MLA).
        cache: One layer's cache, or a BoundCache: then layout and scales are None.
        slot_mapping: int64 [num_tokens], block_id * block_size + offset. -1 is padding and written nowhere.
        layout: How the cache is to be read.
        scales: Scales of 8-bit floats; None means 1.

    Raises:
        TypeError: An argument is no tensor, or of another type.
        ValueError: Anything else is wrong, a slot is out of range, or one is named twice. On the host nothing has then
            been written.
    """
    bound_cache = bound(cache, layout, scales)
    if not bound_cache.is_writable:
        bound_cache.check_writable()
    if bound_cache.is_cuda and cuda.repeat_reshape(key, value, bound_cache, slot_mapping):
        return
    key = readable("key", key)
    value = None if value is None else readable("value", value)
    slots = readable("slot_mapping", slot_mapping)
    if (value is None) != (bound_cache.value is None):
        check_pair("", key, value, bound_cache.value is not None)
    _check_rows("key", key, None, bound_cache)
    if value is not None:
        _check_rows("value", value, key.shape[0], bound_cache)
    num_tokens = key.shape[0]
    if slots.dtype != torch.int64 or slots.shape != (num_tokens,) or slots.device != bound_cache.device:
        check_tensor("slot_mapping", slots, torch.int64, (num_tokens,), bound_cache.device)
    slots = slots.contiguous()  # held until the call is over
    if bound_cache.is_cuda:
        cuda.reshape_and_cache(key, value, bound_cache, slots)
        return
    num_blocks, block_size, num_kv_heads, _ = bound_cache.shape
    parts = native_parts(bound_cache, key, value)
    _C.reshape_and_cache(
        parts, slots.data_ptr(), num_tokens, num_kv_heads, num_blocks, block_size, torch.get_num_threads()
    )


def _check_rows(name: str, rows: torch.Tensor, num_tokens: int | None, cache: BoundCache) -> None:
    """`rows`, "key" or "value", must be [num_tokens, num_kv_heads, 1..its size], its last dimension contiguous."""
    if rows.dim() != 3:
        raise ValueError(f"{name} must be [num_tokens, num_kv_heads, size], got shape {tuple(rows.shape)}")
    _, _, num_heads, head_size = cache.shape
    most = head_size if name == "key" else cache.value_size
    count, heads, size = rows.shape
    if not 1 <= size <= most or rows.stride(2) != 1:
        check_size(name, rows, most)
    if rows.dtype not in cache.row_dtypes:
        check_dtype(name, rows, cache.row_dtypes)
    if heads != num_heads or (num_tokens is not None and count != num_tokens) or rows.device != cache.device:
        expected = (count if num_tokens is None else num_tokens, num_heads, size)
        check_tensor(name, rows, rows.dtype, expected, cache.device)


def gather_cache(
    cache: torch.Tensor | BoundCache,
    block_tables: torch.Tensor,
    seq_lens: Lengths,
    layout: CacheLayout | None = None,
    seq_starts: Lengths | None = None,
    out: tuple[torch.Tensor, torch.Tensor | None] | None = None,
    scales: KVScales | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Copy the keys and values of `seq_lens[i]` tokens of each sequence, from `seq_starts[i]` on, out of its blocks.

    On a CUDA device the tokens of a block that does not exist are skipped, as are sequences that do not fit, and
    `check_device` reports it.

    Args:
        cache: One layer's cache, or a BoundCache: then layout and scales are None.
        block_tables: int32 [num_seqs, max_blocks] on the cache's device. Entries without a wanted token are not read.
        seq_lens: [num_seqs] integers on the host: a list, or an int32 or int64 tensor. Or a tensor on the cache's CUDA
            device, with `out` given: it is not waited for, so that the call may be captured in a graph. `out` may then
            be larger than the lengths say; what does not fit is skipped.
        layout: How the cache is to be read.
        seq_starts: As seq_lens, and where they are. Default: 0.
        out: (key, value) to write into, on the cache's device, any strides with the last dimension contiguous. `size`
            may be under head_size: so much of each row is read. Either [total_tokens, num_kv_heads, size], one sequence
            after the other, or [num_seqs, max_len, num_kv_heads, size], where the rows past a sequence stay as they
            are. The value is None where the layout has no value part (MLA). The two must not share memory with each
            other or with `cache`.
        scales: Scales of 8-bit floats; None means 1.
        dtype: Of new tensors; None for the cache's. Of a layout that quantises: fp32 (None), bf16, fp16, or its own.

    Returns:
        `out` where given, else new contiguous tensors [total_tokens, num_kv_heads, head_size], of K's size and V's.

    Raises:
        TypeError: An argument is no tensor, no integer, or of another type.
        ValueError: Anything else is wrong, or a needed table entry names no block. On the host nothing has then been
            written.
    """
    bound_cache = bound(cache, layout, scales)
    if out is not None and _is_repeated(bound_cache, block_tables, seq_lens, seq_starts, out):
        return out
    tensor, layout = bound_cache.tensor, bound_cache.layout
    block_tables = readable("block_tables", block_tables)
    tables = native_tables(tensor, block_tables, layout)
    num_seqs, has_values = block_tables.shape[0], bound_cache.value is not None
    if isinstance(seq_lens, torch.Tensor) and seq_lens.is_cuda:
        rows = check_device_lengths(seq_lens, seq_starts, num_seqs, tensor)
        out = check_open_out(out, num_seqs, has_values, tensor, layout)
        cuda.gather_cache_by_device_lengths(bound_cache, block_tables, *rows, out)
        return out
    starts, lengths = _host_spans(seq_starts, seq_lens, num_seqs, block_tables.shape[1] * layout.block_size)
    if out is None:
        out = _new_rows(sum(lengths), tensor, layout, bound_cache.row_dtypes, has_values, dtype)
    _check_out(out, lengths, bound_cache)
    if bound_cache.is_cuda:
        cuda.gather_cache(bound_cache, block_tables, lengths, starts, out)
    else:
        _gather_on_host(bound_cache, tables, starts, lengths, out)
    return out


def _is_repeated(
    cache: BoundCache,
    block_tables: torch.Tensor,
    seq_lens: Lengths,
    seq_starts: Lengths | None,
    out: tuple[torch.Tensor, torch.Tensor | None],
) -> bool:
    """Return whether a device has done the call as it did one of these shapes before."""
    return cache.is_cuda and cuda.repeat_gather(cache, block_tables, seq_lens, seq_starts, out)


def _gather_on_host(
    cache: BoundCache,
    tables: tuple[int, int, int, int, int, int],
    starts: list[int],
    lengths: list[int],
    out: tuple[torch.Tensor, torch.Tensor | None],
) -> None:
    parts, offsets = native_parts(cache, *out), [out_offsets(rows, lengths) for rows in out]
    _C.gather_cache(parts, tables, starts, lengths, offsets, cache.layout.num_kv_heads, torch.get_num_threads())


def _host_spans(
    seq_starts: Lengths | None, seq_lens: Lengths, num_seqs: int, capacity: int
) -> tuple[list[int], list[int]]:
    """Starts and lengths that fit into tables of `capacity` tokens."""
    lengths = host_lengths("seq_lens", seq_lens, num_seqs, capacity)
    starts = host_lengths("seq_starts", [0] * num_seqs if seq_starts is None else seq_starts, num_seqs, capacity)
    last = max(map(operator.add, starts, lengths), default=0)
    if last > capacity:
        raise ValueError(f"seq_starts + seq_lens must be at most {capacity}, got {last}")
    return starts, lengths


def _check_out(out: tuple[torch.Tensor, torch.Tensor | None], lengths: list[int], cache: BoundCache) -> None:
    """Check an output of gather_cache."""
    check_out_pair(out, cache.value is not None)
    key, value = out
    check_out("key", key, lengths, cache.tensor, cache.layout)
    if value is None:
        return
    check_out("value", value, lengths, cache.tensor, cache.layout)
    if (key.dim(), key.dtype) != (value.dim(), value.dtype):
        kinds = f"{key.dim()} of {key.dtype} and {value.dim()} of {value.dtype}"
        raise ValueError(f"key and value must have as many dimensions and one dtype, got {kinds}")


def make_out(given: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Make `out` of gather_cache in code that torch traces.

    Args:
        given: The arguments by name.

    Returns:
        New tensors, as gather_cache makes them.

    Raises:
        ValueError: seq_lens is a tensor: the result's shape would depend on its values.
    """
    if isinstance(given["seq_lens"], torch.Tensor):
        raise ValueError("out must be given in compiled code when seq_lens is a tensor")
    layout = given["layout"]
    has_values = layout.views(torch.empty(layout.shape(1), dtype=layout.dtype))[1] is not None
    return _new_rows(sum(given["seq_lens"]), given["cache"], layout, row_dtypes(layout), has_values, given["dtype"])


def _new_rows(
    num_tokens: int,
    cache: torch.Tensor,
    layout: CacheLayout,
    dtypes: tuple[torch.dtype, ...],
    has_values: bool,
    dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    dtype = dtype or dtypes[0]
    if dtype not in dtypes:
        raise ValueError(f"dtype must be {' or '.join(map(str, dtypes))}, got {dtype}")
    heads = num_tokens, layout.num_kv_heads
    key = cache.new_empty(*heads, layout.head_size, dtype=dtype)
    return key, cache.new_empty(*heads, layout.head_size_v, dtype=dtype) if has_values else None
