"""A device tier so small that blocks leave it, come back and are swapped all the time: the tokens stay the same."""

import pytest
import torch
from support.engines import B, make_engine
from support.models import generate_each, make_model, make_prompts

from kvpage.blocks.config import HostPolicy
from kvpage.blocks.load_or_compute import LoadOrCompute
from kvpage.serving import Engine, SamplingParams

MAX_TOKENS = 10
PARAMS = SamplingParams(max_tokens=MAX_TOKENS)


def conversations() -> list[list[int]]:
    """Prompts that begin alike, in different blocks and in the middle of one, and some that do not."""
    stem = make_prompts([4 * B + 2], seed=3)[0]
    tails = make_prompts([1, 3, B + 1, 2 * B, 7, 2], seed=4)
    return [stem + tail for tail in tails] + make_prompts([5 * B, B + 1, 3 * B - 1, 2], seed=5)


PROMPTS = conversations()


class SlowHost(LoadOrCompute):
    def saw_prefill(self, num_tokens: int, seconds: float) -> None:
        """What is measured here is not to change it."""

    saw_transfer = saw_prefill


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return generate_each(make_model("llama"), PROMPTS, MAX_TOKENS)


def rounds(engine: Engine, expected: list[list[int]], num_rounds: int = 3) -> None:
    for _ in range(num_rounds):
        outputs = engine.generate(PROMPTS, PARAMS)
        assert [output.token_ids for output in outputs] == expected
    engine.manager.check()


@pytest.mark.parametrize("kind", ["swap_in", "swap_out", "copy"])
@pytest.mark.parametrize("is_done", [False, True])
def test_a_copy_between_the_tiers_that_fails_is_done_before_anything_else(expected, kind: str, is_done: bool) -> None:
    """The tree takes its blocks for what is to be copied into them, whatever becomes of the step."""
    engine = make_engine(14, 40, max_num_batched_tokens=24, load_or_compute=False, max_num_seqs=4)
    works, calls = getattr(engine.cache, kind), []

    def fails(pairs: torch.Tensor) -> None:
        calls.append(pairs)
        fails_now = len(calls) % 3 == 1
        if is_done or not fails_now:
            works(pairs)
        if fails_now:
            raise KeyboardInterrupt

    setattr(engine.cache, kind, fails)
    for _ in range(3):
        ids, outputs = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS], {}
        while engine.has_unfinished:
            try:
                outputs |= {one.request_id: one.output.token_ids for one in engine.step() if one.output}
            except KeyboardInterrupt:
                engine.manager.check()
        assert [outputs[request_id] for request_id in ids] == expected
    engine.manager.check()
    assert calls and engine.stats().num_used_blocks == 0  # how many, the hash of the tree decides


@pytest.mark.parametrize("call", ["swap_out", "swap_in", "allocate", "append"])
def test_a_manager_that_fails_costs_a_step(expected, call: str) -> None:
    """It has changed nothing then, and every request is where it was."""
    engine = make_engine(14, 40, max_num_batched_tokens=24, load_or_compute=False, max_num_seqs=4, share_parts=False)
    owner = engine.manager.rows if call == "append" else engine.manager
    works, calls = getattr(owner, call), []

    def fails(*args: object, **named: object) -> object:
        calls.append(args)
        if len(calls) % 3 == 0:
            raise MemoryError
        return works(*args, **named)

    setattr(owner, call, fails)
    ids, outputs, num_raised = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS], {}, 0
    while engine.has_unfinished:
        try:
            outputs |= {one.request_id: one.output.token_ids for one in engine.step() if one.output}
        except MemoryError:
            num_raised += 1
            engine.manager.check()
    assert [outputs[request_id] for request_id in ids] == expected
    assert num_raised > 0
    engine.manager.check()
    assert engine.stats().num_used_blocks == 0


@pytest.mark.parametrize("after_hits", [None, 0, 1])
def test_tokens_are_those_of_generate_while_blocks_come_and_go(expected, after_hits) -> None:
    options = {"max_num_batched_tokens": 24, "load_or_compute": False, "host_policy": HostPolicy(after_hits)}
    engine = make_engine(14, 200, **options)
    rounds(engine, expected)
    space = engine.manager.stats().space
    assert space.host_hit_tokens > 40 and space.promoted_blocks > 10 and space.evicted_blocks > 30, space
    assert (space.written_blocks > 3) == (after_hits is not None)
    assert engine.stats().num_preemptions > 3 and engine.stats().num_swaps > 3


def test_a_host_tier_that_is_small_too(expected) -> None:
    engine = make_engine(14, 6, max_num_batched_tokens=24, load_or_compute=False)
    rounds(engine, expected)
    stats = engine.stats()
    assert stats.num_preemptions >= stats.num_swaps > 0
    assert engine.manager.stats().space.demoted_blocks > 50


def test_without_parts_of_blocks(expected) -> None:
    engine = make_engine(40, 100, share_parts=False)
    rounds(engine, expected, 2)
    assert engine.manager.stats().space.part_hit_tokens == 0


def test_parts_of_blocks_are_shared(expected) -> None:
    engine = make_engine(100, 0)
    engine.generate(PROMPTS[:1], PARAMS)
    output = engine.generate(PROMPTS[1:2], PARAMS)[0]
    assert output.num_cached_tokens == 4 * B + 2 and output.token_ids == expected[1]
    assert engine.manager.stats().space.part_hit_tokens == 2


def test_what_is_slower_to_load_than_to_compute_is_computed(expected) -> None:
    engine = make_engine(14, 200)
    rounds(engine, expected, 1)
    assert engine.manager.space.rule.tokens_per_second > 0
    engine.manager.space.rule = SlowHost(1, B, bytes_per_second=1.0, tokens_per_second=1e9)
    before = engine.manager.stats().space
    rounds(engine, expected, 2)
    after = engine.manager.stats().space
    assert after.host_hit_tokens == before.host_hit_tokens and after.refused_tokens > before.refused_tokens
    assert after.demoted_blocks == before.demoted_blocks  # nor is anything worth keeping there


def test_priority_keeps_a_prefix(expected) -> None:
    for priority, kept in ((0, False), (5, True)):
        engine = make_engine(16, 0)
        engine.generate(PROMPTS[6:7], SamplingParams(max_tokens=1, retain_priority=priority))
        for prompt in PROMPTS[:3]:
            engine.generate([prompt], PARAMS)
        output = engine.generate(PROMPTS[6:7], SamplingParams(max_tokens=1))[0]
        assert (output.num_cached_tokens >= 4 * B) == kept, (priority, output.num_cached_tokens)


def test_an_aborted_request_leaves_nothing_on_the_host(expected) -> None:
    engine = make_engine(14, 50, max_num_batched_tokens=24)
    ids = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
    while not engine.stats().num_swaps:
        engine.step()
    for request_id in ids:
        if request_id in engine.loop.requests:
            engine.abort(request_id)
    engine.manager.check()
    space = engine.manager.stats().space
    assert space.num_free_host_blocks + space.num_cached_host_blocks == 50
