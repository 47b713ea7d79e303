"""Attention over blocks: one way in for tensors, one for caches that are bound, one call for every implementation.

paged_attention(query, cache, block_tables, seq_lens, layout, scale=...)       tensors: everything is checked
    └─► attend(query, BoundCache, Sequences, Attention, out)                   a step's layers come in here
            ├─► cpu.attention.attend       C++
            ├─► cuda.attention.attend      Triton, or the reference
            └─► cache.library.attend       FlashInfer and others, where an engine chose one
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from kvpage.checks.tensors import check_dense, check_writable, readable
from kvpage.layout.attention import Attention
from kvpage.layout.cache_layout import CacheLayout
from kvpage.layout.kv_scales import KVScales
from kvpage.ops.args.bound_cache import BoundCache, bound
from kvpage.ops.args.sequences import Sequences
from kvpage.ops.args.tokens import COMPUTE_DTYPES, Lengths, check_dtype, check_size, check_tensor
from kvpage.ops.cpu import attention as cpu
from kvpage.ops.cuda import attention as cuda


def paged_attention(
    query: torch.Tensor,
    cache: torch.Tensor | BoundCache,
    block_tables: torch.Tensor,
    seq_lens: Lengths,
    layout: CacheLayout | None = None,
    attention: Attention | None = None,
    *,
    query_lens: Lengths | None = None,
    out: torch.Tensor | None = None,
    scales: KVScales | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    shared: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Attend from each sequence's last tokens to all of its tokens, read in place from their blocks; causal.

    On a CPU a query's result has the same bits whatever else is in the batch and with any number of threads.
    On a CUDA device nothing is waited for. The keys of a block that does not exist count as not there, and
    `check_device` reports them. Lengths and positions on the device are not checked:

    - A sequence longer than its table ends there and is reported as well.
    - A query without a key, as of a sequence of length 0, gives zeros.
    - Rows of query beyond the sum of query_lens leave their rows of `out` as they are.
    - A position beyond its sequence counts as that of its last token.

    A captured graph needs all lengths on the device. A replay reads them then, and no length may exceed its bound.

    Args:
        query: [num_tokens, num_heads, key_size], sequence after sequence, the last dimension contiguous. The cache's
            dtype (fp32, bf16 or fp16), or fp32; where the layout quantises, any of these. num_heads is a multiple of
            num_kv_heads; neighbours share a KV head. key_size is at most head_size.
        cache: One layer's cache, or a BoundCache: then layout and scales are None.
        block_tables: int32 [num_seqs, max_blocks]. Entries without a visible token are not read.
        seq_lens: [num_seqs] tokens of each sequence in the cache, its queries' included. On the host; for a CUDA
            device also int32 or int64 there, as query_lens, and then read when the kernel runs.
        layout: How the cache is to be read.
        attention: The options; or give them by name, each a field of Attention: scale, sliding_window and so on.
        query_lens: [num_seqs] queries of each sequence, default 1 each: its last tokens.
        out: [num_tokens, num_heads, value_size] in the query's dtype, last dimension contiguous, apart from the others
            in memory. Without a value part (MLA), V is the first value_size elements of each key.
        scales: Scales of 8-bit floats; None means 1.
        max_query_len: Bound of query_lens that are on the device; by default as much as fits into query.
        max_seq_len: Bound of seq_lens that are on the device; by default as much as fits into a table.
        shared: A plan of `shared_prefixes` on the query's device: see Sequences.
        **options: Fields of Attention, in place of `attention`.

    Returns:
        `out`, or a new tensor of this shape, in the query's dtype. All sums are in fp32.

    Raises:
        TypeError: An argument is no tensor, no integer, no number, or not known.
        ValueError: Anything else is wrong, or a needed table entry names no block. Nothing is written then.
    """
    bound_cache, query = bound(cache, layout, scales), readable("query", query)
    _check_query(query, bound_cache)
    counts = seq_lens, query_lens, max_query_len, max_seq_len, shared
    sequences = Sequences(bound_cache, len(query), block_tables, *counts)
    return attend(query, bound_cache, sequences, Attention.of(attention, options), out)


def attend(
    query: torch.Tensor,
    cache: BoundCache,
    sequences: Sequences,
    attention: Attention,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do what `paged_attention` does, of a cache and sequences that were checked when they were made.

    Args:
        query: [num_tokens, num_heads, key_size], see paged_attention.
        cache: The layer's cache.
        sequences: The same for all layers of a step.
        attention: The options.
        out: As paged_attention's.

    Returns:
        As paged_attention.

    Raises:
        TypeError: query or out is no tensor.
        ValueError: query, out or an option does not fit, a table entry names no block, or the memory of the cache or
            the tables is another than when they were bound. Nothing is written then.
    """
    if cache.is_cuda and out is None and cache.library is None:
        again = cuda.attend_again(query, cache, sequences, attention)
        if again is not None:
            return again
    cache.check()
    query = readable("query", query)
    _check_query(query, cache)
    sequences.check(cache, query.shape[0])
    attention = _completed(attention, query, cache)
    shape = (*query.shape[:2], attention.value_size)
    if cache.library is not None and len(query):
        result = cache.library.attend(query, cache, sequences, attention)
        if result is not None:
            return result if out is None else _checked_out(out, query, shape, cache).copy_(result)
    if out is None:
        out = query.new_empty(shape)
    else:
        _checked_out(out, query, shape, cache)
    (cuda if cache.is_cuda else cpu).attend(query, cache, sequences, attention, out)
    return out


def make_out(given: Mapping[str, Any]) -> torch.Tensor:
    """Make `out` of paged_attention in code that torch traces.

    Args:
        given: The arguments by name.

    Returns:
        A new tensor, as paged_attention makes it.
    """
    query, value_size = given["query"], given.get("value_size")
    size = given["layout"].head_size_v if value_size is None else value_size
    made: torch.Tensor = query.new_empty(*query.shape[:2], size)
    return made


def fill(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_lens: torch.Tensor | None,
    out: torch.Tensor,
    layout: CacheLayout,
    scales: KVScales | None,
    max_query_len: int | None,
    max_seq_len: int | None,
    shared: torch.Tensor | None,
    **options: Any,
) -> None:
    """Call paged_attention with the arguments of its operator. The size of a value is that of `out`, if not given."""
    check_dense("out", out)
    if out.dim() != 3:
        raise ValueError(f"out must be [num_tokens, num_heads, value_size], got shape {tuple(out.shape)}")
    if options.get("value_size") is None:
        options["value_size"] = out.shape[2]
    paged_attention(
        query,
        cache,
        block_tables,
        seq_lens,
        layout,
        Attention(**options),
        query_lens=query_lens,
        out=out,
        scales=scales,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        shared=shared,
    )


def _checked_out(out: torch.Tensor, query: torch.Tensor, shape: tuple[int, ...], cache: BoundCache) -> torch.Tensor:
    check_writable("out", out)
    check_tensor("out", out, query.dtype, shape, cache.device)
    check_size("out", out, cache.value_size)
    return out


def _check_query(query: torch.Tensor, cache: BoundCache) -> None:
    layout = cache.layout
    if query.dim() != 3:
        raise ValueError(f"query must be [num_tokens, num_heads, size], got shape {tuple(query.shape)}")
    stored = cache.tensor.dtype
    is_quantized = len(cache.row_dtypes) > 1
    if stored not in COMPUTE_DTYPES and not is_quantized:
        raise ValueError(f"cache.dtype must be one of {', '.join(map(str, COMPUTE_DTYPES))}, got {stored}")
    if query.dtype != stored or is_quantized:
        check_dtype("query", query, COMPUTE_DTYPES if is_quantized else (stored, torch.float32))
    _, num_heads, size = query.shape
    if num_heads == 0 or num_heads % layout.num_kv_heads:
        raise ValueError(f"query's heads must be a multiple of {layout.num_kv_heads}, got {num_heads}")
    if not 1 <= size <= layout.head_size or query.stride(2) != 1:
        check_size("query", query, layout.head_size)
    if query.device != cache.device:
        raise ValueError(f"query must be on {cache.device}, got {query.device}")


def _completed(attention: Attention, query: torch.Tensor, cache: BoundCache) -> Attention:
    """Give the options that were left open, as implementations take them: sinks contiguous and in fp32."""
    most, size = cache.value_size, attention.value_size
    if size is not None and not 1 <= size <= most:
        raise ValueError(f"value_size must be in [1, {most}], got {size}")
    changes: dict[str, Any] = {}
    if size is None:
        changes["value_size"] = most
    if attention.scale is None:
        changes["scale"] = query.shape[2] ** -0.5
    if attention.sinks is not None:
        sinks = readable("sinks", attention.sinks)
        check_tensor("sinks", sinks, sinks.dtype, (query.shape[1],), cache.device)
        changes["sinks"] = sinks.float().contiguous()
    if attention.query_positions is not None:
        changes["query_positions"] = _checked_positions(attention.query_positions, query.shape[0], cache.device)
    return replace(attention, **changes) if changes else attention


def _checked_positions(positions: torch.Tensor, num_tokens: int, device: torch.device) -> torch.Tensor:
    """Return them contiguous, on the CPU or on `device`; their values are checked where they are read on the CPU."""
    check_dense("query_positions", positions)
    expected_device = positions.device if positions.device.type == "cpu" else device
    check_tensor("query_positions", positions, torch.int64, (num_tokens,), expected_device)
    return positions.contiguous()
