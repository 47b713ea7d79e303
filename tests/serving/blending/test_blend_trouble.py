"""Blending with slow and broken segments, refused models and arguments, and caches of other kinds."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
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
    drain,
    error,
    lengths_of,
    logits_of,
    make_engine,
    model_of,
    own_logits,
    prompt_of,
    scaled,
    serve,
    standalone,
)
from support.models import make_model, make_prompts

from kvpage import CacheConfig
from kvpage.blend import BlendConfig, MemorySegments, SegmentKV
from kvpage.serving import Engine, EngineConfig
from kvpage.store import KVStore, KVStoreConfig, metadata_of


class Troubled(MemorySegments):
    """A source whose calls raise, or take their time."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.open, self.raises = threading.Event(), False

    def find(self, tokens: np.ndarray, namespace: bytes = b"") -> SegmentKV | None:
        if self.raises:
            raise OSError("gone")
        self.open.wait(120)
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
        self.go.wait(120)
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
    source.num_waiting = lambda: len(engine.debug.blend._keeps)
    return engine


def test_what_a_slow_source_is_to_keep_is_bounded() -> None:
    source = SlowToKeep(go=False)
    engine = engine_over(source, 2)
    prompts = [[*segment, 7] for segment in make_prompts([9] * 6, seed=9)]
    for prompt in prompts:
        engine.add_request(prompt, ONE, segments=[9])
    while engine.has_unfinished:
        engine.step()
        assert sum(engine.debug.blend._keeps.values()) <= engine.debug.blend._max_bytes
    stats = engine.stats().blend
    assert (stats.num_kept_segments, stats.num_skipped_segments) == (2, 4)
    source.go.set()
    engine.debug.blend.drain()
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
