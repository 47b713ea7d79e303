"""LanePool: the streams and rooms through which chunks pass between a GPU's blocks and host memory.

A lane is one stream, with room for one run of layers on the device and in pinned host memory. A chunk takes a set of
NUM_LANES: while one copies, the next one gathers, and the bytes of the one before are hashed. A store keeps few sets.
One fills a bus: more would only take memory of the device.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kvpage.cache.transfer_stream import TransferEvent, TransferStream, current_point, open_stream
from kvpage.checks.interrupts import HeldInterrupts

NUM_LANES = 3
MAX_SETS = 4  # of lanes, in use at once


@dataclass(slots=True)
class Lane:
    """A stream and its rooms, uint8 each; on_host is pinned beside a GPU."""

    stream: TransferStream
    on_device: torch.Tensor
    on_host: torch.Tensor


def make_rooms(device: torch.device, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return room on a device, and in pinned host memory."""
    on_host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return torch.empty(num_bytes, dtype=torch.uint8, device=device), on_host


class LanePool:
    """Sets of lanes by device, made when they are needed and used again. Thread-safe.

    make_stream, rooms: make a lane's stream and rooms. mark: returns the point after the work of the caller's current
    stream. is_pinned: whether a GPU's copies reach host memory without a wait.
    """

    def __init__(
        self,
        make_stream: Callable[[torch.device], TransferStream] = open_stream,
        rooms: Callable[[torch.device, int], tuple[torch.Tensor, torch.Tensor]] = make_rooms,
        mark: Callable[[torch.device], TransferEvent] = current_point,
        is_pinned: Callable[[torch.Tensor], bool] = torch.Tensor.is_pinned,
    ) -> None:
        self._make_stream, self._rooms = make_stream, rooms
        self.mark, self.is_pinned = mark, is_pinned
        self._changed = threading.Condition()
        self._free: list[tuple[torch.device, list[Lane]]] = []
        self._num_used = 0

    @contextmanager
    def lanes(self, device: torch.device, num_bytes: int) -> Iterator[list[Lane]]:
        """Lend a set of lanes with so much room each. The caller has waited for their work when it gives them back.

        After an error no lane is kept: the state of the device is unknown. Ctrl-C is raised when they are given back.
        """
        with HeldInterrupts():  # a chunk takes milliseconds
            lanes = self._take(device, num_bytes)
            is_right = False
            try:
                lanes = lanes or self._make(device, num_bytes)
                yield lanes
                is_right = True
            finally:
                with self._changed:
                    self._num_used -= 1
                    if is_right:
                        self._free.append((device, lanes))
                    self._changed.notify()

    def _take(self, device: torch.device, num_bytes: int) -> list[Lane]:
        """Return a free set, or room for a new one: an empty list, which `_make` fills."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_used < MAX_SETS)
            self._num_used += 1
            for at, (lanes_device, lanes) in enumerate(self._free):
                if lanes_device == device and len(lanes[0].on_device) >= num_bytes:
                    del self._free[at]
                    return lanes
            if len(self._free) + self._num_used > MAX_SETS:
                del self._free[0]  # too small, or of another device
            return []

    def _make(self, device: torch.device, num_bytes: int) -> list[Lane]:
        lanes = [Lane(self._make_stream(device), *self._rooms(device, num_bytes)) for _ in range(NUM_LANES)]
        for lane in lanes:  # the room may be memory that the caller's stream has freed, and still works on
            lane.stream.wait_current()
        return lanes
