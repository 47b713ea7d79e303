"""TransferStream: an order of work beside the computation, on a CUDA stream or on a thread.

    computation   ──A──●───────B────────────────●───C──►     ● wait_current: what is submitted next comes after A
    the stream         └──work──event──work──event──►          event.wait_stream: C comes after the work

Work runs in the order in which it was submitted; an event has passed when all that was submitted before it is done. The
rest of kvpage knows no more of streams than these two protocols say, so that a test can put its own in their place.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch


class TransferEvent(Protocol):
    """A point in a stream's order. RuntimeError from any of these: the device has failed."""

    def is_done(self) -> bool:
        """Whether it has passed. It may say no as long as the device cannot be asked: while a graph is captured."""

    def wait(self) -> None:
        """Until it has passed. ValueError while a graph is captured."""

    def wait_stream(self, stream: torch.cuda.Stream | None) -> None:
        """What `stream` (None: the current one) is given from now on comes after this point.

        Where the computation runs on the host, the caller waits. ValueError for a stream that captures a graph.
        """

    def seconds_since(self, earlier: Any) -> float:
        """From another event of the same stream to this one; both have passed."""


class TransferStream(Protocol):
    """Does work in the order in which it was submitted, beside the caller."""

    def wait_current(self) -> None:
        """What is submitted from now on comes after the work that the caller's current stream has by now.

        ValueError while that stream captures a graph.
        """

    def submit(self, work: Callable[[], None]) -> None:
        """Has `work`, which must not raise, done: called, and what it enqueues on the current stream, ran through."""

    def record(self) -> TransferEvent:
        """The point after all that was submitted so far."""

    def close(self, last: Callable[[], None]) -> None:
        """Calls `last` when all that was submitted is done, waits for that, and ends the stream."""


def open_stream(device: torch.device) -> TransferStream:
    return CudaStream(device) if device.type == "cuda" else HostStream()


class CudaEvent:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def is_done(self) -> bool:
        return not _is_capturing(self._device) and self._event.query()  # a query would end the capture with an error

    def wait(self) -> None:
        _check_not_capturing(self._device)
        self._event.synchronize()

    def wait_stream(self, stream: torch.cuda.Stream | None) -> None:
        waiting = stream or torch.cuda.current_stream(self._device)
        with torch.cuda.stream(waiting):
            _check_not_capturing(waiting.device)
        waiting.wait_event(self._event)

    def seconds_since(self, earlier: "CudaEvent") -> float:
        return earlier._event.elapsed_time(self._event) / 1000


class CudaStream:
    """A CUDA stream that does not wait for the null stream by itself, and orders itself by events with any other."""

    def __init__(self, device: torch.device) -> None:
        """ValueError while a graph is captured."""
        _check_not_capturing(device)
        self._device, self._stream = device, torch.cuda.Stream(device)

    def wait_current(self) -> None:
        _check_not_capturing(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def submit(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def record(self) -> CudaEvent:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return CudaEvent(event, self._device)

    def close(self, last: Callable[[], None]) -> None:
        self._stream.synchronize()
        last()


class HostEvent:
    def __init__(self, passed: "Future[float]") -> None:
        self._passed = passed  # the time

    def is_done(self) -> bool:
        return self._passed.done()

    def wait(self) -> None:
        self._passed.result()

    def wait_stream(self, stream: torch.cuda.Stream | None) -> None:
        self.wait()

    def seconds_since(self, earlier: "HostEvent") -> float:
        return self._passed.result() - earlier._passed.result()


class HostStream:
    """One thread, started when there is work for the first time and ended by close, or when the stream is forgotten.

    A forked child has no thread of its parent's: the stream starts one of its own there, and what was submitted before
    the fork is the parent's to do. At the end of the interpreter all that was submitted is still done.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._pid = 0

    def wait_current(self) -> None:
        """Nothing to wait for: what the host computes is done when its call returns."""

    def submit(self, work: Callable[[], None]) -> None:
        self._open().submit(work)

    def record(self) -> HostEvent:
        return HostEvent(self._open().submit(time.perf_counter))

    def close(self, last: Callable[[], None]) -> None:
        executor, self._executor = self._executor, None
        if executor is not None and self._pid == os.getpid():
            executor.shutdown()
        last()

    def _open(self) -> ThreadPoolExecutor:
        if self._executor is None or self._pid != os.getpid():
            self._executor, self._pid = ThreadPoolExecutor(1, "kvpage-transfer"), os.getpid()
        return self._executor


def _is_capturing(device: torch.device) -> bool:
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _check_not_capturing(device: torch.device) -> None:
    if _is_capturing(device):
        raise ValueError("stream must not be capturing a graph when blocks are moved")
