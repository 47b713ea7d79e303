"""Each of OpenAI's parameters, and vLLM's beside them, does to the model's logits what its definition says."""

from collections import Counter

import pytest
import torch
import transformers as tf
from support.engines import make_engine
from support.models import VOCAB, make_model, make_prompts

from kvpage.serving import SamplingParams

PROMPTS = make_prompts([1, 4, 9], seed=8)
MAX_TOKENS = 10
PROCESSORS = tf.generation.logits_process
FIELDS: dict[str, dict] = {
    "none": {},
    "presence": {"presence_penalty": 1.5},
    "negative_presence": {"presence_penalty": -2.0},
    "frequency": {"frequency_penalty": 0.7},
    "repetition": {"repetition_penalty": 1.4},
    "bias": {"logit_bias": {5: 3.0, 9: -4.0, VOCAB - 1: 2.5}},
    "one_token_alone": {"logit_bias": {7: 100.0}},
    "never": {"logit_bias": {token: -100.0 for token in range(0, VOCAB, 2)}},
    "least": {"min_tokens": 6, "stop_token_ids": list(range(0, VOCAB, 3))},
    "all": {
        "presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.2, "logit_bias": {5: 2.0, 7: -1.0},
        "min_tokens": 3, "stop_token_ids": list(range(0, VOCAB, 5)),
    },
}  # fmt: skip


def naive(prompt: list[int], params: SamplingParams) -> list[int]:
    """Return the likeliest tokens, one by one, each after a pass over all tokens before it."""
    model, generated = make_model("llama"), []
    while len(generated) < MAX_TOKENS and not (generated and generated[-1] in params.stop_token_ids):
        with torch.no_grad():
            row = model(torch.tensor([[*prompt, *generated]])).logits[:, -1].float()
        generated.append(int(_changed(row, prompt, generated, params).argmax()))
    return generated


def _changed(row: torch.Tensor, prompt: list[int], generated: list[int], params: SamplingParams) -> torch.Tensor:
    """Return the logits after transformers' processors, and OpenAI's formula for those that it lacks."""
    tokens, processors = torch.tensor([[*prompt, *generated]]), tf.LogitsProcessorList()
    if params.logit_bias:
        processors.append(
            PROCESSORS.SequenceBiasLogitsProcessor([[[token], bias] for token, bias in params.logit_bias])
        )
    if params.repetition_penalty is not None:
        processors.append(PROCESSORS.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.min_tokens:
        stops = list(params.stop_token_ids)
        processors.append(PROCESSORS.MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, stops, "cpu"))
    row = processors(tokens, row)
    for token, count in Counter(generated).items():
        row[0, token] -= (params.presence_penalty or 0.0) + count * (params.frequency_penalty or 0.0)
    return row


@pytest.mark.parametrize("name", FIELDS)
def test_the_likeliest_tokens_are_those_of_the_definition(name: str) -> None:
    """All prompts in one batch, and three equal answers to each: without a temperature nothing is drawn."""
    params = SamplingParams(max_tokens=MAX_TOKENS, n=3, **FIELDS[name])
    outputs = make_engine().generate(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert [sample.token_ids for sample in output.samples] == [naive(prompt, params)] * 3
    plain = [naive(prompt, SamplingParams()) for prompt in PROMPTS]
    assert name == "none" or [output.token_ids for output in outputs] != plain, "the field has done nothing"
