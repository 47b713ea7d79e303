"""Engine over models with windows, whose layers have blocks of their own: tokens are those of model.generate."""

import pytest
from support.models import WINDOW
from support.state_engines import own_tokens, random_prompt
from support.window_engines import (
    KINDS,
    B,
    ask,
    check_nothing_held,
    finished,
    greedy,
    make_engine,
    make_window_model,
    poison,
)

NUM_TOKENS = 32


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_batched_tokens", [7, 512])
def test_each_offset_of_three_blocks(kind: str, num_batched_tokens: int) -> None:
    model, common = make_window_model(kind), random_prompt(3 * B + 1)
    engine = make_engine(model, max_num_batched_tokens=num_batched_tokens)
    tokens, _ = ask(engine, common, NUM_TOKENS)
    assert tokens == own_tokens(model, common, NUM_TOKENS)
    for position in range(1, 3 * B + 1):
        prompt = [*common[:position], (common[position] + 1) % 90 + 1, 7, 9]
        assert ask(engine, prompt, 4) == (own_tokens(model, prompt, 4), position // B * B)
    check_nothing_held(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_behind_the_window_are_given_back(kind: str) -> None:
    """A long sequence runs in few blocks of its windows. Another finds its prefix as far as these are left."""
    model, prompt = make_window_model(kind), random_prompt(9 * B + 1)
    least = WINDOW // B + 2
    engine = make_engine(model, num_window_blocks=least, max_num_batched_tokens=7)
    expected = own_tokens(model, prompt, NUM_TOKENS)
    assert ask(engine, prompt, NUM_TOKENS) == (expected, 0)
    assert all(stats.num_free_blocks + stats.num_evictable_blocks == least for stats in engine.stats().windows)
    longer = [*prompt, *expected, 5]
    tokens, num_cached = ask(engine, longer, 4)
    assert (tokens, num_cached) == (own_tokens(model, longer, 4), (len(longer) - 2) // B * B)
    assert ask(engine, prompt, NUM_TOKENS) == (expected, 0)  # its last window has gone
    check_nothing_held(engine)


FEW = (40, WINDOW // B + 2, 0)
"""Blocks of all tokens, of each window, and of the host."""


@pytest.mark.parametrize(
    ("kind", "few"),
    [
        ("gemma3", (40, 9, 0)),
        ("mistral", (40, 16, 0)),
        *((kind, few) for kind in KINDS for few in (FEW, (24, WINDOW // B + 4, 6), (24, WINDOW // B + 4, 64))),
    ],
)
def test_requests_together_in_few_blocks(kind: str, few: tuple[int, int, int]) -> None:
    """Preempted requests compute again, or go to the host and come back."""
    model = make_window_model(kind)
    prompts = [random_prompt(length, length) for length in (1, B - 1, B, B + 1, 9 * B, 5 * B + 3, 7 * B)]
    engine = make_engine(model, *few, load_or_compute=False, max_num_batched_tokens=13)
    for prompt in prompts:
        engine.add_request(prompt, greedy(NUM_TOKENS))
    outputs = []
    while engine.has_unfinished:
        poison(engine)
        outputs += [one.output for one in engine.step() if one.output is not None]
        engine.manager.check()
    found = {tuple(output.prompt_token_ids): output.samples[0].token_ids for output in outputs}
    assert found == {tuple(prompt): own_tokens(model, prompt, NUM_TOKENS) for prompt in prompts}
    assert engine.stats().num_preemptions > 0 and (engine.stats().num_swaps > 0) == (few[2] > 0)
    check_nothing_held(engine)


@pytest.mark.parametrize("is_beside", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_evicted_comes_back_from_the_host(kind: str, is_beside: bool) -> None:
    """Few blocks of all groups on the device, and many on the host. is_beside: as on a GPU."""
    model, prompt = make_window_model(kind), random_prompt(9 * B + 1)
    engine = make_engine(model, 16, WINDOW // B + 3, 128, load_or_compute=False, max_num_batched_tokens=7)
    engine.debug.transfers._is_beside = is_beside
    expected = own_tokens(model, prompt, 4)
    assert ask(engine, prompt, 4) == (expected, 0)
    for number in range(3):
        other = random_prompt(9 * B, number + 10)
        assert ask(engine, other, 4) == (own_tokens(model, other, 4), 0)
    assert ask(engine, prompt, 4) == (expected, 9 * B)
    assert all(stats.promoted_blocks > 0 for stats in engine.stats().windows)
    check_nothing_held(engine)


def test_a_pinned_prompt_is_found_after_many_others() -> None:
    model, prompt = make_window_model("gemma3"), random_prompt(6 * B)
    engine = make_engine(model, 32, WINDOW // B + 6, pin_quota=6, max_num_batched_tokens=7)
    ask(engine, prompt, 2)
    engine.manager.space.pin(prompt)
    for number in range(6):
        ask(engine, random_prompt(9 * B, number + 10), 2)
    assert ask(engine, [*prompt, 5], 4) == (own_tokens(model, [*prompt, 5], 4), 6 * B)
    check_nothing_held(engine)


@pytest.mark.parametrize("is_beside", [False, True])
@pytest.mark.parametrize("kind", ["gemma3", "mistral"])
def test_samples_share_their_prompt(kind: str, is_beside: bool) -> None:
    """Each writes into a copy of the last block. is_beside: copies run beside the computation, as on a GPU."""
    model, prompt = make_window_model(kind), random_prompt(3 * B + 2)
    engine = make_engine(model)
    engine.debug.transfers._is_beside = is_beside
    engine.add_request(prompt, greedy(NUM_TOKENS, n=3))
    (output,) = finished(engine)
    assert [sample.token_ids for sample in output.samples] == [own_tokens(model, prompt, NUM_TOKENS)] * 3
    check_nothing_held(engine)
