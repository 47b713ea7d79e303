"""AsyncEngine: tokens are those of Engine, whoever asks; requests end when they should; nothing is left behind."""

import asyncio
import threading

import pytest
from support.insides import stepper_of
from support.live_engines import B, check_nothing_left, expected, make_live
from support.models import make_model, make_prompts

from kvpage import CacheConfig
from kvpage.serving import AsyncEngine, AsyncEngineConfig, Engine, EngineClosed, EngineConfig, QueueFull, SamplingParams

PROMPTS = make_prompts([1, B - 1, B, B + 1, 5 * B + 3, 2 * B], seed=7)
PARAMS = [
    SamplingParams(max_tokens=6),
    SamplingParams(max_tokens=1),
    SamplingParams(max_tokens=9, temperature=0.8, seed=3),
    SamplingParams(max_tokens=5, temperature=1.0, seed=5, n=3),
]
WORK = [(prompt, params) for prompt in PROMPTS for params in PARAMS]


def test_tokens_are_those_of_the_engine():
    """Streams and whole outcomes, of coroutines and of threads, all at once."""

    async def stream(live, prompt, params):
        tokens: dict[int, list[int]] = {}
        request = live.submit(prompt, params)
        async for outputs in request:
            assert outputs
            for one in outputs:
                tokens.setdefault(one.sample_index, []).append(one.token_id)
        assert [sample.token_ids for sample in request.output.samples] == [tokens[i] for i in sorted(tokens)]
        return request.output

    def read(live, prompt, params):
        request = live.submit(prompt, params)
        tokens = [one.token_id for outputs in request for one in outputs if one.sample_index == 0]
        assert tokens == request.output.token_ids
        return request.output

    async def main():
        async with make_live() as live:
            works = []
            for number, (prompt, params) in enumerate(WORK):
                if number % 3 == 0:
                    works.append(stream(live, prompt, params))
                elif number % 3 == 1:
                    works.append(live.generate(prompt, params))
                else:
                    works.append(asyncio.to_thread(read, live, prompt, params))
            outputs = await asyncio.gather(*works)
            check_nothing_left(live)
            return outputs

    got = [[sample.token_ids for sample in output.samples] for output in asyncio.run(main())]
    assert got == expected(WORK)


def test_arguments_are_checked_in_the_caller():
    with make_live() as live:
        for tokens, fields, error in (
            ([], {}, ValueError),
            (["a"], {}, (ValueError, TypeError)),
            ([10**6], {}, ValueError),
            ("text", {}, TypeError),
            ([1], {"params": 3}, TypeError),
            ([1], {"params": SamplingParams(max_tokens=10**6)}, ValueError),
            ([1], {"params": SamplingParams(n=99, temperature=1.0, max_tokens=1)}, ValueError),
            ([1], {"request_id": 3}, TypeError),
            ([1], {"namespace": "a"}, TypeError),
            ([1], {"priority": 1.5}, TypeError),
            ([1], {"timeout": -1}, ValueError),
            ([1], {"timeout": float("nan")}, ValueError),
            ([1], {"timeout": "1"}, TypeError),
            ([1], {"blend": True}, ValueError),
        ):
            with pytest.raises(error):
                live.submit(tokens, fields.pop("params", None), **fields)
        assert live.stats().num_submitted == 0
        check_nothing_left(live)


def test_one_engine_has_one_thread():
    engine = Engine.from_model(make_model("llama"), EngineConfig(CacheConfig(B, 64)))
    with AsyncEngine(engine) as live:
        with pytest.raises(RuntimeError, match="taken twice"):
            AsyncEngine(engine)
        for use in (engine.step, engine.close, engine.reset_prefix_cache, lambda: engine.add_request([1])):
            with pytest.raises(RuntimeError, match="an AsyncEngine, which has it"):
                use()
        request = live.submit([1, 2], SamplingParams(max_tokens=2))
        assert [one.token_id for outputs in request for one in outputs] == request.output.token_ids
    assert not stepper_of(live).thread.is_alive()
    assert engine.generate([[1, 2]], SamplingParams(max_tokens=2))[0].token_ids == request.output.token_ids
    for use in (lambda: live.submit([1]), lambda: live.call(print), live.begin_drain):
        with pytest.raises(EngineClosed):
            use()
    live.close()


def test_calls_are_done_between_steps():
    with make_live() as live:
        thread = live.call(lambda engine: threading.current_thread()).result()
        assert thread is stepper_of(live).thread
        live.call(Engine.reset_prefix_cache).result()
        with pytest.raises(ZeroDivisionError):
            live.call(lambda engine: 1 / 0).result()
        with pytest.raises(TypeError, match="callable"):
            live.call(3)
        with pytest.raises(RuntimeError, match="on the stepping thread"):
            live.call(lambda engine: live.close()).result()
        output = live.call(lambda engine: engine.generate([[1, 2]], SamplingParams(max_tokens=2))[0]).result()
        assert len(output.token_ids) == 2


def test_a_full_queue_refuses_and_nothing_is_lost():
    gate = threading.Event()
    with make_live(AsyncEngineConfig(max_num_waiting=3)) as live:
        held = live.call(lambda engine: gate.wait())
        live.check_room(3)
        for number, error in ((4, QueueFull), (0, ValueError), (True, ValueError)):
            with pytest.raises(error):
                live.check_room(number)
        requests = [live.submit([1, n], SamplingParams(max_tokens=2)) for n in range(3)]
        with pytest.raises(QueueFull) as refused:
            live.submit([1], SamplingParams(max_tokens=2))
        assert refused.value.retry_after > 0
        with pytest.raises(QueueFull):
            live.check_room()
        assert (live.stats().num_waiting, live.stats().num_refused) == (3, 3)
        gate.set()
        held.result()
        for request in requests:
            assert sum(len(outputs) for outputs in request) == 2
        live.submit([1], SamplingParams(max_tokens=2))
