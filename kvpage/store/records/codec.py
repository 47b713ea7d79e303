"""Codec: the encoding of a record's payload.

    raw     bfloat16         as it is; nothing is copied
    zstd    bfloat16:zstd    the first bytes of all elements, then the second ones, .. : one zstd frame.  Lossless
    split   bfloat16:split   exponents apart, in a few bits each: see csrc/codec/exponent_codec.h.  Lossless
    fp8     bfloat16:fp8     scales float32 [layers, parts, heads], then elements in 8-bit floats (e4m3).  Lossy

The record names its codec and the dtype that it decodes to (`RecordHead.codec`). A payload may come from anywhere. A
payload that is not right to the last byte raises CorruptRecord. No payload makes the reader allocate more than
`raw_bytes`, which the reader has checked.
"""

import ctypes
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

import kvpage._C as _C
from kvpage.store.records.record import BYTES_CODEC, CorruptRecord, Shape

Format = Literal["vllm", "huggingface"]
SHORT_NAMES = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}  # names and suffixes must fit 16 characters
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SPLIT_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float8_e4m3fn: 2, torch.float8_e5m2: 3}  # csrc's FloatKind
SPLIT_SIZES = {torch.bfloat16: 0.71, torch.float16: 0.89, torch.float8_e4m3fn: 0.89, torch.float8_e5m2: 0.78}
"""Of normally distributed numbers, coded; of their bytes."""
DECODED_PER_SECOND = 12e9  # bytes that split gives back in one thread, measured: kvpage bench codec
BYTE_KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
FP8_SOURCES = (torch.bfloat16, torch.float16, torch.float32)
SLICE_ELEMENTS = 32767  # from 32,768 on, torch shares the work among threads
LOSSLESS = ("zstd", "split")  # besides raw
ZSTD_LEVEL = 1  # of bf16, level 3 is half as fast and no smaller


class Codec(ABC):
    """An encoding of payloads. Stateless and thread-safe.

    name: at most 16 ASCII characters. way: what a store's configuration calls it. is_lossless: whether `decode` returns
    the bytes that `encode` was given. gains_below: bytes a second of a tier's reads, below which coded ones are faster.
    """

    name: str
    way: str
    is_lossless = True
    gains_below = 0.0

    @abstractmethod
    def encode(self, raw: memoryview, shape: Shape) -> memoryview:
        """Return the payload, which may share the memory of `raw`.

        raw: contiguous bytes of a tensor [layers, parts, tokens, heads, size] or [layers, parts, heads, tokens, size];
        any bytes for the codec "raw".
        """

    @abstractmethod
    def decode(self, payload: memoryview, raw_bytes: int, shape: Shape) -> memoryview:
        """Return `raw_bytes` bytes, which may share the payload's memory. Raises CorruptRecord for a wrong payload."""


class RawCodec(Codec):
    way = "raw"

    def __init__(self, dtype: torch.dtype) -> None:
        self.name = dtype_name(dtype)

    def encode(self, raw: memoryview, shape: Shape) -> memoryview:
        return raw

    def decode(self, payload: memoryview, raw_bytes: int, shape: Shape) -> memoryview:
        _check_length("payload", payload.nbytes, raw_bytes)
        return payload


class ZstdCodec(Codec):
    """Compresses the bytes of equal places in all elements together, without loss.

    Neighbours have similar signs and exponents: bf16 of normal values shrinks to two thirds. Bytes after the last whole
    element follow unchanged.
    """

    way = "zstd"

    def __init__(self, dtype: torch.dtype) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise ImportError("the codec zstd needs the package zstandard: pip install 'kvpage[zstd]'") from error
        self.name = dtype_name(dtype) + ":zstd"
        self._zstd, self._width = zstandard, dtype.itemsize

    def encode(self, raw: memoryview, shape: Shape) -> memoryview:
        data = np.frombuffer(raw, np.uint8)
        return memoryview(self._zstd.ZstdCompressor(level=ZSTD_LEVEL).compress(_shuffled(data, self._width).data))

    def decode(self, payload: memoryview, raw_bytes: int, shape: Shape) -> memoryview:
        """Check the frame's length before it is decoded: it decides the bytes that are allocated."""
        try:
            _check_length("frame", self._zstd.get_frame_parameters(payload).content_size, raw_bytes)
            data = self._zstd.ZstdDecompressor().decompress(payload, allow_extra_data=False)
        except self._zstd.ZstdError as error:
            raise CorruptRecord(f"zstd: {error}") from error
        _check_length("decoded payload", len(data), raw_bytes)
        return _unshuffled(np.frombuffer(data, np.uint8), self._width).data


class SplitCodec(Codec):
    """Stores exponents apart from the other bits, without loss, by the C++ core: nearly all are among a few neighbours.

    Normally distributed bf16 shrinks to 0.70 of its bytes, fp16 and fp8 e4m3 to 0.89, and e5m2 to 0.77. Blocks of
    8,192 elements are coded by themselves. Where a block would grow, it is stored as it is.
    """

    way = "split"

    def __init__(self, dtype: torch.dtype) -> None:
        if dtype not in SPLIT_KINDS:
            names = ", ".join(map(dtype_name, SPLIT_KINDS))
            raise ValueError(f"dtype must be one of {names} for split, got {dtype_name(dtype)}")
        self.name = dtype_name(dtype) + ":split"
        self._kind = SPLIT_KINDS[dtype]
        self.gains_below = DECODED_PER_SECOND * (1 - SPLIT_SIZES[dtype])

    def encode(self, raw: memoryview, shape: Shape) -> memoryview:
        data = np.frombuffer(raw, np.uint8)
        out = np.empty(_C.most_payload_bytes(self._kind, data.nbytes), np.uint8)
        return out[: _C.encode_exponents(self._kind, data.ctypes.data, data.nbytes, out)].data

    def decode(self, payload: memoryview, raw_bytes: int, shape: Shape) -> memoryview:
        data, out = np.frombuffer(payload, np.uint8), np.empty(raw_bytes, np.uint8)
        try:
            _C.decode_exponents(self._kind, data.ctypes.data, data.nbytes, out)
        except ValueError as error:
            raise CorruptRecord(f"split: {error}") from error
        return out.data


class ByteSplitCodec(SplitCodec):
    """SplitCodec for records of bytes that are numbers of one dtype. The record's name tells which."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.name = f"{BYTES_CODEC}:{self.way}:{BYTE_KINDS[dtype]}"


class Fp8Codec(Codec):
    """Stores elements as 8-bit floats with scales, in half the bytes of bf16. Lossy.

    Each layer, part and head has a scale s, the least power of two with max |x| <= 448 s, but at least 2**-126. So
    scaling rounds nothing, and s < max |x| / 224. A finite x comes back finite and with its sign. The error is at most
    |x| / 16 or s / 1024, whichever is more. Infinities come back as 448 s or the dtype's largest number, NaN as NaN.
    """

    way = "fp8"
    is_lossless = False

    def __init__(self, dtype: torch.dtype, fmt: Format = "vllm") -> None:
        if dtype not in FP8_SOURCES:
            raise ValueError(f"dtype must be bfloat16, float16 or float32 for fp8, got {dtype_name(dtype)}")
        if fmt not in ("vllm", "huggingface"):
            raise ValueError(f"fmt must be vllm or huggingface, got {fmt!r}")
        self.name = dtype_name(dtype) + ":fp8"
        self._dtype, self._head_axis = dtype, 1 if fmt == "vllm" else 0  # of [tokens, heads, size] or [heads, ..]

    def encode(self, raw: memoryview, shape: Shape) -> memoryview:
        """Return scales and elements. Raises ValueError if `raw` is not of this shape."""
        count = math.prod(shape)
        if raw.nbytes != count * self._dtype.itemsize:
            raise ValueError(f"raw must have {count * self._dtype.itemsize} bytes for {shape}, got {raw.nbytes}")
        out = np.empty(self._scale_bytes(shape) + count, np.uint8)
        scales, codes = self._split(out, shape)
        elements = _parts(np.frombuffer(raw, np.uint8), self._dtype, shape)
        for part, scale, code in zip(elements, scales, codes, strict=True):
            pieces = self._slices(part)
            scale.copy_(_scale_of(pieces, scale.shape))
            for piece, coded in zip(pieces, self._slices(code), strict=True):
                # clamped, since older versions of torch make NaN of larger values
                coded.copy_((piece.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8))
        return out.data

    def decode(self, payload: memoryview, raw_bytes: int, shape: Shape) -> memoryview:
        count = math.prod(shape)
        _check_length("shape", count * self._dtype.itemsize, raw_bytes)
        _check_length("payload", payload.nbytes, self._scale_bytes(shape) + count)
        scales, codes = self._split(np.frombuffer(payload, np.uint8), shape)
        if not _are_scales(scales):
            raise CorruptRecord("scales must be powers of two")
        out = np.empty(raw_bytes, np.uint8)
        most = torch.finfo(self._dtype).max
        for part, scale, code in zip(_parts(out, self._dtype, shape), scales, codes, strict=True):
            for piece, coded in zip(self._slices(part), self._slices(code), strict=True):
                piece.copy_(_floats_of(coded).mul_(scale).clamp_(-most, most))
        return out.data

    def _slices(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return runs of tokens, so small that torch uses this thread alone.

        On busy cores, torch's other threads cost ten times the time that they save.
        """
        axis = 1 - self._head_axis
        of_token = max(part.numel() // max(part.shape[axis], 1), 1)
        return torch.split(part, max(SLICE_ELEMENTS // of_token, 1), axis)

    def _scale_bytes(self, shape: Shape) -> int:
        return 4 * shape[0] * shape[1] * shape[2 + self._head_axis]

    def _split(self, payload: np.ndarray, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scales [layers * parts, .., heads, .., 1], to multiply a part with, and codes as of `_parts`."""
        cut = self._scale_bytes(shape)
        of_part = [1, 1, 1]
        of_part[self._head_axis] = shape[2 + self._head_axis]
        scales = _tensor(payload[:cut], torch.float32).view(shape[0] * shape[1], *of_part)
        return scales, _parts(payload[cut:], torch.uint8, shape)


def get_codec(name: str, dtype: torch.dtype | str, fmt: Format = "vllm") -> Codec:
    """Return the codec "raw", "zstd", "split" or "fp8" for payloads of `dtype`.

    Raises ValueError for another name or dtype.
    fmt: the order of a payload's dimensions, in which fp8 finds the heads.
    """
    dtype = as_dtype(dtype)
    if name == "raw":
        return RawCodec(dtype)
    if name == "zstd":
        return ZstdCodec(dtype)
    if name == "split":
        return SplitCodec(dtype)
    if name == "fp8":
        return Fp8Codec(dtype, fmt)
    raise ValueError(f"codec must be raw, zstd, split or fp8, got {name!r}")


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in records, at most 11 characters."""
    name = str(dtype).removeprefix("torch.")
    return SHORT_NAMES.get(name, name)


def as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Return the dtype, or the one of a name. Raises ValueError for another name, and for one that no record has."""
    torch_dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(torch_dtype, torch.dtype) or len(dtype_name(torch_dtype)) > 11:
        raise ValueError(f"dtype must be one of torch's with a name of at most 11 characters, got {dtype!r}")
    return torch_dtype


def _check_length(name: str, num_bytes: int, expected: int) -> None:
    if num_bytes != expected:
        raise CorruptRecord(f"{name} must have {expected} bytes, got {num_bytes}")


def _shuffled(data: np.ndarray, width: int) -> np.ndarray:
    whole = data.size // width * width
    if width == 1 or whole == 0:
        return data
    out = np.empty_like(data)
    np.copyto(out[:whole].reshape(width, -1), data[:whole].reshape(-1, width).T)
    out[whole:] = data[whole:]
    return out


def _unshuffled(data: np.ndarray, width: int) -> np.ndarray:
    whole = data.size // width * width
    if width == 1 or whole == 0:
        return data
    out = np.empty_like(data)
    for i, byte in enumerate(data[:whole].reshape(width, -1)):
        out[i:whole:width] = byte  # five times as fast as one transposition
    out[whole:] = data[whole:]
    return out


def _tensor(data: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Return a view, valid as long as `data`. Callers must not write to a view of read-only memory.

    It is made from the address, since torch refuses read-only arrays.
    """
    if data.size == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_ubyte * data.size).from_address(data.ctypes.data), dtype=dtype)


def _parts(data: np.ndarray, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return a view [layers * parts, ...], whose parts are small enough to stay in a core's cache."""
    return _tensor(data, dtype).view(shape[0] * shape[1], *shape[2:])


def _scale_of(pieces: Sequence[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """Return [.., heads, .., 1]: the least powers of two, at least 2**-126, that bring finite values within 448."""
    most = torch.zeros(shape)
    axes = [axis for axis, size in enumerate(shape) if size == 1 or axis == 2]
    for piece in pieces if most.numel() else ():
        if piece.numel():
            peaks = piece.abs().amax(axes, keepdim=True)
            if not peaks.isfinite().all():
                peaks = piece.nan_to_num(0.0, 0.0, 0.0).abs().amax(axes, keepdim=True)
            most = torch.maximum(most, peaks)
    mantissa, exponent = torch.frexp(most)  # most = mantissa * 2**exponent, mantissa in [1/2, 1); 448 = 7/8 * 2**9
    exponent = exponent - 9 + (mantissa > 0.875).to(torch.int32)
    exponent = torch.where(most > 0, exponent, 0).clamp(min=-126)
    return ((exponent + 127) << 23).view(torch.float32)  # exact on every platform, unlike torch.ldexp


def _are_scales(scales: torch.Tensor) -> bool:
    mantissa, exponent = torch.frexp(scales)
    return bool(((mantissa == 0.5) & (exponent >= -125) & scales.isfinite()).all())


def _floats_of(codes: torch.Tensor) -> torch.Tensor:
    """Return e4m3 as float32, through float16, whose exponent is one bit longer: eight times as fast as torch."""
    bits = codes.view(torch.int8).to(torch.int16)  # the sign bit comes along
    bits <<= 7
    bits &= ~0x4000
    floats = bits.view(torch.float16).float().mul_(256.0)  # 2 to the difference of the exponents' biases
    is_nan = (codes & 0x7F) == 0x7F
    return floats.masked_fill_(is_nan, math.nan) if is_nan.any() else floats
