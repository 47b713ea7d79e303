"""`Engine.from_model(model)` alone: blocks, blocks of windows and checkpoints, as many as the memory has room for."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as tf
from support.dict_store import DictStore
from support.models import WINDOW, make_model
from support.state_engines import greedy, own_tokens, random_prompt
from support.state_engines import poison as poison_states
from support.state_models import make_state_model
from support.window_engines import check_nothing_held, make_window_model

from kvpage import CacheConfig
from kvpage.blend import BlendConfig
from kvpage.layout.config import DeviceConfig
from kvpage.serving import Engine, EngineConfig, StateConfig
from kvpage.serving.assembly.block_count import with_blocks
from kvpage.serving.assembly.parts import ChosenAttention, check_servable
from kvpage.store import KVStore, KVStoreConfig, KVStoreMetadata

B = 16
LAYER_BYTES = 2 * B * 2 * 16 * 4  # of a block in a layer of "gemma3": K and V, tokens, KV heads, elements, fp32
SMALL = {"max_num_seqs": 2, "max_num_batched_tokens": 32}
STATES = ("lfm2", "mamba2", "qwen3_next")
KINDS = (
    "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt2", "gpt_oss", "phi3", "deepseek_v3", "cohere2",
    *STATES,
)  # fmt: skip


def make(kind: str) -> tf.PreTrainedModel:
    return make_state_model(kind) if kind in STATES else make_window_model(kind)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that says how many bytes of host memory are free."""

    def say(num_bytes: int) -> None:
        monkeypatch.setattr(DeviceConfig, "free_memory", lambda self: num_bytes)

    return say


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_alone_gives_the_tokens_of_generate(kind: str) -> None:
    model = make(kind)
    engine = Engine.from_model(model)
    if kind in STATES:
        poison_states(engine)
    for cache in (engine.cache, *engine.window_caches):  # nothing is anybody's yet
        for layer in cache.gpu_cache:
            layer.fill_(torch.nan)
    prompts = [random_prompt(length, length) for length in (1, B - 1, B, B + 1, 3 * B)]
    for _ in range(2):  # then over cached prefixes
        for output in engine.generate(prompts, greedy(5)):
            assert output.samples[0].token_ids == own_tokens(model, output.prompt_token_ids, 5)
    engine.manager.check()
    if kind not in STATES:
        check_nothing_held(engine)
    has_windows = kind in ("mistral", "gemma2", "gemma3", "gpt_oss", "phi3", "cohere2")
    assert bool(engine.stats().windows) == has_windows


def test_windows_get_what_four_times_the_running_sequences_need() -> None:
    engine = Engine.from_model(make_model("gemma3"), EngineConfig(**SMALL))
    each, step = WINDOW // B + 2, 2
    assert engine.config.num_window_blocks == 4 * 2 * each + step
    assert engine.config.cache_config.num_gpu_blocks == 4 * 2 * 256 // B


def test_windows_and_other_layers_share_little_memory(free: Any) -> None:
    """Two layers of three have windows: half of the bytes are 10 blocks of them, and 20 blocks of the other one."""
    free(2 * 40 * LAYER_BYTES)
    config = EngineConfig(**{**SMALL, "max_num_batched_tokens": 256})
    engine = Engine.from_model(make_model("gemma3"), config)
    assert (engine.config.num_window_blocks, engine.config.cache_config.num_gpu_blocks) == (10, 20)


def test_one_table_where_it_holds_as_much(free: Any) -> None:
    free(2 * 8 * LAYER_BYTES)
    engine = Engine.from_model(make_model("gemma3"), EngineConfig(**SMALL))
    assert (engine.config.num_window_blocks, engine.config.cache_config.num_gpu_blocks) == (2, 4)
    free(2 * 4 * LAYER_BYTES)
    engine = Engine.from_model(make_model("gemma3"), EngineConfig(**SMALL))
    assert (engine.config.num_window_blocks, engine.config.cache_config.num_gpu_blocks) == (None, 1)


def test_the_widest_of_many_windows_tells_their_blocks() -> None:
    config = EngineConfig(**SMALL)
    servable = replace(
        check_servable(make_model("gemma3"), config), attention=ChosenAttention(None, {0: WINDOW, 1: None, 2: 3 * B})
    )
    assert with_blocks(servable, config).num_window_blocks == 4 * 2 * (3 + 2) + 2


def test_blocks_of_a_model_of_windows_alone_only_count_tokens(free: Any) -> None:
    free(2 * 30 * LAYER_BYTES // 2)  # its heads have half of the elements
    engine = Engine.from_model(make_model("mistral"), EngineConfig(**SMALL))
    assert (engine.config.num_window_blocks, engine.config.cache_config.num_gpu_blocks) == (10, 128)
    assert engine.cache.gpu_cache == []


@pytest.mark.parametrize(
    "fields",
    [
        {"blend": BlendConfig()},
        {"tensor_parallel_size": 2},
        {"attention_backend": "flashinfer"},
        {"cache_config": CacheConfig(backend="mla")},
        {"cache_config": CacheConfig(B, 8)},
    ],
)
def test_options_that_need_one_table_get_it(fields: dict[str, Any]) -> None:
    assert EngineConfig(**fields).num_window_blocks is None
    assert EngineConfig(**{**fields, "num_window_blocks": "auto"}).num_window_blocks is None


@pytest.mark.parametrize("fields", [{"num_window_blocks": None}, {"max_model_len": WINDOW}, {"blend": BlendConfig()}])
def test_one_table_where_nothing_is_to_be_won(fields: dict[str, Any]) -> None:
    engine = Engine.from_model(make_model("gemma3"), EngineConfig(**SMALL, **fields))
    assert engine.config.num_window_blocks is None
    assert not engine.stats().windows


def test_a_store_that_keeps_no_layers_apart_gets_one_table() -> None:
    engine = Engine.from_model(make_model("gemma3"), store=DictStore())
    assert engine.config.num_window_blocks is None
    engine.close()
    with KVStore(KVStoreConfig(B, ("memory://?size=1MiB",)), KVStoreMetadata("m", kv_dtype=torch.float32)) as store:
        engine = Engine.from_model(make_model("gemma3"), store=store)
        assert engine.config.num_window_blocks == 4 * 64 * 2 + 128
        engine.close()


def test_checkpoints_share_the_memory_of_blocks(free: Any) -> None:
    """Beside the states of running sequences, which come first."""
    model = make_state_model("lfm2")
    engine = Engine.from_model(model, EngineConfig(**SMALL))
    layer_bytes = sum(layer[:, 0].nbytes for layer in engine.cache.gpu_cache)
    slot_bytes = engine.states.layout.slot_bytes + layer_bytes
    slots = engine.stats().blocks.slots
    assert slots.num_slots - 2 == 4 * 4 * 2
    free(2 * slot_bytes + engine.states.layout.slot_bytes + 2 * 20 * slot_bytes)  # a state is that of padding
    engine = Engine.from_model(model, EngineConfig(**SMALL))
    assert engine.stats().blocks.slots.num_slots == 2 + 10
    assert engine.config.states.checkpoint_bytes == 10 * slot_bytes
    assert engine.manager.num_blocks == 10 * slot_bytes // layer_bytes


def test_a_budget_of_checkpoints_is_left_alone(free: Any) -> None:
    model = make_state_model("lfm2")
    states = StateConfig(checkpoint_bytes=0)
    engine = Engine.from_model(model, EngineConfig(**SMALL, states=states))
    assert engine.config.states == states
    assert engine.stats().blocks.slots.num_slots == 2
    engine = Engine.from_model(model, EngineConfig(CacheConfig(B, 8), **SMALL))
    assert engine.config.states == StateConfig()
    assert engine.stats().blocks.slots.num_slots == 2 + 8  # 1 GiB: one for each block


def test_states_of_running_sequences_must_fit(free: Any) -> None:
    free(1000)
    with pytest.raises(ValueError, match=r"num_gpu_blocks must be positive, 0 MiB .* lower .* max_num_seqs=64"):
        Engine.from_model(make_state_model("lfm2"))


def test_memory_that_is_named_takes_the_place_of_what_is_free(free: Any) -> None:
    free(0)
    config = EngineConfig(**{**SMALL, "max_num_batched_tokens": 256}, kv_cache_memory=40 * LAYER_BYTES)
    sized = Engine.from_model(make_model("gemma3"), config).config
    assert (sized.num_window_blocks, sized.cache_config.num_gpu_blocks) == (10, 20)
    with pytest.raises(ValueError, match="kv_cache_memory must hold a block, got 1$"):
        Engine.from_model(make_model("gemma3"), EngineConfig(kv_cache_memory=1))
    with pytest.raises(ValueError, match="kv_cache_memory must be None with num_gpu_blocks, got 1$"):
        EngineConfig(CacheConfig(B, 8), kv_cache_memory=1)
    with pytest.raises(ValueError, match="kv_cache_memory must be an integer of at least 1, got '4GiB'"):
        EngineConfig(kv_cache_memory="4GiB")


@pytest.mark.parametrize("number", ["Auto", "none", 0, 1.5, True])
def test_other_numbers_of_blocks_of_windows_are_refused(number: Any) -> None:
    with pytest.raises(ValueError, match="num_window_blocks must be an integer of at least 1, got"):
        EngineConfig(num_window_blocks=number)
    with pytest.raises(TypeError, match="cache_config must be a CacheConfig, got NoneType"):
        EngineConfig(None)
