"""Pieces: buffers of callers as runs of memory, which they keep alive.

b"...", a numpy array, a CPU tensor            one run
[piece, piece, ...]                            one run each, one after the other
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvpage.store.tiers.stretches import Runs

Piece = Any
"""bytes, bytearray, memoryview, numpy array, or a tensor in host memory; contiguous."""


class Pieces(NamedTuple):
    """Memory of one record.

    runs: address and length of each piece, none of them empty. One at address 0 takes no bytes. owners: what keeps the
    memory alive. page_ids: int64, of owners whose pages share no byte; -1 for none. None for other memory.
    """

    runs: Runs
    owners: list[Any]
    page_ids: npt.NDArray[np.int64] | None = None


def pieces_of(buffer: Piece | Sequence[Piece], writable: bool) -> Pieces:
    """Return a buffer, or a sequence of such, as runs. Pieces that were made already stay as they are.

    Raises TypeError for an object that is no buffer; ValueError for a buffer that is not contiguous or not writable.
    """
    if isinstance(buffer, Pieces):
        return buffer
    pieces = list(buffer) if isinstance(buffer, list | tuple) else [buffer]
    owners, rows = [], np.empty((len(pieces), 2), np.int64)
    for at, piece in enumerate(pieces):
        owner = piece if isinstance(piece, torch.Tensor) else _array(piece)
        rows[at] = _tensor_run(owner) if isinstance(owner, torch.Tensor) else _array_run(owner, writable)
        owners.append(owner)
    return Pieces(rows[rows[:, 1] > 0], owners)


def check_apart(records: Sequence[Pieces]) -> None:
    """Raise ValueError if two pieces of these records share a byte: no order of writes would be right.

    Pages of the same owners are told apart by their ids, which are fewer than their pieces.
    """
    if not records:
        return
    first = records[0]
    if first.page_ids is not None and all(record.owners is first.owners for record in records):
        ids = np.sort(np.concatenate([record.page_ids for record in records if record.page_ids is not None]))
        twice = ids[1:][(ids[1:] == ids[:-1]) & (ids[1:] >= 0)]
        if len(twice):
            raise ValueError(f"pages must be given once where they are read, got page {twice[0]} twice")
    elif share_bytes(np.concatenate([record.runs for record in records])):
        raise ValueError("buffers must share no byte where they are read, got some that do")


def share_bytes(runs: Runs) -> bool:
    """Return whether two runs have a byte in common. Those at address 0 have none."""
    if len(runs) < 2:
        return False
    runs = runs[np.argsort(runs[:, 0])]
    if not runs[0, 0]:
        runs = runs[runs[:, 0] != 0]
    return bool((runs[1:, 0] < runs[:-1, 0] + runs[:-1, 1]).any())


def check_memory(tensor: torch.Tensor) -> None:
    """Raise ValueError for a tensor whose bytes are not its own storage's, as they are."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.device.type != "cpu":
        raise ValueError(f"tensors must be strided and in host memory, got one on {tensor.device}")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError("tensors must be resolved, got one that is a conjugate or negative view")
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    storage_bytes, end = tensor.untyped_storage().nbytes(), (tensor.storage_offset() + last + 1) * tensor.element_size()
    if tensor.numel() and storage_bytes < end:
        raise ValueError(f"tensors must have memory, got one of {end} bytes whose storage has {storage_bytes}")


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
    check_memory(tensor)
    if not tensor.is_contiguous():
        raise ValueError(f"buffers must be contiguous, got strides {tensor.stride()} of shape {tuple(tensor.shape)}")
    return tensor.data_ptr(), tensor.nbytes
