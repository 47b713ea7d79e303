"""Rows of vLLM's operations, written into slots and gathered out of blocks of caches that are views."""

import torch

from kvpage.integrations.vllm_ops.args import check_rows, num_slots, scales_of
from kvpage.layout.kv_scales import KVScales
from kvpage.layout.kv_view import KVView
from kvpage.layout.view_layout import layout_of
from kvpage.ops import rows as token_ops


def write_rows(
    key: torch.Tensor,
    value: torch.Tensor,
    key_view: KVView,
    value_view: KVView,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Write key and value [num_tokens, num_heads, size] into slots of two views. Rows after the last are padding."""
    keys, values = key_view.rows, value_view.rows
    if keys.shape[:3] != values.shape[:3] or keys.dtype != values.dtype or keys.device != values.device:
        raise ValueError(
            "key and value caches must have as many blocks, slots and heads, one dtype and device, got "
            f"{tuple(keys.shape[:3])} {keys.dtype} on {keys.device} and "
            f"{tuple(values.shape[:3])} {values.dtype} on {values.device}"
        )
    sizes = [rows.shape[3] * rows.shape[4] for rows in (keys, values)]
    for name, rows, cached, size in (("key", key, keys, sizes[0]), ("value", value, values, sizes[1])):
        check_rows(name, rows, cached, size, kv_cache_dtype)
    num_tokens = num_slots(slot_mapping, key, value)
    if not num_tokens == len(key) == len(value):
        key, value = key[:num_tokens], value[:num_tokens]
    layout, scales = layout_of(key_view, value_view, max(sizes)), scales_of(keys, kv_cache_dtype, k_scale, v_scale)
    token_ops.reshape_and_cache(key, value, keys, slot_mapping, layout, scales)


def gather_rows(
    views: tuple[KVView, KVView | None],
    out: tuple[torch.Tensor, torch.Tensor | None],
    block_table: torch.Tensor,
    lengths: list[int] | torch.Tensor,
    seq_starts: torch.Tensor | None,
    scales: KVScales | None = None,
) -> None:
    """Gather lengths[i] tokens of each sequence into out [num_tokens, num_heads, size], of K, and of V where given.

    On the host, `out` must have as many rows as the lengths sum up to.
    """
    starts = seq_starts.tolist() if seq_starts is not None and isinstance(lengths, list) else seq_starts
    layout = layout_of(*views, max(view.rows.shape[3] * view.run_size for view in views if view is not None))
    token_ops.gather_cache(views[0].rows, block_table, lengths, layout, starts, out, scales)
