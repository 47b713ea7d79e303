"""An update that waits for requests to finish: another takes its place, or it is withdrawn for good."""

import asyncio
import threading
from concurrent.futures import CancelledError

import pytest
from support.models import make_prompts
from support.step_gate import StepGate
from support.weight_versions import WeightVersions

from kvpage import CacheConfig
from kvpage.serving import AsyncEngine, Engine, EngineConfig, SamplingParams
from kvpage.serving.weights.watch import WeightsChanged

PROMPTS = make_prompts([24, 20], seed=1)
PARAMS = SamplingParams(max_tokens=6)


@pytest.fixture
def versions() -> WeightVersions:
    return WeightVersions()


def begun_engine(versions: WeightVersions) -> tuple[Engine, str]:
    """Return an engine with a request that has a token."""
    engine = Engine.from_model(versions.model, EngineConfig(CacheConfig(4, 64), load_or_compute=False))
    request_id = engine.add_request(PROMPTS[0], PARAMS)
    engine.step()
    return engine, request_id


def run_out(engine: Engine) -> list[list[int]]:
    outputs = [one.output for _ in range(40) for one in engine.step() if one.output]
    assert not engine.has_unfinished
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("running", ["restart", "stale"])
def test_another_update_takes_the_place_of_one_that_waits(versions, running):
    engine, _ = begun_engine(versions)
    waiting = engine.begin_update("v1", lambda: versions.load("v1"), "finish")
    with pytest.raises(RuntimeError, match="'restart' and 'stale' take its place"):
        engine.update_weights("v2", lambda: versions.load("v2"), running="finish")
    with pytest.raises(ZeroDivisionError):
        engine.update_weights("v2", lambda: 1 // 0, running=running)
    assert not waiting.done()
    versions.load("v2")
    with pytest.raises(WeightsChanged):
        engine.step()
    engine.update_weights("v2", running=running)
    with pytest.raises(RuntimeError, match="withdrawn, version 'v2' has begun"):
        waiting.result(0)
    run_out(engine)
    assert engine.weights_version == "v2"
    assert engine.generate(PROMPTS[:1], PARAMS)[0].token_ids == versions.answer("v2", PROMPTS[0], 6)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, "weights"])
def test_a_call_that_raises_while_requests_finish_changes_nothing_later(versions, interrupt):
    engine, _ = begun_engine(versions)

    def raise_once(module: object, args: object) -> None:
        hook.remove()
        if interrupt is KeyboardInterrupt:
            raise KeyboardInterrupt
        versions.load("")

    hook = versions.model.register_forward_pre_hook(raise_once)
    with pytest.raises((KeyboardInterrupt, WeightsChanged)):
        engine.update_weights("v1", lambda: versions.load("v1"), running="finish")
    if interrupt == "weights":
        engine.reset_prefix_cache()
    assert run_out(engine) == [versions.answer("", PROMPTS[0], 6)] and engine.weights_version == ""


def test_a_cancelled_future_is_an_update_that_never_comes(versions):
    engine, _ = begun_engine(versions)
    waiting = engine.begin_update("v1", lambda: versions.load("v1"), "finish")
    engine.add_request(PROMPTS[1], PARAMS)
    engine.step()
    assert engine.loop.num_begun == 1
    cancelling = threading.Thread(target=waiting.cancel)
    cancelling.start()
    cancelling.join()
    engine.step()
    assert engine.loop.num_begun == 2
    assert sorted(run_out(engine)) == sorted(versions.answer("", prompt, 6) for prompt in PROMPTS)
    assert engine.weights_version == ""
    with pytest.raises(CancelledError):
        waiting.result(0)


@pytest.mark.parametrize("ending", ["abort", "drop"])
def test_others_begin_on_the_new_weights_once_all_that_had_begun_are_aborted(versions, ending):
    engine, request_id = begun_engine(versions)
    waiting = engine.begin_update("v1", lambda: versions.load("v1"), "finish")
    engine.add_request(PROMPTS[1], PARAMS)
    if ending == "abort":
        engine.abort(request_id)
    else:
        engine.loop.forget(engine.loop.requests[request_id])
    engine.step()
    assert waiting.done() and engine.weights_version == "v1"
    assert run_out(engine) == [versions.answer("v1", PROMPTS[1], 6)]


def test_a_cancelled_coroutine_withdraws_its_update(versions):
    engine = Engine.from_model(versions.model, EngineConfig(CacheConfig(4, 64), load_or_compute=False))

    async def life(live: AsyncEngine) -> None:
        gate = StepGate(live, 2)
        request = live.submit(PROMPTS[0], SamplingParams(max_tokens=40, ignore_eos=True))
        reader = aiter(request)  # a reader that goes aborts its request
        await anext(reader)
        updating = asyncio.ensure_future(live.update_weights("v1", lambda: versions.load("v1"), running="finish"))
        await asyncio.sleep(0)  # it asks the engine's thread meanwhile
        assert await gate.ask(lambda engine: engine.loop.is_due_later)
        updating.cancel()
        await asyncio.gather(updating, return_exceptions=True)
        assert updating.cancelled()
        assert not await gate.ask(lambda engine: engine.loop.is_due_later)
        gate.open()
        request.abort()
        assert (await live.generate(PROMPTS[1], PARAMS)).token_ids == versions.answer("", PROMPTS[1], 6)
        assert engine.weights_version == ""

    with AsyncEngine(engine) as live:
        asyncio.run(life(live))
