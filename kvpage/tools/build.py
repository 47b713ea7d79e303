"""Build information: versions of kvpage and its parts, and the devices of this machine."""

import importlib.metadata
from typing import Any

import torch

import kvpage._C as _C
from kvpage.layout.cache_layout import CacheLayout
from kvpage.ops.cuda.libraries.choice import automatic_choice, installed_libraries

_BF16, _E4M3 = torch.bfloat16, torch.float8_e4m3fn
_LAYOUTS = {
    "flash, bf16, blocks of 16": CacheLayout(16, 8, 128, _BF16),
    "flash, bf16, blocks of 256": CacheLayout(256, 8, 128, _BF16),
    "flash, fp8_e4m3, blocks of 16": CacheLayout(16, 8, 128, _E4M3),
    "flashinfer, bf16, blocks of 16": CacheLayout(16, 8, 128, _BF16, "flashinfer"),
    "mla, bf16, blocks of 64": CacheLayout(64, 1, 576, _BF16, "mla"),
    "paged, bf16, blocks of 16": CacheLayout(16, 8, 128, _BF16, "paged"),
}
"""Layouts that stand for others: heads of 128 elements, latents of 512 + 64."""


def build_info() -> dict[str, Any]:
    """Return versions of this build and of installed parts, and the devices found here. No device is started.

    Returns:
        A dict with these entries. An absent part is None.

        version: kvpage's version.
        sources: A digest of the sources that the extension was compiled from.
        compiler: The compiler of the native core.
        cuda: The CUDA toolkit of the build.
        cuda_archs: The architectures compiled in, in CMake's words.
        driver: The CUDA version of the installed driver, such as "13.0".
        cuda_error: The reason why CUDA cannot be used here.
        devices: A list of dicts with name, compute_capability (major, minor) and num_copy_engines, as CUDA numbers
            them.
        batched_copy: Whether the driver copies many extents in one call.
        torch, triton, transformers: Installed versions.
        torch_cuda: The CUDA version that this torch was built for.
        numerics: What the bits of results depend on with EngineConfig(same_bits=True) on a CPU, besides model and
            request.
        tiles: Whether native products in bf16 take the tiles of AMX: "amx", or why they do not.
        flashinfer, flash_attn, flash_attn_3, flash_mla: Installed versions of libraries that can attend over blocks.
        attention: The library that EngineConfig(attention_backend="auto") takes on the first device, by layout. A model
            whose options the library does not take gets "kvpage".
    """
    machine = _C.cuda_machine() or {"driver_version": 0, "devices": [], "batched_copy": False}
    return {
        **_C.build_info(),
        "driver": _cuda_version(machine["driver_version"]),
        "cuda_error": _C.cuda_error(),
        "devices": machine["devices"],
        "batched_copy": machine["batched_copy"],
        "torch": _installed("torch"),
        "torch_cuda": _torch_cuda(),
        "triton": _installed("triton"),
        "transformers": _installed("transformers"),
        "numerics": _numerics(),
        "tiles": _tiles(),
        **installed_libraries(),
        "attention": _attention(machine["devices"]),
    }


def _attention(devices: list[dict[str, Any]]) -> dict[str, str]:
    """Return the library that "auto" takes, by layout."""
    capability = None
    if devices and torch.version.cuda:
        major, minor = devices[0]["compute_capability"]
        capability = 10 * major + minor
    return {words: automatic_choice(layout, capability) for words, layout in _LAYOUTS.items()}


def _numerics() -> str | None:
    """Return the name of this machine's arithmetic; None without the packages of an engine."""
    if _installed("transformers") is None:
        return None
    from kvpage.serving.model.native.bits.numerics import numerics_name

    return numerics_name()


def _tiles() -> str:
    """Return the name of the bits of products by tiles, or why no tiles are taken."""
    name, refusal = _C.product_tiles()
    return name or f"not taken: {refusal}"


def _cuda_version(number: int) -> str | None:
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_cuda() -> str | None:
    return torch.version.cuda
