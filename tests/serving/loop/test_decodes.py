"""The work of a decode step: counted in calls, which do not grow with the sequences, and not with those that wait."""

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from types import FrameType

import numpy as np
import pytest
import torch
from support.models import VOCAB, make_model, make_prompts
from support.scheduler_steps import request_of, scheduler_of, step

from kvpage import CacheConfig
from kvpage.blocks.rows import SequenceSteps
from kvpage.serving import Engine, EngineConfig, SamplingParams
from kvpage.serving.loop.batch.batch import Decodes

B = 4


def make_engine(num_seqs: int) -> Engine:
    """Its model is a stub, once it is accepted."""
    engine = Engine.from_model(make_model("llama"), EngineConfig(CacheConfig(B, 40 * num_seqs), max_num_seqs=num_seqs))
    logits = torch.randn(num_seqs, VOCAB, generator=torch.Generator().manual_seed(0))
    engine.debug.runner.forward = lambda packed, step: logits[: len(packed.wanted)]
    return engine


def decoding(num_seqs: int, num_waiting: int = 0, **fields: object) -> Engine:
    engine, params = make_engine(num_seqs), SamplingParams(max_tokens=90, **fields)
    for prompt in make_prompts([B + index % B for index in range(num_seqs + num_waiting)], seed=1):
        engine.add_request(prompt, params)
    while len(engine.step()) < num_seqs:
        pass
    for _ in range(2):
        engine.step()
    return engine


def calls_of(work: Callable[[], object]) -> Counter[str]:
    """Return how often each function of kvpage in Python was called."""
    found: Counter[str] = Counter()

    def see(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and "/kvpage/" in frame.f_code.co_filename.replace("\\", "/"):
            found[f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_code.co_name}"] += 1

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("fields", [{}, {"stop_token_ids": [VOCAB + 5]}])
def test_no_call_of_python_for_each_sequence(fields: dict) -> None:
    few, many = (sum(calls_of(decoding(number, **fields).step).values()) for number in (8, 64))
    assert abs(many - few) < 10 and many < 200


def test_a_step_does_nothing_for_those_that_wait() -> None:
    none, some = (sum(calls_of(decoding(4, waiting).step).values()) for waiting in (0, 300))
    assert abs(some - none) < 4


def test_the_manager_is_asked_as_often_for_many_as_for_few(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Counter[str] = Counter()
    for name in ("of", "append", "slots", "tables", "inputs", "commit"):
        own = getattr(SequenceSteps, name)
        monkeypatch.setattr(SequenceSteps, name, lambda *args, own=own, name=name: asked.update([name]) or own(*args))
    found = []
    for number in (2, 32):
        engine = decoding(number)
        asked.clear()
        engine.step()
        found.append(dict(asked))
    assert found[0] == found[1] and set(found[0].values()) == {1}


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "n": 2}])
def test_nothing_of_a_request_waits_for_the_garbage_collector(fields: dict) -> None:
    """Finished or aborted, it is gone at once: a cycle would keep its tokens."""
    engine = make_engine(4)
    engine.add_request(make_prompts([B])[0], SamplingParams(max_tokens=3, **fields))
    engine.add_request(make_prompts([B + 1])[0], SamplingParams(max_tokens=3, **fields), "aborted")
    seen = [weakref.ref(request) for request in engine.loop.requests.values()]
    gc.collect()
    gc.disable()
    try:
        engine.step()
        seen += [weakref.ref(sample) for request in engine.loop.requests.values() for sample in request.group.samples]
        engine.abort("aborted")
        while engine.has_unfinished:
            engine.step()
        engine.generate(make_prompts([B]), SamplingParams(max_tokens=2))  # other columns take the place of theirs
        assert [each() for each in seen] == [None] * len(seen)
    finally:
        gc.enable()


def test_a_step_leaves_nothing_to_the_garbage_collector() -> None:
    engine = decoding(8)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            engine.step()
        assert gc.collect() == 0
    finally:
        gc.enable()


# --- the columns -----------------------------------------------------------------------------------------------------


def test_last_tokens_are_left_to_the_caller() -> None:
    """Of a stop token, and of the last of max_tokens; a stop token of one request is none of another."""
    requests = [
        request_of(0, 3, max_tokens=9, stop_token_ids=[7]),
        request_of(1, 3, max_tokens=9),
        request_of(2, 3, max_tokens=2),
        request_of(3, 3, max_tokens=9, stop_token_ids=[7, 8]),
    ]
    for request in requests:
        request.admit(0)
        request.append(1, now=0.0)
    decodes, outputs = Decodes(requests, np.arange(4)), []
    decodes.begin()
    assert decodes.last_rows(np.array([1, 1, 1, 1])) == [2]
    assert decodes.last_rows(np.array([7, 7, 7, 8])) == [0, 2, 3]
    decodes.take(np.array([7, 7, 7, 8]), outputs, but=[0, 2, 3])
    assert [output.request_id for output in outputs] == ["r1"]
    assert [request.num_generated for request in requests] == [1, 2, 1, 1]


@pytest.mark.parametrize("num_host_blocks", [0, 16])
def test_a_request_that_comes_back_within_one_schedule_is_looked_up_anew(num_host_blocks: int) -> None:
    """It gives its blocks back before the step that admits it again: its old row names nobody."""
    scheduler = scheduler_of(num_host_blocks=num_host_blocks)
    requests = [request_of(number, B + number, max_tokens=24) for number in range(3)]
    for request in requests:
        scheduler.add(request)
    for number in range(8):
        step(scheduler)
        decodes = scheduler._decodes
        if all(request in scheduler.running for request in decodes.requests):
            assert decodes.rows.tolist() == scheduler.manager.rows.of([one.seq_id for one in decodes.requests]).tolist()
        if number % 3 == 2:
            scheduler.preempt_last()
    assert scheduler.preemptions.num == 2 and len(scheduler.running) == 3
    assert scheduler.preemptions.num_swaps > 0 or not num_host_blocks
    while scheduler.running or scheduler.waiting:
        step(scheduler)
    assert [request.num_generated for request in requests] == [24, 24, 24]
