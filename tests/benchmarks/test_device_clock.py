"""DeviceClock on a simulated device: the host's launches are in no time of the device that is called hidden."""

import pytest

from kvpage.benchmarks.device_clock import LONGEST_DELAY, DeviceClock

CYCLE = 5e-10  # seconds


class Event:
    def __init__(self, device):
        self.device, self.at = device, 0.0

    def record(self):
        self.at = self.device.busy_until = max(self.device.busy_until, self.device.now)

    def query(self):
        return self.device.now >= self.at

    def synchronize(self):
        self.device.now = max(self.device.now, self.at)

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


class SimulatedDevice:
    """Two clocks: `now` is the host's, `busy_until` the device's. The queue holds as many launches as a real one."""

    def __init__(self, capacity=1000):
        self.now = self.busy_until = 0.0
        self.capacity, self.ends = capacity, []

    def sleep(self, cycles):
        self.launch(0.0, cycles * CYCLE)

    def event(self):
        return Event(self)

    def launch(self, host_seconds, device_seconds):
        self.now += host_seconds
        self.ends = [end for end in self.ends if end > self.now]
        if len(self.ends) >= self.capacity:
            self.now = self.ends[-self.capacity]
        self.busy_until = max(self.busy_until, self.now) + device_seconds
        self.ends.append(self.busy_until)

    def wait(self):
        self.now = max(self.now, self.busy_until)


@pytest.mark.parametrize("host_seconds", [1e-6, 3e-4, 5e-3])
def test_launches_are_hidden_however_long_they_take(host_seconds):
    device = SimulatedDevice()
    clock = DeviceClock(device)
    for _ in range(2):
        timing = clock.time("call", lambda: device.launch(host_seconds, 2e-5), 10)
        assert timing.is_hidden and timing.seconds == pytest.approx(2e-5)


def test_a_delay_that_was_long_enough_is_remembered():
    device = SimulatedDevice()
    clock, slept = DeviceClock(device), []
    sleep, device.sleep = device.sleep, lambda cycles: slept.append(cycles) or sleep(cycles)
    for _ in range(3):
        clock.time("call", lambda: device.launch(1e-3, 1e-5), 10)
    tries = len(slept) - 2
    assert tries > 1 and slept[-2:] == [slept[tries - 1]] * 2
    clock.time("another", lambda: device.launch(1e-6, 1e-5), 10)
    assert slept[-1] == slept[0]


def test_a_queue_that_is_full_takes_fewer_calls():
    device = SimulatedDevice(capacity=1000)

    def call():
        for _ in range(300):
            device.launch(3e-6, 1e-6)

    timing = DeviceClock(device).time("call", call, 10)
    assert timing.is_hidden and timing.seconds == pytest.approx(3e-4)


def test_a_call_that_waits_is_never_called_hidden():
    device = SimulatedDevice()

    def call():
        device.launch(1e-4, 1e-5)
        device.wait()

    timing = DeviceClock(device).time("call", call, 10)
    assert not timing.is_hidden and LONGEST_DELAY * CYCLE > 0.1
