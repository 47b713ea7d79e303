"""Chunk transforms against their reference: every layout and dtype, every byte of both ends."""

import itertools

import pytest
import torch

from kvpage import CacheLayout, KVScales, ops
from kvpage.layout.config import CACHE_DTYPES
from kvpage.ops import reference

PLACES = [
    ("flash", "NHD"),
    ("flash", "HND"),
    ("flashinfer", "NHD"),
    ("flashinfer", "HND"),
    ("paged", "NHD"),
    ("mla", "NHD"),
]
EVERY_LAYOUT = pytest.mark.parametrize(
    "place, layer_layout", list(itertools.product(PLACES, ("separate", "packed"))), ids=str
)
DTYPES = pytest.mark.parametrize("dtype", list(CACHE_DTYPES.values()), ids=str)
BLOCK, NUM_BLOCKS, LAYERS = 4, 9, 3


def make_layout(place, layer_layout="separate", dtype=torch.bfloat16, size=46, block=BLOCK):
    return CacheLayout(block, 1 if place[0] == "mla" else 2, size, dtype, place[0], place[1], layer_layout)


def random_caches(layout, seed=0):
    caches = layout.allocate(NUM_BLOCKS, LAYERS, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.arange(NUM_BLOCKS, dtype=torch.int32)
    num_tokens, parts = NUM_BLOCKS * layout.block_size, 1 if layout.backend == "mla" else 2
    shape = (LAYERS, parts, num_tokens, layout.num_kv_heads, layout.head_size)
    rows = torch.randn(shape, generator=generator).to(torch.float32 if layout.is_quantized else layout.dtype)
    reference.load_chunk(caches, ids, 0, rows, layout)
    return caches


def row_dtypes(layout):
    if not layout.is_quantized:
        return [layout.dtype]
    return [torch.float32, torch.bfloat16, *([] if layout.has_token_scales else [layout.dtype])]


def empty_chunk(layout, num_tokens, dtype, fmt, fill=0xC3):
    parts, heads = (1 if layout.backend == "mla" else 2), layout.num_kv_heads
    inner = (num_tokens, heads) if fmt == "vllm" else (heads, num_tokens)
    chunk = torch.empty(LAYERS, parts, *inner, layout.head_size, dtype=dtype)
    chunk.view(torch.uint8).fill_(fill)
    return chunk


def by_token(chunk, fmt):
    return chunk if fmt == "vllm" else chunk.transpose(2, 3)


def raw(tensors):
    return [tensor.contiguous().view(torch.uint8) for tensor in tensors]


def assert_same(got, want):
    for one, other in zip(raw(got), raw(want), strict=True):
        assert torch.equal(one, other)


IDS = torch.tensor([7, 2, 0, 5, 8], dtype=torch.int32)


@EVERY_LAYOUT
@DTYPES
def test_chunks_are_what_the_reference_says(place, layer_layout, dtype):
    layout = make_layout(place, layer_layout, dtype)
    caches = random_caches(layout)
    scales = None
    if dtype.itemsize == 1 and not layout.has_token_scales:
        scales = [KVScales.of([0.5 + layer, 0.3][: layout.num_kv_heads], 2.0) for layer in range(LAYERS)]
    cases = itertools.product((0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 11), (0, 3, 6), ("vllm", "huggingface"))
    for (num_tokens, start, fmt), rows in itertools.product(cases, row_dtypes(layout)):
        got, want = (empty_chunk(layout, num_tokens, rows, fmt) for _ in range(2))
        before = [cache.clone() for cache in caches]
        ops.store_chunk(caches, IDS, got, layout, start, fmt, scales)
        reference.store_chunk(caches, IDS, start, by_token(want, fmt), layout, scales)
        assert_same([got], [want])
        assert_same(caches, before)
        there, expected = random_caches(layout, 1), random_caches(layout, 1)
        ops.load_chunk(there, IDS, got, layout, start, fmt, scales)
        reference.load_chunk(expected, IDS, start, by_token(want, fmt), layout, scales)
        assert_same(there, expected)


@EVERY_LAYOUT
def test_raw_int8_chunks_keep_every_bit(place, layer_layout):
    layout = make_layout(place, layer_layout, torch.int8)
    caches, parts = random_caches(layout), 1 if place[0] == "mla" else 2
    for fmt in ("vllm", "huggingface"):
        inner = (11, layout.num_kv_heads) if fmt == "vllm" else (layout.num_kv_heads, 11)
        chunk = torch.zeros(LAYERS, parts, *inner, layout.padded_head_size + 4, dtype=torch.int8)
        ops.store_chunk(caches, IDS, chunk, layout, 2, fmt)
        there = random_caches(layout, 1)
        ops.load_chunk(there, IDS, chunk, layout, 2, fmt)
        want, got = (empty_chunk(layout, 11, torch.float32, "vllm") for _ in range(2))
        reference.store_chunk(caches, IDS, 2, want, layout)
        reference.store_chunk(there, IDS, 2, got, layout)
        assert_same([got], [want])
        again, plain = torch.zeros_like(chunk), torch.zeros_like(chunk)
        ops.store_chunk(there, IDS, again, layout, 2, fmt)
        reference.store_chunk(caches, IDS, 2, by_token(plain, fmt), layout)
        assert torch.equal(again, chunk) and torch.equal(plain, chunk)
        expected = random_caches(layout, 1)
        reference.load_chunk(expected, IDS, 2, by_token(chunk, fmt), layout)
        assert_same(there, expected)


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("size, block", [(8, 1), (80, 16), (96, 32), (112, 5), (576, 256), (256, 16)])
def test_other_sizes(place, size, block):
    layout = make_layout(place, size=size, block=block, dtype=torch.float16)
    caches = random_caches(layout)
    got, want = (empty_chunk(layout, 3 * block, torch.float16, "vllm") for _ in range(2))
    ops.store_chunk(caches, IDS, got, layout, block - 1)
    reference.store_chunk(caches, IDS, block - 1, want, layout)
    assert_same([got], [want])


def test_slices_of_chunks_and_of_heads():
    """A chunk may be a part of a larger one: of its tokens, of its layers' heads, of each head's elements."""
    layout = make_layout(("flash", "NHD"))
    caches = random_caches(layout)
    whole = torch.zeros(LAYERS, 2, 20, 2, 60, dtype=torch.bfloat16)
    expected = whole.clone()
    ops.store_chunk(caches, IDS, whole[:, :, 3:14, :, 5:45], layout, 1)
    want = empty_chunk(layout, 11, torch.bfloat16, "vllm")
    reference.store_chunk(caches, IDS, 1, want, layout)
    expected[:, :, 3:14, :, 5:45] = want[..., :40]
    assert torch.equal(whole, expected)


def test_over_threads():
    layout = CacheLayout(16, 8, 128, torch.bfloat16)
    caches = layout.allocate(40, 4, torch.device("cpu"))
    for cache in caches:
        cache.normal_()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    ids = torch.randperm(40, dtype=torch.int32)
    chunk, want = (torch.zeros(4, 2, 601, 8, 128, dtype=torch.bfloat16) for _ in range(2))
    ops.store_chunk(caches, ids, chunk, layout, 7)
    torch.set_num_threads(before)
    reference.store_chunk(caches, ids, 7, want, layout)
    assert torch.equal(chunk, want)


LAYOUT = make_layout(("flash", "NHD"))
GOOD = {"block_ids": IDS, "chunk": torch.zeros(LAYERS, 2, 5, 2, 46, dtype=torch.bfloat16), "layout": LAYOUT}
BAD = [
    ({"fmt": "hf"}, ValueError, "fmt must be one of vllm, huggingface, got 'hf'"),
    ({"start": -1}, ValueError, "start \\+ num_tokens must be in \\[0, 20\\]"),
    ({"start": 16}, ValueError, "got 16 \\+ 5"),
    ({"start": 1.0}, TypeError, "start must be an integer"),
    ({"block_ids": IDS.long()}, ValueError, "block_ids.dtype must be torch.int32"),
    ({"block_ids": IDS[None]}, ValueError, "block_ids must be \\[num_blocks\\]"),
    ({"block_ids": [1, 2]}, TypeError, "block_ids must be a torch.Tensor, got list"),
    (
        {"block_ids": torch.tensor([1, NUM_BLOCKS], dtype=torch.int32)},
        ValueError,
        "block_ids\\[1\\] must be in \\[0, 9\\)",
    ),
    ({"block_ids": torch.tensor([-1, 3], dtype=torch.int32)}, ValueError, "got -1"),
    ({"chunk": GOOD["chunk"].float()}, ValueError, "chunk.dtype must be torch.bfloat16"),
    ({"chunk": GOOD["chunk"][:2]}, ValueError, "chunk.shape must be"),
    ({"chunk": GOOD["chunk"][:, :1]}, ValueError, "chunk.shape must be"),
    ({"chunk": GOOD["chunk"][0]}, ValueError, "chunk must have 5 dimensions"),
    (
        {"chunk": torch.zeros(LAYERS, 2, 5, 2, 47, dtype=torch.bfloat16)},
        ValueError,
        "head size must be in \\[1, 46\\], got 47",
    ),
    ({"chunk": torch.zeros(LAYERS, 2, 5, 2, 92, dtype=torch.bfloat16)[..., ::2]}, ValueError, "contiguous in its last"),
    ({"chunk": GOOD["chunk"].to("meta")}, ValueError, "chunk must be on cpu, got meta"),
    ({"chunk": [1]}, TypeError, "chunk must be a torch.Tensor, got list"),
    ({"layout": "flash"}, TypeError, "layout must be a CacheLayout"),
    ({"scales": [KVScales.of(1, 1)] * LAYERS}, ValueError, "scales must be None for a cache of torch.bfloat16"),
    ({"scales": [KVScales.of(1, 1)]}, ValueError, "one for each of 3 layers, got 1"),
    ({"caches": []}, ValueError, "caches must be at least one layer's"),
]


@pytest.mark.parametrize("move", [ops.store_chunk, ops.load_chunk])
@pytest.mark.parametrize("change, error, match", BAD, ids=[match for _, _, match in BAD])
def test_what_is_refused_has_changed_nothing(move, change, error, match):
    caches = random_caches(LAYOUT)
    before = [cache.clone() for cache in caches]
    with pytest.raises(error, match=match):
        move(**{"caches": caches, **GOOD, **change})
    assert_same(caches, before)
    assert not GOOD["chunk"].any()


def test_a_block_must_not_be_written_twice():
    caches = random_caches(LAYOUT)
    twice = torch.tensor([3, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match="a block once where it is written"):
        ops.load_chunk(caches, twice, GOOD["chunk"], LAYOUT)
    ops.store_chunk(caches, twice, GOOD["chunk"].clone(), LAYOUT)
    with pytest.raises(ValueError, match="memory for each of its elements"):
        ops.store_chunk(caches, IDS, GOOD["chunk"][:, :, :1].expand(-1, -1, 5, -1, -1), LAYOUT)
