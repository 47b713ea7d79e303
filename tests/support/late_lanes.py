"""Streams that do their work late: lanes of a store without a GPU, where a byte that nobody waited for is poison."""

import random
import threading
from collections import deque
from collections.abc import Callable

import torch

from kvpage.store.load.device.device_lanes import LanePool

POISON = 0xA5


class LateLanes:
    """All lanes of a pool. Work is done when somebody waits for it, and some of other lanes with it: dice say which.

    failing_work: the number of the work that raises. failing_submit: of the work that is refused.
    failing_wait: the number of the wait in which Ctrl-C comes.
    is_hasty: events do not wait. log: "ready" or "work" by lane, in the order in which they were done.
    """

    def __init__(
        self,
        seed: int = 0,
        pinned: bool = True,
        failing_work: int | None = None,
        failing_wait: int | None = None,
        is_hasty: bool = False,
    ) -> None:
        self.rng, self.lock = random.Random(seed), threading.RLock()
        self.streams: list[LateStream] = []
        self.failing_work, self.failing_wait, self.is_hasty = failing_work, failing_wait, is_hasty
        self.failing_submit: int | None = None
        self.num_works = self.num_waits = self.num_marks = self.num_submits = 0
        self.pool = LanePool(self._stream, self._rooms, self._mark, lambda tensor: pinned)

    def is_idle(self) -> bool:
        return not any(stream.line for stream in self.streams)

    def do_any(self) -> None:
        stream = self.rng.choice([stream for stream in self.streams if stream.line])
        work = stream.line.popleft()
        self.num_works += 1
        if self.num_works == self.failing_work:
            work = self._failing(work)
        stream.log.append("work")
        self.current = stream
        work()
        stream.num_done += 1

    def _failing(self, work: Callable[[], None]) -> Callable[[], None]:
        """Make the function within a pipeline's own function fail, which takes the error."""
        do, *_ = work.args

        def fail() -> None:
            raise RuntimeError(f"copy {self.num_works} has failed, before {do}")

        return lambda: work.func(fail)

    def _stream(self, device: torch.device) -> "LateStream":
        self.streams.append(LateStream(self))
        return self.streams[-1]

    def _rooms(self, device: torch.device, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.full((num_bytes,), POISON, dtype=torch.uint8) for _ in range(2))

    def _mark(self, device: torch.device) -> "LateMark":
        self.num_marks += 1
        return LateMark(self)


class LateStream:
    def __init__(self, lanes: LateLanes) -> None:
        self._lanes = lanes
        self.line: deque[Callable[[], None]] = deque()
        self.log: list[str] = []
        self.num_put = self.num_done = 0
        self.waits_for_rooms = False

    def wait_current(self) -> None:
        assert not self.num_put, "a lane waits for the stream that its rooms are of before it touches them"
        self.waits_for_rooms = True

    def submit(self, work: Callable[[], None]) -> None:
        assert self.waits_for_rooms, "memory of the rooms may still be worked on"
        with self._lanes.lock:
            self._lanes.num_submits += 1
            if self._lanes.num_submits == self._lanes.failing_submit:
                raise RuntimeError("the stream takes no more work")
            self.line.append(work)
            self.num_put += 1

    def record(self) -> "LateEvent":
        return LateEvent(self._lanes, self, self.num_put)


class LateEvent:
    def __init__(self, lanes: LateLanes, stream: LateStream, at: int) -> None:
        self._lanes, self._stream, self._at = lanes, stream, at

    def wait(self) -> None:
        lanes = self._lanes
        with lanes.lock:
            lanes.num_waits += 1
            if lanes.num_waits == lanes.failing_wait:
                raise KeyboardInterrupt
            self._reach()

    def wait_stream(self, stream: object) -> None:
        """The computation, which comes here at once, waits."""
        assert stream is None
        with self._lanes.lock:
            self._reach()

    def _reach(self) -> None:
        while self._stream.num_done < self._at and not self._lanes.is_hasty:
            self._lanes.do_any()


class LateMark:
    """The point that a call's lanes begin after."""

    def __init__(self, lanes: LateLanes) -> None:
        self._lanes = lanes

    def wait_stream(self, stream: object) -> None:
        assert stream is None, "the lane that does this work is the current stream"
        self._lanes.current.log[-1] = "ready"
