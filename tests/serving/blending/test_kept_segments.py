"""Segments that an engine keeps for blending: which, for which tenant, and how their rows change."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support import blend_oracle
from support.blend_oracle import Recorder
from support.blending import (
    FULL,
    LEAD,
    ONE,
    QUESTION,
    SEGMENTS,
    B,
    drain,
    error,
    first_logits,
    keep_unmeasured,
    kept,
    lengths_of,
    make_engine,
    model_of,
    own_logits,
    prompt_of,
    serve,
    serve_plainly,
    standalone,
)
from support.models import generate_each, make_prompts

from kvpage import CacheConfig
from kvpage.blend import BlendConfig, ContentBoundaries
from kvpage.serving import Engine, EngineConfig, SamplingParams
from kvpage.store import KVStore, KVStoreConfig, metadata_of


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
    assert not engine.debug.blend.source.find(np.array(unknown, np.int32))
    assert exact.token_ids == make_engine().generate([prompt + output.token_ids], ONE)[0].token_ids


def test_what_comes_before_the_first_reused_token_is_exact_and_found() -> None:
    model, engine = model_of("llama"), make_engine(ratio=0)
    engine.warm_segments([SEGMENTS[2]])
    parts = [SEGMENTS[0], SEGMENTS[2], SEGMENTS[1]]
    assert serve(engine, parts)[0].is_blended
    exact, logits = serve_plainly(engine, prompt_of(parts))
    assert exact.num_cached_tokens == (len(LEAD) + len(SEGMENTS[0])) // B * B
    assert error(logits, own_logits(model, prompt_of(parts))) <= FULL
    engine.debug.blend.drain()  # another thread keeps them
    assert engine.debug.blend.source.find(np.array(SEGMENTS[0], np.int32))
    assert not engine.debug.blend.source.find(np.array(SEGMENTS[1], np.int32))


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
    engine.debug.connectors.ask(engine.scheduler.waiting)
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
    engine.debug.blend.drain()
    fresh = make_engine(ratio=0.4, check_layer=None, segments=engine.debug.blend.source)  # its blocks are empty
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
    fresh = make_engine(ratio=0.4, check_layer=None, segments=engine.debug.blend.source)  # its blocks are empty
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
    measuring = make_engine(segments=engine.debug.blend.source)
    measuring.warm_segments(SEGMENTS)  # what was kept without one is measured
    assert measuring.stats().num_computed_tokens == 2 * sum(map(len, SEGMENTS))
    assert all(kept(measuring, tokens).sensitivity is not None for tokens in SEGMENTS)


@pytest.mark.parametrize("uses_sensitivity", [True, False])
def test_what_is_kept_is_not_computed_again(uses_sensitivity: bool) -> None:
    engine = make_engine(uses_sensitivity=uses_sensitivity)
    engine.warm_segments(SEGMENTS[:2])
    again = make_engine(uses_sensitivity=uses_sensitivity, segments=engine.debug.blend.source)
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
