"""Crowds: many streams of which a third go away, two event loops, random lives beside an oracle, a slow store."""

import asyncio
import gc
import logging
import random
import threading
import time

import numpy as np
import pytest
from support.insides import stepper_of
from support.live_engines import B, check_nothing_left, expected, make_live
from support.models import make_model, make_prompts
from support.waiting import until

from kvpage.serving import AsyncEngineConfig, LiveRequest, SamplingParams
from kvpage.store import BlockStore

PROMPTS = make_prompts([1, B, 7, 2 * B + 1, 13, 30], seed=9)


async def whole(live, prompt, params) -> list[int]:
    request = live.submit(prompt, params)
    tokens = [one.token_id async for outputs in request for one in outputs]
    assert request.output.token_ids == tokens
    return tokens


def test_two_hundred_streams_of_which_a_third_go_away():
    params = SamplingParams(max_tokens=12)
    wanted = expected([(prompt, params) for prompt in PROMPTS])

    async def client(live, number: int) -> bool:
        prompt, leaves_after = PROMPTS[number % len(PROMPTS)], number % 11 if number % 3 == 0 else None
        got: list[int] = []
        async for outputs in live.submit(prompt, params):
            got += [one.token_id for one in outputs]
            if leaves_after is not None and len(got) >= leaves_after:
                return False
        assert got == wanted[number % len(PROMPTS)][0]
        return True

    async def main() -> None:
        async with make_live(num_blocks=128) as live:
            held = []
            for _ in range(2):
                stayed = await asyncio.gather(*(client(live, number) for number in range(200)))
                await asyncio.to_thread(check_nothing_left, live)
                gc.collect()
                held.append(sum(type(one) is LiveRequest for one in gc.get_objects()))
            assert sum(stayed) >= 133 and held[-1] == 0
            assert sum(thread.name == "kvpage-step" for thread in threading.enumerate()) == 1

    asyncio.run(main())
    assert all(thread.name != "kvpage-step" for thread in threading.enumerate())


def test_two_event_loops_and_a_thread_read_at_once():
    params = SamplingParams(max_tokens=8)
    wanted = [one[0] for one in expected([(prompt, params) for prompt in PROMPTS])]
    got: dict[str, list[list[int]]] = {}
    with make_live() as live:

        def in_loop(name: str) -> None:
            async def all_of_them() -> list[list[int]]:
                return await asyncio.gather(*(whole(live, prompt, params) for prompt in PROMPTS))

            got[name] = asyncio.run(all_of_them())

        def in_thread() -> None:
            requests = [live.submit(prompt, params) for prompt in PROMPTS]
            got["thread"] = [[one.token_id for outputs in each for one in outputs] for each in requests]

        threads = [threading.Thread(target=in_loop, args=(name,)) for name in "ab"] + [
            threading.Thread(target=in_thread)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == {"a": wanted, "b": wanted, "thread": wanted}
        check_nothing_left(live)


def test_a_loop_that_is_gone_holds_up_nobody():
    with make_live() as live:
        gate = threading.Event()
        held = live.call(lambda engine: gate.wait())
        loop = asyncio.new_event_loop()
        task = loop.create_task(whole(live, PROMPTS[3], SamplingParams(max_tokens=5)))
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()
        gate.set()
        held.result()
        assert len(asyncio.run(live.generate(PROMPTS[1], SamplingParams(max_tokens=5))).token_ids) == 5
        task._log_destroy_pending = False
        del task
        gc.collect()
        check_nothing_left(live)


@pytest.mark.parametrize("seed", range(4))
def test_random_lives(seed):
    """Requests of threads and coroutines end in every way, and the model raises now and then.

    Whoever gets tokens gets those of an Engine alone, as far as they go; whole answers are whole.
    """
    rng = random.Random(seed)
    logging.disable(logging.ERROR)
    lengths = [SamplingParams(max_tokens=number) for number in (1, 5, 9)]
    drawn = SamplingParams(max_tokens=6, temperature=1.0, seed=4)
    works = [(prompt, params) for prompt in PROMPTS for params in (*lengths, drawn)]
    wanted = [one[0] for one in expected(works)]
    model, fails = make_model("llama"), random.Random(seed + 100)

    def hook(module, args) -> None:
        if fails.random() < 0.08:
            raise RuntimeError("boom")

    model.model.layers[1].register_forward_pre_hook(hook)
    live = make_live(AsyncEngineConfig(max_num_waiting=500), 40, model, max_num_seqs=6, max_num_batched_tokens=24)
    fields = [
        {"timeout": rng.choice([None, None, 1e-4, 0.02, 50.0]), "priority": rng.randrange(3)} for _ in range(60)
    ]  # fmt: skip

    def check(request, tokens, number) -> None:
        last = request.output.finish_reason if request.output else None
        if last in ("stop", "length"):
            assert tokens == wanted[number]
        assert tokens == wanted[number][: len(tokens)]

    async def coroutine(index: int) -> None:
        number, leaves = rng.randrange(len(works)), rng.choice([None, None, 0, 2])
        await asyncio.sleep(rng.random() * 0.05)
        request, tokens = live.submit(*works[number], **fields[index]), []
        async for outputs in request:
            tokens += [one.token_id for one in outputs if one.token_id is not None]
            if leaves is not None and len(tokens) > leaves:
                request.abort() if index % 2 else None
                break
        check(request, tokens, number)

    def thread(index: int) -> None:
        own = random.Random(seed * 1000 + index)
        number = own.randrange(len(works))
        time.sleep(own.random() * 0.05)
        request, tokens = live.submit(*works[number], **fields[index]), []
        for outputs in request:
            tokens += [one.token_id for one in outputs if one.token_id is not None]
            if own.random() < 0.05:
                request.abort()
        check(request, tokens, number)

    async def main() -> None:
        tasks = [asyncio.create_task(coroutine(index)) for index in range(40)]
        threads = [asyncio.to_thread(thread, index) for index in range(40, 60)]
        for task in rng.sample(tasks, 8):
            asyncio.get_running_loop().call_later(rng.random() * 0.1, task.cancel)
        for done in await asyncio.gather(*tasks, *threads, return_exceptions=True):
            assert done is None or isinstance(done, asyncio.CancelledError), repr(done)

    try:
        with live:
            asyncio.run(main())
            check_nothing_left(live)
            stats = live.stats()
            assert stats.num_refused == 0 and stats.engine.num_finished == stats.num_submitted
    finally:
        logging.disable(logging.NOTSET)


class SlowStore(BlockStore):
    """A store whose lookups wait for `gate`; it holds nothing."""

    def __init__(self) -> None:
        self.gate, self.num_lookups = threading.Event(), 0

    def lookup(self, tokens, *, namespace=b"") -> int:
        self.num_lookups += 1
        if len(tokens) > 2 * B:
            self.gate.wait()
        return 0

    def load_blocks(self, tokens, engine, block_table, *, start, namespace) -> int:
        raise AssertionError("it holds nothing")

    def store_blocks(self, tokens, engine, block_table, *, namespace) -> int:
        return 0


class SlowSaves(SlowStore):
    """A store that takes blocks once the gate is open."""

    num_saves = 0

    def lookup(self, tokens, *, namespace=b"") -> int:
        return 0

    def store_blocks(self, tokens, engine, block_table, *, namespace) -> int:
        self.num_saves += 1
        self.gate.wait()
        return 0


def test_a_store_that_is_slow_holds_up_its_request_alone():
    """All requests wait for the store: others come and go meanwhile, and the thread sleeps."""
    store, params = SlowStore(), SamplingParams(max_tokens=4)
    live = make_live(store_deadline=1e4)
    with live:
        live.call(lambda engine: engine.use_store(store)).result()
        held = live.submit(PROMPTS[-1], params)
        until(lambda: store.num_lookups == 1)
        before = live.call(lambda engine: engine.stats().num_steps).result()
        assert len(asyncio.run(live.generate(PROMPTS[0], params)).token_ids) == 4
        late = live.submit(PROMPTS[-1][:-1], params, timeout=0.05)
        assert [one.error for outputs in late for one in outputs] == ["deadline"]
        gone = live.submit(PROMPTS[-1][:-2], params)
        gone.abort()
        assert [one.finish_reason for outputs in gone for one in outputs] == ["abort"]
        time.sleep(0.1)
        num_rounds = live.call(lambda engine: engine.stats().num_steps).result() - before
        assert num_rounds < 10 and held.output is None
        store.gate.set()
        assert sum(len(outputs) for outputs in held) == 4
        check_nothing_left(live)
    assert np.array_equal(held.output.prompt_token_ids, PROMPTS[-1])


def test_an_idle_engine_lets_go_of_blocks_that_are_stored():
    """The last request ends before its prompt is stored, and no other comes."""
    store = SlowSaves()
    with make_live() as live:
        live.call(lambda engine: engine.use_store(store)).result()
        assert len(list(live.submit(PROMPTS[-1], SamplingParams(max_tokens=1)))) == 1
        until(lambda: store.num_saves == 1)
        assert live.stats().num_unfinished == 0 and live.stats().engine.num_used_blocks > 0
        store.gate.set()
        check_nothing_left(live)


def test_waiting_for_a_store_takes_no_turns():
    store = SlowStore()
    with make_live(store_deadline=1e4) as live:
        live.call(lambda engine: engine.use_store(store)).result()
        request = live.submit(PROMPTS[-1], SamplingParams(max_tokens=2))
        until(lambda: store.num_lookups == 1)
        turns = []
        take = stepper_of(live).inbox.take
        stepper_of(live).inbox.take = lambda: turns.append(1) or take()
        time.sleep(0.15)
        assert len(turns) <= 2
        store.gate.set()
        assert sum(len(outputs) for outputs in request) == 2


def test_priorities_order_those_that_wait():
    gate, ends = threading.Event(), []
    with make_live(max_num_seqs=1) as live:
        held = live.call(lambda engine: gate.wait())
        requests = {
            number: live.submit(PROMPTS[number], SamplingParams(max_tokens=2), priority=priority)
            for number, priority in enumerate([1, 0, 2, 0, 1])
        }
        gate.set()
        held.result()
        for number, request in requests.items():
            for _ in request:
                pass
            ends.append((request.output.first_token_time, number))
    assert [number for _, number in sorted(ends)] == [1, 3, 0, 4, 2]
