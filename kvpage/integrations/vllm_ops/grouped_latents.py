"""vLLM's operation on the latents of several layers at once, whose caches are named by raw addresses."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvpage.checks.values import as_integer
from kvpage.integrations.vllm_ops.args import (
    RAW_CACHE_DTYPES,
    check_kind,
    check_reachable,
    check_shape,
    check_tensors,
    fp8_dtype,
    is_raw,
    latent_view,
    scales_of,
)
from kvpage.integrations.vllm_ops.latents import PAD_SLOT, write_latents
from kvpage.integrations.vllm_ops.registered_memory import REGISTERED, RegisteredMemory
from kvpage.layout.kv_view import KVView


def concat_and_cache_mla_grouped(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache_ptrs: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
    block_stride: int,
    entry_stride: int,
    kv_scales: torch.Tensor | None = None,
    kv_cache_dtype: str = "auto",
) -> None:
    """Do the same as `concat_and_cache_mla` for several layers at once, whose caches are laid out alike.

    No two caches may share memory.

    Args:
        kv_c: [num_layers, num_tokens, kv_lora_rank].
        k_pe: [num_layers, num_tokens, rope size].
        kv_cache_ptrs: int64 [num_layers], addresses of the caches. Each must be in a tensor that `register_caches` was
            given; the cache's blocks end with it. The call waits for addresses on a device.
        slot_mapping: int64 [num_layers, at most num_tokens].
        block_size: Tokens of a block.
        block_stride: Elements from a block to the next.
        entry_stride: Elements from a token to the next.
        kv_scales: fp32 [num_layers] for 8-bit floats, else None.
        kv_cache_dtype: How the caches hold their rows; see kvpage.integrations.vllm_ops.

    Raises:
        TypeError: An argument is of another type.
        ValueError: A shape, dtype, stride, slot or address is wrong. Nothing is written.
    """
    dtype = check_group(kv_c, k_pe, kv_cache_ptrs, slot_mapping, kv_scales, kv_cache_dtype)
    sizes = as_integer("block_size", block_size), kv_c.shape[2] + k_pe.shape[2]
    strides = as_integer("block_stride", block_stride), as_integer("entry_stride", entry_stride)
    caches = [cache_at(REGISTERED, address, dtype, sizes, strides) for address in kv_cache_ptrs.tolist()]
    for cache in caches:
        check_kind("kv_cache_ptrs", cache, (dtype,), kv_c.device)
    write_layers(grouped_layers(kv_c, k_pe, caches, slot_mapping, kv_scales, kv_cache_dtype), kv_cache_dtype)


class Layer(NamedTuple):
    """Rows that `write_layers` writes into slots of one layer's cache."""

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
    """Return the layers of `concat_and_cache_mla_grouped`, after a check of everything that differs between layers."""
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
    """Write the rows of one layer after the other."""
    for layer in layers:
        write_latents(layer.kv_c, layer.k_pe, layer.cache, layer.slot_mapping, kv_cache_dtype, layer.scale)


def check_group(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache_ptrs: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None,
    kv_cache_dtype: str,
) -> torch.dtype:
    """Return the dtype of the caches.

    Raises:
        ValueError: The tensors do not name the same number of layers, or have dtypes that do not fit.
    """
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
    """Return the cache [num_blocks, *sizes] at the address, with as many blocks as are in registered memory.

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


def _check_slots(slots: torch.Tensor, cache: KVView) -> None:
    """Raise ValueError for a wrong slot: the slots of all layers must be known before the first layer is written.

    The native code checks the slots of one layer.
    """
    num_slots_there = cache.num_blocks * cache.rows.shape[1]
    real = slots[slots != PAD_SLOT]
    outside = real[(real < 0) | (real >= num_slots_there)]
    if len(outside):
        raise ValueError(f"slot_mapping must be -1 or in [0, {num_slots_there}), got {outside[0].item()}")
    in_order = real.sort().values
    again = in_order[1:][in_order[1:] == in_order[:-1]]
    if len(again):
        raise ValueError(f"slot_mapping must name a slot of a layer once, got {again[0].item()} twice")
