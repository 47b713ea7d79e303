"""Arrays of the host on a CUDA device in one copy, and numbers of the device on the host: nothing waits but `wait`.

arrays    [ 5 7 ]      [[ 0 1 ] [ 4 2 ]]      [ 3 9 ]
pinned    | 5 7 | 0 1 4 2 | 3 9 |     ── one copy ──►     the same memory on the device, cut into views
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT = 16
"""Bytes: each array begins at a multiple of it, as kernels that load several numbers at once want it."""


def upload(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Return the arrays on `device`, all in one copy from pinned memory; on a CPU they are the arrays' own memory.

    The copy is ordered on the current stream. Torch uses the pinned memory again once the copy is done.

    Args:
        arrays: Contiguous arrays of any numbers.
        device: A CPU or a CUDA device.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    places = _places(arrays)
    pinned = torch.empty(places[-1], dtype=torch.uint8, pin_memory=True)
    bytes_of = pinned.numpy()
    for array, begin in zip(arrays, places, strict=False):
        bytes_of[begin : begin + array.nbytes] = array.reshape(-1).view(np.uint8)
    packed = pinned.to(device, non_blocking=True)
    return [_cut(packed, array, begin) for array, begin in zip(arrays, places, strict=False)]


def _places(arrays: Sequence[npt.NDArray[Any]]) -> list[int]:
    """Return where each array begins, in bytes, and where the last one ends."""
    places = [0]
    for array in arrays:
        places.append(places[-1] + -(-array.nbytes // ALIGNMENT) * ALIGNMENT)
    return places


def _cut(packed: torch.Tensor, array: npt.NDArray[Any], begin: int) -> torch.Tensor:
    dtype = torch.from_numpy(array[:0].reshape(-1)).dtype
    return packed[begin : begin + array.nbytes].view(dtype).view(array.shape)


class Fetch:
    """Numbers of a device on their way to the host.

    The copy is ordered on the current stream: whatever overwrites the numbers later, on that stream, comes after it.

    Args:
        numbers: A tensor on a CPU or a CUDA device.
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if numbers.device.type == "cpu":
            self._host = numbers.clone()
            return
        self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        self._host.copy_(numbers, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]  # not annotated
        self._event.record(torch.cuda.current_stream(numbers.device))

    def wait(self) -> npt.NDArray[Any]:
        """Return the numbers once they have come. It waits for all earlier work of the stream, and for no later."""
        if self._event is not None:
            self._event.synchronize()  # type: ignore[no-untyped-call, unused-ignore]
        numbers: npt.NDArray[Any] = self._host.numpy()
        return numbers
