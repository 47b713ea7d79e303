"""A layer of a step: its rows are written, then its queries attend over all blocks.

    query, key, value  [1, heads, tokens, size], as transformers' models hand them to their attention
        │   in host memory, of a usual form     one look at each tensor, two native calls
        └─► all else                            reshape_and_cache, then attend, on views [tokens, heads, size]

A decode step of a small model calls this once a layer, and the native calls take as long as a few dozen lookups of
attributes. The short way takes nothing that the long one would not take, and leaves every error to it.
"""

from dataclasses import replace

import torch

import kvpage._C as _C
from kvpage.checks.tensors import check_dense
from kvpage.layout.attention import Attention
from kvpage.ops.args.bound_cache import BoundCache
from kvpage.ops.args.sequences import Sequences
from kvpage.ops.args.tokens import ROW_TYPES
from kvpage.ops.attention import attend
from kvpage.ops.cpu.attention import Queries, attend_queries
from kvpage.ops.rows import reshape_and_cache


def write_and_attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: BoundCache,
    slot_mapping: torch.Tensor,
    sequences: Sequences,
    attention: Attention,
) -> torch.Tensor:
    """Write the new rows of a layer, then attend from them to all tokens of their sequences.

    Args:
        query: [1, num_heads, num_tokens, key_size], as attend's but for the order of dimensions.
        key: [1, num_kv_heads, num_tokens, size], as reshape_and_cache's but for the order of dimensions.
        value: As key, of a size of its own.
        cache: The layer's cache, which has a value part.
        slot_mapping: As reshape_and_cache's.
        sequences: The same for all layers of a step; the new tokens are counted in.
        attention: The options.

    Returns:
        [1, num_tokens, num_heads, value_size] in the query's dtype.

    Raises:
        TypeError: As of reshape_and_cache and attend.
        ValueError: Likewise. Rows may have been written where attend's arguments are wrong.
    """
    if cache.library is None:
        output = _attend_on_host(query, key, value, cache, slot_mapping, sequences, attention)
        if output is not None:
            return output
    rows = [_by_token(name, x) for name, x in (("query", query), ("key", key), ("value", value))]
    reshape_and_cache(rows[1], rows[2], cache, slot_mapping)
    return attend(rows[0], cache, sequences, attention).unsqueeze(0)


def _attend_on_host(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: BoundCache,
    slots: torch.Tensor,
    sequences: Sequences,
    attention: Attention,
) -> torch.Tensor | None:
    """Take the short way; None, with nothing done, for anything that needs a closer look."""
    cache.check()
    num_blocks, block_size, num_kv_heads, head_size = cache.shape
    most = cache.value_size
    num_tokens, value_size = sequences.num_tokens, attention.value_size
    queries, keys = (_host_rows(rows, cache, num_tokens, head_size) for rows in (query, key))
    values = _host_rows(value, cache, num_tokens, most)
    if queries is None or keys is None or values is None or query.dtype not in ROW_TYPES:
        return None
    if value_size is None or not 1 <= value_size <= most or attention.scale is None:
        return None
    num_heads, host_options = query.shape[1], _host_options(attention, query.shape[1])
    if host_options is None or not _are_slots(slots, num_tokens):
        return None
    if not key.shape[1] == value.shape[1] == num_kv_heads or num_heads == 0 or num_heads % num_kv_heads:
        return None
    if not cache.is_writable:
        cache.check_writable()
    sequences.check(cache, num_tokens)
    native = cache.native
    _C.reshape_and_cache(
        [(native.key_blocks, *keys, *native.key_scale), (native.value_blocks, *values, *native.value_scale)],
        slots.data_ptr(),
        num_tokens,
        num_kv_heads,
        num_blocks,
        block_size,
        torch.get_num_threads(),
    )
    out = query.new_empty(1, num_tokens, num_heads, value_size)
    item = out.element_size()
    out_rows = out.data_ptr(), num_heads * value_size * item, value_size * item
    asked = Queries(queries[:3], out_rows, ROW_TYPES[query.dtype], num_tokens, num_heads, queries[5], value_size)
    attend_queries(asked, cache, sequences, host_options)
    return out


def _host_rows(
    rows: torch.Tensor, cache: BoundCache, num_tokens: int, most: int
) -> tuple[int, int, int, int, int, int] | None:
    """Address, strides of token and head, row type, codec and size of [1, heads, num_tokens, size] in host memory.

    most: of the size.
    """
    if type(rows) is not torch.Tensor or rows.layout is not torch.strided or rows.is_nested:
        return None
    form = cache.host_forms.get(rows.dtype)
    if form is None:
        return None
    shape, strides, address = rows.shape, rows.stride(), rows.data_ptr()
    if not rows.is_cpu or not address or rows.is_neg() or len(shape) != 4:
        return None
    size, item = shape[3], rows.element_size()
    if shape[0] != 1 or shape[2] != num_tokens or not 1 <= size <= most or strides[3] != 1:
        return None
    return address, strides[2] * item, strides[1] * item, *form, size


def _host_options(attention: Attention, num_heads: int) -> Attention | None:
    """Return the options with sinks as the native call takes them; None for sinks or positions of another form."""
    sinks = attention.sinks
    if attention.query_positions is not None:
        return None
    if sinks is None:
        return attention
    if type(sinks) not in (torch.Tensor, torch.nn.Parameter) or sinks.dtype not in ROW_TYPES:
        return None
    if (
        sinks.layout is not torch.strided
        or not sinks.is_cpu
        or sinks.is_neg()
        or sinks.shape != (num_heads,)
        or not sinks.data_ptr()
    ):
        return None
    if sinks.dtype == torch.float32 and sinks.is_contiguous():
        return attention
    return replace(attention, sinks=sinks.float().contiguous())


def _are_slots(slots: torch.Tensor, num_tokens: int) -> bool:
    if type(slots) is not torch.Tensor or slots.layout is not torch.strided or slots.is_nested:
        return False
    if slots.dtype != torch.int64 or slots.shape != (num_tokens,):
        return False
    return slots.is_cpu and slots.data_ptr() != 0 and slots.is_contiguous() and not slots.is_neg()


def _by_token(name: str, rows: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, size] of [1, heads, tokens, size]."""
    check_dense(name, rows)
    if rows.dim() != 4 or len(rows) != 1:
        raise ValueError(f"{name} must be [1, heads, num_tokens, size], got shape {tuple(rows.shape)}")
    return rows[0].transpose(0, 1)
