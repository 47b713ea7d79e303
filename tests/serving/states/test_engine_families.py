"""Engine over each family with states: tokens are those of model.generate, hits are those of an ideal cache."""

import pytest
from support.state_engines import B, ask, check_nothing_held, greedy, make_engine, own_tokens, random_prompt
from support.state_models import APART, SERVED, make_state_model

NUM_TOKENS = 13  # more than three blocks


@pytest.mark.parametrize("kind", SERVED)
def test_prefixes_that_diverge_end_and_go_on(kind: str) -> None:
    model = make_state_model(kind)
    first = random_prompt(19)
    others = [first[:10] + random_prompt(5, seed) for seed in (1, 2)]
    expected = {tuple(prompt): own_tokens(model, prompt, NUM_TOKENS) for prompt in (first, *others)}
    longer = first + expected[tuple(first)] + [3, 5]
    engine = make_engine(model, max_num_batched_tokens=7)
    hits = []
    for prompt in (first, *others, first):
        tokens, num_cached = ask(engine, prompt, NUM_TOKENS)
        assert tokens == expected[tuple(prompt)]
        hits.append(num_cached)
    assert hits == [0, 0, 10, 18]
    tokens, num_cached = ask(engine, longer, 4)
    assert tokens == own_tokens(model, longer, 4)
    ends = len(first) - 1, len(first) + NUM_TOKENS - 1  # of an answer, the last token was never computed
    assert num_cached == ends[kind not in APART]
    forked = engine.generate([first], greedy(NUM_TOKENS, n=3))[0]
    assert [sample.token_ids for sample in forked.samples] == [expected[tuple(first)]] * 3
    check_nothing_held(engine)


@pytest.mark.parametrize("kind", ["jamba", "lfm2", "mamba2", "qwen3_next", "recurrent_gemma"])
@pytest.mark.parametrize("num_batched_tokens", [7, 512])
def test_each_offset_of_three_blocks(kind: str, num_batched_tokens: int) -> None:
    model, common = make_state_model(kind), random_prompt(3 * B + 1)
    engine = make_engine(model, max_num_batched_tokens=num_batched_tokens)
    tokens, _ = ask(engine, common, 2, cache_at=range(1, 3 * B + 1))
    assert tokens == own_tokens(model, common, 2)
    for position in range(1, 3 * B + 1):
        prompt = [*common[:position], (common[position] + 1) % 90 + 1, 7, 9]
        assert ask(engine, prompt, 4) == (own_tokens(model, prompt, 4), position)
    check_nothing_held(engine)
