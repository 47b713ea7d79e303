"""Log-probabilities are those of the model's own logits, whatever rules choose the tokens and however they come."""

import numpy as np
import pytest
import torch
from support.cpu_graphs import as_on_a_device
from support.engines import make_engine
from support.models import VOCAB, make_model, make_prompts

from kvpage.serving import RequestOutput, SamplingParams, TokenLogprobs
from kvpage.serving.loop.batch import logprobs as module
from kvpage.serving.loop.batch.logprobs import logprobs_of_rows

PROMPTS = make_prompts([5, 11, 3, 8], seed=6)
EACH = [
    SamplingParams(max_tokens=9, logprobs=3),
    SamplingParams(max_tokens=12),
    SamplingParams(max_tokens=7, logprobs=0, temperature=0.8, seed=4, n=3, presence_penalty=1.5),
    SamplingParams(max_tokens=8, logprobs=20, suppress_tokens=list(range(60, 120)), repetition_penalty=1.4),
]


def naive(tokens: list[int], num_prompt: int) -> torch.Tensor:
    """Return the log-probabilities of all tokens in the place of each generated one, by the model itself."""
    with torch.no_grad():
        logits = make_model("llama")(torch.tensor([tokens])).logits[0]
    return torch.log_softmax(logits.float(), -1)[num_prompt - 1 : -1]


def check(found: list[TokenLogprobs], token_ids: list[int], logprobs: torch.Tensor, num: int) -> None:
    assert len(found) == len(token_ids)
    for one, token, row in zip(found, token_ids, logprobs, strict=True):
        assert one.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert one.rank == int((row > row[token] + 1e-4).sum()) + 1
        values, ids = row.topk(num) if num else (torch.empty(0), torch.empty(0))
        assert [token_id for token_id, _ in one.top] == ids.tolist()
        assert [value for _, value in one.top] == pytest.approx(values.tolist(), abs=1e-4)


def check_outputs(outputs: list[RequestOutput]) -> None:
    for prompt, params, output in zip(PROMPTS, EACH, outputs, strict=True):
        for sample in output.samples:
            if params.logprobs is None:
                assert sample.logprobs is None
            else:
                expected = naive([*prompt, *sample.token_ids], len(prompt))
                check(sample.logprobs, sample.token_ids, expected, params.logprobs)


@pytest.mark.parametrize("ways", ["plain", "few_blocks", "ahead", "captured", "small_steps"])
def test_they_are_those_of_the_model(ways: str) -> None:
    options = {"few_blocks": {"num_blocks": 18}, "small_steps": {"max_num_batched_tokens": 5}}.get(ways, {})
    engine = make_engine(max_num_seqs=8, **options)
    if ways in ("ahead", "captured"):
        engine = as_on_a_device(engine, graphs=ways == "captured")
    outputs = engine.generate(PROMPTS, EACH)
    check_outputs(outputs)
    assert [one.rank for one in outputs[0].samples[0].logprobs] == [1] * 9
    plain = [SamplingParams(**{**_fields(params), "logprobs": None}) for params in EACH]
    without = make_engine(max_num_seqs=8).generate(PROMPTS, plain)
    assert [[one.token_ids for one in output.samples] for output in without] == [
        [one.token_ids for one in output.samples] for output in outputs
    ], "tokens do not change"
    assert ways != "few_blocks" or engine.stats().num_preemptions


def _fields(params: SamplingParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in params.__dataclass_fields__}


def test_steps_have_those_of_their_token() -> None:
    engine, found = make_engine(), []
    engine.add_request(PROMPTS[0], EACH[0])
    engine.add_request(PROMPTS[1], EACH[1], "without")
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    found = [step.logprobs for step in outputs if step.request_id != "without"]
    assert found == next(step.output for step in outputs if step.output and step.logprobs).samples[0].logprobs
    assert all(step.logprobs is None for step in outputs if step.request_id == "without")


def test_a_step_that_fails_gives_none_twice() -> None:
    """The second token's step raises once, after its tokens were chosen."""
    engine = make_engine()
    engine.add_request(PROMPTS[0], EACH[0])
    steps = engine.step()
    complete, engine.scheduler.complete = engine.scheduler.complete, None
    with pytest.raises(TypeError):
        engine.step()
    engine.scheduler.complete = complete
    while engine.has_unfinished:
        steps += engine.step()
    (expected,) = make_engine().generate(PROMPTS[:1], EACH[0])
    assert steps[-1].output.samples == expected.samples


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num", [0, 1, 5, VOCAB, 300])
def test_rows_in_parts(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, num: int) -> None:
    """Parts of a row, of a few and of all; some rows of a batch; many equal logits; -inf among them."""
    logits = (torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(1)) * 3).round().to(dtype)
    logits[4, 7:50] = -torch.inf
    rows, tokens = [0, 1, 2, 4, 8], np.array([3, 9, 100, 51, 6], np.int32)
    want = None
    for size in (1, 2 * VOCAB + 1, 2**21):
        monkeypatch.setattr(module, "PART_SIZE", size)
        found = logprobs_of_rows(logits, rows, tokens, [num, 0, num, num, num])
        assert want is None or found == want, "the parts make no difference"
        want = found
    for row, token, one in zip(rows, tokens.tolist(), want, strict=True):
        scores = logits[row].float()
        order = sorted(range(VOCAB), key=lambda index: (-float(scores[index]), index))
        exact = torch.log_softmax(scores, -1)
        assert one.logprob == float(exact[token]) and one.rank == int((scores > scores[token]).sum()) + 1
        num_here = 0 if row == 1 else num
        assert one.top == [(index, float(exact[index])) for index in order[:num_here]]


@pytest.mark.parametrize("value", [-1, 21, True, 1.0, "3"])
@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_other_numbers_are_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be an integer in \[0, 20\], got {value!r}"):
        SamplingParams(**{name: value})
