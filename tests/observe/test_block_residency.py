"""How long blocks stay, on a clock of the test's own."""

import numpy as np
import pytest

from kvpage.observe.histogram import SECONDS, Histogram
from kvpage.observe.residency import BlockResidency
from kvpage.observe.tree_watch import ChangeKind, TreeChanges

SECOND = 1_000_000_000


def changes(now: float, *entries: tuple[ChangeKind, int, int], is_restart: bool = False) -> TreeChanges:
    array = np.array(entries, np.int64).reshape(-1, 3)
    return TreeChanges(is_restart, int(now * SECOND), array, np.zeros((0, 1), np.int32), [])


def values(stats) -> list[float]:
    """The upper bounds of what was observed."""
    bounds = (*stats.bounds, float("inf"))
    return [bound for bound, count in zip(bounds, stats.counts, strict=True) for _ in range(count)]


def test_histogram_bounds_belong_to_the_range_below():
    histogram = Histogram((1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 2.5, 9.0):
        histogram.observe(value)
    stats = histogram.stats()
    assert (stats.bounds, stats.counts, stats.total, stats.count) == ((1.0, 2.0), (2, 2, 2), 16.0, 6)
    histogram.observe(0.5)
    assert stats.count == 6


def test_lifetime_and_idle_time_by_tier():
    kinds = ChangeKind
    residency = BlockResidency(1.0)
    residency.tell(changes(10, (kinds.INSERTED, 5, -1), (kinds.INSERTED, 6, 5)))
    residency.tell(changes(20, (kinds.WRITTEN, 5, 6), (kinds.LEFT_DEVICE, 6, 18 * SECOND)))
    residency.tell(changes(21, (kinds.PROMOTED, 6, 5)))
    residency.tell(changes(121, (kinds.LEFT_DEVICE, 6, 0), (kinds.LEFT_HOST, 5, 120 * SECOND), (kinds.LEFT_HOST, 3, 1)))
    device, host = residency.stats()["device"], residency.stats()["host"]
    assert device.lifetime.total == 10 + 100 and values(device.lifetime) == [10.0, 100.0]
    assert device.idle_time.total == 2 and values(device.idle_time) == [3.0]  # of one the last use is not known
    assert host.lifetime.total == 101 and values(host.lifetime) == [300.0]
    assert host.idle_time.total == 1 and values(host.idle_time) == [1.0]


def test_a_restart_forgets_when_blocks_came():
    residency = BlockResidency(1.0)
    residency.tell(changes(1, (ChangeKind.INSERTED, 5, -1)))
    residency.tell(changes(2, (ChangeKind.INSERTED, 5, -1), is_restart=True))
    residency.tell(changes(3, (ChangeKind.LEFT_DEVICE, 5, SECOND)))
    assert residency.stats()["device"].lifetime.count == 0


@pytest.mark.parametrize("rate, least, most", [(0.0, 0, 0), (0.25, 2200, 2800), (1.0, 10_000, 10_000)])
def test_sampling(rate, least, most):
    residency = BlockResidency(rate)
    residency.tell(changes(1, *((ChangeKind.INSERTED, i, -1) for i in range(10_000))))
    residency.tell(changes(2, *((ChangeKind.LEFT_DEVICE, i, SECOND) for i in range(10_000))))
    stats = residency.stats()["device"]
    assert least <= stats.lifetime.count == stats.idle_time.count <= most


def test_refused_rates():
    for rate in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=f"sample_rate must be in \\[0, 1\\], got {rate}"):
            BlockResidency(rate)


def test_the_bounds_ascend():
    assert list(SECONDS) == sorted(set(SECONDS)) and SECONDS[0] == 0.001
