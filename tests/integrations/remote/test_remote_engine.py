"""Requests that are computed elsewhere: tokens as an engine's own, whatever becomes of the workers."""

import asyncio
import time
from dataclasses import replace

import pytest
import torch
from support.models import generate_each, make_model, make_prompts

from kvpage import CacheConfig
from kvpage.integrations.remote import RemoteEngine, RemoteLoop, RemoteSettings, Worker, WorkerLost
from kvpage.integrations.remote.delivered import Delivered, Diverged
from kvpage.serving import AsyncEngine, AsyncEngineConfig, Engine, EngineConfig, QueueFull, SamplingParams, StepOutput
from kvpage.store import ArrivingStore, KVStore, KVStoreConfig, LayerwiseStore, metadata_of

B, C = 4, 8
CONFIG = EngineConfig(CacheConfig(block_size=B, num_gpu_blocks=128), load_or_compute=False)
PARAMS = SamplingParams(max_tokens=12)
PROMPTS = make_prompts([3 * C + 1, C, 1, 5 * C])


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return generate_each(make_model("llama"), PROMPTS, 12)


@pytest.fixture(scope="module")
def worker():
    with AsyncEngine(Engine.from_model(make_model("llama"), CONFIG)) as live:
        yield Worker(live)


class Workers:
    """Some workers, one after the other, of which some are lost after a number of outputs."""

    def __init__(self, worker: Worker, lost_after: list[int | None] = ()) -> None:  # type: ignore[assignment]
        self.worker, self.lost_after, self.calls = worker, list(lost_after), []
        self.num_open = 0

    async def stream(self, call):
        self.calls.append(call)
        left = self.lost_after.pop(0) if self.lost_after else None
        self.num_open += 1
        try:
            async for items in self.worker.stream(call):
                for item in items:  # under load all outputs may come at once
                    if left == 0:
                        raise WorkerLost("killed")
                    left = None if left is None else left - 1
                    yield [item]
        finally:
            self.num_open -= 1


def live(workers, prefill=None, settings=None, **fields) -> AsyncEngine:
    settings = settings or RemoteSettings()
    with torch.device("meta"):
        skeleton = make_model("llama")
    engine = RemoteEngine(skeleton, CONFIG, RemoteLoop(workers, prefill, settings))
    return AsyncEngine(engine, AsyncEngineConfig(**fields))


def read(request) -> tuple[list[int], object]:
    items = [item for items in request for item in items]
    return [item.token_id for item in items if item.token_id is not None], request.output


def check(engine: AsyncEngine, expected, params=PARAMS) -> None:
    requests = [engine.submit(prompt, params) for prompt in PROMPTS]
    for request, prompt, tokens in zip(requests, PROMPTS, expected, strict=True):
        got, output = read(request)
        assert got == output.token_ids == tokens and output.request_id == request.request_id
        assert output.prompt_token_ids == prompt
        assert output.arrival_time <= output.first_token_time <= output.finish_time <= time.monotonic()


def test_tokens_are_those_of_the_engine(worker, expected) -> None:
    workers = Workers(worker)
    with live(workers) as engine:
        check(engine, expected)
        assert engine.stats().num_unfinished == 0
    assert workers.num_open == 0


@pytest.mark.parametrize("lost_after", [[0], [1, 3], [5, 0, 2]])
def test_lost_workers_are_not_noticed(worker, expected, lost_after) -> None:
    workers = Workers(worker, [n for n in lost_after for _ in PROMPTS])
    with live(workers) as engine:
        check(engine, expected)
        assert engine.engine.loop.num_retries >= len(lost_after)


def test_drawn_tokens_are_the_same_after_a_loss(worker) -> None:
    params = SamplingParams(max_tokens=10, temperature=1.0, n=3)
    workers = Workers(worker, [1, 1])
    with live(workers) as engine:
        request = engine.submit(PROMPTS[0], params)
        by_sample: dict[int, list[int]] = {}
        for items in request:
            for item in items:
                if item.token_id is not None:
                    by_sample.setdefault(item.sample_index, []).append(item.token_id)
    assert [by_sample[i] for i in range(3)] == [sample.token_ids for sample in request.output.samples]
    assert len(workers.calls) == 3 and len({call.params.seed for call in workers.calls}) == 1
    assert len({call.request_id for call in workers.calls}) == 3


def test_too_many_losses_are_an_error(worker) -> None:
    with live(Workers(worker, [0, 0, 0]), settings=RemoteSettings(max_tries=2)) as engine:
        request = engine.submit(PROMPTS[0], PARAMS)
        assert read(request)[1].finish_reason == "error"
        assert request.output.error == "2 workers were lost, the last one by: killed"


def test_refusals_are_raised_at_once_or_told(worker) -> None:
    with live(Workers(worker)) as engine:
        for prompt, params in (([], PARAMS), ([10**6], PARAMS), ([1], SamplingParams(max_tokens=10**6))):
            with pytest.raises(ValueError):
                engine.submit(prompt, params)
        with pytest.raises(TypeError):
            engine.submit("text", PARAMS)


class Failing:
    async def stream(self, call):
        raise ValueError("no such thing")
        yield []


def test_errors_of_workers_are_the_readers() -> None:
    with live(Failing()) as engine:
        assert read(engine.submit([1], PARAMS))[1].error == "ValueError: no such thing"


class Silent:
    def __init__(self) -> None:
        self.num_open = 0

    async def stream(self, call):
        self.num_open += 1
        try:
            await asyncio.sleep(3600)
            yield []
        finally:
            self.num_open -= 1


def test_aborts_deadlines_and_full_queues_end_the_streams() -> None:
    silent = Silent()
    with live(silent, max_num_waiting=2) as engine:
        both = [engine.submit([1], PARAMS) for _ in range(2)]
        with pytest.raises(QueueFull):
            engine.submit([1], PARAMS)
        for aborted in both:
            aborted.abort()
            assert read(aborted)[1].finish_reason == "abort"
        assert read(engine.submit([1], PARAMS, timeout=0.05))[1].error == "deadline"
        engine.submit([1], PARAMS)  # and nobody reads it
    assert silent.num_open == 0


# --- prefill and decode apart ----------------------------------------------------------------------------------------


@pytest.fixture(params=["whole chunks", "layers"])
def apart(request):
    prefill = Engine.from_model(make_model("llama"), replace(CONFIG, save_portions=True, max_num_batched_tokens=C))
    decode = Engine.from_model(make_model("llama"), replace(CONFIG, store_deadline=60.0))
    with KVStore(KVStoreConfig(C, ("memory://?size=4MiB",)), metadata_of(prefill.cache, "m")) as store:
        of_prefill, of_decode = (
            LayerwiseStore(store, engine.cache, 1) if request.param == "layers" else store
            for engine in (prefill, decode)
        )
        arriving = ArrivingStore(of_decode, patience=60.0)
        prefill.use_store(of_prefill)
        decode.use_store(arriving)
        with AsyncEngine(prefill) as first, AsyncEngine(decode) as second:
            yield Worker(first), Worker(second, arriving)


@pytest.mark.parametrize("params", [PARAMS, SamplingParams(max_tokens=12, temperature=0.9, seed=5, min_tokens=3)])
def test_apart_gives_the_same_tokens(apart, worker, params) -> None:
    expected = [asyncio.run(_whole(worker.engine, prompt, params)) for prompt in PROMPTS]
    prefill, decode = (Workers(one) for one in apart)
    with live(decode, prefill, RemoteSettings(min_prefill_tokens=B)) as engine:
        check(engine, expected, params)
    assert len(prefill.calls) == 3 and [call.is_arriving for call in decode.calls].count(True) == 3
    stats = decode.worker.engine.stats().engine
    assert stats.num_cached_tokens >= sum(max(len(p) - 1, 0) // B * B for p in PROMPTS)
    assert prefill.worker.engine.stats().engine.num_generated_tokens == 3


async def _whole(engine: AsyncEngine, prompt, params) -> list[int]:
    return (await engine.generate(prompt, params)).token_ids


@pytest.mark.parametrize("lost_after", [0, 1])
def test_a_lost_prefill_worker_costs_time_only(apart, expected, lost_after) -> None:
    prefill, decode = (Workers(one) for one in apart)
    prefill.lost_after = [lost_after] * 4
    with live(decode, prefill) as engine:
        check(engine, expected)


def test_a_lost_decode_worker_costs_time_only(apart, expected) -> None:
    prefill, decode = (Workers(one) for one in apart)
    decode.lost_after = [2] * 4
    with live(decode, prefill) as engine:
        check(engine, expected)


# --- tokens that the reader has --------------------------------------------------------------------------------------


def item(token: int | None, index: int = 0, reason=None, output=None) -> StepOutput:
    return StepOutput("far", token, index, reason, output)


def test_second_copies_are_left_out() -> None:
    delivered = Delivered("near", 2)
    assert delivered.fresh([item(7), item(8, 1)]) == [StepOutput("near", 7, 0), StepOutput("near", 8, 1)]
    delivered.restart()
    assert delivered.fresh([item(7), item(9), item(8, 1, "stop")]) == [
        StepOutput("near", 9, 0), StepOutput("near", None, 1, "stop")]  # fmt: skip
    delivered.restart()
    with pytest.raises(Diverged, match="token 1 of sample 0 must be 9 again, got 6"):
        delivered.fresh([item(7), item(6)])


def test_early_tokens_are_first_ones_that_go_on() -> None:
    delivered = Delivered("near", 3)
    delivered.fresh([item(5, 2)])
    assert delivered.early([item(7, 0, "length"), item(8, 1, "stop"), item(5, 2, "length")]) == [
        StepOutput("near", 7, 0)]  # fmt: skip
    assert delivered.fresh([item(7), item(8, 1, "stop")]) == [StepOutput("near", 8, 1, "stop")]
