"""Scalar types of PTX as numpy has them: the bits of a register, and the numbers that they mean."""

import numpy as np

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOATS = {16: np.float16, 32: np.float32, 64: np.float64}
_WIDTHS = {"pred": 1, "bf16": 16, "tf32": 32, "f16x2": 32, "bf16x2": 32, "e4m3x2": 16, "e5m2x2": 16}
_WIDTHS |= {f"{kind}{bits}": bits for kind in "bsu" for bits in UNSIGNED}
_WIDTHS |= {f"f{bits}": bits for bits in FLOATS}
TYPES = frozenset(_WIDTHS)
NAN32, NAN16 = np.uint32(0x7FFFFFFF), np.uint16(0x7FFF)


class PtxError(Exception):
    """Something that a device would not do as written: an unknown opcode, a wrong access, a race, a lost barrier."""


def width(kind: str) -> int:
    """Return the bits of a type."""
    return _WIDTHS[kind]


def is_float(kind: str) -> bool:
    return kind in ("f16", "bf16", "f32", "f64")


def is_pair(kind: str) -> bool:
    """Return whether a register holds two numbers of half its width, the first in the lower half."""
    return kind in ("f16x2", "bf16x2")


def integer(kind: str) -> type:
    """Return numpy's integer for a type of integers or bits."""
    return (SIGNED if kind[0] == "s" else UNSIGNED)[width(kind)]


def numbers(bits: np.ndarray, kind: str) -> np.ndarray:
    """Return what unsigned integers of the type's width mean; bf16 becomes fp32."""
    if kind == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if is_float(kind):
        return bits.view(FLOATS[width(kind)])
    return bits.view(SIGNED[width(kind)]) if kind[0] == "s" else bits


def halves(words: np.ndarray, kind: str) -> list[np.ndarray]:
    """Return both numbers of packed registers, those of the lower half first."""
    parts = [(words >> np.uint32(shift)).astype(np.uint16) for shift in (0, 16)]
    return [numbers(part, kind.removesuffix("x2")) for part in parts]


def packed(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return registers that hold two 16-bit words each."""
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))
