"""Pieces: buffers of callers as runs of memory, which they keep alive.

b"...", a numpy array, a CPU tensor            one run
[piece, piece, ...]                            one run each, one after the other
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from kvpage.store.tiers.stretches import Runs

Piece = Any
"""bytes, bytearray, memoryview, numpy array, or a tensor in host memory; contiguous."""


class Pieces(NamedTuple):
    """Memory of one record.

    runs: address and length of each piece, none of them empty. One at address 0 takes no bytes. owners: what keeps the
    memory alive.
    """

    runs: Runs
    owners: list[Any]


def pieces_of(buffer: Piece | Sequence[Piece], writable: bool) -> Pieces:
    """Return a buffer, or a sequence of such, as runs. Pieces that were made already stay as they are.

    Raises TypeError for what is no buffer; ValueError for one that is not contiguous, or not writable as it must be.
    """
    if isinstance(buffer, Pieces):
        return buffer
    each = list(buffer) if isinstance(buffer, list | tuple) else [buffer]
    owners, rows = [], np.empty((len(each), 2), np.int64)
    for at, piece in enumerate(each):
        owner = piece if isinstance(piece, torch.Tensor) else _array(piece)
        rows[at] = _tensor_run(owner) if isinstance(owner, torch.Tensor) else _array_run(owner, writable)
        owners.append(owner)
    return Pieces(rows[rows[:, 1] > 0], owners)


def _array(piece: Piece) -> np.ndarray[Any, Any]:
    if isinstance(piece, np.ndarray):
        return piece
    if isinstance(piece, str):
        raise TypeError("buffers must be bytes, arrays or CPU tensors, got str")
    try:
        return np.frombuffer(_contiguous(memoryview(piece)), np.uint8)
    except TypeError as error:
        raise TypeError(f"buffers must be bytes, arrays or CPU tensors, got {type(piece).__name__}") from error


def _contiguous(view: memoryview) -> memoryview:
    if not view.c_contiguous:
        raise ValueError(f"buffers must be contiguous, got strides {view.strides} of shape {view.shape}")
    return view.cast("B") if view.nbytes else memoryview(b"" if view.readonly else bytearray())


def _array_run(array: np.ndarray[Any, Any], writable: bool) -> tuple[int, int]:
    if not array.flags.c_contiguous:
        raise ValueError(f"buffers must be contiguous, got strides {array.strides} of shape {array.shape}")
    if array.dtype.hasobject:
        raise TypeError(f"buffers must be of plain bytes, got dtype {array.dtype}")
    if writable and not array.flags.writeable:
        raise ValueError("buffers must be writable, got a read-only one")
    return array.__array_interface__["data"][0] if array.nbytes else 0, array.nbytes


def _tensor_run(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        raise ValueError(f"buffers must be plain tensors in host memory, got one on {tensor.device}")
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"buffers must be contiguous, got strides {tensor.stride()} of shape {tuple(tensor.shape)}")
    return tensor.data_ptr(), tensor.nbytes
