"""The scheduler with states: samples for whose states there is no room wait, and begin again."""

import pytest
from support.scheduler_steps import B, request_of, step

from kvpage.blocks.hybrid.manager import HybridManager
from kvpage.serving.loop.scheduler import Scheduler


def scheduler_of(num_slots: int, max_num_seqs: int = 4) -> Scheduler:
    return Scheduler(HybridManager(64, B, num_slots=num_slots), max_num_seqs, 64)


@pytest.mark.parametrize("num_held", [0, 1, 2, 3])
def test_a_fork_without_a_slot_waits(num_held: int) -> None:
    """Others hold slots: loads of a store, saves, branches."""
    scheduler = scheduler_of(4)
    manager = scheduler.manager
    for number in range(num_held):
        manager.allocate(("held", number), [number + 1] * 5)
    first = request_of(0, 9, n=3, max_tokens=4)
    scheduler.add(first)
    batch = scheduler.schedule()
    forks = first.forks()
    manager.take_moves()
    scheduler.complete(batch)
    scheduler.fork(first, forks)
    num_running = min(3, 4 - num_held)
    assert scheduler.running == [first, *forks][:num_running]
    assert scheduler.waiting == [first, *forks][num_running:]
    assert first.num_forks_due == 0 and first.group.samples == [first, *forks]
    for request in (first, *forks):
        request.append(7, now=0.0)
    while scheduler.running or scheduler.waiting:
        step(scheduler)
    assert manager.stats().num_sequences == num_held
    assert [request.finish_reason for request in (first, *forks)] == ["length"] * 3


def test_a_waiting_fork_ends_like_the_others() -> None:
    scheduler = scheduler_of(1)
    request = request_of(0, 9, n=2, max_tokens=1)
    scheduler.add(request)
    scheduler.complete(scheduler.schedule())
    forks = request.forks()
    scheduler.fork(request, forks)
    for one in (request, *forks):
        assert one.append(7, now=0.0) == "length"
        scheduler.keep_state(one)
        scheduler.finish(one)
    assert not scheduler.running and not scheduler.waiting and scheduler.manager.stats().num_sequences == 0
    scheduler.manager.check()
