"""EngineConfig: it checks itself, and Engine.from_model takes nothing else for its settings."""

import dataclasses

import numpy as np
import pytest
from support.models import make_model

from kvpage import CacheConfig, KVScales
from kvpage.blend import BlendConfig
from kvpage.blocks.config import HostPolicy
from kvpage.observe.events import EventConfig
from kvpage.serving import Engine, EngineConfig, SamplingParams

CACHE = CacheConfig(block_size=4, num_gpu_blocks=16)

WRONG_VALUES = [
    ({"max_num_seqs": 0}, "max_num_seqs must be a positive integer, got 0"),
    ({"max_num_seqs": True}, "max_num_seqs must be a positive integer, got True"),
    ({"max_num_batched_tokens": 1.0}, "max_num_batched_tokens must be a positive integer, got 1.0"),
    ({"max_model_len": 0}, "max_model_len must be a positive integer or None, got 0"),
    ({"max_model_len": True}, "max_model_len must be a positive integer or None, got True"),
    ({"pin_quota": -1}, "pin_quota must be an integer of at least 0, got -1"),
    ({"residency_sample_rate": 1.5}, r"residency_sample_rate must be in \[0, 1\], got 1.5"),
    ({"residency_sample_rate": float("nan")}, r"residency_sample_rate must be in \[0, 1\], got nan"),
    ({"store_deadline": -1}, "store_deadline must not be negative, got -1"),
    ({"store_deadline": float("nan")}, "store_deadline must not be negative, got nan"),
    ({"kv_scales": "measure"}, "kv_scales must be KVScales, one a layer, 'calibrate' or None, got 'measure'"),
    ({"calibration_tokens": [1]}, "calibration_tokens must be None unless kv_scales is 'calibrate'"),
    ({"generation_config": "all"}, "generation_config must be 'model', 'served' or 'ignore', got 'all'"),
    (
        {"cudagraph_capture_sizes": [1, 65]},
        r"cudagraph_capture_sizes must be integers in \[1, max_num_seqs = 64\], got 65",
    ),
    ({"cudagraph_capture_sizes": [True]}, "cudagraph_capture_sizes must be integers in"),
    ({"cudagraph_capture_sizes": []}, "cudagraph_capture_sizes must not be empty: enforce_eager=True captures nothing"),
    ({"cudagraph_max_bytes": -1}, "cudagraph_max_bytes must be an integer of at least 0, got -1"),
    ({"blend": BlendConfig(), "enable_prefix_caching": False}, "blend needs enable_prefix_caching"),
]
WRONG_TYPES = [
    ({"cache_config": 16}, "cache_config must be a CacheConfig, got int"),
    ({"host_policy": 1}, "host_policy must be a HostPolicy, got int"),
    ({"events": "tcp://127.0.0.1:1"}, "events must be an EventConfig, got str"),
    ({"blend": True}, "blend must be a BlendConfig, got bool"),
    ({"enable_prefix_caching": 1}, "enable_prefix_caching must be True or False, got int"),
    ({"share_parts": None}, "share_parts must be True or False, got NoneType"),
    ({"load_or_compute": 0}, "load_or_compute must be True or False, got int"),
    ({"enforce_eager": None}, "enforce_eager must be True or False, got NoneType"),
    ({"async_scheduling": 1}, "async_scheduling must be True or False, got int"),
    ({"compile_model": "default"}, "compile_model must be True or False, got str"),
    ({"cudagraph_capture_sizes": 8}, "cudagraph_capture_sizes must be a sequence, got int"),
    ({"native_layers": "cpu"}, "native_layers must be True or False, got str"),
    ({"save_generated": 0}, "save_generated must be True or False, got int"),
    ({"residency_sample_rate": "1"}, "residency_sample_rate must be a number, got str"),
    ({"store_deadline": None}, "store_deadline must be a number, got NoneType"),
    ({"kv_scales": [1.0]}, "kv_scales must be a KVScales, got float"),
    ({"kv_scales": 1.0}, "kv_scales must be a sequence, got float"),
]


@pytest.mark.parametrize("fields, message", WRONG_VALUES)
def test_values_out_of_their_range(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**{"cache_config": CACHE} | fields)


@pytest.mark.parametrize("fields, message", WRONG_TYPES)
def test_values_of_another_type(fields: dict, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        EngineConfig(**{"cache_config": CACHE} | fields)


def test_values_at_the_edges_of_their_ranges() -> None:
    EngineConfig(CACHE, 1, 1, 1, pin_quota=0, residency_sample_rate=1, store_deadline=0, save_generated=False)
    EngineConfig(CACHE, host_policy=HostPolicy(), events=EventConfig(), blend=BlendConfig())


def test_it_is_frozen_and_holds_copies() -> None:
    scales, tokens = [KVScales.of(1.0, 1.0)], np.array([1, 2])
    assert EngineConfig(CACHE, kv_scales=scales).kv_scales == tuple(scales)
    config = EngineConfig(CACHE, kv_scales="calibrate", calibration_tokens=tokens)
    tokens[0] = 7
    assert config.calibration_tokens == (1, 2) and config == dataclasses.replace(config)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_num_seqs = 1
    assert not hasattr(config, "__dict__")


def test_an_engine_takes_its_settings_from_nowhere_else() -> None:
    model = make_model("llama")
    with pytest.raises(TypeError, match=r"config must be an EngineConfig, got CacheConfig: give EngineConfig\("):
        Engine.from_model(model, CACHE)
    with pytest.raises(TypeError, match="config must be an EngineConfig, got str$"):
        Engine.from_model(model, "auto")
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_num_seqs'"):
        Engine.from_model(model, EngineConfig(CACHE), max_num_seqs=2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_seqs'"):
        EngineConfig(CACHE, max_seqs=2)
    config = EngineConfig(CACHE, max_num_seqs=3, max_num_batched_tokens=5, max_model_len=20)
    engine = Engine.from_model(model, config)
    assert engine.config is config and engine.max_model_len == 20
    assert (engine.scheduler.max_num_seqs, engine.scheduler.max_num_batched_tokens) == (3, 5)
    assert len(engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4))[0].token_ids) == 4


def test_max_model_len_must_be_one_the_model_has() -> None:
    with pytest.raises(ValueError, match=r"max_model_len must be in \[1, 256\] for this model, got 257"):
        Engine.from_model(make_model("llama"), EngineConfig(CACHE, max_model_len=257))
