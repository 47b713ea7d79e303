"""What is between a row and its 8 bits, bit by bit, on every instruction set of this machine."""

import pytest
import torch

import kvpage._C as _C
from kvpage.ops import reference
from kvpage.ops.args.tokens import CODECS, ROW_TYPES

KERNELS = pytest.mark.parametrize("name", _C._codecs())
FP8 = pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
ROWS = pytest.mark.parametrize("row_dtype", list(ROW_TYPES), ids=str)


TABLES = pytest.mark.parametrize("name", [name for name in _C._codecs() if name != "base"])
STREAMING = pytest.mark.parametrize("streaming", [False, True], ids=["cached", "streamed"])


def aligned(num_bytes):
    """Bytes from a multiple of a cache line on, as streaming wants them."""
    buffer = torch.zeros(num_bytes + 64, dtype=torch.uint8)
    start = -buffer.data_ptr() % 64
    return buffer[start : start + num_bytes]


def encode(name, rows, dtype, scale=1.0, streaming=False):
    codes = aligned(len(rows) + 3).fill_(0xA5)
    own = _C._codec_row(
        name, True, CODECS[dtype], ROW_TYPES[rows.dtype], rows.data_ptr(), len(rows), scale, codes.data_ptr(), streaming
    )
    assert (codes[len(rows) :] == 0xA5).all()
    return codes[: len(rows)].view(dtype), own


def decode(name, codes, row_dtype, scale, streaming=False, call=_C._codec_row):
    rows = aligned((len(codes) + 3) * row_dtype.itemsize).view(row_dtype).fill_(7.0)
    types = CODECS[codes.dtype], ROW_TYPES[row_dtype]
    assert call(name, False, *types, rows.data_ptr(), len(codes), scale, codes.data_ptr(), streaming) is not False
    assert (rows[len(codes) :] == 7).all()
    return rows[: len(codes)]


def encode_by_table(name, rows, dtype, scale, streaming=False):
    """None where there is no table."""
    codes = aligned(len(rows) + 3).fill_(0xA5)
    types = CODECS[dtype], ROW_TYPES[rows.dtype]
    size, place = len(rows), codes.data_ptr()
    if not _C._codec_row_by_table(name, True, *types, rows.data_ptr(), size, scale, place, streaming):
        assert (codes == 0xA5).all()
        return None
    assert (codes[size:] == 0xA5).all()
    return codes[:size].view(dtype)


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


@TABLES
@FP8
@STREAMING
def test_tables_write_every_bf16_as_the_reference_does(name, dtype, streaming):
    """Of scales, what matters is the significand, and that codes' ends lie within bf16."""
    rows = every_value(torch.bfloat16)
    random = torch.rand(12, generator=torch.Generator().manual_seed(1)).exp2()
    odd = [1.0, 1 + 2.0**-23, 2 - 2.0**-22, 1.0078125, 0.37, 1 / 448, 127 / 57344, 3.1e-9, 2.0**-100, 1.9e-30, 2.0**99]
    for scale in [*odd, *random.tolist()]:
        got = encode_by_table(name, rows, dtype, scale, streaming)
        want = reference.quantize_fp8(rows[None, None], torch.tensor([scale]), dtype)[0, 0]
        assert torch.equal(bits(got), bits(want)), scale


@TABLES
@FP8
@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 31, 32, 33, 46, 80, 128, 576])
@STREAMING
def test_tables_write_and_read_rows_of_any_size(name, dtype, size, streaming):
    rows = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(torch.bfloat16)
    codes = encode_by_table(name, rows, dtype, 0.011, streaming)
    want = reference.quantize_fp8(rows[None, None], torch.tensor([0.011]), dtype)[0, 0]
    assert torch.equal(bits(codes), bits(want))
    back = decode(name, codes, torch.bfloat16, 0.011, streaming, _C._codec_row_by_table)
    assert torch.equal(back, reference.dequantize_fp8(want[None, None], torch.tensor([0.011]), torch.bfloat16)[0, 0])


@TABLES
@FP8
@pytest.mark.parametrize("scale", [2.0**-101, 2.0**101, 3e38, 2.0**-140, float("inf"), float("nan")])
def test_scales_too_far_from_one_have_no_table(name, dtype, scale):
    assert encode_by_table(name, torch.ones(40, dtype=torch.bfloat16), dtype, scale) is None


def test_the_base_has_no_tables():
    assert encode_by_table("base", torch.ones(40, dtype=torch.bfloat16), torch.float8_e5m2, 1.0) is None


@TABLES
@FP8
@STREAMING
@pytest.mark.parametrize("row_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.37, 1e-30, 1e30, 3e38, 2.0**-140])
def test_tables_read_every_8_bit_float_as_the_reference_does(name, dtype, row_dtype, scale, streaming):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    want = reference.dequantize_fp8(codes[None, None], torch.tensor([scale]), row_dtype)[0, 0]
    got = decode(name, codes, row_dtype, scale, streaming, _C._codec_row_by_table)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(bits(got)[~want.isnan().repeat_interleave(2)], bits(want)[~want.isnan().repeat_interleave(2)])


@KERNELS
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8], ids=str)
@ROWS
@pytest.mark.parametrize("size", [0, 64, 80, 128])
def test_streamed_rows_are_those_that_are_not(name, dtype, row_dtype, size):
    rows = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(row_dtype)
    codes, scale = encode(name, rows, dtype, 0.37)
    streamed, own = encode(name, rows, dtype, 0.37, streaming=True)
    assert torch.equal(bits(streamed), bits(codes)) and own == scale
    back = decode(name, codes, row_dtype, scale, streaming=True)
    assert torch.equal(back, decode(name, codes, row_dtype, scale))


def int8_rows(name, rows, stride):
    """Codes [num_rows, stride], with what is behind a row's, and scales."""
    codes, scales = torch.full((len(rows), stride), -91, dtype=torch.int8), torch.full((len(rows) + 1,), 7.0)
    places = rows.data_ptr(), 2 * rows.stride(0), codes.data_ptr(), stride
    _C._codec_int8_rows(name, *places, *rows.shape, scales.data_ptr())
    assert scales[-1] == 7
    return codes, scales[:-1]


@KERNELS
@pytest.mark.parametrize("num_rows", [0, 1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33])
def test_several_int8_rows_at_once(name, num_rows):
    fused = torch.randn(num_rows, 53, generator=torch.Generator().manual_seed(num_rows)).to(torch.bfloat16)
    fused[1::5] = 0
    fused[2::7] *= 1e-36
    fused[3::11, 40] = float("inf")
    rows = fused[:, :46]
    codes, scales = int8_rows(name, rows, 50)
    want, want_scales = reference.quantize_int8(rows[None])
    assert torch.equal(codes[:, :46], want[0]) and (codes[:, 46:] == -91).all()
    assert torch.equal(scales, want_scales[0])


@KERNELS
@pytest.mark.parametrize("exponent", [-60, -3, 0, 50])
def test_int8_of_every_pair_of_bf16_significands(name, exponent):
    """Rows hold all numbers from their largest down to what rounds to zero, of either sign."""
    largest = (1 + torch.arange(128) / 128) * 2.0**exponent
    below = ((1 + torch.arange(128) / 128)[:, None] * 2.0 ** (exponent - torch.arange(10))).flatten()
    rows = torch.cat([largest[:, None], torch.minimum(below[None], largest[:, None])], 1)
    rows = torch.cat([rows, -rows], 1).to(torch.bfloat16)
    codes, scales = int8_rows(name, rows, rows.shape[1])
    want, want_scales = reference.quantize_int8(rows[None])
    assert torch.equal(scales, want_scales[0]) and torch.equal(codes, want[0])


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
@STREAMING
def test_every_int8_is_read_as_the_reference_reads_it(name, row_dtype, streaming):
    codes = torch.arange(-128, 128, dtype=torch.int32).to(torch.int8)
    random = torch.randn(40, generator=torch.Generator().manual_seed(3)).exp()
    odd = [0.0, 1.0, -0.37, 1e-44, 2.0**-140, 2.0**-126, 2.0**-120, 2.0**-100 * (1 - 2.0**-24), 2.0**-100, 2.7e36, 3e38]
    for scale in torch.tensor([*odd, float("inf"), float("nan"), *random.tolist()]).tolist():
        got = decode(name, codes, row_dtype, scale, streaming)
        want = reference.dequantize_int8(codes[None, None], torch.tensor([[scale]]), row_dtype)[0, 0]
        assert torch.equal(got.isnan(), want.isnan()), scale
        assert torch.equal(got[~got.isnan()], want[~got.isnan()]), scale


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
    with pytest.raises(ValueError, match="kernel must be one that this machine has, got sse9"):
        encode("sse9", rows, torch.int8)
