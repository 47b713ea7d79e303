"""Attention over blocks in host memory, by the C++ core."""

from typing import NamedTuple

import torch

import kvpage._C as _C
from kvpage.layout.attention import MAX_WINDOW, Attention
from kvpage.ops.args.bound_cache import BoundCache
from kvpage.ops.args.sequences import Sequences
from kvpage.ops.args.tokens import ROW_TYPES, row_view


class Queries(NamedTuple):
    """Queries and the room for their outputs, in host memory.

    query, out: address, strides of token and head in bytes.
    """

    query: tuple[int, int, int]
    out: tuple[int, int, int]
    row_type: int  # ROW_TYPES, of both
    num_tokens: int
    num_heads: int
    key_size: int
    value_size: int


def attend(
    query: torch.Tensor, cache: BoundCache, sequences: Sequences, attention: Attention, out: torch.Tensor
) -> None:
    """Write kvpage.ops.attend into `out`; all but ids, positions and sums of lengths is checked."""
    num_tokens, num_heads, key_size = query.shape
    places = row_view(query), row_view(out)
    queries = Queries(*places, ROW_TYPES[query.dtype], num_tokens, num_heads, key_size, out.shape[2])
    attend_queries(queries, cache, sequences, attention)


def attend_queries(queries: Queries, cache: BoundCache, sequences: Sequences, attention: Attention) -> None:
    """Do the same for tensors of any order of dimensions."""
    query, out, row_type, num_tokens, num_heads, key_size, value_size = queries
    key_blocks, value_blocks, key_scale, value_scale, cache_type, codec = cache.native
    positions, sinks, num_kv_heads = attention.query_positions, attention.sinks, cache.shape[2]
    _C.paged_attention(
        query,
        out,
        key_blocks,
        value_blocks,
        (row_type, cache_type, codec),
        (*key_scale, *value_scale),
        sequences.native_tables,
        sequences.seq_lens,  # type: ignore[arg-type]  # lists, on a CPU
        sequences.query_lens,  # type: ignore[arg-type]
        0 if positions is None else positions.data_ptr(),
        (num_tokens, num_kv_heads, num_heads // num_kv_heads, key_size, value_size),
        attention.sliding_window or MAX_WINDOW,
        attention.scale,  # type: ignore[arg-type]  # given by kvpage.ops.attention
        attention.softcap or 0.0,
        0 if sinks is None else sinks.data_ptr(),
        torch.get_num_threads(),
    )
