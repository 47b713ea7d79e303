"""Beam search over blocks gives the continuations, and the scores, of `model.generate(num_beams=...)`."""

from functools import cache

import pytest
import torch
from support.models import make_model, make_prompts

from kvpage import CacheConfig, OutOfBlocks
from kvpage.serving import BeamSearchParams, Engine, EngineConfig, SamplingParams

B = 4
MAX_TOKENS = 10
PROMPTS = make_prompts([1, B - 1, B, B + 1, 3 * B + 2])


def make_engine(kind: str = "llama", num_blocks: int = 256, eos: list[int] | None = None, **options) -> Engine:
    model = make_model(kind)
    model.generation_config.eos_token_id = eos
    engine = Engine.from_model(model, EngineConfig(CacheConfig(block_size=B, num_gpu_blocks=num_blocks), **options))
    for layer in engine.cache.gpu_cache:
        layer.fill_(float("nan"))
    return engine


def by_generate(kind: str, prompt: list[int], eos: tuple[int, ...], **fields) -> list[tuple[list[int], float]]:
    model = make_model(kind)
    model.generation_config.eos_token_id = list(eos) or None
    row = torch.tensor([prompt])
    output = model.generate(
        row, attention_mask=torch.ones_like(row), do_sample=False, pad_token_id=0, max_new_tokens=MAX_TOKENS,
        return_dict_in_generate=True, output_scores=True, **fields,
    )  # fmt: skip
    beams = []
    for tokens, score in zip(
        output.sequences[:, len(prompt) :].tolist(), output.sequences_scores.tolist(), strict=True
    ):
        ends = [index for index, token in enumerate(tokens) if token in eos]
        beams.append((tokens[: ends[0] + 1] if ends else tokens, score))
    return beams


def check(output, expected: list[tuple[list[int], float]]) -> None:
    assert [beam.token_ids for beam in output.beams] == [tokens for tokens, _ in expected]
    assert [beam.score for beam in output.beams] == pytest.approx([score for _, score in expected], rel=1e-5, abs=1e-4)
    assert output.token_ids == expected[0][0]


def check_drained(engine: Engine) -> None:
    engine.manager.check()
    assert engine.stats().num_used_blocks == 0


@cache
def likely_tokens(kind: str) -> tuple[int, ...]:
    """Some that beams meet early and late: as stop tokens they end some of them."""
    tokens, _ = by_generate(kind, PROMPTS[4], (), num_beams=4)[0]
    return tuple(sorted({tokens[2], tokens[5]}))


@pytest.mark.parametrize("num_beams", [1, 2, 5])
@pytest.mark.parametrize("kind", ["llama", "mistral", "deepseek_v3"])
def test_beams_are_those_of_generate(kind: str, num_beams: int) -> None:
    engine = make_engine(kind)
    params = BeamSearchParams(num_beams, MAX_TOKENS, num_return_sequences=num_beams)
    outputs = engine.beam_search(PROMPTS, params)
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    if num_beams == 1:
        greedy = engine.generate(PROMPTS, SamplingParams(max_tokens=MAX_TOKENS))
        assert [output.token_ids for output in outputs] == [output.token_ids for output in greedy]
    else:
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            check(output, by_generate(kind, prompt, (), num_beams=num_beams, num_return_sequences=num_beams))
    check_drained(engine)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_ends_are_those_of_generate(early_stopping: object, length_penalty: float) -> None:
    fields = {"length_penalty": length_penalty, "early_stopping": early_stopping, "num_return_sequences": 3}
    eos = likely_tokens("llama")
    engine = make_engine(eos=list(eos))
    outputs = engine.beam_search(PROMPTS, BeamSearchParams(3, MAX_TOKENS, **fields))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        check(output, by_generate("llama", prompt, eos, num_beams=3, **fields))
    lengths = {len(beam.token_ids) for output in outputs for beam in output.beams}
    assert len(lengths) > 1 or length_penalty > 0, "no beam ended early"
    stopped = make_engine().beam_search(PROMPTS, BeamSearchParams(3, MAX_TOKENS, stop_token_ids=eos, **fields))
    assert [output.beams for output in stopped] == [output.beams for output in outputs]
    ignored = engine.beam_search(PROMPTS[:1], BeamSearchParams(3, MAX_TOKENS, ignore_eos=True, **fields))
    assert {len(beam.token_ids) for beam in ignored[0].beams} == {MAX_TOKENS}


@pytest.mark.parametrize(
    "options", [{"enable_prefix_caching": False}, {"max_num_batched_tokens": 3}, {"num_blocks": 16}]
)
def test_under_every_condition(options: dict) -> None:
    """Alone, in small passes, and with blocks for few prompts at once."""
    engine = make_engine(**options)
    for _ in range(2):
        for prompt, output in zip(PROMPTS, engine.beam_search(PROMPTS, BeamSearchParams(3, MAX_TOKENS)), strict=True):
            check(output, by_generate("llama", prompt, (), num_beams=3))
    check_drained(engine)


def test_beams_share_blocks_and_find_what_is_cached() -> None:
    engine = make_engine(num_blocks=64)
    prompt = make_prompts([10 * B + 1], seed=9)[0]
    (output,) = engine.beam_search([prompt], BeamSearchParams(4, 2))
    assert output.num_cached_tokens == 0 and engine.stats().num_computed_tokens == len(prompt) + 4
    (output,) = engine.beam_search([prompt], BeamSearchParams(4, 2))
    assert output.num_cached_tokens == 10 * B and engine.stats().num_computed_tokens == len(prompt) + 4 + 1 + 4
    (output,) = engine.beam_search([prompt], BeamSearchParams(4, 2), namespace=b"other")
    assert output.num_cached_tokens == 0


def test_requests_go_on_afterwards_also_those_that_it_preempts() -> None:
    engine = make_engine(num_blocks=12)
    expected = [output.token_ids for output in engine.generate(PROMPTS[3:], SamplingParams(max_tokens=12))]
    for prompt in PROMPTS[3:]:
        engine.add_request(prompt, SamplingParams(max_tokens=12))
    found = {one.request_id: [one.token_id] for one in engine.step()}
    (output,) = engine.beam_search(PROMPTS[2:3], BeamSearchParams(4, MAX_TOKENS))
    check(output, by_generate("llama", PROMPTS[2], (), num_beams=4))
    assert engine.stats().num_preemptions > 0
    while engine.has_unfinished:
        for one in engine.step():
            found[one.request_id].append(one.token_id)
    assert list(found.values()) == expected
    check_drained(engine)


def test_too_few_blocks_for_one_prompt_leave_nothing_behind() -> None:
    engine = make_engine(num_blocks=6)
    with pytest.raises(OutOfBlocks):
        engine.beam_search(PROMPTS[4:], BeamSearchParams(6, MAX_TOKENS))
    check_drained(engine)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_beams": 0}, "num_beams must be a positive integer, got 0"),
        ({"max_tokens": 1.5}, "max_tokens must be a positive integer, got 1.5"),
        ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences must be at most num_beams=2, got 3"),
        ({"length_penalty": float("nan")}, "length_penalty must be finite, got nan"),
        ({"early_stopping": "always"}, "early_stopping must be True, False or 'never', got 'always'"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids must be integers"),
    ],
)
def test_bad_params(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BeamSearchParams(**fields)


def test_bad_calls_compute_nothing() -> None:
    engine = make_engine()
    for arguments, error, message in (
        (([[1], []], BeamSearchParams()), ValueError, "at least one token"),
        (([[1], [199]], BeamSearchParams()), ValueError, "ids in"),
        (([[1] * 250], BeamSearchParams()), ValueError, "max_model_len=256"),
        (([[1]], SamplingParams()), TypeError, "params must be BeamSearchParams, got SamplingParams"),
        (([[1]], BeamSearchParams(), "text"), TypeError, "namespace must be bytes"),
    ):
        with pytest.raises(error, match=message):
            engine.beam_search(*arguments)
    assert engine.stats().num_steps == 0 and engine.beam_search([], BeamSearchParams()) == []
    check_drained(engine)
