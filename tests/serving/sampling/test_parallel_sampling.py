"""n samples of one prompt: computed once, forked, and each what a request with its own seed would have drawn."""

import pytest
from support.engines import B, make_engine
from support.models import make_prompts

from kvpage.serving import SamplingParams

N = 4
MAX_TOKENS = 9
PROMPTS = make_prompts([1, B - 1, B, B + 1, 3 * B + 2])
PARAMS = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=11, n=N)


@pytest.fixture(scope="module")
def alone() -> list[list[list[int]]]:
    """By prompt and seed, each request in an engine of its own."""
    params = [SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=11 + index) for index in range(N)]
    return [[make_engine().generate([prompt], one)[0].token_ids for one in params] for prompt in PROMPTS]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 3},
        {"max_num_seqs": N + 1},
        {"num_blocks": 10},
        {"num_blocks": 10, "enable_prefix_caching": False},
        {"num_blocks": 10, "num_host_blocks": 30, "load_or_compute": False},
    ],
    ids=str,
)
def test_samples_are_those_of_requests_with_their_seeds(alone: list[list[list[int]]], options: dict) -> None:
    engine = make_engine(**options)
    outputs = engine.generate(PROMPTS, PARAMS)
    assert [[sample.token_ids for sample in output.samples] for output in outputs] == alone
    assert {sample.finish_reason for output in outputs for sample in output.samples} == {"length"}
    assert [output.token_ids for output in outputs] == [samples[0] for samples in alone]
    stats = engine.stats()
    assert (stats.num_finished, stats.num_used_blocks) == (len(PROMPTS), 0)
    assert stats.num_generated_tokens == len(PROMPTS) * N * MAX_TOKENS
    assert (stats.num_preemptions > 0) == ("num_blocks" in options)
    engine.manager.check()


def test_a_prompt_is_computed_once_and_its_blocks_are_shared() -> None:
    engine = make_engine(enable_prefix_caching=False)
    prompt = make_prompts([5 * B + 2])[0]
    engine.add_request(prompt, PARAMS)
    assert [output.sample_index for output in engine.step()] == list(range(N))
    assert engine.stats().num_computed_tokens == len(prompt)
    assert engine.stats().num_used_blocks == 6
    engine.step()
    assert engine.stats().num_used_blocks == 5 + N  # the last block was copied for all but one
    assert engine.stats().num_running == N


def test_each_sample_ends_for_itself(alone: list[list[list[int]]]) -> None:
    stop = alone[4][1][2]
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=11, n=N, stop_token_ids=[stop])
    expected = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in alone[4]]
    assert len(set(map(len, expected))) > 1
    engine = make_engine()
    engine.add_request(PROMPTS[4], params, "one")
    tokens: list[list[int]] = [[] for _ in range(N)]
    reasons: list[str | None] = [None] * N
    while engine.has_unfinished:
        outputs = engine.step()
        for one in outputs:
            assert reasons[one.sample_index] is None
            tokens[one.sample_index].append(one.token_id)
            reasons[one.sample_index] = one.finish_reason
        assert [one.output is not None for one in outputs[:-1]] == [False] * (len(outputs) - 1)
        assert (outputs[-1].output is not None) == (None not in reasons)
    output = outputs[-1].output
    assert tokens == expected == [sample.token_ids for sample in output.samples]
    assert reasons == ["stop" if stop in one else "length" for one in expected]
    assert [sample.finish_reason for sample in output.samples] == reasons


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_abort_ends_all_samples(alone: list[list[list[int]]], num_steps: int) -> None:
    engine = make_engine()
    engine.add_request(PROMPTS[4], PARAMS, "one")
    for _ in range(num_steps):
        engine.step()
    output = engine.abort("one")
    assert [sample.finish_reason for sample in output.samples] == ["abort"] * (N if num_steps else 1)
    expected = [tokens[:num_steps] for tokens in alone[4]] if num_steps else [[]]
    assert [sample.token_ids for sample in output.samples] == expected
    assert not engine.has_unfinished and engine.stats().num_used_blocks == 0
    engine.manager.check()


def test_a_step_that_fails_forks_nothing(alone: list[list[list[int]]]) -> None:
    engine = make_engine()
    engine.add_request(PROMPTS[4], PARAMS)

    def fail(module: object, args: tuple) -> None:
        handle.remove()
        raise RuntimeError("boom")

    handle = engine.debug.runner.model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="boom"):
        engine.step()
    assert (engine.stats().num_running, engine.stats().num_waiting) == (0, 1)
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    assert [sample.token_ids for sample in outputs[-1].output.samples] == alone[4]


def test_bad_numbers_of_samples() -> None:
    for wrong in (0, -1, 1.5, True, "2"):
        with pytest.raises(ValueError, match="n must be a positive integer"):
            SamplingParams(temperature=1.0, n=wrong)
    engine = make_engine(max_num_seqs=N - 1)
    with pytest.raises(ValueError, match="n must be at most max_num_seqs=3, got 4"):
        engine.add_request(PROMPTS[0], PARAMS)
    with pytest.raises(ValueError, match="n must be 1 for a stream, got 4"):
        engine.stream(PROMPTS[0], PARAMS)
    assert not engine.has_unfinished
