"""Pieces: buffers of callers as runs of memory, which they keep alive. RunPayload: runs as the payload of one record.

b"...", a numpy array, a CPU tensor            one run
[piece, piece, ...]                            one run each, one after the other

memory    [ run | run ]   [ run ]   [ run | run ]
payload   [ stretch      | stretch      | str.. ]         of one size, whatever the runs are; nothing is copied between
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvpage.store.tiers.stretches import Runs, cut_runs, gather_stretches, scatter_stretches

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


STRETCH_BYTES = 1 << 18  # of every record: its reader may have other runs than its writer
MIN_RUN_BYTES = 4096  # of memory that is written to a file directly; shorter runs are copied into one piece first
STREAM_BYTES = 1 << 20  # of bytes written past the CPU's cache: the caller of a smaller read may find its bytes there


class RunPayload:
    """A source and a sink.

    runs: none is empty. One at address 0 takes no bytes, and is in no source. owner: keeps the memory alive.
    """

    stretch_bytes = STRETCH_BYTES
    piece_ends = None

    def __init__(self, runs: Runs, owner: Any = None) -> None:
        self._runs, self._owner = runs, owner
        self.num_bytes = int(runs[:, 1].sum())

    @classmethod
    def of(cls, pieces: Pieces) -> "RunPayload":
        """Return the payload of a record's memory."""
        return cls(pieces.runs, pieces.owners)

    def check_source(self) -> None:
        """Raise ValueError if there are bytes that no memory holds: they can be skipped, and not be stored."""
        if len(self._runs) and not self._runs[:, 0].all():
            raise ValueError("pieces must be whole where they are put, got some from a later start, or without a page")

    def fill(self, begin: int, buffer: memoryview, num_threads: int, streaming: bool) -> bytes:
        runs = self._cut(begin, len(buffer))
        return gather_stretches(runs, buffer, self.stretch_bytes, num_threads, streaming)

    def runs(self) -> Runs | None:
        """Return the memory; None for a payload without bytes, and for short runs."""
        return self._runs if 0 < len(self._runs) * MIN_RUN_BYTES <= self.num_bytes else None

    def take(self, begin: int, piece: memoryview, num_threads: int) -> bytes:
        runs, streaming = self._cut(begin, len(piece)), self.num_bytes >= STREAM_BYTES
        return scatter_stretches(piece, runs, self.stretch_bytes, num_threads, streaming)

    @functools.cached_property
    def _ends(self) -> npt.NDArray[np.int64]:
        """Return the bytes up to the end of each run. Several threads may make it: it is the same."""
        return np.cumsum(self._runs[:, 1])

    def _cut(self, begin: int, num_bytes: int) -> Runs:
        """Return the runs of the bytes from `begin` on."""
        if num_bytes == self.num_bytes:
            return self._runs
        return cut_runs(self._runs, self._ends, begin, begin + num_bytes)
