"""Blended prompts through an engine: exact where they must be, as the definition says, beside other requests."""

import pytest
from support import blend_oracle
from support.blend_oracle import Recorder
from support.blending import (
    FAMILIES,
    FULL,
    LEAD,
    ONE,
    QUESTION,
    SEGMENTS,
    B,
    cut,
    drain,
    error,
    first_logits,
    lengths_of,
    make_engine,
    model_of,
    own_logits,
    prompt_of,
    serve,
    standalone,
)
from support.models import make_prompts

from kvpage import CacheConfig
from kvpage.blend import BlendConfig
from kvpage.serving import Engine, EngineConfig, RequestOutput, SamplingParams
from kvpage.serving.model import step


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
    decoding = others[0] + next(iter(engine.loop.requests.values())).generated_token_ids[:1]
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


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_rows_may_be_gathered_instead_of_read_in_place(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "attends_in_place", lambda device: False)
    test_any_ratio_is_what_the_definition_says(True, family)
