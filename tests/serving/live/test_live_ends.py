"""Requests of an AsyncEngine that end before their last token, and the ends of the AsyncEngine itself."""

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
from support.insides import stepper_of
from support.live_engines import B, check_nothing_left, expected, make_live
from support.models import make_model, make_prompts
from support.waiting import until

from kvpage.serving import AsyncEngine, AsyncEngineConfig, EngineClosed, RankLost, SamplingParams

PROMPT = make_prompts([2 * B + 1], seed=3)[0]
OTHER = make_prompts([B], seed=5)[0]
LONG, SHORT = SamplingParams(max_tokens=200), SamplingParams(max_tokens=4)


def ended(request) -> bool:
    return request.output is not None


def hooked(hook) -> tuple[AsyncEngine, torch.nn.Module]:
    """An AsyncEngine whose model calls `hook(tokens)` at the beginning of each pass."""
    model = make_model("llama")
    live = make_live(model=model, num_blocks=256)
    model.get_input_embeddings().register_forward_pre_hook(lambda module, args: hook(args[0].flatten().tolist()))
    return live, model


# --- requests --------------------------------------------------------------------------------------------------------


def test_abort_from_any_thread_keeps_what_there_is():
    with make_live() as live:
        request = live.submit(PROMPT, LONG)
        reader = iter(request)
        read = [*next(reader), *next(reader)]
        thread = threading.Thread(target=request.abort)
        thread.start()
        thread.join()
        request.abort()
        read += [one for outputs in reader for one in outputs]
        assert read[-1].finish_reason == "abort" and read[-1].output is request.output and read[-1].error is None
        tokens = [one.token_id for one in read[:-1]]
        assert request.output.token_ids == tokens and 2 <= len(tokens) < 200
        assert list(request) == []
        request.abort()
        assert live.stats().num_aborted == 1
        check_nothing_left(live)


def test_a_request_ends_at_its_deadline_also_while_it_waits():
    with make_live(max_num_seqs=1) as live:
        runs, waits = live.submit(PROMPT, LONG), live.submit(OTHER, SHORT, timeout=0.01)
        outputs = [one for each in waits for one in each]
        assert (outputs[-1].finish_reason, outputs[-1].error, waits.output.error) == ("abort", "deadline", "deadline")
        assert waits.output.token_ids == []
        runs.abort()
        assert live.submit(OTHER, SHORT, timeout=60.0).output is None
        until(lambda: live.stats().num_late == 1)  # it is counted after its reader knows
        check_nothing_left(live)


@contextlib.contextmanager
def held(live: AsyncEngine) -> Iterator[None]:
    """Let the engine do nothing meanwhile."""
    gate = threading.Event()
    live.call(lambda engine: gate.wait())
    try:
        yield
    finally:
        gate.set()


@pytest.mark.parametrize("way", ["break", "raise", "cancel", "drop", "drop reader", "cancel generate", "wait_for"])
def test_a_request_ends_when_its_consumer_goes(way):
    async def consume(live):
        if way == "wait_for":
            with held(live), pytest.raises(asyncio.TimeoutError):
                request = live.submit(PROMPT, LONG)
                await asyncio.wait_for(anext(aiter(request)), 0.01)
            return request
        request = live.submit(PROMPT, LONG)
        if way == "drop":
            return
        if way == "drop reader":
            await anext(aiter(request))
            return
        async for _ in request:
            if way == "raise":
                raise ZeroDivisionError
            if way == "break":
                return request
        raise AssertionError("it ran to its end")

    async def main():
        async with make_live(num_blocks=256) as live:
            task = asyncio.create_task(live.generate(PROMPT, LONG) if way == "cancel generate" else consume(live))
            if way.startswith("cancel"):
                await asyncio.sleep(0)  # until it has sent its request
                with held(live):
                    await asyncio.sleep(0.02)
                    task.cancel()
            done = (await asyncio.gather(task, return_exceptions=True))[0]
            assert not isinstance(done, AssertionError)
            await asyncio.to_thread(check_nothing_left, live)
            assert (live.stats().num_submitted, live.stats().num_aborted) == (1, 1)

    asyncio.run(main())


def test_a_slow_reader_is_left_behind_and_memory_is_bounded():
    with make_live(AsyncEngineConfig(max_buffered_tokens=5)) as live:
        request = live.submit(PROMPT, LONG)
        whole = asyncio.run(live.generate(OTHER, SamplingParams(max_tokens=30)))
        until(lambda: ended(request))
        outputs = next(iter(request))
        assert [one.finish_reason for one in outputs] == [None] * 6 + ["abort"]
        assert outputs[-1].error == "the reader is more than 5 tokens back"
        assert (live.stats().num_slow, len(whole.token_ids)) == (1, 30)
        check_nothing_left(live)


def test_one_reader_at_a_time():
    with make_live() as live:
        held = threading.Event()
        live.call(lambda engine: held.wait())
        request, failed = live.submit(PROMPT, SHORT), []

        def read():
            try:
                for _ in request:
                    pass
            except RuntimeError as error:
                failed.append(str(error))

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        until(lambda: len(failed) == 1)
        held.set()
        for reader in readers:
            reader.join()
        assert "one reader at a time" in failed[0]


# --- errors ----------------------------------------------------------------------------------------------------------


def test_a_request_with_which_the_model_raises_ends_alone():
    def hook(tokens):
        if 7 in tokens:
            raise RuntimeError("boom")

    good = [[token if token != 7 else 8 for token in prompt] for prompt in make_prompts([3, B, 9, 17], seed=2)]
    wanted = expected([(prompt, SHORT) for prompt in good])
    assert not any(7 in tokens for one in wanted for tokens in one)
    live, _ = hooked(hook)
    with live:
        requests = [live.submit(prompt, SHORT) for prompt in [*good, [5, 7, 9]]]
        read = [[one for outputs in request for one in outputs] for request in requests]
        assert [[one.token_id for one in each] for each in read[:-1]] == [one[0] for one in wanted]
        assert (read[-1][-1].finish_reason, read[-1][-1].error) == ("error", "RuntimeError: boom")
        assert live.stats().num_failed == 1
        check_nothing_left(live)


def test_a_model_that_always_raises_ends_each_request_and_the_engine_goes_on():
    broken = [True]

    def hook(tokens):
        if broken[0]:
            raise RuntimeError("boom")

    live, _ = hooked(hook)
    with live:
        requests = [live.submit(prompt, SHORT) for prompt in make_prompts([3, B, 9, 17, 2], seed=2)]
        for request in requests:
            assert [one.error for outputs in request for one in outputs] == ["RuntimeError: boom"]
            assert request.output.finish_reason == "error"
        check_nothing_left(live)
        broken[0] = False
        assert asyncio.run(live.generate(PROMPT, SHORT)).token_ids == expected([(PROMPT, SHORT)])[0][0]


def test_an_error_of_no_batch_ends_all_requests_once():
    live, model = hooked(lambda tokens: None)
    with live:
        live.call(lambda engine: model.train()).result()
        live.call(lambda engine: engine.add_request(OTHER, SHORT)).result()
        output = asyncio.run(live.generate(PROMPT, SHORT))
        assert output.finish_reason == "error" and "training mode" in output.error
        live.call(lambda engine: model.eval()).result()
        check_nothing_left(live)
        assert asyncio.run(live.generate(PROMPT, SHORT)).error is None


@pytest.mark.parametrize("error", [SystemExit(3), RankLost("rank 1 is gone")])
def test_a_thread_that_fails_tells_everybody(error):
    def hook(tokens):
        if 7 in tokens:
            raise error

    live, _ = hooked(hook)
    requests = [live.submit(OTHER, LONG), live.submit([7], SHORT)]
    for request in requests:
        last = [one for outputs in request for one in outputs][-1]
        assert last.finish_reason == "error" and type(error).__name__ in last.error
    stepper_of(live).thread.join()
    assert live.failure is error
    for use in (lambda: live.submit(PROMPT), lambda: live.call(print), live.begin_drain):
        with pytest.raises(EngineClosed, match=type(error).__name__):
            use()
    live.close()


def test_a_call_may_abort_and_step():
    with make_live() as live:
        request = live.submit(PROMPT, LONG, request_id="mine")
        with pytest.raises(ValueError, match="in use"):
            live.submit(PROMPT, request_id="mine")
        live.call(lambda engine: (engine.step(), engine.abort("mine"))).result()
        assert [one.finish_reason for outputs in request for one in outputs][-1] == "abort"
        live.call(lambda engine: engine.add_request(PROMPT, LONG, "theirs")).result()
        assert asyncio.run(live.generate(PROMPT, request_id="theirs")).error == (
            "request_id must not be in use, 'theirs' is"
        )
        live.call(lambda engine: (engine.abort("theirs"), engine.step())).result()
        check_nothing_left(live)


# --- the end of all --------------------------------------------------------------------------------------------------


def test_drain_waits_and_then_aborts():
    async def main():
        async with make_live(num_blocks=256) as live:
            short, long = live.submit(OTHER, SHORT), live.submit(PROMPT, SamplingParams(max_tokens=220))
            task = asyncio.create_task(live.drain(0.05))
            await asyncio.sleep(0)
            with pytest.raises(EngineClosed, match="drains"):
                live.submit(OTHER, SHORT)
            assert not live.takes_requests and live.stats().is_draining
            num_aborted = await task
            assert num_aborted == sum(request.output.error == "the engine was drained" for request in (short, long))
            assert ended(short) and ended(long)
            assert await live.drain() == num_aborted
            assert await asyncio.wrap_future(live.call(lambda engine: 3)) == 3
            check_nothing_left(live)

    asyncio.run(main())


def test_an_idle_engine_is_drained_at_once():
    with make_live() as live:
        assert live.begin_drain(300.0).result() == 0


def test_close_ends_what_is_under_way():
    live = make_live()
    gate = threading.Event()
    first = live.call(lambda engine: gate.wait())
    requests, late = [live.submit(PROMPT, LONG) for _ in range(3)], live.call(lambda engine: 3)
    drained = live.begin_drain(300.0)
    until(lambda: first.running())
    closer = threading.Thread(target=live.close)
    closer.start()
    until(lambda: not live.takes_requests)
    gate.set()
    closer.join()
    for request in requests:
        assert request.output.finish_reason == "abort"
        assert [one.error for outputs in request for one in outputs][-1] == "the engine is closed"
    assert late.result() == 3 and drained.result() == 0
    assert not stepper_of(live).thread.is_alive() and not live.engine.has_unfinished
    assert live.engine.stats().num_used_blocks == 0


def test_a_forgotten_engine_ends_but_not_while_it_is_read():
    live = make_live()
    thread, forgotten = stepper_of(live).thread, weakref.ref(live)
    request = live.submit(PROMPT, SamplingParams(max_tokens=20))
    del live
    assert sum(len(outputs) for outputs in request) == 20 and forgotten() is not None
    del request
    gc.collect()
    thread.join(20.0)
    assert not thread.is_alive() and forgotten() is None


def test_a_forked_process_is_refused():
    with make_live() as live:
        request = live.submit(PROMPT, SHORT)
        pid = os.fork()
        if pid == 0:
            refused = 0
            for use in (lambda: live.submit(PROMPT), lambda: live.call(print), live.begin_drain, live.close):
                try:
                    use()
                except RuntimeError as error:
                    refused += "must be used in process" in str(error)
            request.abort()
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
        assert sum(len(outputs) for outputs in request) == 4


PROGRAM = """
import sys
from support.live_engines import make_live
from kvpage.serving import SamplingParams
live = make_live(num_blocks=256)
request = live.submit([1, 2, 3], SamplingParams(max_tokens=200))
next(iter(request))
print("out")
"""


def test_a_program_ends_though_nothing_was_closed():
    paths = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "out\n", "")
