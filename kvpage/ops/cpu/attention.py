"""Attention over blocks in host memory, by the C++ core."""

import torch

import kvpage._C as _C
from kvpage.layout.attention import MAX_WINDOW, Attention
from kvpage.ops.bound_cache import BoundCache
from kvpage.ops.sequences import Sequences
from kvpage.ops.token_args import ROW_TYPES


def attend(
    query: torch.Tensor, cache: BoundCache, sequences: Sequences, attention: Attention, out: torch.Tensor
) -> None:
    """Write kvpage.ops.attend into `out`; all but ids, positions and sums of lengths is checked."""
    native, positions, sinks = cache.native, attention.query_positions, attention.sinks
    num_tokens, num_heads, key_size = query.shape
    item, (row, head, _), (out_row, out_head, _) = query.element_size(), query.stride(), out.stride()
    num_kv_heads = cache.layout.num_kv_heads
    _C.paged_attention(
        (query.data_ptr(), row * item, head * item),
        (out.data_ptr(), out_row * item, out_head * item),
        native.key_blocks,
        native.value_blocks,
        (ROW_TYPES[query.dtype], native.row_type, native.codec),
        (*native.key_scale, *native.value_scale),
        sequences.native_tables,
        sequences.seq_lens,  # type: ignore[arg-type]  # lists, on a CPU
        sequences.query_lens,  # type: ignore[arg-type]
        0 if positions is None else positions.data_ptr(),
        (num_tokens, num_kv_heads, num_heads // num_kv_heads, key_size, out.shape[2]),
        attention.sliding_window or MAX_WINDOW,
        attention.scale,  # type: ignore[arg-type]  # given by kvpage.ops.attention
        attention.softcap or 0.0,
        0 if sinks is None else sinks.data_ptr(),
        torch.get_num_threads(),
    )
