"""TransferStream: an order of work beside the computation, on a CUDA stream or on a thread.

    computation   ──A──●───────B────────────────●───C──►     ● wait_current: work that is submitted next comes after A
    the stream         └──work──event──work──event──►          event.wait_stream: C comes after the work

Work runs in the order in which it was submitted. An event has passed when all work submitted before it is done. The
rest of kvpage knows streams by these two protocols alone, so that a test can put its own in their place.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch


class TransferEvent(Protocol):
    """A point in a stream's order. Each method raises RuntimeError if the device has failed."""

    def is_done(self) -> bool:
        """Return whether it has passed. False also where the device cannot be asked: while a graph is captured."""

    def wait(self) -> None:
        """Wait until it has passed.

        Raises:
            ValueError: A graph is captured.
        """

    def wait_stream(self, stream: torch.cuda.Stream | None) -> None:
        """Order a stream's further work after this point. Where the computation runs on the host, the caller waits.

        Args:
            stream: The stream; None for the current one.

        Raises:
            ValueError: The stream captures a graph.
        """

    def seconds_since(self, earlier: Any) -> float:
        """Return the seconds from an earlier event of the same stream to this one. Both have passed.

        Args:
            earlier: The earlier event.
        """


class TransferStream(Protocol):
    """Does work in the order in which it was submitted, beside the caller."""

    def wait_current(self) -> None:
        """Order further submitted work after the work that the caller's current stream has by now.

        Raises:
            ValueError: That stream captures a graph.
        """

    def submit(self, work: Callable[[], None]) -> None:
        """Have `work` called, and wait in order for the work that it enqueues on the current stream.

        Args:
            work: A function that must not raise.
        """

    def record(self) -> TransferEvent:
        """Return the point after all work submitted so far."""

    def close(self, last: Callable[[], None]) -> None:
        """Wait until all submitted work is done, call `last`, and end the stream.

        Args:
            last: The last work.
        """


def open_stream(device: torch.device) -> TransferStream:
    """Return a new stream for a device."""
    return CudaStream(device) if device.type == "cuda" else HostStream()


def current_point(device: torch.device) -> TransferEvent:
    """Return the point after all work that the caller's current stream has by now."""
    if device.type == "cuda":
        event = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]  # torch does not annotate it
        event.record(torch.cuda.current_stream(device))
        return CudaEvent(event, device)
    passed: Future[float] = Future()
    passed.set_result(time.perf_counter())
    return HostEvent(passed)


class CudaEvent:
    """An event of a CUDA stream."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def is_done(self) -> bool:
        if _is_capturing(self._device):  # a query would end the capture with an error
            return False
        return bool(self._event.query())  # type: ignore[no-untyped-call, unused-ignore]  # torch does not annotate it

    def wait(self) -> None:
        _check_not_capturing(self._device)
        self._event.synchronize()

    def wait_stream(self, stream: torch.cuda.Stream | None) -> None:
        waiting = stream or torch.cuda.current_stream(self._device)
        with torch.cuda.stream(waiting):
            _check_not_capturing(waiting.device)
        waiting.wait_event(self._event)

    def seconds_since(self, earlier: "CudaEvent") -> float:
        return float(earlier._event.elapsed_time(self._event)) / 1000


class CudaStream:
    """A CUDA stream that does not wait for the null stream by itself, and orders itself by events with any other.

    Raises:
        ValueError: A graph is captured.
    """

    def __init__(self, device: torch.device) -> None:
        _check_not_capturing(device)
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]  # torch does not annotate it

    def wait_current(self) -> None:
        _check_not_capturing(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def submit(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def record(self) -> CudaEvent:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call, unused-ignore]  # torch does not annotate it
        event.record(self._stream)
        return CudaEvent(event, self._device)

    def close(self, last: Callable[[], None]) -> None:
        self._stream.synchronize()
        last()


class HostEvent:
    """A point in the order of a thread's work."""

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
    """One thread, started for the first work and ended by `close`, or when the stream is forgotten.

    A forked child has no thread of its parent's. The stream starts one of its own there; work submitted before the fork
    is the parent's to do. At the end of the interpreter all submitted work is still done.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._pid = 0

    def wait_current(self) -> None:
        """Do nothing: the host's computation is done when its call returns."""

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
