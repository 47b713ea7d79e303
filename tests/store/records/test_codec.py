"""Codecs: round trips, error bounds against a plain computation, and payloads that mean harm."""

import itertools
import math
import struct
import tracemalloc

import numpy as np
import pytest
import torch

from kvpage.store.records.codec import dtype_name, get_codec
from kvpage.store.records.record import CorruptRecord

zstandard = pytest.importorskip("zstandard")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ALL_DTYPES = [*DTYPES, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8]
SHAPES = [(1, 1, 1, 1, 1), (2, 2, 5, 3, 8), (3, 1, 17, 1, 7), (0, 2, 4, 4, 4), (2, 2, 0, 3, 8), (2, 2, 4, 4, 16)]


def as_bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def as_tensor(data: memoryview, dtype: torch.dtype, shape) -> torch.Tensor:
    if not data.nbytes:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


def inputs(kind: str, dtype: torch.dtype, shape, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "random bits":
        raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        return raw.view(dtype).view(shape) if raw.numel() else torch.empty(shape, dtype=dtype)
    if kind == "constant":
        return torch.full(shape, 3.0).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("name", ["raw", "zstd"])
def test_lossless_round_trips(name, dtype):
    codec = get_codec(name, dtype)
    assert codec.is_lossless and len(codec.name) <= 16
    for shape, kind in itertools.product(SHAPES, ["normal", "constant", "random bits"]):
        raw = as_bytes(inputs(kind, dtype, shape))
        payload = codec.encode(raw, shape)
        back = codec.decode(payload, raw.nbytes, shape)
        assert isinstance(back, memoryview) and bytes(back) == bytes(raw), (shape, kind)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 1001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_zstd_of_bytes_that_are_no_whole_elements(dtype, size):
    raw = memoryview(np.random.default_rng(0).bytes(size))
    codec = get_codec("zstd", dtype)
    assert bytes(codec.decode(codec.encode(raw, (1, 1, 1, 1, size)), size, (1, 1, 1, 1, size))) == bytes(raw)


def test_raw_copies_nothing():
    data = bytearray(b"abcd")
    codec = get_codec("raw", "bfloat16")
    payload = codec.encode(memoryview(data), (1, 1, 1, 1, 2))
    back = codec.decode(payload, 4, (1, 1, 1, 1, 2))
    data[0] = 0
    assert payload[0] == back[0] == 0
    with pytest.raises(CorruptRecord, match="payload must have 5 bytes, got 4"):
        codec.decode(payload, 5, (1, 1, 1, 1, 2))


def test_zstd_shrinks_what_resembles():
    raw = as_bytes(inputs("normal", torch.bfloat16, (8, 2, 256, 8, 64)))
    codec = get_codec("zstd", torch.bfloat16)
    shuffled, plain = codec.encode(raw, (0,) * 5).nbytes, len(zstandard.ZstdCompressor(level=1).compress(raw))
    assert shuffled < 0.72 * raw.nbytes and shuffled < 0.95 * plain


def naive_scale(values: list[float]) -> float:
    most, scale = max((abs(v) for v in values), default=0.0), 2.0**-126
    if most == 0:
        return 1.0
    while most > 448 * scale:
        scale *= 2
    return scale


@pytest.mark.parametrize("fmt", ["vllm", "huggingface"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("size", [1e-42, 1e-6, 1.0, 447.0, 6e4, 3e38])
def test_fp8_is_within_its_bound(dtype, fmt, size):
    shape = (2, 2, 5, 3, 8) if fmt == "vllm" else (2, 2, 3, 5, 8)
    heads = 3 if fmt == "vllm" else 2
    most = torch.finfo(dtype).max
    x = (inputs("normal", torch.float64, shape, seed=3) * size).clamp(-most, most)
    x *= torch.logspace(-6, 0, 8, dtype=torch.float64)  # of all sizes within a head
    x = x.to(dtype)
    codec = get_codec("fp8", dtype, fmt)
    payload = codec.encode(as_bytes(x), shape)
    assert payload.nbytes == 4 * 2 * 2 * 3 + x.numel() and not codec.is_lossless
    back = as_tensor(codec.decode(payload, x.nbytes, shape), dtype, shape)
    assert back.isfinite().all()
    by_head = x.double().movedim(heads, 2).flatten(3)
    got = back.double().movedim(heads, 2).flatten(3)
    scales = iter(struct.unpack("<12f", payload[:48]))
    for want, have in zip(by_head.flatten(0, 2), got.flatten(0, 2), strict=True):
        scale = next(scales)
        assert scale == naive_scale(want.tolist())
        bound = torch.maximum(want.abs() / 16, torch.tensor(scale / 1024, dtype=torch.float64))
        tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # of a dtype that ends before the product
        assert ((have - want).abs() <= bound + tiny / 2).all()
        assert ((have * want) >= 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_fp8_codes_are_torchs(dtype):
    """Every code, times a scale of 1 and of 2, as torch turns it into numbers."""
    codec = get_codec("fp8", dtype)
    codes = bytes(range(256))
    for scale in (1.0, 2.0):
        shape = (1, 1, 32, 1, 8)
        data = codec.decode(memoryview(struct.pack("<f", scale) + codes), 256 * dtype.itemsize, shape)
        want = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float() * scale
        got = as_tensor(data, dtype, (256,)).float()
        assert torch.equal(got.nan_to_num(-1.0), want.nan_to_num(-1.0))
        assert torch.equal(got.isnan(), want.isnan()) and got.isnan().sum() == 2
        assert torch.equal(got.signbit() | got.isnan(), want.signbit() | want.isnan())


def test_fp8_of_zeros_and_of_what_is_not_finite():
    codec = get_codec("fp8", "float16")
    x = torch.tensor([[0.0, -0.0, 0.0, 0.0], [math.inf, -math.inf, math.nan, 448.0], [65504.0, -65504.0, 1.0, 40000.0]])
    x = x.half().view(1, 1, 1, 3, 4)
    back = as_tensor(codec.decode(codec.encode(as_bytes(x), x.shape), 24, x.shape), torch.float16, (3, 4))
    assert back[0].tolist() == [0.0] * 4 and back[0].signbit().tolist() == [False, True, False, False]
    assert back[1, [0, 1, 3]].tolist() == [448.0, -448.0, 448.0] and back[1, 2].isnan()
    assert back[2].tolist()[:2] == [65504.0, -65504.0]  # 256 * 256 rounds up to what float16 has not


def test_fp8_of_nothing():
    codec = get_codec("fp8", "bfloat16")
    for shape in [(0, 2, 4, 4, 4), (2, 2, 0, 3, 8), (2, 2, 3, 0, 8)]:
        payload = codec.encode(memoryview(b""), shape)
        assert codec.decode(payload, 0, shape).nbytes == 0


def test_fp8_refuses_another_length():
    codec = get_codec("fp8", "bfloat16")
    with pytest.raises(ValueError, match="raw must have 16 bytes"):
        codec.encode(memoryview(bytes(15)), (1, 1, 1, 1, 8))


def corrupt(codec, payload: bytes, raw_bytes: int, shape) -> None:
    tracemalloc.start()
    with pytest.raises(CorruptRecord):
        codec.decode(memoryview(payload), raw_bytes, shape)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < (1 << 20) + 4 * raw_bytes


def test_crafted_zstd():
    codec, shape = get_codec("zstd", torch.bfloat16), (1, 1, 1, 1, 512)
    good = bytes(codec.encode(memoryview(bytes(range(256)) * 4), shape))
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(64 << 20))
    lying = bytearray(zstandard.ZstdCompressor(level=1).compress(bytes(1 << 20)))
    lying[6:10] = (1024).to_bytes(4, "little")  # a frame that says 1024 bytes and holds more
    unknown = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1024))
    crafted = [b"", b"\0" * 40, good[:-1], good + b"\0", good + good, bomb, bytes(lying), unknown]
    skippable = b"\x50\x2a\x4d\x18" + (8).to_bytes(4, "little") + bytes(8)
    for payload in [*crafted, skippable, skippable + good]:
        corrupt(codec, payload, 1024, shape)
    corrupt(codec, good, 1023, shape)
    corrupt(codec, good, 1025, shape)
    assert zstandard.get_frame_parameters(bytes(lying)).content_size == 1024  # it does lie
    assert bytes(codec.decode(memoryview(good), 1024, shape)) == bytes(range(256)) * 4


@pytest.mark.parametrize("scale", [0.0, -1.0, 3.0, math.inf, math.nan, 2.0**-127, 1e-45])
def test_fp8_scales_that_are_none(scale):
    codec, shape = get_codec("fp8", "bfloat16"), (1, 1, 4, 1, 8)
    corrupt(codec, struct.pack("<f", scale) + bytes(32), 64, shape)


def test_crafted_fp8():
    codec, shape = get_codec("fp8", "bfloat16"), (1, 1, 4, 2, 8)
    good = bytes(codec.encode(as_bytes(inputs("normal", torch.bfloat16, shape)), shape))
    for payload in (b"", good[:-1], good + b"\0"):
        corrupt(codec, payload, 128, shape)
    corrupt(codec, good, 127, shape)
    for other in [(1 << 31,) * 5, (1, 1, 4, 2, 9), (1, 1, 8, 1, 8), (0, 1, 4, 2, 8)]:
        corrupt(codec, good, 128, other)


def test_names():
    assert get_codec("raw", torch.float8_e4m3fn).name == "fp8_e4m3"
    assert get_codec("zstd", "float8_e4m3fn").name == "fp8_e4m3:zstd"
    assert get_codec("fp8", "bfloat16").name == "bfloat16:fp8"
    for name, dtype, fmt in [("lz4", "int8", "vllm"), ("raw", "Tensor", "vllm"), ("raw", "float8_e4m3fnuz", "vllm")]:
        with pytest.raises(ValueError, match="must be"):
            get_codec(name, dtype, fmt)
    with pytest.raises(ValueError, match="dtype must be"):
        get_codec("fp8", "int8")
    with pytest.raises(ValueError, match="fmt must be"):
        get_codec("fp8", "float16", "other")
