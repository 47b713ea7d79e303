"""The schedules of transfers find what they are for: streams and servers that leave something out are caught."""

import contextlib
import warnings

import pytest
from battery_transfers import Schedule
from fake_device import FakeEvent, FakeStream, Lane, Point


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


def test_nothing_is_caught_without_a_fault():
    assert not is_caught(50)


def test_a_lane_waits_and_keeps_the_order_of_its_batches():
    schedule = Schedule(0)
    first, second, log = Lane(schedule.rng), Lane(schedule.rng), []
    first.put([lambda: log.append("a"), lambda: log.append("b")])
    second.put(first.point())
    second.put([lambda: log.append("c")])
    assert not second.can_step() and not Point(first, 1).is_reached()
    first.step()
    assert not second.can_step() and len(log) == 1
    first.step()
    second.step()
    second.step()
    assert sorted(log[:2]) == ["a", "b"] and log[2] == "c" and not second.can_step() and not first.can_step()
