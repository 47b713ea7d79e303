"""Message: one decision of rank 0 as plain numbers, checked where it is received.

    int64    [ magic | kind | number | size of part 0 | size of part 1 | ... ]     sizes in bytes
    bytes    [ part 0 .. | part 1 ..... | ... ]                                    each begins at a multiple of 8

A kind says which parts there are, and their dtypes. Nothing is unpickled.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

MAGIC = 0x6B76_7061_6765_0002  # "kvpage", and the version of the format
MAX_PARTS = 8
HEADER = np.dtype(np.int64).itemsize * (3 + MAX_PARTS)

Part = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


class Kind(IntEnum):
    """The decisions of rank 0."""

    CLOSE = 1
    STEP = 2
    SWAP_OUT = 3
    SWAP_IN = 4
    COPY = 5
    SETTLE = 6
    LOOKUP = 7
    LOAD = 8
    SAVE = 9
    BEAT = 10


_MOVE = (np.int64, np.int64)
_STORE = (np.int64, np.int32, np.int32, np.uint8)
PARTS: dict[Kind, tuple[type[np.generic], ...]] = {
    Kind.CLOSE: (),
    Kind.STEP: (np.int64, np.int32, np.int64, np.int64, np.int64, np.int64, np.int32, np.int64),
    Kind.SWAP_OUT: _MOVE,
    Kind.SWAP_IN: _MOVE,
    Kind.COPY: _MOVE,
    Kind.SETTLE: (),
    Kind.LOOKUP: _STORE,
    Kind.LOAD: _STORE,
    Kind.SAVE: _STORE,
    Kind.BEAT: (),
}


class Message(NamedTuple):
    """A decision. number: how many came before it on the same way. parts: arrays of one dimension, see PARTS."""

    kind: Kind
    number: int
    parts: Sequence[Part] = ()

    def encode(self) -> Bytes:
        """Return the bytes."""
        parts = [np.ascontiguousarray(part, dtype) for part, dtype in zip(self.parts, PARTS[self.kind], strict=True)]
        sizes = [part.nbytes for part in parts]
        data = np.zeros(HEADER + sum(map(_padded, sizes)), np.uint8)
        data[:HEADER].view(np.int64)[: 3 + len(sizes)] = [MAGIC, self.kind, self.number, *sizes]
        at = HEADER
        for part, size in zip(parts, sizes, strict=True):
            data[at : at + size] = part.reshape(-1).view(np.uint8)
            at += _padded(size)
        return data

    @classmethod
    def decode(cls, data: Bytes) -> "Message":
        """Return the message in these bytes, without a copy. ValueError for any other bytes."""
        if len(data) < HEADER:
            raise ValueError(f"a message must have at least {HEADER} bytes, got {len(data)}")
        magic, kind, number, *sizes = data[:HEADER].view(np.int64).tolist()
        if magic != MAGIC:
            raise ValueError(f"a message must begin with {MAGIC:#x}, got {magic:#x}: is another kvpage on that rank?")
        if kind not in list(Kind):
            raise ValueError(f"a message must be of a known kind, got {kind}")
        dtypes = PARTS[Kind(kind)]
        if any(sizes[len(dtypes) :]) or len(data) != HEADER + sum(map(_padded, sizes)) or min(sizes) < 0:
            raise ValueError(f"a message of {Kind(kind).name} must be as long as its parts, got {sizes}, {len(data)}")
        return cls(Kind(kind), number, _parts(data, sizes, dtypes))


def _parts(data: Bytes, sizes: Sequence[int], dtypes: Sequence[type[np.generic]]) -> list[Part]:
    parts, at = [], HEADER
    for size, dtype in zip(sizes, dtypes, strict=False):
        if size % np.dtype(dtype).itemsize:
            raise ValueError(f"a part of {np.dtype(dtype)} must have whole elements, got {size} bytes")
        parts.append(data[at : at + size].view(dtype))
        at += _padded(size)
    return parts


def _padded(size: int) -> int:
    return -(-size // 8) * 8
