"""DevicePipeline: the runs of one chunk between a GPU's blocks and host memory, hashed while the next ones are copied.

store    lane 0   [ gather 0 ][ copy 0 ]               [ gather 3 ][ copy 3 ]
         lane 1       [ gather 1 ]      [ copy 1 ]
         lane 2           [ gather 2 ]           [ copy 2 ]
         host                            [ hash 0 ][ hash 1 ][ hash 2 ] ...           straight out of a pinned slab

load     host     [ hash 0 ][ hash 1 ][ hash 2 ] ...                                  straight out of a pinned slab
         lanes    [ copy 0 ][ copy 1 ][ copy 2 ]       [ scatter ] of each behind its copy

Memory that is not pinned is reached by a lane's own pinned room. The host then copies and hashes in one pass.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvpage.cache.transfer_stream import TransferEvent
from kvpage.store.load.device.device_lanes import Lane, LanePool
from kvpage.store.load.device.layer_copies import LayerCopies, Work
from kvpage.store.tiers.stretches import digests_of, gather_stretches, runs_of


class DeviceRun(NamedTuple):
    """Whole stretches of a payload that are copied at once.

    data: their bytes in host memory.
    move: gathers them from the blocks into room on the device, uint8, or scatters them from there, on the current
        stream.
    """

    data: memoryview
    move: Callable[[torch.Tensor], None]


class _Job:
    """A run under way in a lane. Its error is raised when it is waited for."""

    def __init__(self, run: DeviceRun, lane: Lane) -> None:
        self.run, self.lane = run, lane
        self._error: Exception | None = None
        self._event: TransferEvent | None = None

    def submit(self, *works: Callable[[], object]) -> None:
        try:
            for work in works:
                self.lane.stream.submit(partial(self._do, work))
        finally:  # the event covers all work that has begun
            self._event = self.lane.stream.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.wait()

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _do(self, work: Callable[[], object]) -> None:
        if self._error is None:  # otherwise the rest is of no use
            try:
                work()
            except Exception as error:  # perhaps on a stream's thread
                self._error = error


class DevicePipeline:
    """One way for the chunks of an engine's blocks. ready: the work after which the blocks may be read or written."""

    def __init__(self, pool: LanePool, device: torch.device, ready: TransferEvent) -> None:
        self._pool, self._device, self._ready = pool, device, ready

    def store(self, runs: Sequence[DeviceRun], stretch_bytes: int, num_threads: int, streaming: bool) -> bytes:
        """Copy runs out of the blocks to their memory, and return the digests of all stretches.

        All is done on return. After an error nothing is written any more.
        """
        digest = partial(self._digest_stored, stretch_bytes, num_threads, streaming)
        return self._run(runs, self._fetch, digest, lambda run, lane: b"")

    def load(self, runs: Sequence[DeviceRun], stretch_bytes: int, num_threads: int) -> bytes:
        """Copy runs from their memory into the blocks, and return the digests of all stretches, of the copied bytes.

        All is done on return. After an error nothing is read or written any more.
        """
        stage = partial(self._stage, stretch_bytes, num_threads)
        hash_direct = partial(self._digest_direct, stretch_bytes, num_threads)
        return self._run(runs, partial(self._send, stage), lambda job: b"", hash_direct)

    def is_pinned(self, data: memoryview) -> bool:
        """Return whether a GPU's copies reach the bytes without a room in between."""
        return self._pinned(data) is not None

    @contextmanager
    def layers(self, pieces: Sequence[tuple[int, int]], runs: Sequence[Sequence[DeviceRun]]) -> Iterator[LayerCopies]:
        """Copy runs from pinned memory into the blocks, piece after piece. Inside, all are begun; on leaving, done.

        pieces: layers [first, last) of each piece. runs: of each piece. Raises the error of a copy.
        """
        room = max((len(run.data) for piece in runs for run in piece), default=0)
        with self._pool.lanes(self._device, room) as lanes:
            copies = LayerCopies(lanes, self._ready, pieces)
            try:
                copies.begin([[partial(self._copy, run) for run in piece] for piece in runs])
                yield copies
            finally:
                copies.wait()
            copies.raise_error()

    # --- inside ---

    def _copy(self, run: DeviceRun, lane: Lane) -> tuple[Work, Work]:
        on_device, source = lane.on_device[: len(run.data)], self._pinned(run.data)
        assert source is not None, "copies layer by layer are of pinned memory"
        return partial(on_device.copy_, source, non_blocking=True), partial(run.move, on_device)

    def _run(
        self,
        runs: Sequence[DeviceRun],
        begin: Callable[[_Job], bytes],
        end: Callable[[_Job], bytes],
        meanwhile: Callable[[DeviceRun, Lane], bytes],
    ) -> bytes:
        """Begin each run as soon as a lane is free; join the digests that the three return, in the runs' order."""
        room, digests, under_way = max((len(run.data) for run in runs), default=0), list[bytes](), deque[_Job]()
        with self._pool.lanes(self._device, room) as lanes:
            try:
                for number, run in enumerate(runs):
                    if len(under_way) == len(lanes):
                        digests.append(self._finish(under_way, end))
                    job = _Job(run, lanes[number % len(lanes)])
                    under_way.append(job)
                    if number < len(lanes):
                        job.submit(partial(self._ready.wait_stream, None))
                    digests.append(begin(job))
                    digests.append(meanwhile(run, job.lane))
                while under_way:
                    digests.append(self._finish(under_way, end))
            finally:
                for job in under_way:  # after an error: their memory is given back soon
                    job.wait()
        return b"".join(digests)

    @staticmethod
    def _finish(under_way: deque[_Job], end: Callable[[_Job], bytes]) -> bytes:
        job = under_way[0]
        job.wait()
        under_way.popleft()
        job.raise_error()
        return end(job)

    def _fetch(self, job: _Job) -> bytes:
        data, lane = job.run.data, job.lane
        on_device = lane.on_device[: len(data)]
        to = self._pinned(data)
        to = lane.on_host[: len(data)] if to is None else to
        job.submit(partial(job.run.move, on_device), partial(to.copy_, on_device, non_blocking=True))
        return b""

    def _digest_stored(self, stretch_bytes: int, num_threads: int, streaming: bool, job: _Job) -> bytes:
        data = job.run.data
        if self._pinned(data) is not None:
            return digests_of(data, stretch_bytes, num_threads)
        landed = runs_of(job.lane.on_host[: len(data)].numpy())
        return gather_stretches(landed, data, stretch_bytes, num_threads, streaming)

    def _send(self, stage: Callable[[DeviceRun, Lane], bytes], job: _Job) -> bytes:
        data, lane = job.run.data, job.lane
        on_device, source = lane.on_device[: len(data)], self._pinned(data)
        digests = b""
        if source is None:
            digests, source = stage(job.run, lane), lane.on_host[: len(data)]
        job.submit(partial(on_device.copy_, source, non_blocking=True), partial(job.run.move, on_device))
        return digests

    @staticmethod
    def _stage(stretch_bytes: int, num_threads: int, run: DeviceRun, lane: Lane) -> bytes:
        room = lane.on_host[: len(run.data)].numpy()
        return gather_stretches(runs_of(run.data), room, stretch_bytes, num_threads, streaming=False)

    def _digest_direct(self, stretch_bytes: int, num_threads: int, run: DeviceRun, lane: Lane) -> bytes:
        """Hash bytes during their copy out of pinned memory; a record there does not change while it is read."""
        return b"" if self._pinned(run.data) is None else digests_of(run.data, stretch_bytes, num_threads)

    def _pinned(self, data: memoryview) -> torch.Tensor | None:
        """Return the bytes as a tensor, uint8, that a GPU's copies reach; None if they do not."""
        array = np.frombuffer(data, np.uint8)
        if not array.flags.writeable:  # torch has no read-only tensors, and this one is only read
            array = np.asarray(_Unlocked(array))
        tensor = torch.from_numpy(array)
        return tensor if self._pool.is_pinned(tensor) else None


class _Unlocked:
    """Shows read-only bytes to torch as if they could be written."""

    def __init__(self, array: npt.NDArray[np.uint8]) -> None:
        self.__array_interface__ = {**array.__array_interface__, "data": (array.__array_interface__["data"][0], False)}
        self._array = array
