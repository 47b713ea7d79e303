"""LayerShape, ModelConfig of unlike layers, and their layouts: each layer has its own bytes."""

import math

import pytest
import torch
from support.unlike_layers import PLACES, SHAPES, B, make_engine, model_config, own_shapes
from transformers import AutoConfig

from kvpage import CacheConfig, CacheEngine
from kvpage.layout.cache_layout import CacheLayout
from kvpage.layout.config import ModelConfig, ParallelConfig
from kvpage.layout.layer_shape import LayerShape

ONE = ParallelConfig()
JOINT = CacheLayout(4, 2, 12, torch.float16, "joint", value_size=8)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: "-".join(place.values()))
@pytest.mark.parametrize("kind", SHAPES)
def test_the_bytes_of_a_cache_are_the_sum_of_its_layers(kind: str, place: dict) -> None:
    """The backend `paged` pads V to K, or K to V: no kernel of its layout knows rows of two sizes."""
    engine = make_engine(kind, 5, 3, **place)
    pads = place["backend"] == "paged"
    sizes = [2 * 8 * -(-one.largest // 8) if pads else one.head_size + (one.value_size or one.head_size)
             for one in own_shapes(kind)]  # fmt: skip
    each = [B * shape.num_kv_heads * size * 2 for shape, size in zip(own_shapes(kind), sizes, strict=True)]
    assert [layer.nbytes for layer in engine.gpu_cache] == [5 * num_bytes for num_bytes in each]
    assert [layer.nbytes for layer in engine.cpu_cache] == [3 * num_bytes for num_bytes in each]
    assert CacheEngine.get_cache_block_size(CacheConfig(B, **place), model_config(kind)) == sum(each)
    fitting = CacheConfig.for_memory(7 * sum(each), model_config(kind), block_size=B, **place)
    assert fitting.num_gpu_blocks == 7


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_k_and_v_of_one_row_share_no_byte(dtype: torch.dtype, kv_layout: str) -> None:
    layout = CacheLayout(4, 2, 10, dtype, "joint", kv_layout, value_size=7)
    (cache,) = layout.allocate(3, 1, torch.device("cpu"))
    key, value = layout.views(cache)
    assert (key.rows.shape, value.rows.shape) == ((3, 4, 2, 1, 12 if dtype is torch.int8 else 10),
                                                  (3, 4, 2, 1, 8 if dtype is torch.int8 else 7))  # fmt: skip
    for number, part in enumerate([key.rows, value.rows, key.scales, value.scales]):
        if part is not None:
            assert not part.any(), "another part has written here"
            part.fill_(number + 1)
    assert cache.numel() == math.prod(layout.shape(3)) and bool(cache.view(torch.uint8).any())


def test_the_spec_of_a_layout_names_the_size_of_v() -> None:
    assert JOINT.spec == "joint:NHD:separate:4:2:12+8:float16"
    assert CacheLayout.from_spec(JOINT.spec) == JOINT and JOINT.head_size_v == 8
    even = CacheLayout(4, 2, 12, torch.float16, "joint", value_size=12)
    assert even == CacheLayout(4, 2, 12, torch.float16, "joint") == CacheLayout.from_spec(even.spec)
    assert even.head_size_v == 12 and JOINT.part(0).views(torch.zeros(1, 4, 2, 12))[1] is None


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"value_size": 8}, "value_size must be None or 12 for 'flash', got 8"),
        ({"value_size": -1, "backend": "joint"}, "value_size must be an integer of at least 0, or None, got -1"),
        ({"value_size": True, "backend": "joint"}, "value_size must be an integer"),
    ],
)
def test_sizes_of_v_that_no_layout_has(fields: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CacheLayout(4, 2, 12, torch.float16, **fields)
    for spec in ("joint:NHD:separate:4:2:12+:float16", "joint:NHD:separate:4:2:12+8+8:float16"):
        with pytest.raises(ValueError, match="spec must be"):
            CacheLayout.from_spec(spec)


@pytest.mark.parametrize(
    "kind, fields, expected, shared",
    [
        (
            "gemma4_text",
            {"num_key_value_heads": 16, "num_global_key_value_heads": 4, "attention_k_eq_v": True,
             "num_kv_shared_layers": 0},
            [(16, 256), (16, 256), (4, 512)] * 2, (),
        ),
        ("gemma4_text", {"num_key_value_heads": 2, "num_kv_shared_layers": 3}, [(2, 256), (2, 256), (2, 512)] * 2,
         ((3, 1), (4, 1), (5, 2))),
        ("gemma3n_text", {"num_key_value_heads": 2, "num_kv_shared_layers": 3}, [(2, 256)] * 6,
         ((3, 1), (4, 1), (5, 2))),
        ("mimo_v2_flash", {"num_key_value_heads": 4}, [(8, 192, 128), (8, 192, 128), (4, 192, 128)] * 2, ()),
    ],
)  # fmt: skip
def test_shapes_of_released_configs(kind: str, fields: dict, expected: list, shared: tuple) -> None:
    words = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = AutoConfig.for_model(kind, num_hidden_layers=6, layer_types=words, **fields)
    found = ModelConfig.from_hf(config)
    assert [found.shape_of(layer) for layer in range(6)] == [LayerShape(*one) for one in expected]
    assert found.shared_layers == shared
    assert found.attention_layers(ONE) == [layer for layer in range(6) if layer not in dict(shared)]


def test_layers_that_share_go_where_their_source_goes() -> None:
    config = model_config("gemma4").with_caches_of([1])
    assert config.attention_layers(ONE) == [1] and config.shared_layers == ((3, 1),)
    engine = CacheEngine(CacheConfig(B, 2), config)
    assert engine.shared_layers == {3: 1} and list(engine.bound_layers) == [1, 3]
    assert engine.bound_layers[3] is engine.bound_layers[1] and len(engine.gpu_cache) == 1
    stages = [CacheEngine(CacheConfig(B, 4), model_config("gemma4"), ParallelConfig(1, 2, rank)) for rank in (0, 1)]
    assert [list(stage.bound_layers) for stage in stages] == [[0, 1, 2, 3, 4], [5, 6]]


def test_equal_shapes_are_a_uniform_model() -> None:
    found = ModelConfig.of_shapes([LayerShape(2, 8, 8), None, LayerShape(2, 8)], ("full_attention",) * 3, torch.float16)
    assert found.is_uniform and (found.num_kv_heads, found.head_size) == (2, 8)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"layer_shapes": [LayerShape(2, 8)]}, "layer_shapes must be one of each of 2 layers, got 1"),
        ({"layer_shapes": [LayerShape(2, 8), None]}, "layer_shapes must have a LayerShape of layer 1, got None"),
        ({"layer_shapes": [LayerShape(2, 8), LayerShape(4, 8)]}, r"must be the largest of layer_shapes, \(8, 4\)"),
        ({"shared_layers": [(0, 1)]}, "shared_layers must name a layer and an earlier one with a cache"),
        ({"shared_layers": [(1, 1)]}, "shared_layers must name a layer and an earlier one with a cache"),
        ({"use_mla": True, "num_kv_heads": 1, "layer_shapes": [LayerShape(1, 8)] * 2}, "must be None with use_mla"),
    ],
)
def test_shapes_that_do_not_fit(fields: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelConfig(**{"head_size": 8, "num_kv_heads": 2, "layer_types": ("full_attention",) * 2, **fields})
    for numbers in ((0, 8), (1, 0), (1, 8, 0)):
        with pytest.raises(ValueError, match="must be an integer of at least 1, got 0"):
            LayerShape(*numbers)
