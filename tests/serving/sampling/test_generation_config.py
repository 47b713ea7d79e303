"""What a model's generation config asks for is done as `model.generate` does it, or refused by name."""

import json
from pathlib import Path

import pytest
import torch
import transformers as tf
from support.models import VOCAB, make_model, make_prompts

from kvpage import CacheConfig
from kvpage.serving import BeamSearchParams, Engine, EngineConfig, SamplingParams
from kvpage.serving.loop.request import Request
from kvpage.serving.sampling.logits_processing import process_logits
from kvpage.serving.sampling.sampler import padded_scores, warp

PROMPTS = make_prompts([1, 3, 4, 5, 14], seed=3)
EOS = [7, 19]
MAX_TOKENS = 12
FIELDS: dict[str, dict] = {
    "repetition": {"repetition_penalty": 1.3},
    "repetition_below_one": {"repetition_penalty": 0.8},
    "sequence_bias": {"sequence_bias": [[[5], 4.0], [[9, 11], -3.0], [[30], 3.0]]},
    "no_repeat": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[154], [148, 110], [141, 83], [7]]},
    "min_length": {"min_length": 12},
    "min_new": {"min_new_tokens": 6, "min_length": 3},
    "forced_bos": {"forced_bos_token_id": 33, "begin_suppress_tokens": [5, 6, 50]},
    "forced_eos": {"forced_eos_token_id": 19},
    "decay": {"exponential_decay_length_penalty": (2, 1.5)},
    "suppress": {"suppress_tokens": list(range(20, 120))},
    "begin_suppress": {"begin_suppress_tokens": list(range(60, 190))},
    "invalid": {"remove_invalid_values": True},
    "renormalize": {"renormalize_logits": True, "repetition_penalty": 1.2},
    "watermark": {"watermarking_config": {"bias": 3.0, "seeding_scheme": "lefthash"}},
    "all": {
        "repetition_penalty": 1.2, "sequence_bias": [[[5], 4.0], [[9, 11], 3.0]], "no_repeat_ngram_size": 2,
        "bad_words_ids": [[12], [40, 41]], "min_new_tokens": 4, "forced_eos_token_id": [19], "forced_bos_token_id": 33,
        "exponential_decay_length_penalty": (3, 1.2), "suppress_tokens": [20, 21], "begin_suppress_tokens": [22, 23],
        "renormalize_logits": True,
    },
}  # fmt: skip
WARPERS: dict[str, dict] = {
    "library_defaults": {},
    "temperature": {"temperature": 0.6, "top_k": 0},
    "top_k": {"top_k": 7},
    "top_k_past_vocabulary": {"top_k": 1000},
    "top_p": {"top_k": 0, "top_p": 0.7},
    "top_p_flat": {"top_k": 0, "top_p": 0.95, "temperature": 20.0},
    "min_p": {"top_k": 0, "min_p": 0.1},
    "top_h": {"top_k": 0, "top_h": 0.5},
    "typical": {"typical_p": 0.6},
    "epsilon": {"top_k": 0, "epsilon_cutoff": 0.02},
    "eta": {"top_k": 0, "eta_cutoff": 0.05, "top_p": 0.9},
    "common": {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.1},
    "rare": {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.9, "no_repeat_ngram_size": 2},
}


def model_with(**fields: object) -> tf.PreTrainedModel:
    model = make_model("llama")
    eos = fields.pop("eos_token_id", EOS)
    model.generation_config = tf.GenerationConfig(**{"eos_token_id": eos, "pad_token_id": 0, **fields})
    return model


def make_engine(model: tf.PreTrainedModel, **options: object) -> Engine:
    return Engine.from_model(model, EngineConfig(CacheConfig(block_size=4, num_gpu_blocks=128), **options))


def generated(model: tf.PreTrainedModel, prompt: list[int], **fields: object) -> list[int]:
    row = torch.tensor([prompt])
    return model.generate(row, attention_mask=torch.ones_like(row), **fields)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", FIELDS)
def test_greedy_tokens_are_those_of_generate(name: str) -> None:
    model = model_with(**FIELDS[name])
    expected = [generated(model, prompt, max_new_tokens=MAX_TOKENS) for prompt in PROMPTS]
    outputs = make_engine(model).generate(PROMPTS, SamplingParams(max_tokens=MAX_TOKENS))
    assert [output.token_ids for output in outputs] == expected
    plain = make_engine(model, generation_config="ignore").generate(PROMPTS, SamplingParams(max_tokens=MAX_TOKENS))
    if name not in ("invalid", "min_length", "min_new"):
        assert [output.token_ids for output in plain] != expected, "the field has done nothing"


@pytest.mark.parametrize("name", ["min_length", "min_new"])
def test_least_lengths_hold_back_the_end(name: str) -> None:
    plain = make_engine(model_with()).generate(PROMPTS, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True))
    ends = [plain[1].token_ids[1], plain[4].token_ids[0]]
    model = model_with(eos_token_id=ends, **FIELDS[name])
    outputs = make_engine(model).generate(PROMPTS, SamplingParams(max_tokens=MAX_TOKENS))
    assert [output.token_ids for output in outputs] == [
        generated(model, prompt, max_new_tokens=MAX_TOKENS) for prompt in PROMPTS
    ]
    without = make_engine(model_with(eos_token_id=ends)).generate(PROMPTS, SamplingParams(max_tokens=MAX_TOKENS))
    assert [output.token_ids for output in outputs] != [output.token_ids for output in without]


@pytest.mark.parametrize("name", WARPERS)
def test_scores_that_tokens_are_drawn_by_are_those_of_generate(name: str) -> None:
    """Step by step, given the tokens that generate has drawn."""
    model = model_with(do_sample=True, **WARPERS[name])
    if "top_h" in WARPERS[name] and not hasattr(tf.generation.logits_process, "TopHLogitsWarper"):
        pytest.skip("this version of transformers has no top_h")
    prompt = torch.tensor([PROMPTS[4]])
    torch.manual_seed(1)
    found = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, return_dict_in_generate=True,
        output_scores=True, output_logits=True,
    )  # fmt: skip
    params = make_engine(model).defaults.sampling(None, prompt.shape[1], 256)
    request = Request("one", prompt[0].numpy().astype("int32"), params, 0, frozenset(EOS))
    assert request.sampled_row is not None and len(found.scores) > 1
    for step, (raw, expected) in enumerate(zip(found.logits, found.scores, strict=True)):
        tokens = [found.sequences[0, : prompt.shape[1] + step].numpy().astype("int32")]
        scores = padded_scores(raw)
        process_logits(scores[:, :VOCAB], [request.sampled_row], tokens)
        warp(scores, VOCAB, [request.sampled_row], tokens)
        torch.testing.assert_close(scores[:, :VOCAB].softmax(-1), expected.softmax(-1), rtol=1e-4, atol=1e-6)
        assert ((scores[:, :VOCAB] > -87) == (expected - expected.max() > -87)).all()


@pytest.mark.parametrize("name", [name for name in FIELDS if name not in ("watermark", "forced_eos", "all")])
def test_beams_are_those_of_generate(name: str) -> None:
    model = model_with(num_beams=3, num_return_sequences=2, length_penalty=0.5, max_new_tokens=6, **FIELDS[name])
    for prompt, output in zip(PROMPTS, make_engine(model).beam_search(PROMPTS), strict=True):
        row = torch.tensor([prompt])
        found = model.generate(
            row, attention_mask=torch.ones_like(row), return_dict_in_generate=True, output_scores=True
        )
        tokens = [_until_end(one) for one in found.sequences[:, len(prompt) :].tolist()]
        assert [beam.token_ids for beam in output.beams] == tokens
        scores = [beam.score for beam in output.beams]
        assert scores == pytest.approx(found.sequences_scores.tolist(), abs=1e-4)


def _until_end(tokens: list[int]) -> list[int]:
    ends = [index for index, token in enumerate(tokens) if token in EOS]
    return tokens[: ends[0] + 1] if ends else tokens


def test_without_params_it_is_generate_without_arguments() -> None:
    for fields in ({}, {"max_new_tokens": 5}, {"max_length": 21}, {"max_length": 100000, "repetition_penalty": 1.2}):
        model = model_with(eos_token_id=None, **fields)
        expected = [generated(model, prompt) for prompt in PROMPTS[:1]] if fields.get("max_length", 0) < 1000 else []
        outputs = make_engine(model).generate(PROMPTS[:1])
        assert [output.token_ids for output in outputs][: len(expected)] == expected
    assert len(outputs[0].token_ids) == 255, "a default longer than the model is cut to what it takes"
    assert list(make_engine(model_with()).stream(PROMPTS[2])) == generated(model_with(), PROMPTS[2])


def test_a_given_parameter_wins_and_none_takes_the_models() -> None:
    model = model_with(do_sample=True, temperature=0.5, top_p=0.8, repetition_penalty=1.3, max_new_tokens=9)
    fill = make_engine(model).defaults.sampling
    params = fill(SamplingParams(), 4, 256)
    assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (0.5, 50, 0.8, 1.3)
    assert params.max_tokens == 9 and fill(SamplingParams(max_tokens=3), 4, 256).max_tokens == 3
    given = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, repetition_penalty=1.0)
    params = fill(given, 4, 256)
    assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (0.0, 0, 1.0, 1.0)
    ignoring = make_engine(model, generation_config="ignore").defaults.sampling(SamplingParams(), 4, 256)
    assert ignoring.is_greedy and ignoring.repetition_penalty is None and ignoring.max_tokens == 16
    beams = make_engine(model_with(length_penalty=2.0)).defaults.beams(BeamSearchParams(), 4, 256)
    assert (beams.length_penalty, beams.num_beams, beams.max_tokens) == (2.0, 4, 16)


@pytest.mark.parametrize(
    "fields",
    [
        {"guidance_scale": 1.5},
        {"encoder_repetition_penalty": 1.2},
        {"encoder_no_repeat_ngram_size": 2},
        {"penalty_alpha": 0.6},
        {"dola_layers": "high"},
        {"stop_strings": ["stop"]},
        {"token_healing": True},
        {"max_time": 1.0},
    ],
)
def test_what_is_not_served_is_refused_by_name_or_left_out(fields: dict) -> None:
    model = model_with(repetition_penalty=1.3)
    ((name, value),) = fields.items()
    setattr(model.generation_config, name, value)
    with pytest.raises(ValueError, match=f"generation_config must ask .* asks for {name}=.*'served' leaves that out"):
        make_engine(model)
    with pytest.raises(ValueError, match=f"asks for {name}="):
        SamplingParams.from_generation_config(model.generation_config)
    params = SamplingParams.from_generation_config(model.generation_config, "ignore", max_tokens=4)
    assert params.repetition_penalty == 1.3 and params.max_tokens == 4
    (output,) = make_engine(model, generation_config="served").generate(PROMPTS[:1], params)
    assert output.token_ids == generated(model_with(repetition_penalty=1.3), PROMPTS[0], max_new_tokens=4)
    make_engine(model, generation_config="ignore")


def test_beams_are_refused_where_there_are_none_and_the_other_way_round() -> None:
    engine = make_engine(model_with(num_beams=4))
    with pytest.raises(ValueError, match="one beam here, it asks for num_beams=4"):
        engine.generate(PROMPTS)
    assert len(engine.generate(PROMPTS, SamplingParams(max_tokens=2))) == len(PROMPTS)
    with pytest.raises(ValueError, match="it asks for do_sample=True"):
        make_engine(model_with(num_beams=4, do_sample=True)).beam_search(PROMPTS)
    with pytest.raises(ValueError, match="generation_config must be 'model', 'served' or 'ignore', got 'no'"):
        make_engine(model_with(), generation_config="no")


def test_tokens_that_the_model_lacks_are_refused_before_a_step() -> None:
    engine = make_engine(model_with())
    for fields in (
        {"logit_bias": {VOCAB: 1.0}},
        {"sequence_bias": {(1, VOCAB): 1.0}},
        {"bad_words_ids": [[-1]]},
        {"forced_bos_token_id": VOCAB},
        {"forced_eos_token_id": VOCAB},
    ):
        (name,) = fields
        with pytest.raises(ValueError, match=rf"{name} must be ids in \[0, {VOCAB}\)"):
            engine.add_request(PROMPTS[0], SamplingParams(**fields))
        with pytest.raises(ValueError, match=rf"{name} must be ids in \[0, {VOCAB}\)"):
            engine.beam_search(PROMPTS[:1], BeamSearchParams(**fields))
    assert not engine.has_unfinished
    odd = SamplingParams(suppress_tokens=[VOCAB, -1], stop_token_ids=[10**6], min_tokens=3, max_tokens=4,
                         exponential_decay_length_penalty=(0, 1.5))  # fmt: skip
    assert len(engine.generate(PROMPTS, odd)) == len(PROMPTS)


def test_preempted_requests_keep_their_history() -> None:
    model = model_with(repetition_penalty=1.3, eos_token_id=None)
    expected = [generated(model, prompt, max_new_tokens=20) for prompt in PROMPTS]
    tight = Engine.from_model(model, EngineConfig(CacheConfig(block_size=4, num_gpu_blocks=12)))
    outputs = tight.generate(PROMPTS, SamplingParams(max_tokens=20))
    assert [output.token_ids for output in outputs] == expected and tight.stats().num_preemptions > 0


def test_a_released_file_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    """As model folders have it: strings of numbers, fields that nobody knows, and no version."""
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05,
                    "eos_token_id": EOS, "chat_format": "chatml", "max_window_size": 24000})
    )  # fmt: skip
    params = SamplingParams.from_generation_config(tf.GenerationConfig.from_pretrained(tmp_path), seed=3)
    expected = SamplingParams(max_tokens=20, temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05, seed=3)
    names = ("max_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "seed", "n")
    assert [getattr(params, name) for name in names] == [getattr(expected, name) for name in names]
