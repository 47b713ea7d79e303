"""The kernels that move rows and chunks, as compiled for a GPU, against the reference: every byte of all layers."""

import pytest
import torch
from support.kernel_calls import gather, gather_by_device_lengths, move_chunk, reshape
from support.kernel_rows import (
    chunk_scales,
    given_scales,
    make_chunk,
    make_layout,
    make_rows,
    noisy,
    same_bytes,
    same_numbers,
)
from support.ptx.archs import BOTH, every_case

from kvpage import CacheLayout, KVScales
from kvpage.ops import reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
FLASH, HND, PAGED, MLA = ("flash", "NHD"), ("flash", "HND"), ("paged", "NHD"), ("mla", "NHD")
CASES = {  # place, dtype of the cache, of the rows, elements of a row
    "bf16": (BOTH, FLASH, BF16, BF16, 128),
    "paged": ([80], PAGED, BF16, BF16, 64),
    "latents": ([90], MLA, BF16, BF16, 576),
    "odd sizes": ([80], HND, FP32, FP32, 46),
    "e4m3 of bf16": (BOTH, FLASH, E4M3, BF16, 128),
    "e4m3 of fp16": ([80], PAGED, E4M3, FP16, 64),
    "e5m2 of fp32": ([90], HND, E5M2, FP32, 46),
    "int8 of bf16": ([90], FLASH, INT8, BF16, 128),
    "int8 of fp32": ([80], PAGED, INT8, FP32, 64),
}
CHUNKS = {name: (*case, name in ("latents", "int8 of fp32")) for name, case in CASES.items()}  # one launch a layer
NUMBERS = {  # dtype of the cache, of the rows, scale
    "e4m3 of fp16": ([80], E4M3, FP16, None),
    "e4m3 of fp16, scaled": ([90], E4M3, FP16, 0.37),
    "e4m3 of bf16, scaled": ([80], E4M3, BF16, 0.37),
    "e5m2 of fp16, scaled": ([80], E5M2, FP16, 0.37),
    "e5m2 of bf16": ([90], E5M2, BF16, None),
}
LENGTHS = {"bf16": ([80], BF16, BF16), "e4m3": ([90], E4M3, BF16), "int8": ([90], INT8, FP16)}


@every_case("place, dtype, rows_dtype, size", CASES)
def test_rows_are_cached_and_gathered(device, place, dtype, rows_dtype, size):
    layout = make_layout(place, dtype=dtype, size=size)
    got, want = noisy(layout), noisy(layout)
    scales = given_scales(layout)
    key = make_rows(layout, 21, size, rows_dtype)
    value = None if place == MLA else make_rows(layout, 21, size, rows_dtype)
    slots = torch.randperm(24)[:21]
    slots[3] = -1
    assert not reshape("interpreter", key, value, got[1], slots, layout, scales)
    reference.reshape_and_cache(key, value, want[1], slots, layout, scales)
    assert all(same_bytes(one, other) for one, other in zip(got, want, strict=True))
    tables = torch.tensor([[0, 3, 2], [5, 1, 4]], dtype=torch.int32)
    lengths, starts = torch.tensor([11, 9]), torch.tensor([1, 0])
    *rows, error = gather("interpreter", got[1], tables, lengths, layout, starts.tolist(), None, scales, rows_dtype)
    assert not error
    expected = reference.gather_cache(want[1], tables, lengths, layout, starts, scales, rows_dtype)
    for one, other in zip(rows, expected, strict=True):
        assert one is other is None or same_numbers(one, other)


@every_case("dtype, rows_dtype", LENGTHS)
def test_lengths_may_be_on_the_device(device, dtype, rows_dtype):
    layout = make_layout(FLASH, dtype=dtype, size=64)
    cache, scales = noisy(layout)[1], given_scales(layout)
    tables, lengths = torch.tensor([[0, 3, 2], [5, 1, 4]], dtype=torch.int32), torch.tensor([11, 9])
    starts = torch.tensor([1, 0])
    got = tuple(torch.full((20, 3, 64), 7, dtype=rows_dtype) for _ in range(2))
    assert not gather_by_device_lengths("interpreter", cache, tables, lengths, layout, starts, got, scales)
    want = reference.gather_cache(cache, tables, lengths, layout, starts, scales, rows_dtype)
    assert all(same_numbers(one, other) for one, other in zip(got, want, strict=True))


@every_case("place, dtype, rows_dtype, size, one_by_one", CHUNKS)
def test_chunks_are_stored_and_loaded(device, place, dtype, rows_dtype, size, one_by_one):
    layout = make_layout(place, dtype=dtype, size=size)
    got, want = noisy(layout), noisy(layout)
    ids, scales = torch.tensor([5, 1, 0, 3, 2, 4], dtype=torch.int32), chunk_scales(layout)
    chunk, memory = make_chunk(layout, 20, size, rows_dtype, heads_first=False)
    before, expected = memory.clone(), memory.clone()
    options = {"max_programs": 2, "one_by_one": one_by_one}
    assert not move_chunk("interpreter", got, ids, 3, chunk, layout, scales, True, **options)
    reference.store_chunk(want, ids, 3, expected[..., 1 : 1 + size], layout, scales)
    assert same_numbers(memory, expected)
    memory.copy_(before)
    assert not move_chunk("interpreter", got, ids, 3, chunk, layout, scales, False, **options)
    reference.load_chunk(want, ids, 3, chunk, layout, scales)
    assert all(same_bytes(one, other) for one, other in zip(got, want, strict=True))


def test_what_lies_outside_is_reported_and_left_alone(device):
    layout = make_layout(FLASH, dtype=BF16, size=64)
    got, want = noisy(layout)[1], noisy(layout)[1]
    rows = make_rows(layout, 3, 64, BF16)
    assert reshape("interpreter", rows, rows, got, torch.tensor([2, 24, 5]), layout) == 1
    reference.reshape_and_cache(rows[::2], rows[::2], want, torch.tensor([2, 5]), layout)
    assert same_bytes(got, want)
    assert gather("interpreter", got, torch.tensor([[0, 6]], dtype=torch.int32), [7], layout)[-1] == 2


@pytest.mark.parametrize("bad", [-1, 6])
@pytest.mark.parametrize("to_chunk", [False, True])
def test_a_bad_block_of_a_chunk_is_reported_and_left_alone(device, bad, to_chunk):
    layout = make_layout(FLASH, dtype=BF16, size=64)
    got, want = noisy(layout), noisy(layout)
    chunk, memory = make_chunk(layout, 12, 64, BF16, heads_first=False)
    expected = memory.clone()
    assert move_chunk("interpreter", got, torch.tensor([4, bad, 2]).int(), 0, chunk, layout, None, to_chunk) == 2
    move = reference.store_chunk if to_chunk else reference.load_chunk
    for block_id, begin in ((4, 0), (2, 8)):
        move(want, torch.tensor([block_id]).int(), 0, expected[:, :, begin : begin + 4, :, 1:65], layout)
    assert same_numbers(memory, expected)
    assert all(same_bytes(one, other) for one, other in zip(got, want, strict=True))


@every_case("dtype, rows_dtype, scale", NUMBERS)
def test_every_number_of_16_bits_becomes_the_8_bit_float_of_the_reference(device, dtype, rows_dtype, scale):
    """NaNs of both signs among them."""
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(rows_dtype).reshape(-1, 1, 2**11)
    layout = CacheLayout(len(numbers), 1, numbers.shape[2], dtype)
    got, want = (layout.allocate(1, 1, torch.device("cpu"))[0] for _ in range(2))
    slots, scales = torch.arange(len(numbers)), None if scale is None else KVScales.of(scale, scale)
    assert not reshape("interpreter", numbers, numbers, got, slots, layout, scales)
    reference.reshape_and_cache(numbers, numbers, want, slots, layout, scales)
    assert same_bytes(got, want)


@every_case("size", {"16 warps": ([90], 8192), "32 warps": ([80], 32768), "the most": ([90], 65536)})
def test_rows_of_any_size_can_be_launched(device, size):
    """A thread block has at most 1024 threads."""
    layout = CacheLayout(2, 1, size, BF16)
    got, want = (layout.allocate(2, 1, torch.device("cpu"))[0] for _ in range(2))
    rows = torch.randn(2, 1, size).to(BF16)
    assert not reshape("interpreter", rows, rows, got, torch.tensor([3, 0]), layout)
    reference.reshape_and_cache(rows, rows, want, torch.tensor([3, 0]), layout)
    assert same_bytes(got, want)
