"""The prompt's log-probabilities are those of a naive pass, in portions of any size, and whatever is cached."""

import pytest
import torch
from support.engines import B, make_engine
from support.models import VOCAB, make_model, make_prompts

from kvpage.blend.config import BlendConfig
from kvpage.serving import RequestOutput, SamplingParams
from kvpage.serving.loop import intake
from kvpage.store import KVStore, KVStoreConfig, metadata_of
from kvpage.store.tiers.memory_tier import MemoryTier

PROMPTS = make_prompts([1, 2, B, B + 1, 19, 33], seed=3)
PARAMS = SamplingParams(max_tokens=4, prompt_logprobs=3)


def check(output: RequestOutput, num_top: int = 3, kind: str = "llama") -> None:
    """Compare with one pass of the model over the prompt."""
    prompt, found = output.prompt_token_ids, output.prompt_logprobs
    with torch.no_grad():
        rows = torch.log_softmax(make_model(kind)(torch.tensor([prompt])).logits[0].float(), -1)
    assert len(found) == len(prompt) and found[0] is None
    for token, row, one in zip(prompt[1:], rows, found[1:], strict=False):
        assert one.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert abs(one.rank - int((row > row[token]).sum()) - 1) <= 1
        values, ids = row.topk(num_top) if num_top else (torch.empty(0), torch.empty(0))
        assert [token_id for token_id, _ in one.top] == ids.tolist()
        assert [value for _, value in one.top] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.parametrize("size", [1, 2, B, 7, 100])
@pytest.mark.parametrize("max_rows", [1, 3, 1000])
def test_they_are_those_of_a_naive_pass(monkeypatch: pytest.MonkeyPatch, size: int, max_rows: int) -> None:
    """Beside requests without them, in steps of so many tokens, and so many rows of logits."""
    monkeypatch.setattr(intake, "MAX_SCORED_LOGITS", max_rows * VOCAB)
    plain, engine = SamplingParams(max_tokens=4), make_engine(max_num_batched_tokens=max(size, 3), max_num_seqs=3)
    wide, compute = [], engine.debug.runner.forward
    monkeypatch.setattr(
        engine.debug.runner,
        "forward",
        lambda packed, step: wide.append(len(packed.wanted)) or compute(packed, step),
    )
    outputs = engine.generate([*PROMPTS, *PROMPTS[3:]], [PARAMS] * 6 + [plain] * 3)
    for output in outputs[:6]:
        check(output)
    assert all(output.prompt_logprobs is None for output in outputs[6:])
    without = make_engine().generate([*PROMPTS, *PROMPTS[3:]], plain)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in without]
    assert max(wide) <= max_rows + 3, "a step has a bounded number of rows, and one for each of its requests"
    engine.manager.check()
    assert engine.stats().num_used_blocks == 0


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma2"])
def test_models_of_other_kinds(kind: str) -> None:
    for output in make_engine(kind=kind, max_num_batched_tokens=8).generate(PROMPTS[2:], PARAMS):
        check(output, kind=kind)


def test_a_cached_prompt_is_computed_again_and_still_shared() -> None:
    engine = make_engine()
    engine.generate(PROMPTS[5:], SamplingParams(max_tokens=2))
    num_computed, num_cached = engine.stats().num_computed_tokens, engine.stats().blocks.num_evictable_blocks
    (output,) = engine.generate(PROMPTS[5:], PARAMS)
    check(output)
    assert output.num_cached_tokens == 0 and engine.stats().num_computed_tokens - num_computed == 33 + 3
    assert engine.stats().blocks.num_evictable_blocks - num_cached == 1, "but one its blocks are those of before"
    (output,) = engine.generate(PROMPTS[5:], SamplingParams(max_tokens=2))
    assert output.num_cached_tokens == 32 and output.prompt_logprobs is None


@pytest.mark.parametrize("num_cpu_blocks", [0, 40])
def test_preempted_requests_have_all(num_cpu_blocks: int) -> None:
    engine = make_engine(num_blocks=14, num_host_blocks=num_cpu_blocks, max_num_batched_tokens=12)
    prompts = [*make_prompts([17, 23, 29], seed=5), PROMPTS[4]]
    params = [SamplingParams(max_tokens=16, prompt_logprobs=0, logprobs=1, retain_priority=index) for index in range(4)]
    outputs = engine.generate(prompts, params)
    for output in outputs:
        check(output, 0)
    assert engine.stats().num_preemptions
    want = make_engine().generate(prompts, params)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in want]


def test_several_samples_share_them() -> None:
    params = SamplingParams(max_tokens=5, prompt_logprobs=2, temperature=0.7, seed=1, n=3)
    (output,) = make_engine(max_num_seqs=4, max_num_batched_tokens=10).generate(PROMPTS[4:5], params)
    check(output, 2)
    assert len(output.samples) == 3


def test_a_failed_step_is_computed_again() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    engine.add_request(PROMPTS[5], PARAMS)
    engine.step()
    complete, engine.scheduler.complete = engine.scheduler.complete, None
    with pytest.raises(TypeError):
        engine.step()
    engine.scheduler.complete = complete
    steps = []
    while engine.has_unfinished:
        steps += engine.step()
    check(steps[-1].output)


def test_an_aborted_request_has_none_unless_all() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    engine.add_request(PROMPTS[5], PARAMS, "one")
    engine.step()
    assert engine.abort("one").prompt_logprobs is None
    engine.add_request(PROMPTS[3], PARAMS, "two")
    engine.step()
    check(engine.abort("two"))


def test_a_store_is_not_asked_for_what_is_computed() -> None:
    engine = make_engine()
    with KVStore(KVStoreConfig(B), metadata_of(engine.cache, "m"), [MemoryTier(1 << 20)]) as store:
        for _ in range(2):
            engine = make_engine()
            engine.use_store(store)
            (output,) = engine.generate(PROMPTS[5:], PARAMS)
            check(output)
            assert output.num_cached_tokens == 0 and engine.stats().store.num_lookups == 0
            engine.close()


def test_blending_excludes_them() -> None:
    engine = make_engine(blend=BlendConfig(separator=[9]))
    with pytest.raises(ValueError, match="prompt_logprobs must be None with blend"):
        engine.add_request(PROMPTS[5], PARAMS, blend=True)
    engine.add_request(PROMPTS[5], PARAMS, segments=[9, 9])
    while engine.has_unfinished:
        steps = engine.step()
    check(steps[-1].output)
