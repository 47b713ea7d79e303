"""A device's own time of some calls: they wait behind a delay until the host has launched them all.

    host     delay | start | call call call | end |  asks: has the delay ended?
    device   ============ delay ============ start call call call end
                                             └── elapsed time ──┘

Where the delay ended before the host was done, the device may have waited for the host: the delay is doubled, and the
calls are timed again. A call that waits itself, or launches more than a queue holds, can never be hidden: then fewer
calls are tried, and at last the time is given as one that is not hidden.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

import torch

FIRST_DELAY, LONGEST_DELAY = 2**21, 2**28  # cycles of the device: some 1 ms, and 0.15 s


class Event(Protocol):
    """As torch.cuda.Event."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end: Any, /) -> float: ...


class Device(Protocol):
    """What a clock asks of a device."""

    def sleep(self, cycles: int) -> None: ...
    def event(self) -> Event: ...


class CudaDevice:
    """The current CUDA device."""

    def sleep(self, cycles: int) -> None:
        torch.cuda._sleep(cycles)

    def event(self) -> Event:
        event: Event = torch.cuda.Event(enable_timing=True)
        return event


class Timing(NamedTuple):
    """seconds: of one call. is_hidden: whether no launch of the host is in them."""

    seconds: float
    is_hidden: bool


class DeviceClock:
    """Times calls, and remembers for each how long a delay hides its launches. device: whose time it is."""

    def __init__(self, device: Device | None = None) -> None:
        self._device = CudaDevice() if device is None else device
        self._plans: dict[Hashable, tuple[int, int]] = {}  # calls, and cycles of the delay

    def time(self, name: Hashable, call: Callable[[], object], number: int) -> Timing:
        """Return the device's time of one call, which launches work on the current stream.

        name: the same for calls that are alike. number: calls behind one delay, at most.
        """
        number, cycles = self._plans.get(name, (number, FIRST_DELAY))
        while True:
            timing = self._behind_delay(call, number, cycles)
            is_last = number == 1 and cycles >= LONGEST_DELAY
            if timing.is_hidden or is_last:
                self._plans[name] = number, cycles
                return timing
            if cycles < LONGEST_DELAY:
                cycles *= 2
            else:
                number, cycles = max(number // 4, 1), FIRST_DELAY

    def _behind_delay(self, call: Callable[[], object], number: int, cycles: int) -> Timing:
        start, end = self._device.event(), self._device.event()
        self._device.sleep(cycles)
        start.record()
        for _ in range(number):
            call()
        end.record()
        is_hidden = not start.query()
        end.synchronize()
        return Timing(start.elapsed_time(end) / 1e3 / number, is_hidden)
