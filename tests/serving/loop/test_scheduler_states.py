"""The scheduler with states: samples without room for theirs begin again; prompts that wait find what they share."""

import pytest
from support.hybrid_requests import serve
from support.managers import manager_of_states
from support.scheduler_steps import B, request_of, step
from support.state_engines import check_nothing_held, finished, greedy, make_engine, own_tokens, random_prompt
from support.state_models import make_state_model

from kvpage.serving import SamplingParams, StateConfig
from kvpage.serving.loop.request import Request
from kvpage.serving.loop.scheduler import Scheduler
from kvpage.serving.text.token_logprobs import ScoredPrompt


def scheduler_of(num_slots: int, max_num_seqs: int = 4) -> Scheduler:
    return Scheduler(manager_of_states(64, B, num_slots=num_slots), max_num_seqs, 64)


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


def test_one_waits_until_the_state_where_it_parts_is_kept() -> None:
    """A portion ends after the last whole block that both have, and before that position."""
    common = random_prompt(2 * B + 2)
    engine = make_engine(make_state_model("lfm2"), max_num_batched_tokens=2 * B + 1)
    for rest in ([5, 6], [8, 9, 1]):
        engine.add_request([*common, *rest], greedy(2))
    outputs = sorted(finished(engine), key=lambda one: len(one.prompt_token_ids))
    assert [one.num_cached_tokens for one in outputs] == [0, len(common)]


@pytest.mark.parametrize("num_host_bytes", [0, 2**20])
def test_without_checkpoints_nobody_waits(num_host_bytes: int) -> None:
    engine = make_engine(make_state_model("lfm2"), states=StateConfig(0, num_host_bytes))
    for last in range(3):
        engine.add_request([*random_prompt(2 * B), last, 9], greedy(2))
    engine.step()
    assert len(engine.scheduler.running) == 3


def alike(number: int, num_tokens: int, other: Request, num_shared: int) -> Request:
    """Return a request that begins like another."""
    request = request_of(number, num_tokens)
    request.tokens[:num_shared] = other.tokens[:num_shared]
    return request


def test_nobody_waits_for_a_decode() -> None:
    """It fills a block, and leaves no state there."""
    scheduler = scheduler_of(4)
    first = request_of(0, 2 * B - 1)
    scheduler.add(first)
    step(scheduler)
    scheduler.add(alike(1, 2 * B + 2, first, 2 * B))
    assert [one for one, _, _ in step(scheduler)] == ["r0", "r1"]


@pytest.mark.parametrize("scores", [False, True])
def test_one_that_computes_its_whole_prompt_marks_nothing(scores: bool) -> None:
    scheduler = scheduler_of(4)
    first = request_of(0, 3 * B)
    scheduler.add(first)
    second = alike(1, 3 * B, first, B + 1)
    second.scored = ScoredPrompt(3 * B, 0, 64) if scores else None
    scheduler.add(second)
    scheduler.schedule()
    assert (B + 1 in scheduler.manager.states._states.running[first.seq_id].marks) != scores
    assert len(scheduler.running) == 1 + scores


def test_a_preempted_request_finds_its_state_in_a_full_budget() -> None:
    scheduler = Scheduler(manager_of_states(64, B, num_slots=4, num_checkpoints=1), 4, 64)
    for _ in range(3):
        serve(scheduler.manager, range(5 * B))
    request = request_of(0, B + 1)
    scheduler.add(request)
    step(scheduler)
    scheduler.preempt_last()
    assert step(scheduler) == [("r0", B + 1, B + 2)]


@pytest.mark.parametrize("is_computed", [True, False])
def test_a_step_ahead_spoils_the_state_of_one_that_is_preempted(is_computed: bool) -> None:
    """The state is after the newest token, which is to be computed again."""
    scheduler = scheduler_of(4)
    scheduler.add(request_of(0, B + 1))
    step(scheduler)
    scheduler.schedule()
    scheduler.use_outcomes(lambda request: is_computed)
    scheduler.preempt_last()
    scheduler.use_outcomes(lambda request: None)
    assert step(scheduler) == [("r0", 0, B + 2)]


@pytest.mark.parametrize("is_computed", [True, False])
def test_a_step_ahead_that_has_failed_leaves_no_state_to_others(is_computed: bool) -> None:
    scheduler = scheduler_of(4)
    request = request_of(0, B + 1)
    scheduler.add(request)
    step(scheduler)
    scheduler.schedule()
    scheduler.use_outcomes(lambda request: is_computed)
    scheduler.keep_state(request)
    scheduler.finish(request)
    tokens = [*request.tokens[: request.num_tokens].tolist(), 8, 9]
    assert scheduler.manager.allocate("next", tokens).num_cached_tokens == (B + 2 if is_computed else 0)


def test_a_waiting_fork_takes_back_a_token_that_nobody_has_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, append, failures = make_engine(make_state_model("lfm2"), states=StateConfig(0)), Request.append, []

    def fail_once(request: Request, *arguments) -> str | None:
        reason = append(request, *arguments)
        if request.sample_index == 1 and not failures:
            failures.append(request)
            raise RuntimeError("once")
        return reason

    for number in range(3):
        engine.manager.allocate(("held", number), [number + 1] * 5)
    monkeypatch.setattr(Request, "append", fail_once)
    engine.add_request(
        random_prompt(B + 1), SamplingParams(max_tokens=3, temperature=1.0, seed=1, n=2, ignore_eos=True)
    )
    told: dict[int, list[int]] = {0: [], 1: []}
    samples = ()
    with pytest.raises(RuntimeError, match="once"):
        engine.step()
    while engine.has_unfinished:
        for one in engine.step():
            told[one.sample_index].append(one.token_id)
            samples = one.output.samples if one.output else samples
    assert len(failures) == 1 and [one.error for one in samples] == [None, None]
    assert [one.token_ids for one in samples] == [told[0], told[1]]
