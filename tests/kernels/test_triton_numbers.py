"""The Triton kernels that quantize rows against the reference: every number, 8-bit float and magnitude.

Every byte of the destination is compared, mapped or not.
"""

import pytest
import torch
from support.kernel_calls import INTERPRETED, ON_KERNELS, device_of, gather, reshape
from support.kernel_rows import ROWS, same_bytes, same_numbers

from kvpage import CacheLayout, KVScales
from kvpage.layout.kv_scales import FP8_DTYPES
from kvpage.ops import reference

pytest.importorskip("triton")


def every_pattern(dtype):
    """All of 16 bits; of 32, those around which a rounding changes, with subnormals, infinities and NaNs."""
    if dtype != torch.float32:
        return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    upper = torch.arange(-(2**15), 2**15).int() << 16
    ties = torch.arange(-(2**15), 2**15).int() << 16 | 0x8000
    return torch.cat([upper, upper - 1, ties, ties + 1, upper ^ 0x0007FFFF, upper | 1]).view(torch.float32)


@ON_KERNELS
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("rows_dtype", ROWS, ids=str)
@pytest.mark.parametrize("scale", [None, 1.0, 0.37, 2.0**-100, 1e30])
def test_every_number_becomes_the_8_bit_float_of_the_reference(where, dtype, rows_dtype, scale):
    numbers = every_pattern(rows_dtype).reshape(-1, 1, 2**15 if INTERPRETED else 2**11)
    layout = CacheLayout(len(numbers), 1, numbers.shape[2], dtype)
    got, want = (layout.allocate(1, 1, device_of(place))[0] for place in (where, "cpu"))
    slots = torch.arange(len(numbers))
    given = [None if scale is None else KVScales.of(scale, scale, device_of(place)) for place in (where, "cpu")]
    numbers_there = numbers.to(device_of(where))
    reshape(where, numbers_there, numbers_there, got, slots.to(device_of(where)), layout, given[0])
    reference.reshape_and_cache(numbers, numbers, want, slots, layout, given[1])
    assert same_bytes(got, want)


@ON_KERNELS
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("rows_dtype", ROWS, ids=str)
@pytest.mark.parametrize("scale", [None, 0.37, 2.0**-140, 3e38])
def test_every_8_bit_float_becomes_the_number_of_the_reference(where, dtype, rows_dtype, scale):
    layout = CacheLayout(1, 1, 256, dtype)
    cache = layout.allocate(1, 1, torch.device("cpu"))[0]
    cache.view(torch.uint8).copy_(torch.arange(256, dtype=torch.uint8))
    if scale == 2.0**-140:  # KVScales has no subnormal ones, but products may be
        cache.view(torch.uint8).fill_(1)
    given = [
        None if scale is None else KVScales.of(max(scale, 2.0**-126), scale if scale > 1 else 1, device_of(place))
        for place in (where, "cpu")
    ]
    table, device = torch.zeros(1, 1, dtype=torch.int32), device_of(where)
    got = gather(where, cache.to(device), table.to(device), [1], layout, scales=given[0], dtype=rows_dtype)
    want = reference.gather_cache(cache, table, torch.tensor([1]), layout, scales=given[1], dtype=rows_dtype)
    for rows, expected in zip(got, want, strict=False):
        assert same_numbers(rows, expected)
        assert torch.equal(rows.cpu().signbit(), expected.signbit()) or rows.isnan().any()


@ON_KERNELS
@pytest.mark.parametrize("rows_dtype", ROWS, ids=str)
def test_int8_takes_every_magnitude(where, rows_dtype):
    torch.manual_seed(3)
    rows = torch.randn(400, 1, 64) * torch.logspace(-44, 38, 400)[:, None, None]
    rows[0], rows[1, 0, 5], rows[2] = 0, 1e-45, -1e-45
    rows[3, 0, :4] = torch.tensor([127.0, 0.5, 1.5, -2.5])  # ties
    rows[3, 0, 4:] = 0
    rows[4] = torch.finfo(torch.float32).max
    rows = rows.to(rows_dtype)
    rows[~rows.isfinite()] = 0
    rows[5, 0, 7], rows[6, 0, 7], rows[7, 0, 7] = float("inf"), float("nan"), float("-inf")
    layout = CacheLayout(8, 1, 64, torch.int8)
    got, want = (layout.allocate(50, 1, device_of(place))[0] for place in (where, "cpu"))
    slots, device = torch.randperm(400), device_of(where)
    reshape(where, rows.to(device), rows.to(device), got, slots.to(device), layout)
    reference.reshape_and_cache(rows, rows, want, slots, layout)
    for part, expected in zip(layout.views(got), layout.views(want), strict=True):
        places = slots // 8, slots % 8
        scales = part.scales.cpu()[places]
        assert same_numbers(scales, expected.scales[places]) and not scales[5:8].isfinite().any()
        finite = torch.arange(400) != 6  # where the largest is a NaN, nothing else means anything
        assert torch.equal(part.rows.cpu()[places][finite], expected.rows[places][finite])
