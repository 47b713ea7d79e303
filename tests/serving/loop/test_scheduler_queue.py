"""The scheduler's queue: who is in it after a restart, and who is admitted from it."""

import pytest
from support.scheduler_steps import request_of, scheduler_of, step


def test_after_a_restart_everything_is_computed_again():
    """What runs, what is swapped out and what waits: in the order in which they came, and without a block."""
    scheduler = scheduler_of(7, max_num_seqs=2, num_host_blocks=8, enable_prefix_caching=False)
    for number in range(3):
        scheduler.add(request_of(number, 7, max_tokens=3))
    step(scheduler)
    scheduler.preempt_youngest()
    assert scheduler.manager.is_swapped("r1") and len(scheduler.running) == 1
    scheduler.restart()
    assert [request.request_id for request in scheduler.waiting] == ["r0", "r1", "r2"] and not scheduler.running
    assert scheduler.manager.num_free_blocks == 7 and scheduler.manager.space.host_pool.num_free == 8
    assert not scheduler.manager.is_swapped("r1")
    scheduler.manager.take_moves()
    assert step(scheduler) == [("r0", 0, 8), ("r1", 0, 8)]


@pytest.mark.parametrize("tried", [[], [0], [1], [2], [0, 2], [2, 1]])
def test_only_those_that_are_tried_are_admitted(tried):
    scheduler = scheduler_of()
    requests = [request_of(number, 5) for number in range(3)]
    for request in requests[:2]:
        scheduler.add(request)
    scheduler.add(requests[2])
    expected = [number for number in range(3) if not tried or number in tried]
    assert step(scheduler, [requests[number] for number in tried]) == [(f"r{number}", 0, 5) for number in expected]
