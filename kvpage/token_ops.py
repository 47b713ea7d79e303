"""Operations on tokens: writing them into blocks, gathering them out of blocks, attending over blocks.

Each validates what needs a tensor (shapes, dtypes, devices, strides), then calls C++ for tensors on the CPU and Triton
for tensors on a CUDA device. Block ids and slots on the host are checked before anything is written; those on a device
are checked there, without waiting for it: a bad one is skipped, and `check_device` raises from it later.
"""

import numbers
import operator

import torch

from kvpage import _C, token_ops_cuda
from kvpage.layout import CacheLayout
from kvpage.tensors import check_writable, readable
from kvpage.token_args import (
    Lengths,
    block_view,
    check_cache,
    check_out_pair,
    check_rows,
    check_size,
    check_tensor,
    fp32_number,
    host_lengths,
    integer,
    native_tables,
    out_offsets,
    row_bytes,
    row_view,
)


def reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor, layout: CacheLayout
) -> None:
    """Writes row i of `key` and `value` into slot `slot_mapping[i]` of `cache`.

    key, value: [num_tokens, num_kv_heads, size], any strides with the last dimension contiguous, the cache's dtype and
        device. `size` may be under the layout's head_size, and differ between the two: the rest of a cache row stays.
    slot_mapping: int64 [num_tokens], block_id * block_size + offset; -1 is padding and written nowhere.

    Raises ValueError for anything else (TypeError for what is no tensor), for a slot out of range, and for one named
    twice; on the host nothing has then been written. On a CUDA device a slot out of range is skipped and reported by
    `check_device`, and of tokens that share a slot any may win. `key` and `value` must not share memory with `cache`.
    """
    check_cache(cache, layout)
    check_writable("cache", cache)
    key, value, slot_mapping = readable("key", key), readable("value", value), readable("slot_mapping", slot_mapping)
    key_cache, value_cache = layout.split_kv(cache)
    check_rows("key", key, None, cache, layout)
    check_rows("value", value, key.shape[0], cache, layout)
    check_tensor("slot_mapping", slot_mapping, torch.int64, (key.shape[0],), cache.device)
    slots = slot_mapping.contiguous()  # held until the call is over
    if cache.is_cuda:
        token_ops_cuda.reshape_and_cache(key, value, cache, slots, layout)
        return
    _C.reshape_and_cache(
        row_view(key),
        row_view(value),
        block_view(key_cache),
        block_view(value_cache),
        (row_bytes(key), row_bytes(value)),
        slots.data_ptr(),
        key.shape[0],
        layout.num_kv_heads,
        key_cache.shape[0],
        layout.block_size,
        torch.get_num_threads(),
    )


def gather_cache(
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: Lengths,
    layout: CacheLayout,
    seq_starts: Lengths | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies the keys and values of `seq_lens[i]` tokens of each sequence, from `seq_starts[i]` on, out of its blocks.

    block_tables: int32 [num_seqs, max_blocks] on the cache's device; entries that no wanted token lies in are not read.
    seq_lens, seq_starts: [num_seqs] integers on the host (a list, or an int32 or int64 tensor); starts default to 0.
    out: (key, value) to write into, of the cache's dtype and device, any strides with the last dimension contiguous;
        `size` may be under head_size: so much of each row is read. Either [total_tokens, num_kv_heads, size], one
        sequence after the other, or [num_seqs, max_len, num_kv_heads, size], where the rows past a sequence stay as
        they are. Without `out`, new contiguous tensors [total_tokens, num_kv_heads, head_size].

    Returns (key, value): `out` where given. Raises ValueError for anything else (TypeError for what is no tensor, or no
    integer), and for a needed table entry that names no block; on the host nothing has then been written. On a CUDA
    device the tokens of such a block are skipped, and `check_device` reports it. The two of `out` must not share memory
    with each other or with `cache`.
    """
    check_cache(cache, layout)
    block_tables = readable("block_tables", block_tables)
    tables = native_tables(cache, block_tables, layout)
    num_seqs = block_tables.shape[0]
    capacity = block_tables.shape[1] * layout.block_size
    lengths = host_lengths("seq_lens", seq_lens, num_seqs, capacity)
    starts = host_lengths("seq_starts", [0] * num_seqs if seq_starts is None else seq_starts, num_seqs, capacity)
    last = max(map(operator.add, starts, lengths), default=0)
    if last > capacity:
        raise ValueError(f"seq_starts + seq_lens must be at most {capacity}, got {last}")
    if out is None:
        shape = (sum(lengths), layout.num_kv_heads, layout.head_size)
        out = cache.new_empty(shape), cache.new_empty(shape)
    check_out_pair(out)
    key_offsets = out_offsets("key", out[0], lengths, cache, layout)
    value_offsets = out_offsets("value", out[1], lengths, cache, layout)
    if out[0].dim() != out[1].dim():
        raise ValueError(f"key and value must have as many dimensions, got {out[0].dim()} and {out[1].dim()}")
    key_cache, value_cache = layout.split_kv(cache)
    if cache.is_cuda:
        token_ops_cuda.gather_cache(cache, block_tables, lengths, starts, out, layout)
        return out
    _C.gather_cache(
        block_view(key_cache),
        block_view(value_cache),
        row_view(out[0]),
        row_view(out[1]),
        (row_bytes(out[0]), row_bytes(out[1])),
        tables,
        starts,
        lengths,
        key_offsets,
        value_offsets,
        layout.num_kv_heads,
        torch.get_num_threads(),
    )
    return out


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
) -> torch.Tensor:
    """Causal attention of each sequence's last tokens to all of its tokens, read in place from their blocks. CPU only.

    query: [num_tokens, num_heads, key_size], the queries of one sequence after those of the other; any strides with the
        last dimension contiguous; the cache's dtype (fp32, bf16 or fp16), or fp32. num_heads is a multiple of the
        layout's num_kv_heads; neighbours share a KV head. key_size <= head_size.
    block_tables: int32 [num_seqs, max_blocks]; entries that no visible token lies in are not read.
    seq_lens: [num_seqs], the tokens of each sequence in the cache, those of its queries included.
    query_lens: [num_seqs], default 1 each. Query j of a sequence is its token seq_len - query_len + j, and sees the
        tokens up to that; with `sliding_window` only as many of them as that, its own included.
    scale: of the products, default key_size ** -0.5, finite. softcap: scores become softcap * tanh(score / softcap); a
        positive number that is normal in fp32.
    sinks: [num_heads], one more logit in each head's softmax, that adds nothing to the sum; not scaled, not capped.
    value_size: of V's heads and of the output, default head_size.
    out: [num_tokens, num_heads, value_size] to write into, of the query's dtype, last dimension contiguous. It must not
        share memory with the others.

    Returns the output in the query's dtype; all sums are in fp32. Raises ValueError for anything else (TypeError for
    what is no tensor, integer or number), and for a needed table entry that names no block, before anything is written.
    Made for few queries a sequence; for whole prompts it
    is about as fast as gathering and torch's scaled_dot_product_attention (benchmarks/bench_paged_attention_cpu.py).
    """
    check_cache(cache, layout)
    query, block_tables = readable("query", query), readable("block_tables", block_tables)
    key_size, group_size = _check_query(query, cache, layout)
    tables = native_tables(cache, block_tables, layout)
    num_seqs, max_blocks = block_tables.shape
    lengths = host_lengths("seq_lens", seq_lens, num_seqs, max_blocks * layout.block_size)
    queries = host_lengths("query_lens", [1] * num_seqs if query_lens is None else query_lens, num_seqs, query.shape[0])
    value_size = layout.head_size if value_size is None else _checked_value_size(value_size, layout)
    window = _EVERY_KEY if sliding_window is None else _checked_window(sliding_window)
    scale = key_size**-0.5 if scale is None else fp32_number("scale", scale)
    softcap = 0.0 if softcap is None else _checked_softcap(softcap)
    if sinks is not None:
        sinks = readable("sinks", sinks)
        check_tensor("sinks", sinks, sinks.dtype, (query.shape[1],), cache.device)
        sinks = sinks.float().contiguous()
    if out is None:
        out = query.new_empty(*query.shape[:2], value_size)
    check_writable("out", out)
    check_tensor("out", out, query.dtype, (*query.shape[:2], value_size), cache.device)
    check_size("out", out, layout)
    key_cache, value_cache = layout.split_kv(cache)
    _C.paged_attention(
        row_view(query),
        row_view(out),
        block_view(key_cache),
        block_view(value_cache),
        (_TYPE_CODES[query.dtype], _TYPE_CODES[cache.dtype]),
        tables,
        lengths,
        queries,
        (query.shape[0], layout.num_kv_heads, group_size, key_size, value_size),
        window,
        scale,
        softcap,
        0 if sinks is None else sinks.data_ptr(),
        torch.get_num_threads(),
    )
    return out


_TYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # ElementType of csrc/attention_kernel.h
_EVERY_KEY = 2**62


def _check_query(query: torch.Tensor, cache: torch.Tensor, layout: CacheLayout) -> tuple[int, int]:
    """Checks the queries of paged_attention; the size of their heads, and how many share a KV head."""
    if cache.device.type != "cpu":
        raise ValueError(f"cache must be on the CPU, got {cache.device}")
    if query.dim() != 3:
        raise ValueError(f"query must be [num_tokens, num_heads, size], got shape {tuple(query.shape)}")
    if cache.dtype not in _TYPE_CODES:
        raise ValueError(f"cache.dtype must be one of {', '.join(map(str, _TYPE_CODES))}, got {cache.dtype}")
    if query.dtype not in (cache.dtype, torch.float32):
        raise ValueError(f"query.dtype must be {cache.dtype} or torch.float32, got {query.dtype}")
    if query.shape[1] == 0 or query.shape[1] % layout.num_kv_heads:
        raise ValueError(f"query's heads must be a multiple of {layout.num_kv_heads}, got {query.shape[1]}")
    check_size("query", query, layout)
    check_tensor("query", query, query.dtype, tuple(query.shape), cache.device)
    return query.shape[2], query.shape[1] // layout.num_kv_heads


def _checked_value_size(value_size: int, layout: CacheLayout) -> int:
    if not 1 <= (size := integer("value_size", value_size)) <= layout.head_size:
        raise ValueError(f"value_size must be in [1, {layout.head_size}], got {size}")
    return size


def _checked_window(sliding_window: int) -> int:
    if not 1 <= (window := integer("sliding_window", sliding_window)) <= _EVERY_KEY:
        raise ValueError(f"sliding_window must be at least 1, got {window}")
    return window


def _checked_softcap(softcap: float) -> float:
    """The scores are divided by it: a subnormal one may be taken for zero, and has no precision."""
    fp32 = torch.finfo(torch.float32)
    if isinstance(softcap, numbers.Real) and not fp32.tiny <= softcap <= fp32.max:
        raise ValueError(f"softcap must be positive and a normal number of fp32, got {softcap}")
    return fp32_number("softcap", softcap)
