"""Calls pass through few functions and files: a reader follows a prompt, a step and a chat from end to end."""

from collections.abc import Callable

import pytest
import torch
from support.models import make_model
from support.walks import Walk, guards_of, hops_of_a_step, make_engine, walk_of_a_chat, walk_of_a_prompt

from kvpage import CacheConfig
from kvpage.serving import KVPageCache, KVPageCachePool, SamplingParams

MAX_HOPS = 8


# A chat: 223 before headers could name a session, which takes 3, and before the page told why a prompt was computed.
@pytest.mark.parametrize("walk, most_functions, most_files", [(walk_of_a_prompt, 20, 10), (walk_of_a_chat, 227, 49)])
def test_a_walk_is_short(walk: Callable[[], Walk], most_functions: int, most_files: int) -> None:
    steps = walk()
    functions, files = steps.functions, steps.files
    assert 0 < len(functions) <= most_functions, "\n  ".join(["", *functions])
    assert len(files) <= most_files, "\n  ".join(["", *files])


@pytest.mark.parametrize("num_steps_before", [0, 3])
def test_a_step_reaches_the_model_in_few_calls(num_steps_before: int) -> None:
    """Of a prompt, and of a decode."""
    hops = hops_of_a_step(num_steps_before)
    assert hops[0] == "Engine.step" and len(hops) <= MAX_HOPS, hops


def test_a_decode_step_of_an_engine_holds_interrupts_back_once() -> None:
    engine = make_engine()
    engine.add_request([1] * 9, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    engine.step()
    assert [guards_of(engine.step) for _ in range(5)] == [1] * 5


@torch.no_grad()
def test_a_forward_over_a_cache_holds_interrupts_back_once() -> None:
    """Also one that fills a block, which is committed."""
    pool = KVPageCachePool.from_model(make_model("llama"), CacheConfig(4, 64))
    prompt, token = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[6]])
    with KVPageCache(pool, prompt) as cache:
        inputs = [prompt, *[token] * 5]
        calls = [lambda ids=ids: pool.model(input_ids=ids, past_key_values=cache, use_cache=True) for ids in inputs]
        assert [guards_of(call) for call in calls] == [1] * len(calls)
