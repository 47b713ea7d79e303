"""LayerCopies: chunks from pinned memory to a GPU's blocks, the first layers of all of them first.

    lane 0   [copy][scatter]        ●   [copy][scatter] ...              ● events: so far all lanes have this piece
    lane 1       [copy][scatter]    ●       [copy][scatter] ...
    piece     layer 0 of all chunks     layers 1, 2 of all chunks ...

The host only begins them. Meanwhile it hashes the same bytes, and nothing may be read from the blocks before all
digests have been right.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from kvpage.cache.transfer_stream import TransferEvent
from kvpage.store.load.device.device_lanes import Lane

Work = Callable[[], object]
CopyOf = Callable[[Lane], tuple[Work, Work]]
"""Returns a copy into a lane's room, and the scatter from there into the blocks."""


class LayerCopies:
    """Copies under way in a set of lanes. One thread begins them and waits; any thread may order a stream after them.

    lanes: lent until `wait` has returned. ready: the point after which the blocks may be written. pieces: runs of
    layers [first, last), in order. A call raises the first error of a copy.
    """

    def __init__(self, lanes: Sequence[Lane], ready: TransferEvent, pieces: Sequence[tuple[int, int]]) -> None:
        self._lanes, self._ready = lanes, ready
        self._piece_of = [number for number, (first, last) in enumerate(pieces) for _ in range(first, last)]
        self._events: list[list[TransferEvent]] = []  # of each piece, one a lane
        self._error: Exception | None = None

    def begin(self, pieces: Sequence[Sequence[CopyOf]]) -> None:
        """Begin the copies of each piece, in order. If one cannot be begun, copies before it are under way."""
        for lane in self._lanes:
            self._submit(lane, partial(self._ready.wait_stream, None))
        number = 0
        for piece in pieces:
            for copy in piece:
                lane = self._lanes[number % len(self._lanes)]
                self._submit(lane, *copy(lane))
                number += 1
            self._events.append([lane.stream.record() for lane in self._lanes])
        self.raise_error()

    def wait_layer(self, layer: int, stream: torch.cuda.Stream | None = None) -> None:
        """Order a stream's further work (None: the current one's) after the copies of a layer and of all before it."""
        for event in self._events[self._piece_of[layer]]:
            event.wait_stream(stream)
        self.raise_error()

    def wait_stream(self, stream: torch.cuda.Stream | None = None) -> None:
        """Order a stream's further work (None: the current one's) after all copies."""
        self.wait_layer(len(self._piece_of) - 1, stream)

    def wait(self) -> None:
        """Wait until nothing that was begun is under way, also after an error."""
        for lane in self._lanes:
            lane.stream.record().wait()

    def raise_error(self) -> None:
        """Raise the first error of a copy, if one is known."""
        if self._error is not None:
            raise self._error

    def _submit(self, lane: Lane, *works: Work) -> None:
        for work in works:
            lane.stream.submit(partial(self._do, work))

    def _do(self, work: Work) -> None:
        if self._error is None:  # otherwise the rest is of no use
            try:
                work()
            except Exception as error:  # perhaps on a stream's thread
                self._error = error
