"""Rotated rows: segments into an engine's blocks, with K rotated to its new positions, and K out of them again.

    segment  [layers, parts, tokens, heads, size]  ── K rotated, V copied, one pass ──►  slots of every layer's blocks

A cache that keeps rows contiguous and in the dtype of the segment takes them in one pass. For a cache that quantises or
packs them, K is rotated first and written as any other K.
"""

from collections.abc import Sequence

import torch

from kvpage import ops
from kvpage.checks.tensors import as_floats, as_indices
from kvpage.checks.values import as_list
from kvpage.layout.cache_layout import CacheLayout, check_layout
from kvpage.layout.kv_scales import KVScales
from kvpage.layout.kv_view import KVView
from kvpage.layout.rotation import Rotation, check_rotation
from kvpage.ops.args.tokens import check_cache, check_given_scales


def load_rotated(
    kv: torch.Tensor,
    caches: Sequence[torch.Tensor],
    slots: torch.Tensor,
    layout: CacheLayout,
    rotations: Rotation | Sequence[Rotation | None] | None,
    scales: Sequence[KVScales] | None = None,
) -> None:
    """Write each token of a segment to its slot, in all layers. The arguments are checked before anything is written.

    Args:
        kv: [num_layers, parts, num_tokens, heads, size] ("vllm"; transpose(2, 3) of "huggingface"), fp32, bf16 or fp16,
            on the caches' device.
        caches: the block memory of each layer.
        slots: int64 [num_tokens], each at most once; -1 to skip a token.
        layout: of the caches.
        rotations: of K, one for all layers, or one a layer; None to copy.
        scales: of 8-bit floats, one a layer; None means 1.

    Raises:
        ValueError: shapes, dtypes or slots do not fit, as in kvpage.ops.mix_rows and reshape_and_cache.
        TypeError: an argument is of the wrong type.
    """
    check_layout(layout)
    kv, caches = as_floats("kv", kv), as_list("caches", caches)
    if kv.dim() != 5 or len(kv) != len(caches):
        raise ValueError(f"kv must be [{len(caches)}, parts, num_tokens, heads, size], got shape {list(kv.shape)}")
    for cache in caches:
        check_cache(cache, layout)
    layer_rotations, each_scales = _rotations(kv, rotations), _scales(scales, caches, layout)
    if len({layout.num_blocks(cache) for cache in caches}) > 1:
        raise ValueError(f"caches must be of as many blocks, got {[layout.num_blocks(cache) for cache in caches]}")
    for layer, (parts, cache, rotation) in enumerate(zip(kv, caches, layer_rotations, strict=True)):
        views = layout.views(cache)
        num_parts = sum(view is not None for view in views)
        if len(parts) != num_parts:
            raise ValueError(f"kv must have {num_parts} parts a layer, got {len(parts)}")
        if all(_is_plain(view, parts.dtype) for view in views if view is not None):
            _write(parts, views, slots, rotation)
            continue
        key = parts[0] if rotation is None else _rotated(parts[0], rotation)
        value = parts[1] if num_parts == 2 else None
        ops.reshape_and_cache(key, value, cache, slots, layout, each_scales[layer])


def _scales(
    scales: Sequence[KVScales] | None, caches: Sequence[torch.Tensor], layout: CacheLayout
) -> Sequence[KVScales | None]:
    """Return the scales of each layer. Raises ValueError for scales that its cache does not take."""
    if scales is None:
        return [None] * len(caches)
    layer_scales = as_list("scales", scales)
    if len(layer_scales) != len(caches):
        raise ValueError(f"scales must be one for each of {len(caches)} layers, got {len(layer_scales)}")
    for layer_scale, cache in zip(layer_scales, caches, strict=True):
        check_given_scales("scales", layer_scale, cache, layout)
    return layer_scales


def _rotations(kv: torch.Tensor, rotations: Rotation | Sequence[Rotation | None] | None) -> list[Rotation | None]:
    """Return the rotation of each layer. Raises ValueError for one that does not fit the rows."""
    layer_rotations = list(rotations) if isinstance(rotations, Sequence) else [rotations] * len(kv)
    if len(layer_rotations) != len(kv):
        raise ValueError(f"rotations must be one for each of {len(kv)} layers, got {len(layer_rotations)}")
    for rotation in layer_rotations:
        check_rotation(rotation)
        if rotation is not None and (rotation.num_rows, rotation.head_size) != (kv.shape[2], kv.shape[4]):
            raise ValueError(
                f"rotations must be of {kv.shape[2]} rows with heads of {kv.shape[4]}, "
                f"got {rotation.num_rows} and {rotation.head_size}"
            )
    return layer_rotations


def _write(
    parts: torch.Tensor, views: tuple[KVView, KVView | None], slots: torch.Tensor, rotation: Rotation | None
) -> None:
    for part, view, its_rotation in zip(parts, views, (rotation, None), strict=False):
        assert view is not None
        ops.mix_rows(part, view.rows[..., 0, : part.shape[-1]], its_rotation, out_slots=slots)


def _is_plain(view: KVView, dtype: torch.dtype) -> bool:
    return view.rows.dtype == dtype and view.rows.shape[3] == 1 and view.scales is None


def _rotated(key: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    out = torch.empty_like(key)
    ops.mix_rows(key, out, rotation)
    return out


def gather_rotated(
    cache: torch.Tensor, slots: torch.Tensor, layout: CacheLayout, rotation: Rotation | None
) -> torch.Tensor:
    """Gather K of some slots of one layer, rotated.

    Args:
        cache: the block memory of the layer.
        slots: int64 [num_tokens].
        layout: of the cache.
        rotation: of the tokens; None to copy.

    Returns:
        A new tensor, [num_tokens, heads, head_size].

    Raises:
        ValueError: the cache quantises or packs K, or arguments do not fit, as in kvpage.ops.mix_rows.
        TypeError: an argument is of the wrong type.
    """
    check_layout(layout)
    check_cache(cache, layout)
    slots = as_indices("slots", slots)
    view = layout.views(cache)[0]
    if not _is_plain(view, layout.dtype) or layout.is_quantized:
        raise ValueError(f"K must be contiguous and in its own dtype, got {layout.backend} of {layout.dtype}")
    blocks = view.rows[..., 0, : layout.head_size]
    out = torch.empty(len(slots), *blocks.shape[2:], dtype=blocks.dtype, device=blocks.device)
    ops.mix_rows(blocks, out, rotation, slots=slots)
    return out
