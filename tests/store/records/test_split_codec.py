"""SplitCodec: every kernel against a plain reading of the format, sizes and numbers of every kind, hostile payloads."""

import numpy as np
import pytest
import torch
from support.seeds import seed_of
from support.store_kv import C, kv_of, make, same

from kvpage import _C
from kvpage.store.records.codec import SPLIT_KINDS, dtype_name, get_codec
from kvpage.store.records.record import CorruptRecord
from kvpage.store.tiers.memory_tier import MemoryTier

BLOCK, GROUP, HEADER = 8192, 64, 8
DTYPES = pytest.mark.parametrize("dtype", SPLIT_KINDS, ids=dtype_name)
KERNELS = pytest.mark.parametrize("kernel", _C.exponent_kernels())
SIZES = [0, 1, 2, GROUP - 1, GROUP, GROUP + 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3 * GROUP + 5]
# Of each kind: bits of the exponent, bits below it.
FIELDS = {torch.bfloat16: (8, 7), torch.float16: (5, 10), torch.float8_e4m3fn: (4, 3), torch.float8_e5m2: (5, 2)}
RATIOS = {torch.bfloat16: 1.42, torch.float16: 1.12, torch.float8_e4m3fn: 1.12, torch.float8_e5m2: 1.28}


def raw_of(name, dtype, size, generator):
    """Return bytes of so many numbers."""
    if name == "random bits":
        return torch.from_numpy(generator.integers(0, 256, size * dtype.itemsize, dtype=np.uint8))
    values = {
        "normal": lambda: generator.standard_normal(size),
        "heavy tails": lambda: generator.standard_cauchy(size),
        "zeros": lambda: np.zeros(size),
        "zeros among others": lambda: generator.standard_normal(size) * (generator.random(size) < 0.5),
        "channels": lambda: generator.standard_normal(size) * 2.0 ** (np.arange(size) % 16 // 4 * 3),
        "tiny": lambda: generator.standard_normal(size) * 1e-38,
        "not finite": lambda: np.where(generator.random(size) < 0.1, np.inf, np.nan),
    }[name]()
    return torch.from_numpy(values.astype(np.float32)).clamp(-400, 400).to(dtype).view(torch.uint8)


def numbers(seed):
    return np.random.default_rng(seed_of(seed))


NAMES = ["normal", "heavy tails", "zeros", "zeros among others", "channels", "tiny", "not finite", "random bits"]


def encoded(dtype, raw, kernel=""):
    """Encode before bytes that nobody may write."""
    kind = SPLIT_KINDS[dtype]
    most = _C.most_payload_bytes(kind, len(raw))
    room = np.full(most + 16, 0xEE, np.uint8)
    size = _C.encode_exponents(kind, raw.data_ptr(), len(raw), room[:most], kernel)
    assert (room[most:] == 0xEE).all()
    return room[:size]


def decoded(dtype, payload, raw_bytes, kernel=""):
    """Decode between bytes that nobody may write."""
    payload, room = np.ascontiguousarray(payload), np.full(raw_bytes + 32, 0xEE, np.uint8)
    _C.decode_exponents(SPLIT_KINDS[dtype], payload.ctypes.data, len(payload), room[16 : 16 + raw_bytes], kernel)
    assert (room[:16] == 0xEE).all() and (room[16 + raw_bytes :] == 0xEE).all()
    return room[16 : 16 + raw_bytes]


def read(dtype, payload, raw_bytes):
    """Read the format bit by bit: the oracle."""
    num_exponent, num_mantissa = FIELDS[dtype]
    width, at, parts = dtype.itemsize, 0, []
    num_low = width - 1
    num_rest = num_mantissa + 1 - 8 * num_low
    left = raw_bytes // width
    while left > 0:
        count = min(left, BLOCK)
        left -= count
        code_bits, base, zero, escapes = (
            payload[at],
            payload[at + 1],
            payload[at + 3],
            payload[at + 4 : at + 8],
        )
        num_escapes, has_nibbles = int(escapes.view(np.uint32)[0]), payload[at + 2]
        at += HEADER
        assert zero == 0 and has_nibbles == (dtype == torch.float8_e4m3fn and code_bits > 0)
        if code_bits == 0:
            parts.append(payload[at : at + count * width])
            at += count * width
            continue
        num_groups, num_planes = -(-count // GROUP), num_rest + int(code_bits)
        low = payload[at : at + num_groups * GROUP * num_low].astype(np.uint32)
        at += len(low)
        planes = payload[at : at + num_groups * num_planes * 8].reshape(num_groups, num_planes, 8)
        at += planes.size
        bits = np.unpackbits(planes, axis=2, bitorder="little").astype(np.uint32)  # [groups, planes, GROUP]
        rest = sum((bits[:, plane] << plane for plane in range(num_rest)), np.zeros((num_groups, GROUP), np.uint32))
        codes = sum(bits[:, num_rest + plane] << plane for plane in range(code_bits)).reshape(-1)
        exponent = (codes + base) & 0xFF
        escaped = codes == (1 << int(code_bits)) - 1
        assert escaped.sum() == num_escapes
        if has_nibbles:
            packed = payload[at : at + -(-num_escapes // 2)]
            assert num_escapes % 2 == 0 or packed[-1] < 16
            exponent[escaped] = np.stack([packed & 15, packed >> 4], 1).reshape(-1)[:num_escapes]
            at += len(packed)
        else:
            exponent[escaped] = payload[at : at + num_escapes]
            at += num_escapes
        rest, low = rest.reshape(-1), low if num_low else np.zeros(num_groups * GROUP, np.uint32)
        if dtype == torch.bfloat16:
            sign, mantissa = low >> 7, low & 0x7F
        else:
            sign, mantissa = rest >> (num_rest - 1), (rest & ((1 << (num_rest - 1)) - 1)) << (8 * num_low) | low
        whole = sign << (num_exponent + num_mantissa) | exponent << num_mantissa | mantissa
        parts.append(whole[:count].astype(np.uint16 if width == 2 else np.uint8).view(np.uint8))
    parts.append(payload[at:])
    return np.concatenate(parts)


@DTYPES
def test_kernels_write_one_format_and_read_it(dtype):
    generator = numbers(SPLIT_KINDS[dtype])
    for name in NAMES:
        for size in SIZES:
            raw = raw_of(name, dtype, size, generator)
            raw = torch.cat([raw, raw[: size % dtype.itemsize]])
            payload = encoded(dtype, raw)
            assert np.array_equal(read(dtype, payload, len(raw)), raw.numpy()), (name, size)
            assert len(payload) <= len(raw) + HEADER * -(-size // BLOCK)
            for kernel in _C.exponent_kernels():
                assert np.array_equal(encoded(dtype, raw, kernel), payload), (kernel, name, size)
                assert np.array_equal(decoded(dtype, payload, len(raw), kernel), raw.numpy()), (kernel, name, size)


@KERNELS
@DTYPES
def test_every_number_comes_back(dtype, kernel):
    """In one block each that has codes: among so many others that codes are worth it."""
    patterns = np.arange(2 ** (8 * dtype.itemsize), dtype=np.uint32)
    others = (
        raw_of("normal", dtype, len(patterns) * 7, numbers(SPLIT_KINDS[dtype])).numpy().reshape(-1, 7 * dtype.itemsize)
    )
    mixed = np.concatenate(
        [patterns.astype(f"<u{dtype.itemsize}").view(np.uint8).reshape(len(patterns), -1), others], 1
    )
    raw = torch.from_numpy(np.ascontiguousarray(mixed).reshape(-1))
    payload = encoded(dtype, raw, kernel)
    assert len(payload) < len(raw) and payload[0] > 0
    assert np.array_equal(decoded(dtype, payload, len(raw), kernel), raw.numpy())


@DTYPES
def test_normal_numbers_shrink(dtype):
    raw = raw_of("normal", dtype, 1 << 18, numbers(SPLIT_KINDS[dtype]))
    assert len(raw) / len(encoded(dtype, raw)) >= RATIOS[dtype]
    random = raw_of("random bits", torch.bfloat16, 1 << 18, numbers(1))
    assert len(encoded(torch.bfloat16, random)) <= 1.005 * len(random)


def test_fp8_of_heavy_tails_shrinks():
    raw = torch.from_numpy(numbers(1).standard_t(3, 1 << 18).astype(np.float32)).to(torch.float8_e4m3fn)
    assert raw.numel() / len(encoded(torch.float8_e4m3fn, raw.view(torch.uint8))) >= 1.1


def with_bytes(payload, num_elements):
    """Return a payload of e4m3 with its escapes as bytes, as elder versions wrote it."""
    parts, at = [payload[:0]], 0
    for begin in range(0, num_elements, BLOCK):
        header = payload[at : at + HEADER].copy()
        num_groups = -(-min(BLOCK, num_elements - begin) // GROUP)
        size = num_groups * 8 * (4 + int(header[0])) if header[0] else min(BLOCK, num_elements - begin)
        body, packed = payload[at + HEADER : at + HEADER + size], payload[at + HEADER + size :]
        count = int(header[4:].view(np.uint32)[0])
        escapes = np.stack([packed & 15, packed >> 4], 1).reshape(-1)[:count]
        header[2] = 0
        parts += [header, body, escapes]
        at += HEADER + size + -(-count // 2)
    return np.concatenate(parts)


@KERNELS
def test_elder_payloads_mean_what_they_did(kernel):
    dtype = torch.float8_e4m3fn
    for size in SIZES:
        raw = raw_of("normal", dtype, size, numbers(size))
        payload = with_bytes(encoded(dtype, raw), size)
        if len(payload) <= len(raw):  # others were written plain
            assert np.array_equal(decoded(dtype, payload, len(raw), kernel), raw.numpy())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e5m2], ids=dtype_name)
def test_half_a_byte_is_for_e4m3_alone(dtype):
    raw = raw_of("normal", dtype, BLOCK, numbers(3))
    payload = encoded(dtype, raw)
    payload[2] = 1
    with pytest.raises(ValueError, match="payload must have escapes of a byte"):
        decoded(dtype, payload, len(raw))


@DTYPES
def test_the_codec_of_records(dtype):
    codec, shape = get_codec("split", dtype), (2, 2, 17, 3, 40)
    raw = memoryview(raw_of("normal", dtype, 2 * 2 * 17 * 3 * 40, numbers(2)).numpy())
    assert codec.is_lossless and codec.name == dtype_name(dtype) + ":split"
    payload = codec.encode(raw, shape)
    assert bytes(codec.decode(memoryview(bytes(payload)), raw.nbytes, shape)) == bytes(raw)
    with pytest.raises(ValueError, match="dtype must be one of bfloat16, float16, .* for split, got float32"):
        get_codec("split", torch.float32)


@KERNELS
@DTYPES
def test_hostile_payloads_raise_or_decode_to_bytes(dtype, kernel):
    """Nothing beyond a payload is read, and nothing beyond the output written: see also the sanitizers' program."""
    generator = numbers(SPLIT_KINDS[dtype])
    raw = raw_of("normal", dtype, BLOCK + 3 * GROUP + 5, generator)
    payload = encoded(dtype, raw)
    body = len(payload)
    cuts = [payload[:at] for at in (0, 1, HEADER - 1, HEADER, HEADER + 1, body // 2, body - 1)]
    longer = [np.append(payload, np.uint8(0)), np.concatenate([payload, payload])]
    for wrong in (*cuts, *longer):
        with pytest.raises(ValueError, match="payload must"):
            decoded(dtype, wrong, len(raw), kernel)
    for at, value in ((0, 0), (0, 5), (0, 255), (2, 2), (3, 1), (4, 0), (4, payload[4] ^ 1), (7, 255)):
        wrong = payload.copy()
        wrong[at] = value
        with pytest.raises(ValueError, match="payload must"):
            decoded(dtype, wrong, len(raw), kernel)
    for _ in range(200):
        wrong = payload.copy()
        wrong[generator.integers(0, body, 3)] = generator.integers(0, 256, 3)
        try:
            decoded(dtype, wrong, len(raw), kernel)
        except ValueError as error:
            assert "payload must" in str(error)
    with pytest.raises(CorruptRecord, match="split: payload must"):
        get_codec("split", dtype).decode(memoryview(payload[:-1].tobytes()), len(raw), (1, 1, 1, 1, 1))


def test_arguments_are_checked():
    raw, out = torch.zeros(64, dtype=torch.uint8), np.empty(4, np.uint8)
    for call in (
        lambda: _C.encode_exponents(0, raw.data_ptr(), 64, out),
        lambda: _C.encode_exponents(4, raw.data_ptr(), 64, np.empty(999, np.uint8)),
        lambda: _C.most_payload_bytes(0, -1),
        lambda: _C.most_payload_bytes(-1, 0),
        lambda: _C.decode_exponents(9, raw.data_ptr(), 64, out),
        lambda: _C.decode_exponents(0, raw.data_ptr(), -1, out),
        lambda: _C.encode_exponents(0, raw.data_ptr(), 64, np.empty(999, np.uint8), "sse9"),
    ):
        with pytest.raises(ValueError, match="must"):
            call()


@pytest.mark.parametrize("written, read", [("split", "split"), ("split", "raw"), ("raw", "split")])
def test_stores_read_each_others_records(written, read):
    tokens, tier = list(range(3 * C + 1)), MemoryTier(1 << 20, pin_memory=False)
    kv = kv_of(tokens, dtype=torch.bfloat16)
    with make(tiers=[tier], codec=written, dtype=torch.bfloat16) as writer:
        writer.store(tokens, kv).result()
        with make(tiers=[tier], codec=read, dtype=torch.bfloat16) as reader:
            assert same(reader.retrieve(tokens)[0], kv) and reader.stats().corrupt_records == 0
