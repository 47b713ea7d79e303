"""Operations in code that torch traces: each calls its operator in torch.ops.kvpage (`torch_ops`).

The functions have the signatures of kvpage.ops, which calls them while something compiles. They unbind a cache, turn
layouts, scales and lengths into arguments of an operator, and make the tensors that it writes.
"""

from collections.abc import Sequence
from typing import Any

import torch

from kvpage.layout.attention import OPTIONS, Attention, option_values
from kvpage.layout.cache_layout import CacheLayout
from kvpage.layout.kv_scales import KVScales
from kvpage.ops import torch_ops as torch_ops  # its import declares the operators
from kvpage.ops.args.bound_cache import BoundCache
from kvpage.ops.args.sequences import Sequences
from kvpage.ops.args.tokens import Lengths, row_dtypes
from kvpage.ops.cuda.sampling import SamplingMemory


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor | None,
    cache: torch.Tensor | BoundCache,
    slot_mapping: torch.Tensor,
    layout: CacheLayout | None = None,
    scales: KVScales | None = None,
) -> None:
    tensor, known, scales = _unbound(cache, layout, scales)
    torch.ops.kvpage.reshape_and_cache(key, value, tensor, slot_mapping, known.spec, *_tensors(scales))


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
    """ValueError without `out` where seq_lens is a tensor: the result's shape would depend on its values."""
    tensor, known, scales = _unbound(cache, layout, scales)
    if out is None:
        if isinstance(seq_lens, torch.Tensor):
            raise ValueError("out must be given in compiled code when seq_lens is a tensor")
        out = _new_rows(sum(seq_lens), tensor, known, dtype)
    lengths, starts = _as_tensor(seq_lens), None if seq_starts is None else _as_tensor(seq_starts)
    torch.ops.kvpage.gather_cache(tensor, block_tables, lengths, starts, *out, known.spec, *_tensors(scales))
    return out


def _new_rows(
    num_tokens: int, cache: torch.Tensor, layout: CacheLayout, dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    dtype = dtype or row_dtypes(layout)[0]
    heads = num_tokens, layout.num_kv_heads
    has_values = layout.views(torch.empty(layout.shape(1), dtype=layout.dtype))[1] is not None
    key = cache.new_empty(*heads, layout.head_size, dtype=dtype)
    return key, cache.new_empty(*heads, layout.head_size_v, dtype=dtype) if has_values else None


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
    **options: Any,
) -> torch.Tensor:
    tensor, known, scales = _unbound(cache, layout, scales)
    if attention is not None:
        if options:
            raise ValueError(f"options must be given in attention or by name, got both: {', '.join(options)}")
        options = option_values(attention)
    for name in options:
        if name not in OPTIONS:
            raise TypeError(f"options must be among {', '.join(OPTIONS)}, got {name}")
    if out is None:
        value_size = options.get("value_size")
        out = query.new_empty(*query.shape[:2], known.head_size_v if value_size is None else value_size)
    torch.ops.kvpage.paged_attention(
        query,
        tensor,
        block_tables,
        _as_tensor(seq_lens),
        None if query_lens is None else _as_tensor(query_lens),
        out,
        known.spec,
        *_tensors(scales),
        max_query_len,
        max_seq_len,
        **options,
    )
    return out


def attend(
    query: torch.Tensor,
    cache: BoundCache,
    sequences: Sequences,
    attention: Attention,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    return paged_attention(
        query,
        cache,
        sequences.block_tables,
        sequences.seq_lens,
        attention=attention,
        query_lens=sequences.query_lens,
        out=out,
        max_query_len=sequences.max_query_len,
        max_seq_len=sequences.max_seq_len,
    )


def write_and_attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: BoundCache,
    slot_mapping: torch.Tensor,
    sequences: Sequences,
    attention: Attention,
) -> torch.Tensor:
    reshape_and_cache(key[0].transpose(0, 1), value[0].transpose(0, 1), cache, slot_mapping)
    return attend(query[0].transpose(0, 1), cache, sequences, attention).unsqueeze(0)


def swap_blocks(src: torch.Tensor, dst: torch.Tensor, block_mapping: torch.Tensor, layout: CacheLayout) -> None:
    torch.ops.kvpage.swap_blocks(src, dst, block_mapping, layout.spec)


def swap_blocks_layers(
    srcs: Sequence[torch.Tensor], dsts: Sequence[torch.Tensor], block_mapping: torch.Tensor, layout: CacheLayout
) -> None:
    torch.ops.kvpage.swap_blocks_layers(list(srcs), list(dsts), block_mapping, layout.spec)


def copy_blocks(caches: Sequence[torch.Tensor], block_mapping: torch.Tensor, layout: CacheLayout) -> None:
    torch.ops.kvpage.copy_blocks(list(caches), block_mapping, layout.spec)


def store_chunk(
    caches: Sequence[torch.Tensor],
    block_ids: torch.Tensor,
    chunk: torch.Tensor,
    layout: CacheLayout,
    start: int = 0,
    fmt: str = "vllm",
    scales: Sequence[KVScales] | None = None,
) -> None:
    each = _layer_tensors(scales)
    torch.ops.kvpage.store_chunk(list(caches), block_ids, chunk, layout.spec, start, fmt, *each)


def load_chunk(
    caches: Sequence[torch.Tensor],
    block_ids: torch.Tensor,
    chunk: torch.Tensor,
    layout: CacheLayout,
    start: int = 0,
    fmt: str = "vllm",
    scales: Sequence[KVScales] | None = None,
) -> None:
    each = _layer_tensors(scales)
    torch.ops.kvpage.load_chunk(list(caches), block_ids, chunk, layout.spec, start, fmt, *each)


def sample_rows(
    logits: torch.Tensor,
    records: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    memory: SamplingMemory | None = None,
) -> None:
    tensors = () if memory is None else (memory.tops, memory.shares, memory.lists, memory.held)
    torch.ops.kvpage.sample_rows(logits, records, positions, out, *tensors)


def _unbound(
    cache: torch.Tensor | BoundCache, layout: CacheLayout | None, scales: KVScales | None
) -> tuple[torch.Tensor, CacheLayout, KVScales | None]:
    """The parts of a cache, bound or not."""
    if isinstance(cache, BoundCache):
        if layout is not None or scales is not None:
            raise ValueError("layout and scales must be None for a BoundCache, which has its own")
        return cache.tensor, cache.layout, cache.scales
    if layout is None:
        raise TypeError("layout must be a CacheLayout, got NoneType")
    return cache, layout, scales


def _tensors(scales: KVScales | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (None, None) if scales is None else (scales.key, scales.value)


def _layer_tensors(
    scales: Sequence[KVScales] | None,
) -> tuple[list[torch.Tensor] | None, list[torch.Tensor] | None]:
    return (None, None) if scales is None else ([each.key for each in scales], [each.value for each in scales])


def _as_tensor(lengths: Lengths) -> torch.Tensor:
    return lengths if isinstance(lengths, torch.Tensor) else torch.tensor(lengths, dtype=torch.int64)
