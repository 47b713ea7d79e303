"""Ctrl-C at lines of kvpage's Python: no block is lost, no request stuck, no token wrong, and what was interrupted goes
on or is aborted, as its call says.
"""

import gc
import os
import random
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache

import pytest
import torch
from support.ctrl_c import CtrlC, pythons_handler  # noqa: F401, a fixture for all that is here
from support.insides import cached_rows
from support.models import generate_each, make_model, make_prompts

from kvpage import CacheConfig
from kvpage.checks.interrupts import HeldInterrupts, interruptible, uninterrupted
from kvpage.serving import (
    BeamSearchParams,
    Branches,
    Engine,
    EngineConfig,
    KVPageCache,
    KVPageCachePool,
    SamplingParams,
)
from kvpage.store import KVStore, KVStoreConfig, metadata_of
from kvpage.store.tiers.memory_tier import MemoryTier

B, MAX_TOKENS = 4, 5
NUM_TRIALS = 8
STEM = make_prompts([4 * B + 2], seed=3)[0]
PROMPTS = [STEM + tail for tail in make_prompts([1, 3, B + 1, 2 * B], seed=4)] + make_prompts([5 * B, 2], seed=5)
PARAMS = SamplingParams(max_tokens=MAX_TOKENS)
DRAWN = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=11, n=2)
BEAMS = BeamSearchParams(max_tokens=3, num_beams=3)


def make_engine(store: KVStore | None = None, **options: object) -> Engine:
    """So few blocks that requests are preempted, and come and go between the tiers."""
    config = CacheConfig(block_size=B, num_gpu_blocks=16, num_cpu_blocks=12)
    options = {"max_num_batched_tokens": 24, "load_or_compute": False, "max_num_seqs": 4} | options
    return Engine.from_model(make_model("llama"), EngineConfig(config, **options), store=store)


@cache
def expected() -> list[list[list[int]]]:
    """Of each prompt the tokens of each sample: greedy ones, then drawn ones."""
    alone = Engine.from_model(make_model("llama"), EngineConfig(CacheConfig(block_size=B, num_gpu_blocks=200)))
    each = [*[PARAMS] * len(PROMPTS), *[DRAWN] * len(PROMPTS)]
    greedy = generate_each(make_model("llama"), PROMPTS, MAX_TOKENS)
    found = [[sample.token_ids for sample in one.samples] for one in alone.generate(PROMPTS * 2, each)]
    assert [[tokens] for tokens in greedy] == found[: len(PROMPTS)]
    return found


@cache
def expected_beams() -> list[list[int]]:
    alone = Engine.from_model(make_model("llama"), EngineConfig(CacheConfig(block_size=B, num_gpu_blocks=200)))
    return [one.token_ids for one in alone.beam_search(PROMPTS[:2], BEAMS)]


def generate(engine: Engine) -> None:
    each = [*[PARAMS] * len(PROMPTS), *[DRAWN] * len(PROMPTS)]
    found = engine.generate(PROMPTS * 2, each)
    assert [[sample.token_ids for sample in one.samples] for one in found] == expected()


def stream(engine: Engine) -> None:
    streams = [engine.stream(prompt, PARAMS) for prompt in PROMPTS[:3]]
    assert [list(one) for one in streams] == [tokens for (tokens,) in expected()[:3]]


def search(engine: Engine) -> None:
    assert [one.token_ids for one in engine.beam_search(PROMPTS[:2], BEAMS)] == expected_beams()


def steer(engine: Engine) -> None:
    with Branches(engine) as branches:
        first = branches.start(PROMPTS[0])
        branches.compute([first])
        second = branches.fork(first)
        first.append([1])
        second.append([2, 3])
        branches.compute([first, second])
        branches.release([first])


@pytest.mark.parametrize("work", [generate, stream, search, steer])
def test_what_is_interrupted_leaves_nothing(work: Callable[[Engine], None]) -> None:
    num_lines, rng, num_raised = count_lines(work), random.Random(work.__name__), 0
    for _ in range(NUM_TRIALS):
        engine = make_engine()
        with CtrlC(rng.randint(1, num_lines)) as ctrl_c:
            try:
                work(engine)
            except KeyboardInterrupt:
                num_raised += 1
        check(engine, ctrl_c.place)
    assert num_raised > NUM_TRIALS / 2  # a run may have fewer lines than the one that was counted


def test_with_a_store() -> None:
    """What is on its way to it and from it."""
    expected()
    rng, num_raised, num_lines, nth = random.Random(1), 0, 0, None
    for _ in range(NUM_TRIALS + 1):
        engine = make_engine()
        with KVStore(KVStoreConfig(2 * B), metadata_of(engine.cache, "m"), [MemoryTier(1 << 20)]) as store:
            engine.use_store(store)
            with CtrlC(nth) as ctrl_c:
                try:
                    generate(engine)
                    engine.close()
                except KeyboardInterrupt:
                    num_raised += 1
            num_lines = num_lines or ctrl_c.num_lines
            nth = rng.randint(1, num_lines)
            engine.close()
            check(engine, ctrl_c.place)
            other = make_engine(store=store)
            check(other, ctrl_c.place)
            other.close()
    assert num_raised > NUM_TRIALS / 2  # how many lines there are depends on the store's threads


def test_a_step_that_is_interrupted_loses_no_token() -> None:
    """By one who goes on."""
    num_lines, rng, num_raised = count_lines(run_steps), random.Random(0), 0
    for _ in range(NUM_TRIALS):
        engine = make_engine()
        with CtrlC(rng.randint(1, num_lines)) as ctrl_c:
            num_raised += run_steps(engine)
        check(engine, ctrl_c.place)
    assert num_raised > NUM_TRIALS / 2  # a run may have fewer lines than the one that was counted


def test_caches_of_generate() -> None:
    """Those that are dropped, and those that are used again."""
    model = make_model("llama")
    pool = KVPageCachePool.from_model(model, CacheConfig(block_size=B, num_gpu_blocks=40))
    prompts = torch.tensor([PROMPTS[0], PROMPTS[0][:-1] + [7]])
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": 2, "pad_token_id": 0}
    alone = model.generate(prompts, **options).tolist()

    def work() -> None:
        with KVPageCache(pool, prompts) as cache:
            assert model.generate(prompts, past_key_values=cache, **options).tolist() == alone

    work()
    with CtrlC() as counted:
        work()
    rng, num_raised = random.Random(2), 0
    for _ in range(NUM_TRIALS):
        with CtrlC(rng.randint(1, counted.num_lines)) as ctrl_c:
            try:
                work()
            except KeyboardInterrupt:
                num_raised += 1
        gc.collect()
        work()
        pool.manager.check()
        assert pool.manager.num_free_blocks == pool.manager.num_blocks, ctrl_c.place
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert num_raised > NUM_TRIALS / 2  # a run may have fewer lines than the one that was counted


def count_lines(work: Callable[[Engine], object]) -> int:
    work(make_engine())  # what is done once in a process does not count
    engine = make_engine()
    with CtrlC() as counted:
        work(engine)
    return counted.num_lines


def run_steps(engine: Engine) -> int:
    """How often it was interrupted."""
    each = [*[PARAMS] * len(PROMPTS), *[DRAWN] * len(PROMPTS)]
    outputs, num_raised = {}, 0
    for number, (prompt, params) in enumerate(zip(PROMPTS * 2, each, strict=True)):
        while True:
            try:
                engine.add_request(prompt, params, f"r{number}")
                break
            except KeyboardInterrupt:
                num_raised += 1
    while True:
        try:
            if not engine.has_unfinished:
                break
            for one in engine.step():
                if one.output:
                    outputs[one.request_id] = [sample.token_ids for sample in one.output.samples]
        except KeyboardInterrupt:
            num_raised += 1
    assert [outputs[f"r{number}"] for number in range(len(each))] == expected()
    return num_raised


def check(engine: Engine, place: str) -> None:
    """It has nothing under way, and works."""
    engine.manager.check()
    assert not engine.has_unfinished, place
    stats = engine.stats()
    assert (stats.num_used_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0), place
    found = engine.generate(PROMPTS, PARAMS)
    assert [[one.token_ids] for one in found] == expected()[: len(PROMPTS)], place
    engine.manager.check()


def test_a_cache_that_goes_on() -> None:
    """After Ctrl-C the same cache takes other tokens, and others find what is really there."""
    model = make_model("llama")
    prompt = torch.tensor([PROMPTS[0]])
    others = [torch.cat([prompt, torch.tensor([[9, token]])], 1) for token in (1, 2)]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    alone = [model.generate(asked, **options).tolist() for asked in (prompt, *others)]
    long = [torch.tensor([[*tokens[0], 1]]) for tokens in alone]
    answers = [model.generate(asked, **options).tolist() for asked in long]

    def make_cache() -> KVPageCache:
        pool = KVPageCachePool.from_model(model, CacheConfig(block_size=B, num_gpu_blocks=60))
        return KVPageCache(pool, prompt)

    def work(cache: KVPageCache) -> None:
        assert model.generate(prompt, past_key_values=cache, **options).tolist() == alone[0]

    work(make_cache())
    counted_cache = make_cache()
    with CtrlC() as counted:
        work(counted_cache)
    rng = random.Random(3)
    for _ in range(NUM_TRIALS):
        cache = make_cache()
        with CtrlC(rng.randint(1, counted.num_lines)) as ctrl_c, suppress(KeyboardInterrupt):
            work(cache)
        for asked, wanted in zip(others, alone[1:], strict=True):
            cache.crop(min(prompt.shape[1] - 1, cached_rows(cache).length))
            assert model.generate(asked, past_key_values=cache, **options).tolist() == wanted, ctrl_c.place
        cache.release()
        for asked, wanted in zip(long, answers, strict=True):
            with KVPageCache(cache._pool, asked) as other:
                assert model.generate(asked, past_key_values=other, **options).tolist() == wanted, ctrl_c.place
        manager = cache._pool.manager
        manager.check()
        assert manager.num_free_blocks == manager.num_blocks, ctrl_c.place


# --- HeldInterrupts --------------------------------------------------------------------------------------------------


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_held_until_the_end() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), HeldInterrupts():
        press()
        with HeldInterrupts():
            done.append(1)
        done.append(2)
    assert done == [1, 2]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with HeldInterrupts():
        done.append(3)


def test_the_second_one_is_raised_at_once_and_once() -> None:
    with HeldInterrupts():
        with pytest.raises(KeyboardInterrupt):
            press()
            press()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_may_be_interrupted() -> None:
    with HeldInterrupts():
        with pytest.raises(KeyboardInterrupt), interruptible():
            press()
        press()
        with pytest.raises(KeyboardInterrupt), interruptible():
            raise AssertionError("the one before is raised first")
        with interruptible():
            pass
    with interruptible(), pytest.raises(KeyboardInterrupt):
        press()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_and_ctrl_c() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, HeldInterrupts():
        press()
        raise ValueError("boom")
    assert str(caught.value.__context__) == "boom"


def test_other_handlers_and_threads_are_left_alone() -> None:
    seen = []
    before = signal.signal(signal.SIGINT, lambda *call: seen.append(call))
    try:
        with HeldInterrupts(), interruptible():
            press()
            assert len(seen) == 1
    finally:
        signal.signal(signal.SIGINT, before)

    def work() -> None:
        with HeldInterrupts(), interruptible():
            seen.append(signal.getsignal(signal.SIGINT))

    with HeldInterrupts():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert seen.pop() is signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert uninterrupted(max)(3, 5) == 5 and uninterrupted(make_engine).__name__ == "make_engine"


def test_a_handler_that_was_put_in_its_place_stays() -> None:
    with HeldInterrupts():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with interruptible():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_handler_that_outlives_its_block_is_pythons() -> None:
    """As a debugger keeps it and puts it back, or another signal's handler that raises."""
    with HeldInterrupts():
        kept = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, kept)
    with pytest.raises(KeyboardInterrupt):
        press()
    done = []
    with pytest.raises(KeyboardInterrupt), HeldInterrupts():
        press()
        done.append(1)
    assert done == [1]


def test_a_child_of_a_fork_is_not_held() -> None:
    with HeldInterrupts():
        child = os.fork()
        if not child:
            try:
                press()
            except KeyboardInterrupt:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_without_pythons_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Python was begun by another program, in another thread: nothing is held, and nothing fails."""

    def run() -> None:
        monkeypatch.setattr(threading, "main_thread", threading.current_thread)
        with HeldInterrupts(), interruptible():
            done.append(1)

    done = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert done == [1]
