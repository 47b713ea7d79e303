"""Captures: work on static tensors, recorded once and replayed as a whole. On a CUDA device a replay is one launch.

    capture(work)     work runs twice, then is recorded       replay()     the same kernels on the same addresses

The first run compiles kernels and gives libraries their workspaces. The second one looks for operations that wait for
the device: these would break the recording. A replay runs no Python.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvpage.checks.device_lock import CAPTURING

WAITS = (
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero", "aten::equal",
    "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::repeat_interleave.Tensor",
)  # fmt: skip
"""Operations whose results the host reads, or whose shapes it must know. `item`, `bool` and `int` are the first."""


class CannotCapture(RuntimeError):
    """The work cannot be captured; the message says why, and can follow "because"."""


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether torch's allocator, or CUDA itself, had too little memory."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


class Replay(Protocol):
    """Captured work. It owns the memory of its intermediate tensors."""

    @property
    def num_bytes(self) -> int:
        """The device memory that it took, beside that of the captures it shares memory with."""

    def replay(self) -> None:
        """Do the work once more, ordered on the current stream."""


class Capturer(Protocol):
    """Captures work on one device."""

    def capture(self, work: Callable[[], None], beside: Replay | None) -> Replay:
        """Record the work.

        Args:
            work: Reads and writes static tensors only. Memory that it allocates is overwritten by other replays.
            beside: An earlier capture, to share memory with: never are two of them replayed at the same time.

        Raises:
            CannotCapture: The work waits for the device.
            torch.OutOfMemoryError: The device's memory does not suffice.
        """

    def release_memory(self) -> None:
        """Give back what failed captures have left."""


class WaitFinder(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]  # not annotated
    """Inside, an operation of the calling thread that waits for its device raises CannotCapture, before it runs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name in WAITS or (name == "aten::_to_copy" and _leaves_device(args[0], kwargs or {})):
            raise CannotCapture(f"the model waits for the device, in {name.removeprefix('aten::')}")
        if name in ("aten::index.Tensor", "aten::index_put_", "aten::index_put") and _has_masks(args[1]):
            raise CannotCapture("the model waits for the device, in indexing by a mask")
        return func(*args, **(kwargs or {}))


def _leaves_device(tensor: torch.Tensor, kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type != tensor.device.type


def _has_masks(indices: Any) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect garbage before the block, and none inside: what is freed there may wait for the device."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CudaReplay:
    """A captured CUDA graph. num_bytes: see Replay."""

    def __init__(self, graph: torch.cuda.CUDAGraph, num_bytes: int) -> None:
        self.graph, self.num_bytes = graph, num_bytes

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self.graph.replay()


class CudaCapturer:
    """Captures CUDA graphs on `device`, all on one stream: only so do they share memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def capture(self, work: Callable[[], None], beside: Replay | None) -> CudaReplay:
        """Record the work as a graph; see Capturer. Errors of the work are raised as they are.

        Other threads may use the device meanwhile; those that wait for all of it wait for the recording first.
        """
        with torch.cuda.device(self._device):
            self._stream = stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
            current = torch.cuda.current_stream()
            stream.wait_stream(current)
            try:
                with torch.cuda.stream(stream):
                    work()
                    with WaitFinder():  # type: ignore[no-untyped-call, unused-ignore]
                        work()
                    with no_garbage_collection():
                        return self._record(work, beside)
            finally:
                current.wait_stream(stream)

    def release_memory(self) -> None:
        """Give the device back what torch's allocator keeps of captures that failed."""
        with torch.cuda.device(self._device):
            torch.cuda.empty_cache()

    def _record(self, work: Callable[[], None], beside: Replay | None) -> CudaReplay:
        graph = torch.cuda.CUDAGraph()
        pool = beside.graph.pool() if isinstance(beside, CudaReplay) else None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # of the runs before
        free, _ = torch.cuda.mem_get_info()
        with CAPTURING:
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # of a recording that is broken; the first error counts
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.synchronize()
        return CudaReplay(graph, max(free - torch.cuda.mem_get_info()[0], 0))
