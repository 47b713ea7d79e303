"""Requests that wait for room: known at once, explained when they have it, and exactly those that do not fit."""

import random
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.group_life import GroupLife
from support.group_worlds import WORLDS
from support.scheduler_steps import B, request_of, scheduler_of, step
from support.seeds import seed_of

from kvpage.blocks.explain import Explanation
from kvpage.blocks.pins import QuotaExceeded
from kvpage.checks.errors import OutOfBlocks
from kvpage.serving.loop.batch.request_blocks import RequestBlocks
from kvpage.serving.loop.request import Request
from kvpage.serving.loop.scheduler import Scheduler
from kvpage.serving.params.sampling import SamplingParams


class CountedExplanations:
    """Explains as the manager of a scheduler does, in its place, and counts."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.asked: list[int] = []
        self._explain = scheduler.manager.explain
        scheduler.manager.explain = self  # type: ignore[method-assign]

    def __call__(self, tokens: np.ndarray, namespace: bytes, searched: str) -> Explanation:
        self.asked.append(len(tokens))
        return self._explain(tokens, namespace, searched)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_shared", [0, 2 * B])
def test_a_prompt_that_waits_is_explained_once(num_shared):
    """What it shares with the one that runs is there already; the rest does not fit before that has ended."""
    scheduler = scheduler_of(12, max_num_seqs=66, explains=True)
    explained = CountedExplanations(scheduler)
    scheduler.add(request_of(0, 6 * B + 1, max_tokens=12, first=1))
    for number in range(1, 65):
        prompt = [*range(1, num_shared + 1), *range(10**4 * number, 10**4 * number + 8 * B - num_shared)]
        params = SamplingParams(max_tokens=2, temperature=1.0)
        scheduler.add(Request(f"r{number}", np.array(prompt, np.int32), params, number))
    for num_steps in range(12):
        assert len(explained.asked) == (num_steps > 0) and len(scheduler.waiting) >= 64
        step(scheduler)
    last = [request.request_id for request in scheduler.waiting][-1]
    while scheduler.waiting:
        step(scheduler)
    assert len(explained.asked) == 65 and last == "r64"


def test_a_preempted_prompt_keeps_its_explanation():
    scheduler = scheduler_of(explains=True)
    step_of, explained = partial(step, scheduler), CountedExplanations(scheduler)
    scheduler.add(request_of(0, 2 * B, max_tokens=1, first=1))
    step_of()
    request = request_of(1, 3 * B, first=1)
    scheduler.add(request)
    assert step_of() == [("r1", 2 * B, 3 * B)]
    explanation = request.group.explanation
    assert explanation is not None and explanation.num_cached_tokens == 2 * B
    scheduler.preempt_last()
    step_of()
    assert request.group.explanation is explanation and explained.asked == [2 * B, 3 * B]


@pytest.mark.parametrize("options", [{}, {"num_host_blocks": 9}, {"share_parts": False}, {"pin_quota": 12}])
def test_no_room_is_said_exactly_where_there_is_none(options):
    rng, counts = random.Random(seed_of(11)), {True: 0, False: 0}
    manager = scheduler_of(14, **options).manager
    blocks, live, paths = RequestBlocks(manager), list[str](), [[1]]
    for number in range(250):
        path = rng.choice(paths)
        tail = [rng.randrange(3) for _ in range(rng.randint(1, 5 * B))]
        prompt = np.array([*path[: rng.randint(0, len(path))], *tail][: 12 * B], np.int32)
        request = Request(f"r{number}", prompt, SamplingParams(max_tokens=1), number)
        num_spare = rng.randint(0, 3)
        lacks = blocks.lacks_room(request, prompt, num_spare)
        try:
            given = blocks.allocate(request, prompt, num_spare)
        except OutOfBlocks:
            assert lacks or len(manager.space.pins)
            counts[True] += 1
            while live:
                manager.release(live.pop())
            continue
        assert not lacks, "no request waits that would fit"
        manager.take_moves()
        manager.commit(request.seq_id, prompt[given.num_cached_tokens :])
        counts[False] += 1
        live.append(request.seq_id)
        paths = [*paths[-5:], prompt.tolist()]
        if options.get("pin_quota") and rng.random() < 0.2:
            with suppress(QuotaExceeded):
                manager.space.pin(rng.choice(paths)[: 3 * B])
        if rng.random() < 0.5:
            manager.release(live.pop(rng.randrange(len(live))))
    assert min(counts.values()) > 10, counts


class AskedAllocate:
    """Allocates as the manager of a life does, in its place, and asks before whether there is no room."""

    def __init__(self, life: GroupLife) -> None:
        self._blocks, self._rng, self._allocate = RequestBlocks(life.manager), life.rng, life.manager.allocate
        life.manager.allocate = self  # type: ignore[method-assign]

    def __call__(self, seq_id: int, tokens: list[int], namespace: bytes, *options: Any) -> Any:
        _, _, num_left_over, _ = options
        num_spare, request = self._rng.choice([0, 0, 0, 1, 3]), SimpleNamespace(namespace=namespace)
        lacks = self._blocks.lacks_room(request, np.array(tokens, np.int32), num_spare)  # type: ignore[arg-type]
        given = self._allocate(seq_id, tokens, namespace, *options, num_spare=num_spare)
        assert not lacks or num_left_over != 1, "no request waits that would fit"
        return given


@pytest.mark.parametrize("number", range(len(WORLDS)))
def test_with_windows_states_pins_and_a_host_no_request_waits_that_would_fit(number):
    life = WORLDS[number].life(seed_of(number))
    AskedAllocate(life)
    life.live(200, compare_every=50)
