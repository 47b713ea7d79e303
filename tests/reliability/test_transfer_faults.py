"""The schedules of transfers find what they are for: streams and servers that leave something out are caught."""

import contextlib
import warnings

import pytest
from battery_transfers import Schedule
from fake_device import FakeEvent, FakeStream


class Hasty(FakeStream):
    """Does not wait for the computation."""

    def wait_current(self):
        pass


class EarlyEvent(FakeEvent):
    def is_done(self):
        return True


class Early(FakeStream):
    """Its events say that they have passed before they have."""

    def record(self):
        event = super().record()
        return EarlyEvent(event._device, event._point)


class NoWait(FakeEvent):
    def wait_stream(self, stream):
        pass


class Unordered(FakeStream):
    """The computation does not wait for it."""

    def record(self):
        event = super().record()
        return NoWait(event._device, event._point)


def is_caught(num_schedules: int, **options) -> bool:
    for seed in range(num_schedules):
        schedule, caught = Schedule(seed, **options), True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.suppress(Exception):
                schedule.run()
                caught = False
            schedule.close()
        if caught:
            return True
    return False


@pytest.mark.parametrize(
    "options",
    [{"make_stream": Hasty}, {"make_stream": Early}, {"make_stream": Unordered}, {"with_pins": False}],
    ids=["hasty", "early", "unordered", "unpinned"],
)
def test_a_fault_is_caught(options):
    assert is_caught(300, **options)
