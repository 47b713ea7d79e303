"""Build information: versions of kvpage and its parts, and the devices of this machine."""

import importlib.metadata
from typing import Any

import kvpage._C as _C


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
