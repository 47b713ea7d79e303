"""Engine.explain with a store: what is told is what a request then loads, and trouble of the store is an answer."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.dict_store import StandIn
from support.engines import PATIENCE
from support.models import make_model, make_prompts
from support.state_models import make_state_model

from kvpage import CacheConfig
from kvpage.blocks.explain import Ending, StoreVerdict
from kvpage.blocks.load_or_compute import LoadOrCompute
from kvpage.serving import AsyncEngine, Engine, EngineConfig, SamplingParams
from kvpage.serving.loop.moves.loads.prompt_loads import NUM_LOADERS
from kvpage.store import ArrivingStore, KVStore, KVStoreConfig, metadata_of

B, C = 4, 8
ONE = SamplingParams(max_tokens=1)
(PROMPT,) = make_prompts([3 * C + 3])


@pytest.fixture(scope="module")
def llama() -> torch.nn.Module:
    return make_model("llama")


@pytest.fixture(scope="module")
def lfm2() -> torch.nn.Module:
    return make_state_model("lfm2")


def make_engine(model: torch.nn.Module, **fields: Any) -> Engine:
    return Engine.from_model(
        model, EngineConfig(CacheConfig(B, 64), **{"load_or_compute": False, **PATIENCE, **fields})
    )


@pytest.fixture
def store(llama: torch.nn.Module) -> Iterator[KVStore]:
    """A store with the prompt of another engine."""
    engine = make_engine(llama)
    with KVStore(KVStoreConfig(C, ("memory://?size=4MiB",)), metadata_of(engine.cache, "m")) as store:
        engine.use_store(store)
        engine.generate([PROMPT], ONE)
        engine.close()
        yield store


def serve(engine: Engine, prompt: list[int]) -> int:
    """How many tokens the request found. The engine has said so before, and nothing has changed by it."""
    before = engine.stats()
    found = engine.explain(prompt)
    assert engine.stats() == before and found.store is not None
    num_cached: int = engine.generate([prompt], ONE)[0].num_cached_tokens
    loads = found.store.verdict is StoreVerdict.LOADS
    assert num_cached == (found.store.num_tokens if loads else found.num_cached_tokens)
    return num_cached


def test_an_engine_without_a_store_says_nothing_of_one(llama: torch.nn.Module) -> None:
    assert make_engine(llama).explain(PROMPT).store is None


@pytest.mark.parametrize("num_tokens", [1, B, C - 1, C, C + 1, 2 * C + B, 3 * C, 3 * C + 1, 3 * C + 3])
def test_a_request_loads_what_was_said(llama: torch.nn.Module, store: KVStore, num_tokens: int) -> None:
    engine = make_engine(llama)
    engine.use_store(store)
    prompt = PROMPT[:num_tokens]
    assert serve(engine, prompt) == min(num_tokens // C * C, (num_tokens - 1) // B * B)
    found = engine.explain(prompt)
    assert found.store is not None and found.store.verdict is StoreVerdict.NO_MORE
    assert found.store.groups[0].num_tokens >= num_tokens // C * C
    engine.close()


def test_what_is_said_of_a_longer_prompt(llama: torch.nn.Module, store: KVStore) -> None:
    engine = make_engine(llama)
    engine.use_store(store)
    assert str(engine.explain([*PROMPT[: 2 * C], 1, 2])) == (
        "0 of 18 tokens are cached\n"
        "  attention: 0 tokens, then nothing more is cached: it was never computed, or evicted\n"
        "  the store has 16 tokens: a request would load them\n"
        "    attention: 16 tokens, then nothing more is cached: it was never computed, or evicted"
    )
    other = engine.explain(PROMPT, b"tenant").store
    assert other is not None and (other.num_tokens, other.verdict) == (0, StoreVerdict.NO_MORE)
    engine.close()


def test_what_is_computed_faster_is_said_so(llama: torch.nn.Module, store: KVStore) -> None:
    engine = make_engine(llama)
    engine.use_store(store, LoadOrCompute(1, B, bytes_per_second=1.0, tokens_per_second=100.0))
    assert serve(engine, PROMPT) == 0
    engine.reset_prefix_cache()
    found = engine.explain(PROMPT).store
    assert found is not None and (found.num_tokens, found.verdict) == (3 * C, StoreVerdict.NOT_WORTH_LOADING)
    engine.close()


def test_a_store_that_does_not_explain_itself_is_looked_up(llama: torch.nn.Module, store: KVStore) -> None:
    for other in (StandIn(store), ArrivingStore(store)):
        engine = make_engine(llama)
        engine.use_store(other)
        found = engine.explain(PROMPT).store
        assert found is not None and (found.num_tokens, found.groups) == (3 * C, ())
        assert serve(engine, PROMPT) == 3 * C
        engine.close()


def raising(*args: Any, **named: Any) -> Any:
    raise OSError("the line is cut")


@pytest.mark.parametrize(
    ("calls", "error"),
    [
        ({"explain": raising}, "OSError('the line is cut')"),
        ({"lookup": raising}, "OSError('the line is cut')"),
        ({"lookup": lambda tokens, namespace: -1}, "-1 is no number of tokens"),
        ({"lookup": lambda tokens, namespace: "3"}, "'3' is no number of tokens"),
    ],
)
def test_a_store_that_fails_is_an_answer(
    llama: torch.nn.Module, store: KVStore, calls: dict[str, Any], error: str
) -> None:
    engine = make_engine(llama)
    engine.use_store(StandIn(store, **calls))
    found = engine.explain(PROMPT)
    assert found.store is not None and found.num_cached_tokens == 0
    assert (found.store.num_tokens, found.store.verdict, found.store.error) == (0, StoreVerdict.FAILED, error)
    assert str(found).endswith(f"the store has 0 tokens: it has failed ({error})")
    engine.close()


def test_a_store_that_is_late_is_an_answer(llama: torch.nn.Module, store: KVStore) -> None:
    answers = threading.Event()

    def explain(tokens: Any, namespace: bytes) -> Any:
        answers.wait()
        return store.explain(tokens, namespace)

    engine = make_engine(llama, store_deadline=0.01)
    engine.use_store(StandIn(store, explain=explain))
    try:
        for _ in range(3):  # the last questions are never asked
            found = engine.explain(PROMPT).store
            assert found is not None and (found.num_tokens, found.verdict) == (0, StoreVerdict.LATE)
    finally:
        answers.set()
    engine.close()


def test_a_question_that_nobody_waits_for_takes_no_thread(llama: torch.nn.Module, store: KVStore) -> None:
    answers, asked = threading.Event(), []

    def explain(tokens: Any, namespace: bytes) -> Any:
        asked.append(tokens)
        answers.wait()
        return store.explain(tokens, namespace)

    async def life() -> None:
        async with AsyncEngine(engine) as live:
            questions = [asyncio.ensure_future(live.explain(PROMPT)) for _ in range(2 * NUM_LOADERS)]
            while not asked:
                await asyncio.sleep(0.001)
            for _ in questions:  # each has been asked by then
                await asyncio.wrap_future(live.call(lambda engine: None))
            for question in questions:
                question.cancel()
            await asyncio.wait(questions)
            answers.set()
            assert (await live.explain(PROMPT)).store is not None

    engine = make_engine(llama, store_deadline=60.0)
    engine.use_store(StandIn(store, explain=explain))
    asyncio.run(life())
    assert len(asked) == 2
    engine.close()


def test_questions_take_no_thread_of_the_requests(llama: torch.nn.Module, store: KVStore) -> None:
    answers = threading.Event()

    def explain(tokens: Any, namespace: bytes) -> Any:
        answers.wait()
        return store.explain(tokens, namespace)

    engine = make_engine(llama)
    engine.use_store(StandIn(store, explain=explain))
    questions = [engine.ask(PROMPT) for _ in range(NUM_LOADERS + 1)]
    try:
        assert engine.generate([PROMPT], ONE)[0].num_cached_tokens == 3 * C, "as if nobody had asked"
    finally:
        answers.set()
    told = [question.stored.result().num_cached_tokens for question in questions if question.stored is not None]
    assert told == [3 * C] * len(questions)
    engine.close()


def test_a_model_with_states_goes_on_at_what_was_said(lfm2: torch.nn.Module) -> None:
    first = make_engine(lfm2)
    with KVStore(KVStoreConfig(C, ("memory://?size=4MiB",)), metadata_of(first.cache, "m")) as store:
        first.use_store(store)
        assert serve(first, PROMPT) == 0
        first.close()
        for prompt, expected in ((PROMPT, len(PROMPT) - 1), ([*PROMPT, 5, 6], len(PROMPT) - 1), (PROMPT[:-2], 0)):
            engine = make_engine(lfm2)
            engine.use_store(store)
            assert serve(engine, prompt) == expected
            engine.close()
        engine = make_engine(lfm2)
        engine.use_store(store)
        states = store.states(engine.states.layout, torch.float32)
        states.remove(PROMPT)
        found = engine.explain(PROMPT).store
        assert found is not None and (found.num_tokens, found.verdict) == (0, StoreVerdict.NO_MORE)
        assert [(one.group, one.ending) for one in found.groups] == [
            ("attention", Ending.NOT_CACHED),
            ("state", Ending.NO_CHECKPOINT),
        ]
        engine.close()
