"""The scheduler with states: samples without room for theirs begin again; prompts that wait find what they share."""

import pytest
from support.scheduler_steps import B, request_of, step
from support.state_engines import check_nothing_held, finished, greedy, make_engine, own_tokens, random_prompt
from support.state_models import make_state_model

from kvpage.blocks.hybrid.manager import HybridManager
from kvpage.serving import StateConfig
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


@pytest.mark.parametrize("budget", [64, 2 * B])
def test_prompts_that_wait_for_each_other_find_what_they_share(budget: int) -> None:
    """Nobody has marked the end of what is common. It is no whole block, and the second prompt finds it."""
    model, common = make_state_model("lfm2"), random_prompt(3 * B + 2)
    prompts = [[*common, 5, 6, 7], [*common, 8, 9], [*common[: 2 * B + 1], 1, 2, 3]]
    engine = make_engine(model, max_num_batched_tokens=budget)
    for prompt in prompts:
        engine.add_request(prompt, greedy(3))
    outputs = sorted(finished(engine), key=lambda one: int(one.request_id.rpartition("-")[2]))
    assert [one.num_cached_tokens for one in outputs] == [0, len(common), 2 * B + 1]
    assert [one.samples[0].token_ids for one in outputs] == [own_tokens(model, prompt, 3) for prompt in prompts]
    check_nothing_held(engine)


def test_without_checkpoints_nobody_waits() -> None:
    engine = make_engine(make_state_model("lfm2"), states=StateConfig(checkpoint_bytes=0))
    for last in range(3):
        engine.add_request([*random_prompt(2 * B), last, 9], greedy(2))
    engine.step()
    assert len(engine.scheduler.running) == 3
