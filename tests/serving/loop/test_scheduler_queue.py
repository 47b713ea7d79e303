"""The scheduler's queue: who is in it after a restart, and who is admitted from it."""

import pytest
from support.scheduler_steps import request_of, scheduler_of, step

from kvpage.serving.loop.request import Request
from kvpage.serving.text.token_logprobs import ScoredPrompt


def test_after_a_restart_everything_is_computed_again():
    """What runs, what is swapped out and what waits: in the order in which they came, and without a block."""
    scheduler = scheduler_of(7, max_num_seqs=2, num_host_blocks=8, enable_prefix_caching=False)
    for number in range(3):
        scheduler.add(request_of(number, 7, max_tokens=3))
    step(scheduler)
    scheduler.preempt_last()
    assert scheduler.manager.is_swapped("r1") and len(scheduler.running) == 1
    scheduler.restart()
    assert [request.request_id for request in scheduler.waiting] == ["r0", "r1", "r2"] and not scheduler.running
    assert scheduler.manager.num_free_blocks == 7 and scheduler.manager.space.host_pool.num_free == 8
    assert not scheduler.manager.is_swapped("r1")
    scheduler.manager.take_moves()
    assert step(scheduler) == [("r0", 0, 8), ("r1", 0, 8)]


def ranked(number: int, priority: int, num_tokens: int = 5, max_tokens: int = 8) -> Request:
    """A request as `request_of` makes it, with a priority."""
    request = request_of(number, num_tokens, max_tokens=max_tokens)
    return Request(request.request_id, request.prompt.copy(), request.params, number, priority=priority)


def ids(requests: list[Request]) -> list[str]:
    return [request.request_id for request in requests]


def test_a_restart_has_those_that_wait_looked_at_anew():
    scheduler = scheduler_of()
    scheduler.add(request_of(0, 5))
    before = scheduler.num_queued
    scheduler.restart()
    assert scheduler.num_queued > before and ids(scheduler.waiting) == ["r0"]


def test_those_that_decode_go_stale_and_run_on_through_a_restart():
    """A prefill begins again, and so does a request that still scores its prompt."""
    scheduler = scheduler_of(budget=16)
    requests = [request_of(number, num_tokens) for number, num_tokens in enumerate((5, 5, 30))]
    for request in requests[:2]:
        scheduler.add(request)
    step(scheduler)
    requests[1].scored = ScoredPrompt(5, 0, 64)
    scheduler.add(requests[2])
    assert step(scheduler) == [("r0", 5, 6), ("r1", 5, 6), ("r2", 0, 14)]
    assert scheduler.go_stale() == 1 and [request.is_stale for request in requests] == [True, False, False]
    scheduler.restart(keeps_stale=True)
    assert ids(scheduler.running) == ["r0"] and ids(scheduler.waiting) == ["r1", "r2"]
    assert step(scheduler)[0] == ("r0", 6, 7)
    scheduler.restart()
    assert not scheduler.running and ids(scheduler.waiting) == ["r0", "r1", "r2"] and not requests[0].is_stale


def test_lower_numbers_come_first_and_the_others_in_order_of_arrival():
    scheduler = scheduler_of(max_num_seqs=2)
    for number, priority in enumerate([0, 5, -1, 0, -1, 5]):
        scheduler.add(ranked(number, priority))
    assert ids(scheduler.waiting) == ["r2", "r4", "r0", "r3", "r1", "r5"]
    assert step(scheduler) == [("r2", 0, 5), ("r4", 0, 5)]


def test_the_last_in_order_is_preempted_first():
    scheduler = scheduler_of()
    for number, priority in enumerate([3, 0, 3, 1]):
        scheduler.add(ranked(number, priority))
    step(scheduler)
    preempted = []
    while scheduler.running:
        before = ids(scheduler.running)
        scheduler.preempt_last()
        preempted += set(before) - set(ids(scheduler.running))
    assert preempted == ["r2", "r0", "r3", "r1"] and ids(scheduler.waiting) == preempted[::-1]


@pytest.mark.parametrize(
    ("num_blocks", "max_num_seqs", "num_left"),
    [(64, 3, 2), (64, 4, 3), (8, 8, 2), (10, 8, 2), (11, 8, 3), (64, 8, 3)],
)
def test_a_waiting_request_preempts_only_those_after_it_and_only_if_it_must(num_blocks, max_num_seqs, num_left):
    """There are too few places, too few blocks (2 each, and one to go on), or enough."""
    scheduler = scheduler_of(num_blocks, max_num_seqs, enable_prefix_caching=False)
    for number in range(3):
        scheduler.add(ranked(number, 1))
    step(scheduler)
    assert len(scheduler.running) == 3 and not scheduler.has_urgent
    scheduler.add(ranked(3, 1))
    step(scheduler)
    assert {"r0", "r1", "r2"} <= set(ids(scheduler.running))
    scheduler.requeue([request for request in scheduler.running if request.request_id == "r3"])
    scheduler.add(ranked(4, 0))
    assert scheduler.has_urgent
    before = scheduler.preemptions[0]
    step(scheduler)
    assert scheduler.preemptions[0] - before == 3 - num_left
    assert "r4" in ids(scheduler.running)
    assert [one for one in ids(scheduler.running) if one in {"r0", "r1", "r2"}] == ["r0", "r1", "r2"][:num_left]
    while scheduler.running or scheduler.waiting:
        step(scheduler)


def test_a_long_prefill_waits_for_one_that_comes_before_it():
    scheduler = scheduler_of(budget=8)
    scheduler.add(ranked(0, 1, num_tokens=30))
    assert step(scheduler) == [("r0", 0, 8)]
    scheduler.add(ranked(1, 0, num_tokens=6, max_tokens=1))
    assert step(scheduler) == [("r1", 0, 6), ("r0", 8, 10)]
    assert step(scheduler) == [("r0", 10, 18)]
    scheduler.add(ranked(2, 1, num_tokens=6))
    assert step(scheduler) == [("r0", 18, 26)]


@pytest.mark.parametrize("tried", [[], [0], [1], [2], [0, 2], [2, 1]])
def test_only_those_that_are_tried_are_admitted(tried):
    scheduler = scheduler_of()
    requests = [request_of(number, 5) for number in range(3)]
    for request in requests[:2]:
        scheduler.add(request)
    scheduler.add(requests[2])
    expected = [number for number in range(3) if not tried or number in tried]
    assert step(scheduler, [requests[number] for number in tried]) == [(f"r{number}", 0, 5) for number in expected]


def test_a_step_for_some_requests_preempts_for_no_other():
    scheduler = scheduler_of(max_num_seqs=1)
    tried = ranked(0, 1)
    scheduler.add(tried)
    step(scheduler)
    scheduler.add(ranked(1, 0))
    assert step(scheduler, [tried]) == [("r0", 5, 6)]
    assert step(scheduler) == [("r1", 0, 5)]


def test_a_request_may_be_admitted_where_it_has_a_place_or_takes_one():
    scheduler = scheduler_of(max_num_seqs=1)
    assert not scheduler.may_admit
    scheduler.add(ranked(0, 1))
    assert scheduler.may_admit
    step(scheduler)
    assert not scheduler.may_admit
    scheduler.add(ranked(1, 1))
    assert not scheduler.may_admit
    scheduler.add(ranked(2, 0))
    assert scheduler.may_admit


@pytest.mark.parametrize("is_stale", [False, True])
@pytest.mark.parametrize("scores", [False, True])
def test_one_that_must_begin_again_is_not_swapped(is_stale, scores):
    """K and V of older weights are no good, and a prompt's scores come from computing all of it."""
    scheduler = scheduler_of(num_host_blocks=8, enable_prefix_caching=False)
    request = request_of(0, 5)
    scheduler.add(request)
    step(scheduler)
    request.is_stale, request.scored = is_stale, ScoredPrompt(5, 0, 64) if scores else None
    scheduler.preempt_last()
    assert scheduler.manager.is_swapped("r0") == scheduler.preemptions.num_swaps == (not is_stale and not scores)
    scheduler.manager.take_moves()
    assert scheduler.manager.num_free_blocks == 64


def test_those_that_decode_together_are_planned_once():
    scheduler, planned = scheduler_of(), []
    for number in range(2):
        scheduler.add(request_of(number, 5, max_tokens=3 + number))
    while scheduler.running or scheduler.waiting:
        batch = scheduler.schedule()
        planned.append(batch.decodes)
        scheduler.manager.take_moves()
        scheduler.complete(batch)
        for portion in batch.portions:
            if portion.request.append(7, now=0.0):
                scheduler.finish(portion.request)
    assert len(planned) == 4 and planned[1] is planned[2] and planned[2] is not planned[3]
