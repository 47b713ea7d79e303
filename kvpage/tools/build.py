"""What was built and what was found on this machine."""

import importlib.metadata
from typing import Any

import kvpage._C as _C


def build_info() -> dict[str, Any]:
    """What this kvpage was built with and what it finds here; None for what is absent. Starts nothing on any device.

    version; sources (a digest of what the extension was compiled from); compiler (of the native core); cuda (the
    toolkit it was built with), cuda_archs (compiled in, in CMake's words); driver (the CUDA version of the installed
    driver, "13.0"); cuda_error (why CUDA cannot be used here);
    devices: a list of dicts with name, compute_capability (major, minor) and num_copy_engines, as CUDA numbers them;
    batched_copy: whether the driver copies many extents in one call; torch, torch_cuda (what that torch was built for),
    triton, transformers: versions.
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
    }


def _cuda_version(number: int) -> str | None:
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_cuda() -> str | None:
    import torch.version

    return torch.version.cuda
