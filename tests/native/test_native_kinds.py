"""What the extension refuses by itself of rows and blocks, whoever calls it: it goes where the addresses lead."""

import pytest
import torch

from kvpage import _C, CacheConfig, CacheEngine, ModelConfig
from kvpage.ops.args.tokens import part_of

NUM_BLOCKS, B, HEADS, SIZE, NUM_TOKENS = 2, 4, 2, 8, 3
PLACES = {"row_type": 4, "codec": 5, "size": 6}
"""Of a part's numbers, those that the native code checks."""
FLOAT32 = 0  # a RowType
BITS, E4M3, E5M2 = range(3)  # Codecs


class Call:
    """A write of rows into K's blocks, with some of its numbers changed. Owns what the addresses lead to."""

    def __init__(self, cache_dtype: str, **changed: int) -> None:
        config = CacheConfig(block_size=B, num_gpu_blocks=NUM_BLOCKS, cache_dtype=cache_dtype)
        engine = CacheEngine(config, ModelConfig(SIZE, HEADS, ("full_attention",), torch.float32))
        self.cache = engine.gpu_cache[0].view(torch.uint8).fill_(7)
        self.rows = torch.full((NUM_TOKENS, HEADS, SIZE), 2.0)
        self.slots = torch.arange(NUM_TOKENS)
        view, _ = engine.layout.views(engine.gpu_cache[0])
        strides = [stride * view.rows.element_size() for stride in view.rows.stride()]
        places = {"data": view.rows.data_ptr(), "run_size": view.run_size, "element_bytes": view.rows.element_size()}
        if view.scales is not None:
            places |= {"scales": view.scales.data_ptr(), "scale_strides": view.scales.stride()}
        places |= {name: number for name, number in changed.items() if name not in PLACES}
        size = places["element_bytes"] or 1  # a power of two divides all strides
        blocks = _C.KVPart(strides=[stride // size for stride in strides], **places)
        part = list(part_of(blocks, view.rows.dtype, self.rows, None))
        for name in PLACES.keys() & changed.keys():
            part[PLACES[name]] = changed[name]
        self.part = tuple(part)

    def write(self, num_tokens: int = NUM_TOKENS, num_heads: int = HEADS, num_blocks: int = NUM_BLOCKS, size: int = B):
        _C.reshape_and_cache([self.part], self.slots.data_ptr(), num_tokens, num_heads, num_blocks, size, 1)

    def is_untouched(self) -> bool:
        return bool((self.cache == 7).all())


@pytest.mark.parametrize("cache_dtype", ["fp32", "fp8_e4m3", "fp8_e5m2", "int8"])
def test_it_takes_what_the_library_hands_over(cache_dtype):
    call = Call(cache_dtype)
    call.write()
    assert not call.is_untouched()


def test_int8_without_scales():
    call = Call("int8", scales=0)
    with pytest.raises(ValueError, match="int8 must have scales in its blocks, got none"):
        call.write()
    assert call.is_untouched()


@pytest.mark.parametrize("codec", [E4M3, E5M2])
def test_fp8_needs_none(codec):
    call = Call("int8", scales=0, codec=codec)
    call.write()
    assert not call.is_untouched()


@pytest.mark.parametrize(
    "cache_dtype, changed, message",
    [
        ("int8", {"row_type": -1}, r"row_type must be in \[0, 3\], got -1"),
        ("int8", {"row_type": 4}, r"row_type must be in \[0, 3\], got 4"),
        ("int8", {"codec": -1}, r"code_type must be in \[0, 3\], got -1"),
        ("int8", {"codec": 4}, r"code_type must be in \[0, 3\], got 4"),
        ("int8", {"codec": BITS}, "both be bits or both be numbers, got 0 and 0"),
        ("fp32", {"codec": E4M3}, "both be bits or both be numbers, got 3 and 1"),
        ("fp32", {"row_type": FLOAT32, "codec": E5M2}, "element_bytes must be 1 for codes, got 4"),
        ("int8", {"element_bytes": 2}, "element_bytes must be 1 for codes, got 2"),
        ("fp32", {"element_bytes": 0}, "element_bytes must be a power of two of at most 16, got 0"),
        ("fp32", {"element_bytes": -4}, "element_bytes must be a power of two of at most 16, got -4"),
        ("fp32", {"element_bytes": 3}, "element_bytes must be a power of two of at most 16, got 3"),
        ("fp32", {"element_bytes": 32, "size": 1}, "element_bytes must be a power of two of at most 16, got 32"),
        ("fp32", {"size": 0}, "size must be positive, got 0"),
        ("fp32", {"size": -1}, "size must be positive, got -1"),
        ("fp32", {"run_size": 0}, "run_size must be positive, got 0"),
    ],
)
def test_numbers_that_no_cache_has(cache_dtype, changed, message):
    call = Call(cache_dtype, **changed)
    with pytest.raises(ValueError, match=message):
        call.write()
    assert call.is_untouched()


@pytest.mark.parametrize("element_bytes", [1, 2, 4, 8, 16])
def test_elements_of_every_power_of_two(element_bytes):
    call = Call("fp32", element_bytes=element_bytes, size=4 * SIZE // element_bytes, run_size=4 * SIZE // element_bytes)
    call.write()
    written = call.cache.view(torch.float32)[0].flatten(0, 1)
    assert (written[:NUM_TOKENS] == 2).all() and (call.cache[1] == 7).all()


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"num_tokens": -1}, "num_tokens must not be negative, got -1"),
        ({"num_heads": 0}, "num_heads must be positive, got 0"),
        ({"num_heads": -1}, "num_heads must be positive, got -1"),
        ({"num_blocks": -1}, r"num_blocks must be in \[0, 2147483647\], got -1"),
        ({"num_blocks": 2**31}, r"num_blocks must be in \[0, 2147483647\], got 2147483648"),
        ({"size": 0}, r"block_size must be in \[1, 2147483647\], got 0"),
        ({"size": 2**31}, r"block_size must be in \[1, 2147483647\], got 2147483648"),
    ],
)
def test_sizes_that_no_cache_has(sizes, message):
    call = Call("fp32")
    with pytest.raises(ValueError, match=message):
        call.write(**sizes)
    assert call.is_untouched()


def test_the_most_blocks_and_the_longest():
    for sizes in ({"num_blocks": 2**31 - 1}, {"size": 2**31 - 1, "num_blocks": 1}, {"num_tokens": 0, "num_blocks": 0}):
        Call("fp32").write(**sizes)


def test_the_smallest_cache():
    call = Call("fp32", size=1, run_size=1)
    call.slots.zero_()
    call.write(num_tokens=1, num_heads=1, num_blocks=1, size=1)
    assert (call.cache.flatten()[:4].view(torch.float32) == 2).all() and (call.cache.flatten()[4:] == 7).all()


@pytest.mark.parametrize("codec, code", [(E4M3, 0x40), (E5M2, 0x40)])
def test_a_codec_writes_its_codes(codec, code):
    call = Call("int8", scales=0, codec=codec)
    call.write()
    written = (call.cache == code).sum().item()
    assert written == NUM_TOKENS * HEADS * SIZE and (call.cache == 7).sum().item() == call.cache.numel() - written


@pytest.mark.parametrize("cache_dtype", ["fp32", "fp8_e4m3", "int8"])
def test_rows_come_back(cache_dtype):
    call = Call(cache_dtype)
    call.write()
    call.rows.zero_()
    block_ids = torch.arange(NUM_BLOCKS, dtype=torch.int32)
    _C.store_chunk([call.part], block_ids.data_ptr(), NUM_BLOCKS, NUM_BLOCKS, B, 0, NUM_TOKENS, HEADS, 1)
    torch.testing.assert_close(call.rows, torch.full_like(call.rows, 2.0))
