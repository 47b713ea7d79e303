"""Segments in blocks of every layout against rotating and writing one after the other; every byte of the caches."""

import itertools

import pytest
import torch

from kvpage import CacheLayout, KVScales, ops
from kvpage.integrations.lmcache.blocks import gather_rotated, load_rotated
from kvpage.layout.rotation import Rotation
from kvpage.ops import reference

BLOCK, NUM_BLOCKS, LAYERS, T = 4, 6, 2, 9
PLACES = [
    ("flash", "NHD"),
    ("flash", "HND"),
    ("flashinfer", "NHD"),
    ("flashinfer", "HND"),
    ("paged", "NHD"),
    ("mla", "NHD"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8]
EVERY_PLACE = pytest.mark.parametrize(
    "place, layer_layout", list(itertools.product(PLACES, ("separate", "packed"))), ids=str
)


def make_layout(place, layer_layout, dtype, size=16):
    return CacheLayout(BLOCK, 1 if place[0] == "mla" else 2, size, dtype, place[0], place[1], layer_layout)


def make_rotation(size=16, num_rows=T):
    angles = torch.randn(num_rows, size // 2)
    return Rotation(angles.cos(), angles.sin(), size)


def random_caches(layout):
    caches = layout.allocate(NUM_BLOCKS, LAYERS, torch.device("cpu"))
    for cache in caches:
        cache.copy_(torch.randn(cache.shape).to(cache.dtype))
    return caches


def slots_of(num_tokens=T):
    slots = torch.randperm(NUM_BLOCKS * BLOCK)[:num_tokens]
    if num_tokens > 3:
        slots[2] = -1
    return slots


@EVERY_PLACE
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", ["vllm", "huggingface"])
def test_segments_are_loaded_and_turned(place, layer_layout, dtype, fmt):
    layout = make_layout(place, layer_layout, dtype)
    heads, parts = layout.num_kv_heads, 1 if place[0] == "mla" else 2
    rows = dtype if dtype.itemsize > 1 else torch.bfloat16
    scales = [KVScales.of(0.5, 2.0)] * LAYERS if dtype == torch.float8_e4m3fn else None
    for num_tokens in (0, 1, BLOCK, T):
        for rotations in (None, make_rotation(16, num_tokens), [None, make_rotation(16, num_tokens)]):
            kv = torch.randn(LAYERS, parts, heads, num_tokens, 16).to(rows).transpose(2, 3)
            kv = kv.contiguous() if fmt == "vllm" else kv
            caches, slots = random_caches(layout), slots_of(num_tokens)
            want = [cache.clone() for cache in caches]
            each = rotations if isinstance(rotations, list) else [rotations] * LAYERS
            for layer, rotation in enumerate(each):
                key = kv[layer, 0] if rotation is None else reference.rotated(kv[layer, 0], rotation)
                value = kv[layer, 1] if parts == 2 else None
                given = None if scales is None else scales[layer]
                reference.reshape_and_cache(key, value, want[layer], slots, layout, given)
            load_rotated(kv, caches, slots, layout, rotations, scales)
            for one, other in zip(caches, want, strict=True):
                assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@EVERY_PLACE
def test_keys_are_gathered_and_turned(place, layer_layout):
    layout, slots = make_layout(place, layer_layout, torch.bfloat16), slots_of().clamp(min=0)
    cache, rotation = random_caches(layout)[0], make_rotation()
    if place[0] == "paged":
        with pytest.raises(ValueError, match="K must be contiguous"):
            gather_rotated(cache, slots, layout, rotation)
        return
    keys = layout.views(cache)[0].read(slots // BLOCK, slots % BLOCK, 16)
    assert torch.equal(gather_rotated(cache, slots, layout, rotation), reference.rotated(keys, rotation))
    assert torch.equal(gather_rotated(cache, slots, layout, None), keys)
    table = torch.arange(NUM_BLOCKS, dtype=torch.int32)[None]
    whole = ops.gather_cache(cache, table, [NUM_BLOCKS * BLOCK], layout)[0]
    assert torch.equal(whole[slots], keys)


def test_bad_arguments():
    layout = make_layout(("flash", "NHD"), "separate", torch.bfloat16)
    caches, slots, rotation = random_caches(layout), slots_of(), make_rotation()
    kv = torch.randn(LAYERS, 2, T, 2, 16).to(torch.bfloat16)
    before = [cache.clone() for cache in caches]
    for message, args in (
        (r"kv must be \[2, parts", (kv[:1], caches, slots, layout, rotation)),
        (r"kv must be \[2, parts", (kv[:, 0], caches, slots, layout, rotation)),
        ("rotations must be one for each of 2 layers, got 1", (kv, caches, slots, layout, [rotation])),
        ("kv must have 2 parts a layer, got 1", (kv[:, :1], caches, slots, layout, rotation)),
        ("rotations must be of 9 rows", (kv, caches, slots, layout, [rotation, make_rotation(num_rows=8)])),
        ("caches must be of as many blocks", (kv, [caches[0], caches[1][:, :5]], slots, layout, rotation)),
        (r"out_slots\[0\] must be in", (kv, caches, slots + 24, layout, rotation)),
        ("out must be of 9 rows", (kv, caches, slots[:4], layout, rotation)),
        ("scales must be one for each of 2 layers, got 0", (kv, caches, slots, layout, rotation, [])),
        ("scales must be None for a cache of", (kv, caches, slots, layout, rotation, [KVScales.of(1.0, 1.0)] * 2)),
    ):
        with pytest.raises(ValueError, match=message):
            load_rotated(*args)
    assert all(torch.equal(one, other) for one, other in zip(caches, before, strict=True))
    floats = make_layout(("flash", "NHD"), "separate", torch.float8_e4m3fn)
    caches = random_caches(floats)
    before = [cache.clone() for cache in caches]
    for scales, error in (([KVScales.of(1.0, 1.0)], ValueError), ([KVScales.of(1.0, 1.0), None], TypeError)):
        with pytest.raises(error, match="scales must be"):
            load_rotated(kv, caches, slots, floats, rotation, scales)
    assert all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in zip(caches, before, strict=True)
    )
    quantised = make_layout(("flash", "NHD"), "separate", torch.int8)
    with pytest.raises(ValueError, match="K must be contiguous and in its own dtype"):
        gather_rotated(quantised.allocate(NUM_BLOCKS, 1, torch.device("cpu"))[0], slots, quantised, rotation)
