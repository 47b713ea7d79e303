"""What is between a row and its 8 bits, bit by bit, on every instruction set of this machine."""

import pytest
import torch

from kvpage import _C, reference
from kvpage.token_args import CODECS, ROW_TYPES

KERNELS = pytest.mark.parametrize("name", _C.attention_kernels())  # the codecs have the same names
FP8 = pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
ROWS = pytest.mark.parametrize("row_dtype", list(ROW_TYPES), ids=str)


def encode(name, rows, dtype, scale=1.0):
    codes = torch.zeros(len(rows) + 3, dtype=torch.uint8).fill_(0xA5)
    own = _C._codec_row(
        name, True, CODECS[dtype], ROW_TYPES[rows.dtype], rows.data_ptr(), len(rows), scale, codes.data_ptr()
    )
    assert (codes[len(rows) :] == 0xA5).all()
    return codes[: len(rows)].view(dtype), own


def decode(name, codes, row_dtype, scale):
    rows = torch.full((len(codes) + 3,), 7.0, dtype=row_dtype)
    _C._codec_row(
        name, False, CODECS[codes.dtype], ROW_TYPES[row_dtype], rows.data_ptr(), len(codes), scale, codes.data_ptr()
    )
    assert (rows[len(codes) :] == 7).all()
    return rows[: len(codes)]


def every_value(row_dtype):
    """All numbers of 16 bits; of 32 bits those around each of these, at every rounding, and many at random."""
    if row_dtype != torch.float32:
        return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(row_dtype)
    high = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int64) << 16
    low = torch.tensor([0, 1, 2, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (high[:, None] | low).reshape(-1).to(torch.int32)
    random = torch.randint(-(1 << 31), (1 << 31) - 1, (1 << 19,), generator=torch.Generator().manual_seed(0))
    return torch.cat([bits, random.to(torch.int32)]).view(torch.float32)


def bits(tensor):
    return tensor.view(torch.uint8)


@KERNELS
@FP8
@ROWS
@pytest.mark.parametrize("scale", [1.0, 0.37, 2.0**-140, 2.0**100, 3e38])
def test_8_bit_floats_are_written_as_the_reference_writes_them(name, dtype, row_dtype, scale):
    rows = every_value(row_dtype)
    got, _ = encode(name, rows, dtype, scale)
    want = reference.quantize_fp8(rows[None, None], torch.tensor([scale]), dtype)[0, 0]
    assert torch.equal(bits(got), bits(want))


@KERNELS
@FP8
@ROWS
@pytest.mark.parametrize("scale", [1.0, 0.37, 1e-30, 1e30])
def test_every_8_bit_float_is_read_as_the_reference_reads_it(name, dtype, row_dtype, scale):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    want = reference.dequantize_fp8(codes[None, None], torch.tensor([scale]), row_dtype)[0, 0]
    torch.testing.assert_close(decode(name, codes, row_dtype, scale), want, rtol=0, atol=0, equal_nan=True)


@KERNELS
@ROWS
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 15, 16, 17, 31, 46, 80, 128, 576])
def test_int8_rows_and_their_scales(name, row_dtype, size):
    generator = torch.Generator().manual_seed(size)
    for magnitude in (1.0, 0.0, 1e-4, 300.0, *((1e-44, 3e38) if row_dtype == torch.float32 else ())):
        rows = (torch.randn(size, generator=generator).clamp(-1, 1) * magnitude).to(row_dtype)
        codes, scale = encode(name, rows, torch.int8)
        want, scales = reference.quantize_int8(rows[None, None])
        assert torch.equal(codes, want[0, 0]) and scale == scales.item()
        back = reference.dequantize_int8(want, scales, row_dtype)[0, 0]
        assert torch.equal(decode(name, codes, row_dtype, scale), back)


@KERNELS
@ROWS
def test_int8_rounds_ties_to_even_and_keeps_what_is_no_number_one(name, row_dtype):
    rows = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]).to(row_dtype)
    codes, scale = encode(name, rows, torch.int8)
    assert scale == 1.0 and codes.tolist() == [127, 0, 2, 2, 0, -2, -2, 126]
    for odd in (float("nan"), float("inf"), -float("inf")):
        for place in (0, 9, 19):
            rows = torch.ones(20, dtype=row_dtype)
            rows[place] = odd
            codes, scale = encode(name, rows, torch.int8)
            assert not torch.isfinite(decode(name, codes, torch.float32, scale)[place])


def test_an_unknown_instruction_set_is_refused():
    rows = torch.zeros(1)
    with pytest.raises(ValueError, match="codec must be one that this machine has, got sse9"):
        encode("sse9", rows, torch.int8)
