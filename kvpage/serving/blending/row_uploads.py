"""RowUploads: K and V of the reused rows of a pass, layer by layer, where the blocks are.

    segments, host memory   [ layer 5 ] of each run ─► pinned memory ─► device     one copy a layer, on its own stream
                                                            [ layer 4 ]    ◄── the pass is here

The copy of a layer begins when the one before is asked for, and nobody waits for it on the host. Segments on the
blocks' device, or on a CPU that computes, are taken as they are.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from kvpage.blend.segments import Reuse

Rows = tuple[list[torch.Tensor], list[torch.Tensor]]  # K and V of each run, [num_tokens, kv heads, size]


class Copies(Protocol):
    """Asynchronous copies from host memory to a device."""

    def buffer(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return host memory to be filled, from which a copy can be started."""

    def start(self, filled: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Start the copy of a buffer; return memory of the device, and what to wait for."""

    def wait(self, copied: torch.Tensor, event: Any) -> None:
        """Let the current stream wait for a copy."""


class PinnedCopies:
    """Copies from pinned memory, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]  # torch does not annotate it

    def buffer(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_elements, dtype=dtype, pin_memory=True)

    def start(self, filled: torch.Tensor) -> tuple[torch.Tensor, Any]:
        with torch.cuda.stream(self._stream):
            return filled.to(self._device, non_blocking=True), self._stream.record_event()

    def wait(self, copied: torch.Tensor, event: Any) -> None:
        current = torch.cuda.current_stream(self._device)
        current.wait_event(event)
        copied.record_stream(current)


class _Started(NamedTuple):
    layer: int
    copied: torch.Tensor
    event: Any


class RowUploads:
    """The rows of some runs. reuses: one for each run; at least one. device: of the blocks.

    copies: how they are copied; None for from pinned memory to a CUDA device.
    """

    def __init__(self, reuses: Sequence[Reuse], device: torch.device, copies: Copies | None = None) -> None:
        self._reuses, self._device = reuses, device
        segments = [reuse.segment for reuse in reuses]
        dtypes = {part.dtype for segment in segments for part in (segment.k, segment.v)}
        is_on_host = all(part.device.type == "cpu" for segment in segments for part in (segment.k, segment.v))
        self._copies = copies
        if copies is None and device.type == "cuda" and is_on_host and len(dtypes) == 1:
            self._copies = PinnedCopies(device)
        self._started: _Started | None = None
        self._taken: tuple[int, Rows] | None = None

    def rows(self, layer: int) -> Rows:
        """Return a layer's K, not rotated, and V of each run, for work on the current stream. Layers come in order."""
        if self._taken is None or self._taken[0] != layer:
            self._taken = layer, self._of(layer)
        return self._taken[1]

    def _of(self, layer: int) -> Rows:
        pairs = [reuse.rows(layer) for reuse in self._reuses]
        rows = [key for key, _ in pairs], [value for _, value in pairs]
        if self._copies is None:
            return rows[0], rows[1]
        started = self._started
        if started is None or started.layer != layer:
            started = self._start(layer, self._copies)
        self._copies.wait(started.copied, started.event)
        is_last = layer + 1 == len(self._reuses[0].segment.k)
        self._started = None if is_last else self._start(layer + 1, self._copies)
        return _cut(started.copied, rows[0]), _cut(started.copied[sum(part.numel() for part in rows[0]) :], rows[1])

    def _start(self, layer: int, copies: Copies) -> _Started:
        pairs = [reuse.rows(layer) for reuse in self._reuses]
        parts = [key for key, _ in pairs] + [value for _, value in pairs]
        buffer = copies.buffer(sum(part.numel() for part in parts), parts[0].dtype)
        for view, part in zip(_cut(buffer, parts), parts, strict=True):
            view.copy_(part)
        return _Started(layer, *copies.start(buffer))


def _cut(memory: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of the memory's beginning, one after the other, of these shapes."""
    sizes = [part.numel() for part in like]
    pieces = torch.split(memory[: sum(sizes)], sizes)
    return [piece.view(part.shape) for piece, part in zip(pieces, like, strict=True)]


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a host tensor on the device; a copy to a CUDA device is not waited for."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
