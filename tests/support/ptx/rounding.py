"""Rounding as a device does it: to nearest even, with the one NaN that arithmetic gives."""

import numpy as np
from support.ptx.scalars import NAN16, NAN32

_SMALLEST_NORMAL = np.float32(2.0**-126)


def to_bf16(numbers: np.ndarray) -> np.ndarray:
    """Return the bits of the nearest bf16."""
    words = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    nearest = (words + np.uint32(0x7FFF) + ((words >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(numbers), NAN16, nearest.astype(np.uint16))


def to_bf16_by_cutting(numbers: np.ndarray) -> np.ndarray:
    """Return the bits of the nearest bf16 towards zero."""
    words = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    return np.where(np.isnan(numbers), NAN16, (words >> np.uint32(16)).astype(np.uint16))


def to_f16(numbers: np.ndarray) -> np.ndarray:
    """Return the bits of the nearest fp16."""
    return np.where(np.isnan(numbers), NAN16, numbers.astype(np.float16).view(np.uint16))


def one_nan(numbers: np.ndarray) -> np.ndarray:
    """Replace every NaN by the positive one of arithmetic, whatever sign and payload went in."""
    if numbers.dtype == np.float32:
        return np.where(np.isnan(numbers), NAN32, numbers.view(np.uint32)).view(np.float32)
    if numbers.dtype == np.float16:
        return np.where(np.isnan(numbers), NAN16, numbers.view(np.uint16)).view(np.float16)
    return numbers


def flushed(numbers: np.ndarray) -> np.ndarray:
    """Replace fp32's subnormals by zeros of their sign, as .ftz does."""
    small = np.abs(numbers) < _SMALLEST_NORMAL
    return np.where(small, np.copysign(np.float32(0), numbers), numbers)


def fused_f32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return a * b + c in fp32, rounded once.

    The product is exact in fp64. The sum is rounded to odd there, so rounding it again to fp32 is as good as once.
    """
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    words = total.view(np.int64)
    inexact = (error != 0) & (words & 1 == 0) & np.isfinite(total)
    away = (error > 0) == (total > 0)
    return np.where(inexact, words + np.where(away, 1, -1), words).view(np.float64).astype(np.float32)


def _fp8_numbers(exponent_bits: int, has_infinity: bool) -> np.ndarray:
    mantissa_bits = 7 - exponent_bits
    bias, steps = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    codes = np.arange(128)
    exponents, mantissas = codes >> mantissa_bits, codes % steps
    fractions = np.where(exponents == 0, mantissas, mantissas + steps) / steps
    table = fractions * 2.0 ** (np.maximum(exponents, 1) - bias)
    if has_infinity:
        table[exponents == exponents.max()] = np.nan
        table[-steps] = np.inf
    else:
        table[-1] = np.nan
    return np.concatenate([table, -table]).astype(np.float32)


FP8 = {"e4m3": _fp8_numbers(4, False), "e5m2": _fp8_numbers(5, True)}  # all 256 codes


def to_fp8(numbers: np.ndarray, kind: str) -> np.ndarray:
    """Return the codes of the nearest 8-bit floats, saturating."""
    table = FP8[kind][:128]
    finite = table[np.isfinite(table)].astype(np.float64)
    sizes = np.abs(numbers.astype(np.float64))
    above = np.clip(np.searchsorted(finite, sizes), 1, len(finite) - 1)
    below = above - 1
    down, up = sizes - finite[below], finite[above] - sizes
    even = np.where(below % 2 == 0, below, above)
    codes = np.where(down < up, below, np.where(up < down, above, even))
    codes = np.where(sizes >= finite[-1], len(finite) - 1, codes)
    signs = np.where(np.signbit(numbers), 0x80, 0)
    return np.where(np.isnan(sizes), 0x7F, codes | signs).astype(np.uint8)
