"""vLLM's operations on latents (MLA): `kvpage.integrations.vllm_ops` serves them, and says what all its operations share."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvpage.checks.tensors import check_plain, check_writable, readable
from kvpage.checks.values import check_flag
from kvpage.integrations.vllm_ops import ds_mla
from kvpage.integrations.vllm_ops.args import (
    RAW_CACHE_DTYPES,
    check_kind,
    check_reachable,
    check_same_dtype,
    check_shape,
    check_tensors,
    fp8_dtype,
    is_raw,
    latent_view,
    num_slots,
    overwrite,
    scales_of,
    stored,
)
from kvpage.integrations.vllm_ops.registered_memory import RegisteredMemory
from kvpage.integrations.vllm_ops.rows import write_rows
from kvpage.layout.kv_view import KVView
from kvpage.ops.token_args import COMPUTE_DTYPES

PAD_SLOT = -1


def concat_and_cache_mla(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    scale: torch.Tensor,
    skip_scale: bool = False,
) -> None:
    """Writes latents kv_c [num_tokens, kv_lora_rank], each followed by its k_pe [num_tokens, rope size], into slots.

    kv_cache: [num_blocks, block_size, kv_lora_rank + rope size]. For "fp8_ds_mla", bytes [num_blocks, block_size, 656]
    of entries that kvpage.integrations.vllm_ops.ds_mla shows; kv_c and k_pe are then bf16 of 512 and of 64 (or 0) elements, and scale is not
    read. skip_scale: 8-bit floats are stored as if the scale were 1.
    """
    check_tensors(kv_c=kv_c, k_pe=k_pe, kv_cache=kv_cache, slot_mapping=slot_mapping)
    check_flag("skip_scale", skip_scale)
    k_pe = k_pe.squeeze(1) if k_pe.dim() == 3 and k_pe.shape[1] == 1 else k_pe
    for name, rows in (("kv_c", kv_c), ("k_pe", k_pe)):
        if rows.dim() != 2:
            raise ValueError(f"{name} must be [num_tokens, size], got shape {tuple(rows.shape)}")
    if isinstance(kv_cache_dtype, str) and kv_cache_dtype == "fp8_ds_mla":
        _write_entries(kv_c, k_pe, kv_cache, slot_mapping)
        return
    view = latent_view("kv_cache", stored(kv_cache, kv_cache_dtype))
    if skip_scale and not is_raw(kv_cache_dtype):
        scale = torch.ones(1, device=kv_cache.device)
    _write_latents(kv_c, k_pe, view, slot_mapping, kv_cache_dtype, scale)


def concat_and_cache_mla_rope_fused(
    positions: torch.Tensor,
    q_pe: torch.Tensor,
    k_pe: torch.Tensor,
    kv_c: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_cache_dtype: str,
    kv_cache_scale: torch.Tensor,
) -> None:
    """Turns q_pe and k_pe in place by their positions, then writes kv_c, followed by k_pe, into slots.

    positions: int64 [num_tokens]. q_pe: [num_tokens, num_heads, rope size]. k_pe: [num_tokens, rope size]. kv_c:
    [num_tokens, kv_lora_rank]. cos_sin_cache: [max_position, rope size], each row all cosines, then all sines.
    is_neox: a pair's halves lie rope size / 2 apart; else side by side. slot_mapping: int64 [at most num_tokens];
    tokens past it, and those whose slot is -1, are neither turned nor written. Products are fp32, rounded once.
    On a CUDA device, a token whose position is out of range counts as one whose slot is.
    """
    check_tensors(positions=positions, q_pe=q_pe, k_pe=k_pe, kv_c=kv_c, cos_sin_cache=cos_sin_cache)
    check_tensors(slot_mapping=slot_mapping, kv_cache=kv_cache)
    check_flag("is_neox", is_neox)
    _check_rotary(positions, q_pe, k_pe, kv_c, cos_sin_cache, kv_cache.device)
    num_tokens = num_slots(slot_mapping, kv_c)
    check_kind("slot_mapping", slot_mapping, (torch.int64,), kv_cache.device)
    view = latent_view("kv_cache", stored(kv_cache, kv_cache_dtype))
    positions, slots = _usable(positions[:num_tokens], slot_mapping, len(cos_sin_cache), view)
    table = cos_sin_cache[positions].float()
    turned_k = _turned(k_pe[:num_tokens], table, is_neox)
    turned_q = _turned(q_pe[:num_tokens], table[:, None], is_neox)
    _write_latents(kv_c, turned_k, view, slots, kv_cache_dtype, kv_cache_scale)
    is_turned = (slots >= 0) & (slots < view.num_blocks * view.rows.shape[1])
    for rows, turned in ((q_pe[:num_tokens], turned_q), (k_pe[:num_tokens], turned_k)):
        overwrite(rows, torch.where(is_turned.view(-1, *[1] * (rows.dim() - 1)), turned, rows))


def concat_mla_q(ql_nope: torch.Tensor, q_pe: torch.Tensor, q_out: torch.Tensor) -> None:
    """Writes ql_nope [num_tokens, num_heads, size], followed by q_pe [num_tokens, num_heads, rope size], into q_out.

    q_out must share no memory with the others.
    """
    check_tensors(ql_nope=ql_nope, q_pe=q_pe, q_out=q_out)
    check_writable("q_out", q_out)
    check_shape("ql_nope", ql_nope, "num_tokens num_heads size", (None, None, None))
    check_shape("q_pe", q_pe, "num_tokens num_heads rope_size", (*ql_nope.shape[:2], None))
    size = ql_nope.shape[2]
    check_shape("q_out", q_out, "num_tokens num_heads size", (*ql_nope.shape[:2], size + q_pe.shape[2]))
    for name, rows in (("ql_nope", ql_nope), ("q_pe", q_pe)):
        check_kind(name, rows, (q_out.dtype,), q_out.device)
    overwrite(q_out[..., :size], ql_nope)
    overwrite(q_out[..., size:], q_pe)


class Layer(NamedTuple):
    """What `write_layers` writes for one layer: rows into slots of a cache."""

    kv_c: torch.Tensor
    k_pe: torch.Tensor
    cache: KVView
    slot_mapping: torch.Tensor
    scale: torch.Tensor


def grouped_layers(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    caches: Sequence[torch.Tensor],
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None,
    kv_cache_dtype: str,
) -> list[Layer]:
    """The layers of `concat_and_cache_mla_grouped`, with everything checked that differs from layer to layer."""
    scales = [torch.ones(1)] * len(kv_c) if kv_scales is None else list(kv_scales.unsqueeze(1))
    layers = [
        Layer(kv_c[index], k_pe[index], latent_view("a cache", cache), slot_mapping[index], scales[index])
        for index, cache in enumerate(caches)
    ]
    for layer in layers:
        scales_of(layer.cache.rows, kv_cache_dtype, layer.scale, layer.scale)
        if not layer.slot_mapping.is_cuda:
            _check_slots(layer.slot_mapping, layer.cache)
    return layers


def write_layers(layers: Sequence[Layer], kv_cache_dtype: str) -> None:
    for layer in layers:
        _write_latents(layer.kv_c, layer.k_pe, layer.cache, layer.slot_mapping, kv_cache_dtype, layer.scale)


def check_group(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache_ptrs: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None,
    kv_cache_dtype: str,
) -> torch.dtype:
    """The dtype of the caches. Raises unless the tensors name as many layers, and what their dtypes have to be."""
    check_tensors(kv_c=kv_c, k_pe=k_pe, kv_cache_ptrs=kv_cache_ptrs, slot_mapping=slot_mapping)
    check_shape("kv_c", kv_c, "num_layers num_tokens kv_lora_rank", (None, None, None))
    check_shape("k_pe", k_pe, "num_layers num_tokens rope_size", (*kv_c.shape[:2], None))
    check_shape("kv_cache_ptrs", kv_cache_ptrs, "num_layers", (len(kv_c),))
    check_shape("slot_mapping", slot_mapping, "num_layers num_slots", (len(kv_c), None))
    check_kind("slot_mapping", slot_mapping, (torch.int64,), kv_c.device)
    check_kind("kv_cache_ptrs", kv_cache_ptrs, (torch.int64,), kv_cache_ptrs.device)
    check_kind("k_pe", k_pe, (kv_c.dtype,), kv_c.device)
    if is_raw(kv_cache_dtype):
        if kv_scales is not None:
            raise ValueError(f"kv_scales must be None for {kv_cache_dtype}, got {type(kv_scales).__name__}")
        return RAW_CACHE_DTYPES[kv_cache_dtype] or kv_c.dtype
    dtype = fp8_dtype("kv_cache_dtype", kv_cache_dtype)
    check_reachable("kv_scales", kv_scales)
    assert kv_scales is not None  # check_reachable raises for None
    check_shape("kv_scales", kv_scales, "num_layers", (len(kv_c),))
    check_kind("kv_scales", kv_scales, (torch.float32,), kv_c.device)
    return dtype


def cache_at(
    memory: RegisteredMemory, address: int, dtype: torch.dtype, sizes: tuple[int, int], strides: tuple[int, int]
) -> torch.Tensor:
    """The cache [num_blocks, *sizes] that begins at the address, with as many blocks as lie in registered memory.

    sizes: block_size, entry_size. strides: of blocks and of entries, in elements.
    """
    if min(*sizes) < 1:
        raise ValueError(f"block_size and the size of an entry must be positive, got {sizes[0]} and {sizes[1]}")
    reach = (sizes[0] - 1) * strides[1] + sizes[1]  # of a block
    if strides[1] < sizes[1] or strides[0] < reach:
        raise ValueError(
            f"entry_stride must be at least {sizes[1]} and block_stride at least a block, got {strides[1]} and "
            f"{strides[0]}"
        )
    whole = memory.bytes_from("kv_cache_ptrs", address)
    if address % dtype.itemsize:
        raise ValueError(f"kv_cache_ptrs must be aligned to {dtype.itemsize} bytes, got {address:#x}")
    num_elements = len(whole) // dtype.itemsize
    if num_elements < reach:
        raise ValueError(f"kv_cache_ptrs must have a block of registered memory, got {len(whole)} bytes")
    elements = whole[: num_elements * dtype.itemsize].view(dtype)
    num_blocks = (num_elements - reach) // strides[0] + 1
    return elements.as_strided((num_blocks, *sizes), (*strides, 1))


def _write_latents(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    view: KVView,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    scale: torch.Tensor,
) -> None:
    rank, size = kv_c.shape[1], kv_c.shape[1] + k_pe.shape[1]
    if view.rows.shape[2:] != (1, 1, size):
        shape = (*view.rows.shape[:2], *view.rows.shape[4:])
        raise ValueError(f"kv_cache must have entries of {size} elements, got shape {shape}")
    views = view.columns(0, rank), view.columns(rank, size)
    write_rows(kv_c.unsqueeze(1), k_pe.unsqueeze(1), *views, slot_mapping, kv_cache_dtype, scale, scale)


def _write_entries(kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    check_shape("kv_c", kv_c, "num_tokens kv_lora_rank", (None, ds_mla.RANK))
    if k_pe.shape[1] not in (0, ds_mla.ROPE_SIZE):
        raise ValueError(f"k_pe must be [num_tokens, {ds_mla.ROPE_SIZE} or 0], got shape {tuple(k_pe.shape)}")
    check_plain("kv_cache", kv_cache)
    check_kind("kv_cache", kv_cache, (torch.uint8, torch.float8_e4m3fn), kv_cache.device)
    check_shape("kv_cache", kv_cache, "num_blocks block_size bytes", (None, None, ds_mla.ENTRY_BYTES))
    for name, rows in (("kv_c", kv_c), ("k_pe", k_pe)):
        check_kind(name, rows, (torch.bfloat16,), kv_cache.device)
    num_tokens = num_slots(slot_mapping, kv_c, k_pe)
    entries = ds_mla.pack_entries(kv_c[:num_tokens], readable("k_pe", k_pe)[:num_tokens])
    parts = entries[:, : ds_mla.ROPE_BEGIN], entries[:, ds_mla.ROPE_BEGIN :]
    _write_latents(*parts, latent_view("kv_cache", kv_cache.view(torch.uint8)), slot_mapping, "auto", torch.ones(1))


def _check_rotary(
    positions: torch.Tensor,
    q_pe: torch.Tensor,
    k_pe: torch.Tensor,
    kv_c: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    device: torch.device,
) -> None:
    check_shape("positions", positions, "num_tokens", (None,))
    num_tokens = len(positions)
    check_shape("kv_c", kv_c, "num_tokens kv_lora_rank", (num_tokens, None))
    check_shape("k_pe", k_pe, "num_tokens rope_size", (num_tokens, None))
    size = k_pe.shape[1]
    check_shape("q_pe", q_pe, "num_tokens num_heads rope_size", (num_tokens, None, size))
    check_shape("cos_sin_cache", cos_sin_cache, "max_position rope_size", (None, size))
    if size % 2 or size == 0:
        raise ValueError(f"the rotary part must have an even number of elements, got {size}")
    if len(cos_sin_cache) == 0:
        raise ValueError("cos_sin_cache must have a row for each position, got none")
    check_kind("positions", positions, (torch.int64,), device)
    check_kind("cos_sin_cache", cos_sin_cache, COMPUTE_DTYPES, device)
    for name, rows in (("q_pe", q_pe), ("k_pe", k_pe)):
        check_kind(name, rows, COMPUTE_DTYPES, device)
        check_same_dtype(name, rows, kv_c)
        check_writable(name, rows)


def _usable(
    positions: torch.Tensor, slots: torch.Tensor, num_positions: int, view: KVView
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions that can be looked up, and slots of which one is out of range where its position was.

    On the CPU, ValueError for a position out of range. Positions of padding are not looked at.
    """
    is_bad = (slots != PAD_SLOT) & ((positions < 0) | (positions >= num_positions))
    if not slots.is_cuda and bool(is_bad.any()):
        bad = positions[is_bad][0].item()
        raise ValueError(f"positions must be in [0, {num_positions}), got {bad}")
    num_slots_there = view.num_blocks * view.rows.shape[1]
    slots = torch.where(is_bad, torch.full_like(slots, num_slots_there), slots)
    usable = torch.where((positions < 0) | (positions >= num_positions), torch.zeros_like(positions), positions)
    return usable, slots


def _turned(rows: torch.Tensor, table: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """Rows [..., rope size], turned by the cosines and sines [..., rope size] of the table."""
    half = rows.shape[-1] // 2
    cos, sin = table[..., :half], table[..., half:]
    if is_neox:
        x, y = rows[..., :half].float(), rows[..., half:].float()
    else:
        x, y = rows[..., 0::2].float(), rows[..., 1::2].float()
    pair = x * cos - y * sin, y * cos + x * sin
    turned = torch.cat(pair, -1) if is_neox else torch.stack(pair, -1).flatten(-2)
    return turned.to(rows.dtype)


def _check_slots(slots: torch.Tensor, cache: KVView) -> None:
    """The native code checks the slots of one layer; those of all must be known before the first is written."""
    num_slots_there = cache.num_blocks * cache.rows.shape[1]
    real = slots[slots != PAD_SLOT]
    outside = real[(real < 0) | (real >= num_slots_there)]
    if len(outside):
        raise ValueError(f"slot_mapping must be -1 or in [0, {num_slots_there}), got {outside[0].item()}")
    in_order = real.sort().values
    again = in_order[1:][in_order[1:] == in_order[:-1]]
    if len(again):
        raise ValueError(f"slot_mapping must name a slot of a layer once, got {again[0].item()} twice")
