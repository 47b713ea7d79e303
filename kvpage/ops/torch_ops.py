"""torch.ops.kvpage: the operations as torch knows them, so that compiled code and captured graphs may contain them.

    eager            ops.reshape_and_cache ────────────────────────────────────────► rows
    torch.compile    ops.reshape_and_cache ─► torch.ops.kvpage.reshape_and_cache ──► rows, when the code runs
                     (through traced)         (declared here)

What an operation writes is declared as mutated, so a compiler neither drops a call nor moves one past another. Layouts
travel as their `spec`, scales and lengths as tensors, the options of attention as the fields of Attention. Every result
is written into a tensor that is given, so that no shape depends on values. The operations bind their cache and check
what kvpage.ops checks, at run time. They have no derivatives.
"""

from collections.abc import Callable
from typing import Any, get_type_hints

import torch

from kvpage.checks.tensors import check_dense
from kvpage.layout.attention import Attention
from kvpage.layout.cache_layout import CacheLayout
from kvpage.layout.kv_scales import KVScales
from kvpage.ops import attention as attention_ops
from kvpage.ops import chunks, rows
from kvpage.ops.copies import BlockCopier
from kvpage.ops.cuda.sampling import SamplingMemory, sample_rows

_Library: Any = torch.library.Library  # torch gives its methods no types
_library = _Library("kvpage", "DEF")

SCALES = "Tensor? key_scale=None, Tensor? value_scale=None"
SCHEMA_TYPES = {float | None: "float?", int | None: "int?", torch.Tensor | None: "Tensor?"}
ATTENTION = ", ".join(f"{SCHEMA_TYPES[kind]} {name}=None" for name, kind in get_type_hints(Attention).items())
LAYER_SCALES = "Tensor[]? key_scales=None, Tensor[]? value_scales=None"


def _operation(schema: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a function that writes into what it is given and returns nothing, on all devices, and its fake."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        name = schema.split("(")[0]
        _library.define(f"{schema} -> ()", tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag))
        for key in ("CompositeExplicitAutograd", "Negative", "Conjugate"):  # torch's own for the last two work on
            _library.impl(name, function, key)  # copies, and fail in the middle where an optional tensor is None
        torch.library.register_fake(f"kvpage::{name}", _writes_nothing, lib=_library)
        return function

    return register


def _writes_nothing(*args: Any, **kwargs: Any) -> None:
    """What an operation does with tensors that have no memory: shapes are checked with the values, at run time."""


@_operation(
    f"reshape_and_cache(Tensor key, Tensor? value, Tensor(a!) cache, Tensor slot_mapping, str layout, {SCALES})"
)
def _reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor | None,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: str,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    scales = _scales(key_scale, value_scale)
    rows.reshape_and_cache(key, value, cache, slot_mapping, CacheLayout.from_spec(layout), scales)


@_operation(
    "gather_cache(Tensor cache, Tensor block_tables, Tensor seq_lens, Tensor? seq_starts, Tensor(a!) key, "
    f"Tensor(b!)? value, str layout, {SCALES})"
)
def _gather_cache(
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_starts: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor | None,
    layout: str,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    known, scales = CacheLayout.from_spec(layout), _scales(key_scale, value_scale)
    rows.gather_cache(cache, block_tables, seq_lens, known, seq_starts, (key, value), scales)


@_operation(
    "paged_attention(Tensor query, Tensor cache, Tensor block_tables, Tensor seq_lens, Tensor? query_lens, "
    f"Tensor(a!) out, str layout, {SCALES}, int? max_query_len=None, int? max_seq_len=None, *, {ATTENTION})"
)
def _paged_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_lens: torch.Tensor | None,
    out: torch.Tensor,
    layout: str,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    **options: Any,
) -> None:
    check_dense("out", out)
    if out.dim() != 3:
        raise ValueError(f"out must be [num_tokens, num_heads, value_size], got shape {tuple(out.shape)}")
    if options.get("value_size") is None:
        options["value_size"] = out.shape[2]
    attention_ops.paged_attention(
        query,
        cache,
        block_tables,
        seq_lens,
        CacheLayout.from_spec(layout),
        Attention(**options),
        query_lens=query_lens,
        out=out,
        scales=_scales(key_scale, value_scale),
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
    )


@_operation("swap_blocks(Tensor src, Tensor(a!) dst, Tensor block_mapping, str layout)")
def _swap_blocks(src: torch.Tensor, dst: torch.Tensor, block_mapping: torch.Tensor, layout: str) -> None:
    BlockCopier([src], [dst], CacheLayout.from_spec(layout)).run(block_mapping)


@_operation("swap_blocks_layers(Tensor[] srcs, Tensor(a!)[] dsts, Tensor block_mapping, str layout)")
def _swap_blocks_layers(
    srcs: list[torch.Tensor], dsts: list[torch.Tensor], block_mapping: torch.Tensor, layout: str
) -> None:
    BlockCopier(srcs, dsts, CacheLayout.from_spec(layout)).run(block_mapping)


@_operation("copy_blocks(Tensor(a!)[] caches, Tensor block_mapping, str layout)")
def _copy_blocks(caches: list[torch.Tensor], block_mapping: torch.Tensor, layout: str) -> None:
    BlockCopier(caches, caches, CacheLayout.from_spec(layout)).run(block_mapping)


@_operation(
    f"store_chunk(Tensor[] caches, Tensor block_ids, Tensor(a!) chunk, str layout, int start, str fmt, {LAYER_SCALES})"
)
def _store_chunk(
    caches: list[torch.Tensor],
    block_ids: torch.Tensor,
    chunk: torch.Tensor,
    layout: str,
    start: int,
    fmt: str,
    key_scales: list[torch.Tensor] | None = None,
    value_scales: list[torch.Tensor] | None = None,
) -> None:
    scales = _layer_scales(key_scales, value_scales)
    chunks.store_chunk(caches, block_ids, chunk, CacheLayout.from_spec(layout), start, fmt, scales)


@_operation(
    f"load_chunk(Tensor(a!)[] caches, Tensor block_ids, Tensor chunk, str layout, int start, str fmt, {LAYER_SCALES})"
)
def _load_chunk(
    caches: list[torch.Tensor],
    block_ids: torch.Tensor,
    chunk: torch.Tensor,
    layout: str,
    start: int,
    fmt: str,
    key_scales: list[torch.Tensor] | None = None,
    value_scales: list[torch.Tensor] | None = None,
) -> None:
    scales = _layer_scales(key_scales, value_scales)
    chunks.load_chunk(caches, block_ids, chunk, CacheLayout.from_spec(layout), start, fmt, scales)


@_operation(
    "sample_rows(Tensor logits, Tensor records, Tensor positions, Tensor(a!) out, Tensor(b!)? tops=None, "
    "Tensor(c!)? shares=None, Tensor(d!)? lists=None, Tensor(e!)? held=None)"
)
def _sample_rows(
    logits: torch.Tensor,
    records: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    tops: torch.Tensor | None = None,
    shares: torch.Tensor | None = None,
    lists: torch.Tensor | None = None,
    held: torch.Tensor | None = None,
) -> None:
    sample_rows(logits, records, positions, out, SamplingMemory.of(logits, tops, shares, lists, held))


def _scales(key: torch.Tensor | None, value: torch.Tensor | None) -> KVScales | None:
    """Whose values were looked at when a KVScales was made of them; both or none."""
    if (key is None) != (value is None):
        raise ValueError(f"key_scale and value_scale must both be given, or none, got {type(key)} and {type(value)}")
    return None if key is None or value is None else KVScales.unchecked(key, value)


def _layer_scales(keys: list[torch.Tensor] | None, values: list[torch.Tensor] | None) -> list[KVScales] | None:
    if (keys is None) != (values is None):
        raise ValueError(
            f"key_scales and value_scales must both be given, or none, got {type(keys)} and {type(values)}"
        )
    if keys is None or values is None:
        return None
    return [KVScales.unchecked(key, value) for key, value in zip(keys, values, strict=True)]
