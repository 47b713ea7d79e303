"""Compiling ahead: the kernels that some calls of a device's operations ask for, compiled before they are needed.

rehearse(work)        ops.attend, ops.reshape_and_cache, ops.sample_rows ─► kernels are noted, not launched
compile_all(kernels)  side by side, in threads
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvpage.ops.cuda.rows import _has_triton

Kernels = Sequence[Any]
"""Kernels to be compiled, each with arguments."""


def rehearse(work: Callable[[], object]) -> Kernels:
    """Do the work, but for launches of kernels that are not compiled: their results are of no account.

    Args:
        work: Calls operations on tensors of a CUDA device.

    Returns:
        The kernels that were not compiled, each once. None where Triton is not installed: nothing is done then.
    """
    if not _has_triton():
        return ()
    from kvpage.kernels.rehearsal import rehearsal

    with rehearsal() as variants:
        work()
    return list(variants.values())


def compile_all(kernels: Kernels, device: torch.device, progress: Callable[[int], object]) -> None:
    """Compile kernels for a device, in as many threads as the machine has cores.

    Args:
        kernels: Those of `rehearse`.
        device: A CUDA device.
        progress: Called with 1 after each.
    """
    if kernels:
        from kvpage.kernels.rehearsal import compile_variants

        compile_variants(kernels, device, progress)
