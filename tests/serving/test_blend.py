"""Blending in the serving loop, against a full prefill and against its definition in plain torch."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf
from support import blend_oracle
from support.blend_oracle import Place, Recorder
from support.models import COMMON, generate_each, make_model, make_prompts

from kvpage import CacheConfig
from kvpage.blend import BlendConfig, ContentBoundaries, MemorySegments, SegmentKV
from kvpage.blend.segments import SegmentCache
from kvpage.serving import Engine, EngineConfig, RequestOutput, SamplingParams
from kvpage.serving.model import attention
from kvpage.store import KVStore, KVStoreConfig, metadata_of

B = 4
ONE = SamplingParams(max_tokens=1)
SEGMENTS = make_prompts([9, 4, 13, 1], seed=3)
LEAD = [3, 7]  # in front of the segments: nothing begins as one that is cached by itself
QUESTION = make_prompts([5], seed=4)[0]
FULL = 1e-5  # of the logits' scale

FAMILIES = {
    **{kind: lambda kind=kind: make_model(kind) for kind in (
        "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "phi3", "deepseek_v3")},
    "granite": lambda: from_config(tf.GraniteConfig(**COMMON, embedding_multiplier=3.0, residual_multiplier=0.5)),
    "cohere": lambda: from_config(tf.CohereConfig(**COMMON)),
    "smollm3": lambda: from_config(tf.SmolLM3Config(**COMMON, no_rope_layers=[1, 0, 1])),
    "phi": lambda: from_config(tf.PhiConfig(**COMMON, partial_rotary_factor=0.5)),
    "glm": lambda: from_config(tf.GlmConfig(**COMMON, head_dim=8, partial_rotary_factor=0.5)),
    "linear": lambda: scaled("linear", factor=4.0),
    "yarn": lambda: scaled("yarn", factor=4.0, original_max_position_embeddings=64),
    "llama3": lambda: scaled("llama3", factor=4.0, original_max_position_embeddings=64, low_freq_factor=1.0,
                             high_freq_factor=4.0),
}  # fmt: skip


def from_config(config: tf.PretrainedConfig) -> tf.PreTrainedModel:
    torch.manual_seed(0)
    return tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()


def scaled(kind: str, **fields: float) -> tf.PreTrainedModel:
    return from_config(tf.LlamaConfig(**COMMON, rope_parameters={"rope_type": kind, "rope_theta": 1e4, **fields}))


@cache
def model_of(family: str) -> tf.PreTrainedModel:
    return FAMILIES[family]()


def make_engine(
    family: str = "llama",
    num_blocks: int = 128,
    ratio: float = 1.0,
    segments: SegmentCache | None = None,
    **fields: object,
) -> Engine:
    names = (
        "check_layer", "metric", "filters", "seam", "separator", "boundaries", "max_bytes", "deadline",
        "uses_sensitivity",
    )  # fmt: skip
    fields.setdefault("check_layer", 1)
    config = BlendConfig(ratio=ratio, **{name: fields.pop(name) for name in names if name in fields})
    cache = CacheConfig(block_size=B, num_gpu_blocks=num_blocks)
    return Engine.from_model(model_of(family), EngineConfig(cache, blend=config, **fields), segments=segments)


@contextmanager
def logits_of(engine: Engine) -> Iterator[list[torch.Tensor]]:
    """The logits of every forward pass of the engine inside."""
    seen: list[torch.Tensor] = []
    forward = engine._runner.forward
    engine._runner.forward = lambda *args: seen.append(forward(*args)) or seen[-1]
    yield seen
    engine._runner.forward = forward


def drain(engine: Engine) -> dict[str, RequestOutput]:
    outputs = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output.output for output in engine.step() if output.output}
    return outputs


def serve(
    engine: Engine, parts: list[list[int]], question: list[int] = QUESTION, lead: list[int] = LEAD
) -> tuple[RequestOutput, torch.Tensor]:
    """One blended prompt of these segments: its output, and the logits of its first token."""
    with logits_of(engine) as seen:
        every = [lead, *parts] if lead else parts
        tokens = [token for part in every for token in part] + question
        request_id = engine.add_request(tokens, ONE, blend=True, segments=[len(part) for part in every])
        output = drain(engine)[request_id]
    return output, seen[-1][-1]


def own_logits(model: tf.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    return blend_oracle.run(model, tokens, 0, Recorder(check_layer=10**6))


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def standalone(model: tf.PreTrainedModel, parts: list[list[int]], is_measured: bool = True) -> list[Place]:
    starts = [len(LEAD) + sum(map(len, parts[:index])) for index in range(len(parts))]
    return [blend_oracle.place(model, [], part, start, is_measured) for part, start in zip(parts, starts, strict=True)]


# --- exactness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_ratio_1_is_a_full_prefill(family: str) -> None:
    model, engine = model_of(family), make_engine(family)
    engine.warm_segments(SEGMENTS)
    parts = [SEGMENTS[index] for index in (2, 0, 3, 1, 0)]
    output, logits = serve(engine, parts)
    assert error(logits, own_logits(model, output.prompt_token_ids)) <= FULL
    assert (output.num_reused_tokens, output.num_recomputed_tokens) == (0, 13 + 9 + 1 + 4 + 9)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("uses_sensitivity", [True, False])
def test_any_ratio_is_what_the_definition_says(uses_sensitivity: bool, family: str) -> None:
    model = model_of(family)
    engine = make_engine(family, ratio=0.3, check_layer=None, uses_sensitivity=uses_sensitivity)
    engine.warm_segments(SEGMENTS)
    parts = [SEGMENTS[index] for index in (2, 0, 3, 1, 0)]
    recorder = Recorder(standalone(model, parts, uses_sensitivity), 0.3, 0 if uses_sensitivity else 1)
    output, logits = serve(engine, parts)
    expected = blend_oracle.run(model, output.prompt_token_ids, 0, recorder)
    assert error(logits, expected) <= FULL
    assert error(expected, own_logits(model, output.prompt_token_ids)) > 10 * FULL
    assert output.num_recomputed_tokens == len(recorder.chosen) - len(LEAD) - len(QUESTION)
    assert output.num_reused_tokens == 36 - output.num_recomputed_tokens


@pytest.mark.parametrize("metric", ["k", "v", "kv"])
@pytest.mark.parametrize("check_layer", [0, 1, 2])
@pytest.mark.parametrize("ratio", [0, 0.05, 0.5])
def test_ratios_check_layers_and_metrics(ratio: float, check_layer: int, metric: str) -> None:
    if check_layer == 0:
        ratio = float(ratio > 0)  # what layer 0 would choose between is rounding
    model = model_of("llama")
    engine = make_engine(ratio=ratio, check_layer=check_layer, metric=metric, uses_sensitivity=False)
    engine.warm_segments(SEGMENTS)
    parts = [SEGMENTS[0], SEGMENTS[2]]
    recorder = Recorder(standalone(model, parts, False), ratio, check_layer, metric)
    output, logits = serve(engine, parts)
    assert error(logits, blend_oracle.run(model, output.prompt_token_ids, 0, recorder)) <= FULL
    assert output.num_recomputed_tokens == len(recorder.chosen) - len(LEAD) - len(QUESTION)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ratio", [0.2, 1.0])
def test_filters_let_go_of_rows_before_the_check_layer(ratio: float, family: str) -> None:
    # Rows out of a window's reach differ by rounding alone, and are not ranked.
    model, filters = model_of(family), ((1, 0.35),)
    engine = make_engine(family, ratio=ratio, check_layer=2, filters=filters)
    engine.warm_segments(SEGMENTS)
    parts = [SEGMENTS[index] for index in (2, 0, 3, 1, 0)]
    recorder = Recorder(standalone(model, parts), ratio, 2, filters=filters)
    output, logits = serve(engine, parts)
    expected = blend_oracle.run(model, output.prompt_token_ids, 0, recorder)
    assert error(logits, expected) <= FULL
    assert output.num_recomputed_tokens == len(recorder.chosen) - len(LEAD) - len(QUESTION) == int(ratio * 36)
    own = error(logits, own_logits(model, output.prompt_token_ids))
    unfiltered = Recorder(standalone(model, parts), ratio, 2)
    other = error(logits, blend_oracle.run(model, output.prompt_token_ids, 0, unfiltered))
    assert own <= FULL and other <= FULL if ratio == 1 else own > 10 * FULL and other > 10 * FULL


@pytest.mark.parametrize("seam", [0.0, 1.0, 1e4])
def test_rows_behind_a_seam_count_for_more(seam: float) -> None:
    model, parts = model_of("llama"), [SEGMENTS[0], SEGMENTS[2]]
    engine = make_engine(ratio=0.3, seam=seam, uses_sensitivity=False)
    engine.warm_segments(SEGMENTS)
    recorder = Recorder(standalone(model, parts, False), 0.3, 1, seam=seam)
    output, logits = serve(engine, parts)
    assert error(logits, blend_oracle.run(model, output.prompt_token_ids, 0, recorder)) <= FULL
    reused = set(range(len(LEAD), len(LEAD) + 22))
    first = {len(LEAD) + offset for offset in (0, 1, 2, 9, 10, 11)}
    assert (recorder.chosen & reused == first) == (seam == 1e4)


def test_segments_kept_out_of_a_prompt_keep_what_they_saw_there() -> None:
    model, engine = model_of("llama"), make_engine(ratio=0)
    first, _ = serve(engine, SEGMENTS[:3])
    assert (first.num_reused_tokens, first.is_blended) == (0, False)
    parts = [SEGMENTS[2], SEGMENTS[1]]
    places = [
        blend_oracle.place(model, LEAD + SEGMENTS[0] + SEGMENTS[1], SEGMENTS[2], 1),
        blend_oracle.place(model, LEAD + SEGMENTS[0], SEGMENTS[1], 1 + len(SEGMENTS[2])),
    ]
    output, logits = serve(engine, parts, lead=[5])
    assert output.num_reused_tokens == len(SEGMENTS[2]) + len(SEGMENTS[1])
    assert error(logits, blend_oracle.run(model, output.prompt_token_ids, 0, Recorder(places, 0, 1))) <= FULL


def test_standalone_segments_take_the_place_of_others_and_not_the_reverse() -> None:
    model, engine = model_of("llama"), make_engine(ratio=0)
    serve(engine, SEGMENTS[:3])
    engine.warm_segments([SEGMENTS[2]])
    serve(engine, [SEGMENTS[1], [7, 8], SEGMENTS[2]])
    output, logits = serve(engine, [SEGMENTS[2]], lead=[5])
    recorder = Recorder([blend_oracle.place(model, [], SEGMENTS[2], 1)], 0, 1)
    assert error(logits, blend_oracle.run(model, output.prompt_token_ids, 0, recorder)) <= FULL


# --- beside and behind other requests --------------------------------------------------------------------------------


def prompt_of(parts: list[list[int]], question: list[int] = QUESTION, lead: list[int] = LEAD) -> list[int]:
    return [token for part in [lead, *parts, question] for token in part]


def lengths_of(parts: list[list[int]]) -> list[int]:
    return [len(LEAD), *map(len, parts)]


def first_logits(engine: Engine) -> torch.Tensor:
    """The logits of one step, with the segments of all that waits at hand."""
    engine._connectors.ask(engine.scheduler.waiting)
    engine._connectors.blend.drain()
    with logits_of(engine) as seen:
        engine.step()
    assert len(seen) == 1
    return seen[0]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("ratio", [0.3, 1.0])
@pytest.mark.parametrize("stages", [{"check_layer": 1}, {"check_layer": 2, "filters": ((1, 0.4),)}])
def test_blended_and_ordinary_requests_in_one_step(stages: dict[str, object], ratio: float, family: str) -> None:
    model, engine = model_of(family), make_engine(family, ratio=ratio, **stages)
    engine.warm_segments(SEGMENTS)
    others = make_prompts([7, 3], seed=9)
    engine.add_request(others[0], SamplingParams(max_tokens=9))
    engine.step()
    orders = [[0, 2], [2, 3, 0, 0], [1]]
    each = [[SEGMENTS[index] for index in order] for order in orders]
    leads = [[3, 7], [9], [11, 12, 13]]
    engine.add_request(others[1], SamplingParams(max_tokens=9))
    for parts, lead in zip(each, leads, strict=True):
        tokens = prompt_of(parts, lead=lead)
        engine.add_request(tokens, ONE, blend=True, segments=[len(lead), *map(len, parts)])
    logits = first_logits(engine)
    assert len(logits) == 5
    decoding = others[0] + next(iter(engine._loop.requests.values())).generated_token_ids[:1]
    assert error(logits[0], own_logits(model, decoding)) <= FULL
    assert error(logits[1], own_logits(model, others[1])) <= FULL
    for row, (parts, lead) in enumerate(zip(each, leads, strict=True)):
        starts = [len(lead) + sum(map(len, parts[:index])) for index in range(len(parts))]
        places = [blend_oracle.place(model, [], part, start) for part, start in zip(parts, starts, strict=True)]
        recorder = Recorder(places, ratio, **stages)
        expected = blend_oracle.run(model, prompt_of(parts, lead=lead), 0, recorder)
        assert error(logits[2 + row], expected) <= FULL
        if ratio == 1:
            assert error(logits[2 + row], own_logits(model, prompt_of(parts, lead=lead))) <= FULL


@pytest.mark.parametrize("num_cached", [1, B, 6, 11, 12, 13, 20])
def test_a_cached_prefix_is_taken_first(num_cached: int) -> None:
    model, engine = model_of("llama"), make_engine(ratio=0.3)
    engine.warm_segments(SEGMENTS)
    parts = [SEGMENTS[0], SEGMENTS[2]]
    prompt = prompt_of(parts)
    engine.generate([prompt[:num_cached]], ONE)
    output, logits = serve(engine, parts)
    cached = output.num_cached_tokens
    assert num_cached - B < cached <= num_cached
    recorder = Recorder(cut(standalone(model, parts), cached), 0.3, 1)
    assert error(logits, blend_oracle.run(model, prompt, 0, recorder)) <= FULL
    assert output.num_reused_tokens + output.num_recomputed_tokens == len(prompt) - 5 - max(cached, len(LEAD))


def cut(places: list[Place], start: int) -> list[Place]:
    """What of them lies at `start` or behind it."""
    kept = []
    for one in places:
        at = max(start - one.start, 0)
        if at < one.k[0].shape[1]:
            rows = [k[:, at:] for k in one.k], [v[:, at:] for v in one.v]
            kept.append(Place(one.start + at, *rows, at, one.sensitivity and one.sensitivity[at:]))
    return kept


@pytest.mark.parametrize("budget", [1, 8, 20])
def test_a_blended_prefill_is_one_step_whatever_the_budget(budget: int) -> None:
    model, engine = model_of("llama"), make_engine(ratio=0.3, max_num_batched_tokens=budget)
    engine.warm_segments(SEGMENTS)
    parts = [SEGMENTS[0], SEGMENTS[2]]
    recorder = Recorder(standalone(model, parts), 0.3, 1)
    steps = engine.stats().num_steps
    _, logits = serve(engine, parts)
    assert engine.stats().num_steps == steps + 1
    assert error(logits, blend_oracle.run(model, prompt_of(parts), 0, recorder)) <= FULL


def test_a_blended_prefill_beyond_the_budget_waits_for_other_prefills() -> None:
    engine = make_engine(ratio=0.3, max_num_batched_tokens=16)
    engine.warm_segments(SEGMENTS)
    long = engine.add_request(make_prompts([30], seed=8)[0], ONE)
    parts = [SEGMENTS[0], SEGMENTS[2]]
    blended = engine.add_request(prompt_of(parts), ONE, blend=True, segments=lengths_of(parts))
    order = [output.request_id for _ in range(3) for output in engine.step()]
    assert order == [long, blended]


def test_preempted_blended_requests_blend_again() -> None:
    parts, others = [SEGMENTS[0], SEGMENTS[2]], make_prompts([20, 18], seed=12)
    params = SamplingParams(max_tokens=24)

    def run(num_blocks: int) -> tuple[list[RequestOutput], Engine]:
        engine = make_engine(ratio=1.0, num_blocks=num_blocks)
        engine.warm_segments(SEGMENTS)
        ids = [engine.add_request(tokens, params) for tokens in others]
        ids.append(engine.add_request(prompt_of(parts), params, blend=True, segments=lengths_of(parts)))
        outputs = drain(engine)
        engine.manager.check()
        return [outputs[one] for one in ids], engine

    ample, _ = run(128)
    scarce, engine = run(24)
    assert engine.stats().num_preemptions > 0 and engine.stats().blend.num_blends > 1
    assert [one.token_ids for one in scarce] == [one.token_ids for one in ample]
    assert [one.is_blended for one in scarce] == [False, False, True]


def test_preempted_blended_requests_come_back_from_the_host() -> None:
    model, parts = model_of("llama"), [SEGMENTS[0], SEGMENTS[2]]
    cache = CacheConfig(block_size=B, num_gpu_blocks=24, num_cpu_blocks=64)
    config = BlendConfig(ratio=0.3, check_layer=1)
    params = SamplingParams(max_tokens=24)

    def run(cache: CacheConfig) -> tuple[list[int], Engine]:
        engine = Engine.from_model(model, EngineConfig(cache, blend=config, load_or_compute=False))
        engine.warm_segments(SEGMENTS)
        for tokens in make_prompts([20, 18], seed=12):
            engine.add_request(tokens, params)
        one = engine.add_request(prompt_of(parts), params, blend=True, segments=lengths_of(parts))
        return drain(engine)[one].token_ids, engine

    expected, _ = run(CacheConfig(block_size=B, num_gpu_blocks=128))
    found, engine = run(cache)
    assert engine.stats().num_swaps > 0 and engine.stats().blend.num_blends == 1
    assert found == expected


# --- what is kept, and what is never found ---------------------------------------------------------------------------


def test_what_was_blended_is_never_found() -> None:
    engine = make_engine(ratio=0.3)
    engine.warm_segments([SEGMENTS[2]])
    unknown, parts = SEGMENTS[0], [SEGMENTS[2], SEGMENTS[0]]
    prompt = prompt_of(parts)
    blended = engine.add_request(prompt, SamplingParams(max_tokens=12), blend=True, segments=lengths_of(parts))
    output = drain(engine)[blended]
    assert output.is_blended
    exact = engine.generate([prompt + output.token_ids], ONE)[0]
    assert exact.num_cached_tokens <= len(LEAD)
    assert not engine._connectors.blend.source.find(np.array(unknown, np.int32))
    assert exact.token_ids == make_engine().generate([prompt + output.token_ids], ONE)[0].token_ids


def test_what_comes_before_the_first_reused_token_is_exact_and_found() -> None:
    model, engine = model_of("llama"), make_engine(ratio=0)
    engine.warm_segments([SEGMENTS[2]])
    parts = [SEGMENTS[0], SEGMENTS[2], SEGMENTS[1]]
    assert serve(engine, parts)[0].is_blended
    exact, logits = serve_plainly(engine, prompt_of(parts))
    assert exact.num_cached_tokens == (len(LEAD) + len(SEGMENTS[0])) // B * B
    assert error(logits, own_logits(model, prompt_of(parts))) <= FULL
    engine._connectors.blend.drain()  # another thread keeps them
    assert engine._connectors.blend.source.find(np.array(SEGMENTS[0], np.int32))
    assert not engine._connectors.blend.source.find(np.array(SEGMENTS[1], np.int32))


def serve_plainly(engine: Engine, tokens: list[int]) -> tuple[RequestOutput, torch.Tensor]:
    with logits_of(engine) as seen:
        output = engine.generate([tokens], ONE)[0]
    return output, seen[-1][-1]


def test_everything_is_known_but_the_last_token() -> None:
    model, engine = model_of("llama"), make_engine(ratio=0)
    engine.warm_segments(SEGMENTS)
    output, logits = serve(engine, [SEGMENTS[0]], question=[5])
    recorder = Recorder(standalone(model, [SEGMENTS[0]]), 0, 1)
    assert error(logits, blend_oracle.run(model, prompt_of([SEGMENTS[0]], [5]), 0, recorder)) <= FULL
    assert (output.num_reused_tokens, output.num_recomputed_tokens) == (9, 0)
    whole, logits = serve(engine, [SEGMENTS[0]], question=[])  # its last token is computed all the same
    assert error(logits, blend_oracle.run(model, prompt_of([SEGMENTS[0]], []), 0, recorder)) <= FULL
    assert (whole.num_reused_tokens, whole.num_recomputed_tokens) == (2 + 8, 1)  # the first prompt's lead is known now


def test_tenants_share_no_segments() -> None:
    engine = make_engine(ratio=0)
    engine.warm_segments([SEGMENTS[2]], namespace=b"a")
    parts = [SEGMENTS[2]]
    for namespace, is_blended in ((b"", False), (b"b", False), (b"a", True)):
        one = engine.add_request(prompt_of(parts), ONE, namespace=namespace, blend=True, segments=lengths_of(parts))
        assert drain(engine)[one].is_blended is is_blended


def test_separators_end_segments() -> None:
    engine = make_engine(ratio=0, separator=[150, 151])
    document = [5, 6, 7, 150, 151]
    first = engine.generate([[9, 150, 151, *document, 3]], ONE, blend=True)[0]
    second = engine.generate([[8, 8, 150, 151, *document, 4]], ONE, blend=True)[0]
    assert (first.is_blended, second.num_reused_tokens) == (False, len(document))
    plain = engine.generate([[7, 7, 150, 151, *document, 4]], ONE)[0]
    assert not plain.is_blended


def test_boundaries_by_contents() -> None:
    boundaries = ContentBoundaries(window=2, min_length=3, max_length=8)
    engine = make_engine(ratio=0, boundaries=boundaries)
    text = make_prompts([60], seed=21)[0]
    assert not engine.generate([[1, 2, *text]], ONE, blend=True)[0].is_blended
    moved = engine.generate([[5, 6, 7, 8, 9, *text]], ONE, blend=True)[0]
    assert 30 <= moved.num_reused_tokens <= 60


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_tokens_behind_a_blended_prompt_that_has_left_its_window(family: str) -> None:
    engine = make_engine(family)
    engine.warm_segments(SEGMENTS)
    parts, params = [SEGMENTS[2], SEGMENTS[0]], SamplingParams(max_tokens=16)
    one = engine.add_request(prompt_of(parts), params, blend=True, segments=lengths_of(parts))
    assert drain(engine)[one].token_ids == generate_each(model_of(family), [prompt_of(parts)], 16)[0]
    engine.manager.check()


def test_an_engine_that_was_closed_computes_in_full() -> None:
    engine = make_engine(ratio=0)
    engine.warm_segments(SEGMENTS)
    parts = [SEGMENTS[2]]
    one = engine.add_request(prompt_of(parts), ONE, blend=True, segments=lengths_of(parts))
    engine._connectors.ask(engine.scheduler.waiting)
    engine.close()
    assert not drain(engine)[one].is_blended
    with pytest.raises(ValueError, match="blend and segments need an engine with a BlendConfig"):
        engine.add_request([1, 2], ONE, blend=True)


def test_samples_of_a_blended_prompt() -> None:
    engine = make_engine(ratio=1.0)
    engine.warm_segments(SEGMENTS)
    parts, params = [SEGMENTS[2]], SamplingParams(max_tokens=6, temperature=1.0, seed=3, n=3)
    one = engine.add_request(prompt_of(parts), params, blend=True, segments=lengths_of(parts))
    output = drain(engine)[one]
    plain = make_engine().generate([prompt_of(parts)], params)[0]
    assert [sample.token_ids for sample in output.samples] == [sample.token_ids for sample in plain.samples]
    assert output.is_blended and not plain.is_blended
    engine.manager.check()


def test_a_stream_blends() -> None:
    engine = make_engine(ratio=1.0)
    engine.warm_segments(SEGMENTS)
    parts = [SEGMENTS[2]]
    tokens = list(engine.stream(prompt_of(parts), SamplingParams(max_tokens=4), blend=True, segments=lengths_of(parts)))
    assert tokens == make_engine().generate([prompt_of(parts)], SamplingParams(max_tokens=4))[0].token_ids
    assert engine.stats().blend.num_blends == 1


# --- sensitivity -----------------------------------------------------------------------------------------------------


def kept(engine: Engine, tokens: list[int], namespace: bytes = b"") -> SegmentKV | None:
    engine._connectors.blend.drain()
    return engine._connectors.blend.source.find(np.array(tokens, np.int32), namespace)


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3"])
@pytest.mark.parametrize("budget", [3, 2048])
def test_a_warmed_segment_knows_how_its_rows_change(budget: int, family: str) -> None:
    model, engine = model_of(family), make_engine(family, max_num_batched_tokens=budget)
    engine.warm_segments(SEGMENTS)
    for tokens in SEGMENTS:
        found, expected = kept(engine, tokens), torch.tensor(blend_oracle.sensitivity(model, tokens))
        assert torch.allclose(found.sensitivity, expected, rtol=1e-3, atol=1e-6)
        assert found.is_standalone and found.positions.tolist() == list(range(len(tokens)))
        alone = blend_oracle.place(model, [], tokens, 0)
        for layer, (key, value) in enumerate(zip(alone.k, alone.v, strict=True)):
            assert error(found.k[layer, ..., : key.shape[-1]].transpose(0, 1), key) <= FULL
            assert error(found.v[layer, ..., : value.shape[-1]].transpose(0, 1), value) <= FULL
    engine.manager.check()
    assert engine.manager.num_free_blocks == engine.manager.num_blocks


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("check_layer, filters", [(None, ()), (2, ()), (2, ((1, 0.4),))])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_segments_of_both_kinds_in_one_prompt(ratio: float, check_layer: int | None, filters, family: str) -> None:  # noqa: ANN001
    model = model_of(family)
    engine = make_engine(family, ratio=ratio, check_layer=check_layer, filters=filters)
    engine.warm_segments(SEGMENTS[:2])
    keep_unmeasured(engine, SEGMENTS[2])
    parts = [SEGMENTS[index] for index in (2, 0, 1, 0)]
    places = standalone(model, parts)
    places[0].sensitivity = None
    output, logits = serve(engine, parts)
    recorder = Recorder(places, ratio, check_layer or 1, filters=filters)
    expected = blend_oracle.run(model, output.prompt_token_ids, 0, recorder)
    assert error(logits, expected) <= FULL
    assert output.num_recomputed_tokens == int(35 * ratio) == len(recorder.chosen) - len(LEAD) - len(QUESTION)


def keep_unmeasured(engine: Engine, tokens: list[int]) -> None:
    """As the first segment of a prompt is."""
    engine.add_request(tokens, ONE, segments=[len(tokens)])
    drain(engine)
    assert kept(engine, tokens).is_standalone and kept(engine, tokens).sensitivity is None


@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_which_layer_chooses_for_a_prompt_does_not_depend_on_others_of_its_step(ratio: float) -> None:
    model, engine = model_of("llama"), make_engine(ratio=ratio, check_layer=None)
    engine.warm_segments(SEGMENTS[:2])
    keep_unmeasured(engine, SEGMENTS[2])
    each, leads = [[0, 1], [2, 0], [2], [1, 0]], [[3, 7], [9], [11, 12], [13]]
    for order, lead in zip(each, leads, strict=True):
        parts = [SEGMENTS[index] for index in order]
        engine.add_request(prompt_of(parts, lead=lead), ONE, blend=True, segments=[len(lead), *map(len, parts)])
    logits = first_logits(engine)
    for row, (order, lead) in enumerate(zip(each, leads, strict=True)):
        start, places = len(lead), []
        for index in order:
            places.append(blend_oracle.place(model, [], SEGMENTS[index], start, is_measured=index != 2))
            start += len(SEGMENTS[index])
        recorder = Recorder(places, ratio, int(2 in order))
        prompt = prompt_of([SEGMENTS[index] for index in order], lead=lead)
        assert error(logits[row], blend_oracle.run(model, prompt, 0, recorder)) <= FULL
        if ratio == 1:
            assert error(logits[row], own_logits(model, prompt)) <= FULL


def test_rows_with_nothing_new_before_them_are_not_chosen() -> None:
    model, engine, parts = model_of("llama"), make_engine(), [SEGMENTS[2], SEGMENTS[0]]
    engine.warm_segments(parts)
    engine._connectors.blend.drain()
    fresh = make_engine(ratio=0.4, check_layer=None, segments=engine._connectors.blend.source)  # its blocks are empty
    output, logits = serve(fresh, parts, lead=[])
    places = [blend_oracle.place(model, [], SEGMENTS[2], 0), blend_oracle.place(model, [], SEGMENTS[0], 13)]
    places[0].sensitivity = [0.0] * 13
    recorder = Recorder(places, 0.4, 0)
    assert error(logits, blend_oracle.run(model, output.prompt_token_ids, 0, recorder)) <= FULL
    assert not recorder.chosen & set(range(13)) and output.num_recomputed_tokens == 8


@pytest.mark.parametrize("others", [[], [1]])
def test_exact_rows_are_not_chosen_beside_rows_that_are_not_known(others: list[int]) -> None:
    model, engine, parts = model_of("llama"), make_engine(), [SEGMENTS[index] for index in (2, 0, *others)]
    keep_unmeasured(engine, SEGMENTS[2])
    keep_unmeasured(engine, SEGMENTS[0])
    engine.warm_segments([SEGMENTS[index] for index in others])
    fresh = make_engine(ratio=0.4, check_layer=None, segments=engine._connectors.blend.source)  # its blocks are empty
    output, logits = serve(fresh, parts, lead=[])
    starts, places = [0, 13, 22], []
    for start, tokens in zip(starts, parts, strict=False):
        places.append(blend_oracle.place(model, [], tokens, start, is_measured=start == 22))
    recorder = Recorder(places, 0.4, 1)
    assert error(logits, blend_oracle.run(model, output.prompt_token_ids, 0, recorder)) <= FULL
    assert not recorder.chosen & set(range(13)) and output.num_recomputed_tokens == int(0.4 * (22 + 4 * len(others)))


def test_a_segment_that_does_not_fit_twice_is_kept_unmeasured() -> None:
    for num_tokens, is_measured in ((15, True), (16, False), (31, False)):
        engine = make_engine(max_model_len=32)
        tokens = make_prompts([num_tokens], seed=5)[0]
        engine.warm_segments([tokens])
        assert (kept(engine, tokens).sensitivity is not None) == is_measured
    for num_tokens, is_measured in ((16, True), (17, False), (32, False)):
        engine = make_engine(num_blocks=8)
        tokens = make_prompts([num_tokens], seed=5)[0]
        engine.warm_segments([tokens])
        assert (kept(engine, tokens).sensitivity is not None) == is_measured
        assert kept(engine, tokens).is_standalone


def test_nothing_is_measured_where_it_is_not_used() -> None:
    engine = make_engine(uses_sensitivity=False)
    engine.warm_segments(SEGMENTS)
    assert engine.stats().num_computed_tokens == sum(map(len, SEGMENTS))
    assert all(kept(engine, tokens).sensitivity is None for tokens in SEGMENTS)
    measuring = make_engine(segments=engine._connectors.blend.source)
    measuring.warm_segments(SEGMENTS)  # what was kept without one is measured
    assert measuring.stats().num_computed_tokens == 2 * sum(map(len, SEGMENTS))
    assert all(kept(measuring, tokens).sensitivity is not None for tokens in SEGMENTS)


@pytest.mark.parametrize("uses_sensitivity", [True, False])
def test_what_is_kept_is_not_computed_again(uses_sensitivity: bool) -> None:
    engine = make_engine(uses_sensitivity=uses_sensitivity)
    engine.warm_segments(SEGMENTS[:2])
    again = make_engine(uses_sensitivity=uses_sensitivity, segments=engine._connectors.blend.source)
    again.warm_segments(SEGMENTS[:2])
    assert again.stats().num_computed_tokens == again.stats().blend.num_kept_segments == 0
    again.warm_segments(SEGMENTS)
    assert again.stats().num_computed_tokens == (1 + uses_sensitivity) * sum(map(len, SEGMENTS[2:]))
    assert again.stats().blend.num_kept_segments == 2
    again.warm_segments([SEGMENTS[0]], namespace=b"tenant")
    assert again.stats().blend.num_kept_segments == 3
    with pytest.raises(TypeError, match="namespace must be bytes, got str"):
        again.warm_segments([SEGMENTS[0]], namespace="tenant")


def test_a_process_warms_what_the_disk_has_for_nothing(tmp_path: Path) -> None:
    cache, config = CacheConfig(block_size=B, num_gpu_blocks=64), KVStoreConfig(4, (f"disk://{tmp_path}?size=16MiB",))
    num_computed = []
    for _ in range(2):
        metadata = metadata_of(Engine.from_model(model_of("llama"), EngineConfig(cache)).cache, "tiny")
        with KVStore(config, metadata) as store:
            engine = Engine.from_model(model_of("llama"), EngineConfig(cache, blend=BlendConfig()), store=store)
            engine.warm_segments(SEGMENTS)
            num_computed.append(engine.stats().num_computed_tokens)
            assert all(kept(engine, tokens).sensitivity is not None for tokens in SEGMENTS)
            engine.close()
    assert num_computed == [2 * sum(map(len, SEGMENTS)), 0]


def test_what_one_tenant_warms_says_nothing_to_another() -> None:
    engine, alone = make_engine(), make_engine()
    engine.warm_segments([SEGMENTS[2], SEGMENTS[0]], namespace=b"a")
    assert kept(engine, SEGMENTS[0]) is None and kept(engine, SEGMENTS[0], b"b") is None
    engine.warm_segments([SEGMENTS[0]], namespace=b"b")
    alone.warm_segments([SEGMENTS[0]])
    of_b, expected = kept(engine, SEGMENTS[0], b"b"), kept(alone, SEGMENTS[0])
    assert torch.equal(of_b.sensitivity, expected.sensitivity) and of_b.sensitivity is not None


def test_the_copy_is_not_stored(tmp_path: Path) -> None:
    model = model_of("llama")
    cache = CacheConfig(block_size=B, num_gpu_blocks=64)
    config = KVStoreConfig(4, (f"disk://{tmp_path}?size=16MiB&segment=8MiB",))
    with KVStore(config, metadata_of(Engine.from_model(model, EngineConfig(cache)).cache, "tiny")) as store:
        engine = Engine.from_model(model, EngineConfig(cache, blend=BlendConfig(), save_generated=True), store=store)
        engine.warm_segments([SEGMENTS[2]])
        engine.close()
        assert store.lookup(SEGMENTS[2] * 2) == 13 // 4 * 4


# --- trouble ---------------------------------------------------------------------------------------------------------


class Troubled(MemorySegments):
    """A source whose calls raise, or take their time."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.open, self.raises = threading.Event(), False

    def find(self, tokens: np.ndarray, namespace: bytes = b"") -> SegmentKV | None:
        if self.raises:
            raise OSError("gone")
        self.open.wait(10)
        return super().find(tokens, namespace)

    def wants(self, *args: object) -> bool:
        if self.raises:
            raise OSError("gone")
        return super().wants(*args)


def test_a_slow_or_broken_source_is_a_prompt_computed_in_full() -> None:
    model, source, cache = model_of("llama"), Troubled(), CacheConfig(block_size=B, num_gpu_blocks=64)
    hasty, patient = (
        Engine.from_model(model, EngineConfig(cache, blend=BlendConfig(ratio=0, deadline=seconds)), segments=source)
        for seconds in (0.01, 60.0)
    )
    hasty.warm_segments([SEGMENTS[2]])
    late, logits = serve(hasty, [SEGMENTS[2]])
    assert not late.is_blended and hasty.stats().blend.num_late == 1
    assert error(logits, own_logits(model, prompt_of([SEGMENTS[2]]))) <= FULL
    source.open.set()
    hasty.close()
    source.raises = True
    broken, _ = serve(patient, [SEGMENTS[2]], lead=[9])
    assert not broken.is_blended and patient.stats().blend.num_errors == 1
    patient.warm_segments([SEGMENTS[0]])  # is asked for, and, as it is computed all the same, once more
    assert patient.stats().blend.num_errors == 3 and patient.stats().blend.num_kept_segments == 0
    source.raises = False
    assert serve(patient, [SEGMENTS[2]], lead=[10])[0].is_blended
    patient.close()


class SlowToKeep(MemorySegments):
    """A source that keeps nothing before it may go on. longest: of the calls that were under way or waiting."""

    def __init__(self, go: bool) -> None:
        super().__init__(1 << 20)
        self.go, self.num_waiting, self.longest = threading.Event(), lambda: 0, 0
        if go:
            self.go.set()

    def keep(self, tokens: np.ndarray, segment: SegmentKV, namespace: bytes = b"") -> None:
        self.go.wait(20)
        self.longest = max(self.longest, self.num_waiting())
        super().keep(tokens, segment, namespace)


def engine_over(source: SlowToKeep, num_segments: int) -> Engine:
    """One that lets so many segments of 9 tokens be on their way."""
    model = model_of("llama")
    num_bytes = num_segments * 9 * 2 * 4 * model.config.num_hidden_layers * model.config.num_key_value_heads * 8
    config = BlendConfig(ratio=0, max_bytes=num_bytes, uses_sensitivity=False)
    engine = Engine.from_model(
        model, EngineConfig(CacheConfig(block_size=B, num_gpu_blocks=64), blend=config), segments=source
    )
    source.num_waiting = lambda: len(engine._connectors.blend._keeps)
    return engine


def test_what_a_slow_source_is_to_keep_is_bounded() -> None:
    source = SlowToKeep(go=False)
    engine = engine_over(source, 2)
    prompts = [[*segment, 7] for segment in make_prompts([9] * 6, seed=9)]
    for prompt in prompts:
        engine.add_request(prompt, ONE, segments=[9])
    while engine.has_unfinished:
        engine.step()
        assert sum(engine._connectors.blend._keeps.values()) <= engine._connectors.blend._max_bytes
    stats = engine.stats().blend
    assert (stats.num_kept_segments, stats.num_skipped_segments) == (2, 4)
    source.go.set()
    engine._connectors.blend.drain()
    engine.add_request([*prompts[-1], 8], ONE, segments=[9])
    drain(engine)
    engine.close()
    assert [source.find(np.array(prompt[:9], np.int32)) is not None for prompt in prompts] == [
        number in (0, 1, 5) for number in range(6)
    ]


def test_all_segments_that_are_warmed_are_kept() -> None:
    segments, source = [*make_prompts([9] * 12, seed=8), *make_prompts([40], seed=7)], SlowToKeep(go=True)
    engine = engine_over(source, 2)
    engine.warm_segments(segments)
    assert all(source.find(np.array(segment, np.int32)) is not None for segment in segments)
    assert engine.stats().blend.num_skipped_segments == 0 and source.longest <= 2
    engine.close()


def test_a_model_that_raises_leaves_the_request_to_blend_later() -> None:
    model, engine = model_of("llama"), make_engine(ratio=0.3)
    engine.warm_segments(SEGMENTS)
    parts = [SEGMENTS[0], SEGMENTS[2]]
    one = engine.add_request(prompt_of(parts), ONE, blend=True, segments=lengths_of(parts))
    handle = model.model.layers[2].register_forward_pre_hook(fail)
    while not engine.scheduler.running:
        with pytest.raises(OSError, match="no memory"):
            engine.step()
        break
    handle.remove()
    engine.manager.check()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    with logits_of(engine) as seen:
        assert drain(engine)[one].is_blended
    recorder = Recorder(standalone(model, parts), 0.3, 1)
    assert error(seen[-1][-1], blend_oracle.run(model, prompt_of(parts), 0, recorder)) <= FULL


def fail(*_: object) -> None:
    raise OSError("no memory")


def test_bad_arguments_change_nothing() -> None:
    engine, plain = (
        make_engine(),
        Engine.from_model(model_of("llama"), EngineConfig(CacheConfig(block_size=B, num_gpu_blocks=8))),
    )
    for lengths, message in (([0], "positive lengths"), ([True], "positive lengths"), ([3, 3], "fit into 5 tokens")):
        with pytest.raises(ValueError, match=f"segments must .*{message}"):
            engine.add_request([1, 2, 3, 4, 5], ONE, blend=True, segments=lengths)
    with pytest.raises(ValueError, match="segments must be given where BlendConfig has neither separator nor boundar"):
        engine.add_request([1, 2, 3], ONE, blend=True)
    for arguments in ({"blend": True}, {"segments": [1]}):
        with pytest.raises(ValueError, match="blend and segments need an engine with a BlendConfig"):
            plain.add_request([1, 2, 3], ONE, **arguments)
    with pytest.raises(ValueError, match="tokens must hold at least one token"):
        engine.warm_segments([[1], []])
    assert not engine.has_unfinished and not plain.has_unfinished
    assert engine.stats().num_steps == plain.stats().num_steps == 0


def test_models_and_configs_that_are_refused() -> None:
    cache = CacheConfig(block_size=B, num_gpu_blocks=8)
    with pytest.raises(ValueError, match="check_layer must be under 3, got 3"):
        Engine.from_model(model_of("llama"), EngineConfig(cache, blend=BlendConfig(check_layer=3)))
    with pytest.raises(ValueError, match="blend needs enable_prefix_caching"):
        Engine.from_model(model_of("llama"), EngineConfig(cache, blend=BlendConfig(), enable_prefix_caching=False))
    with pytest.raises(ValueError, match="segments must be None without blend"):
        Engine.from_model(model_of("llama"), EngineConfig(cache), segments=MemorySegments(1))
    with pytest.raises(ValueError, match="those of LlamaForCausalLM are dynamic"):
        Engine.from_model(scaled("dynamic", factor=2.0), EngineConfig(cache, blend=BlendConfig()))
    with pytest.raises(ValueError, match="rotary embeddings .* of layer 0 of GPT2LMHeadModel"):
        Engine.from_model(make_model("gpt2"), EngineConfig(cache, blend=BlendConfig()))


def test_a_model_whose_layers_do_not_let_go_of_rows_is_refused() -> None:
    model = FAMILIES["llama"]()
    inner = model.model.layers[2].mlp.forward
    model.model.layers[2].mlp.forward = lambda hidden: inner(hidden) * (2 if hidden.shape[1] == 8 else 1)
    cache = CacheConfig(block_size=B, num_gpu_blocks=8)
    with pytest.raises(ValueError, match="blended logits must be the model's own, those of LlamaForCausalLM are"):
        Engine.from_model(model, EngineConfig(cache, blend=BlendConfig()))
    model.model.layers[2].mlp.forward = lambda hidden: (
        inner(hidden) + (torch.zeros(12, 1) if hidden.shape[1] == 8 else 0)
    )
    with pytest.raises(ValueError, match="go on with some rows, those of LlamaForCausalLM cannot"):
        Engine.from_model(model, EngineConfig(cache, blend=BlendConfig()))


@pytest.mark.parametrize("num_blocks", [64, 0])
def test_segments_lie_in_the_store_and_outlive_the_engine(tmp_path: Path, num_blocks: int) -> None:
    model, parts = model_of("llama"), [SEGMENTS[0], SEGMENTS[2]]
    config = KVStoreConfig(4, (f"disk://{tmp_path}?size=16MiB&segment=8MiB",))
    blend = BlendConfig(ratio=0.3, check_layer=1)
    for lead in (LEAD, [9, 11]):  # the first one is a segment itself by then
        cache = CacheConfig(block_size=B, num_gpu_blocks=64, num_cpu_blocks=num_blocks)
        plain = Engine.from_model(model, EngineConfig(cache))
        with KVStore(config, metadata_of(plain.cache, "tiny")) as store:
            engine = Engine.from_model(model, EngineConfig(cache, blend=blend), store=store)
            if lead is LEAD:
                engine.warm_segments(parts)
            output, logits = serve(engine, parts, lead=lead)
            engine.close()
        recorder = Recorder(standalone(model, parts), 0.3, 1)
        expected = blend_oracle.run(model, prompt_of(parts, lead=lead), 0, recorder)
        assert error(logits, expected) <= FULL
        assert output.num_recomputed_tokens + len(LEAD) + len(QUESTION) == len(recorder.chosen)


@pytest.mark.parametrize("cache_dtype", ["bf16", "int8"])
def test_caches_of_other_dtypes(cache_dtype: str) -> None:
    model = model_of("llama")
    cache = CacheConfig(block_size=B, num_gpu_blocks=64, cache_dtype=cache_dtype)
    engine = Engine.from_model(model, EngineConfig(cache, blend=BlendConfig(ratio=0, check_layer=1)))
    engine.warm_segments(SEGMENTS)
    output, logits = serve(engine, [SEGMENTS[0], SEGMENTS[2]])
    recorder = Recorder(standalone(model, [SEGMENTS[0], SEGMENTS[2]]), 0, 1)
    assert output.num_reused_tokens == 22
    assert error(logits, blend_oracle.run(model, output.prompt_token_ids, 0, recorder)) <= 0.1


@pytest.mark.parametrize("backend, kv_layout", [("flash", "HND"), ("flashinfer", "NHD"), ("paged", "NHD")])
def test_other_layouts(backend: str, kv_layout: str) -> None:
    model = model_of("llama")
    cache = CacheConfig(block_size=B, num_gpu_blocks=64, backend=backend, kv_layout=kv_layout, layer_layout="separate")
    engine = Engine.from_model(model, EngineConfig(cache, blend=BlendConfig(ratio=0.3, check_layer=1)))
    engine.warm_segments(SEGMENTS)
    output, logits = serve(engine, [SEGMENTS[0], SEGMENTS[2]])
    recorder = Recorder(standalone(model, [SEGMENTS[0], SEGMENTS[2]]), 0.3, 1)
    assert error(logits, blend_oracle.run(model, output.prompt_token_ids, 0, recorder)) <= FULL


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_rows_may_be_gathered_instead_of_read_in_place(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_reads_in_place", lambda *_: False)
    test_any_ratio_is_what_the_definition_says(True, family)
