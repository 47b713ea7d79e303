"""Blending's operations on rows in a CUDA device's memory: Triton kernels, or torch where Triton is not installed.

Arguments are checked by kvpage.ops.blend, but for slots and fresh rows, which are on the device. The kernel checks
them, skips the bad ones, and sets a bit of the device's error word (`check_device`).
"""

import torch

from kvpage.layout.rotation import Rotation
from kvpage.ops import reference
from kvpage.ops.cuda.rows import _check_if_debugging, _error_word, _has_triton


def mix_rows(
    rows: torch.Tensor,
    out: torch.Tensor,
    rotation: Rotation | None,
    fresh: torch.Tensor | None,
    fresh_rows: torch.Tensor | None,
    slots: torch.Tensor | None,
    out_slots: torch.Tensor | None,
) -> None:
    if not _has_triton():
        _check_range("slots", slots, 0, rows.shape[0] * rows.shape[1])
        _check_range("out_slots", out_slots, -1, out.shape[0] * out.shape[1])
        _check_range("fresh_rows", fresh_rows, -1, 0 if fresh is None else len(fresh))
        reference.mix_rows(rows, out, rotation, fresh, fresh_rows, slots, out_slots)
        return
    from kvpage.kernels import rotary

    with torch.cuda.device(rows.device):
        rotary.mix_rows(rows, out, rotation, fresh, fresh_rows, slots, out_slots, _error_word(rows.device))
        _check_if_debugging(rows.device)


def row_deviation(fresh: torch.Tensor, retrieved: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    if not _has_triton():
        return reference.row_deviation(fresh, retrieved, valid)
    from kvpage.kernels import blend

    with torch.cuda.device(fresh.device):
        return blend.row_deviation(fresh, retrieved, valid)


def _check_range(name: str, ids: torch.Tensor | None, least: int, end: int) -> None:
    """Check the ids: torch would end the process for a bad index on a device, and waits for it in any case."""
    if ids is None:
        return
    bad = (ids < least) | (ids >= end)
    if bool(bad.any()):
        raise ValueError(f"{name} must be in [{least}, {end}), got {int(ids[bad][0])}")
