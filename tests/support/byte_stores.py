"""Stores of bytes, records of every size that matters, and buffers in several pieces, for tests of a ByteStore."""

import random
from pathlib import Path

import numpy as np
import torch

from kvpage.store import ByteStore, ByteStoreConfig
from kvpage.store.bytes.pieces import STRETCH_BYTES

HEADER = {"model": "m@1", "version": 1}
SIZES = [0, 1, 4095, 4096, 4097, STRETCH_BYTES - 1, STRETCH_BYTES, STRETCH_BYTES + 1, (1 << 20) - 1, 1 << 20, 3 << 20]
MEMORY = "memory://?size=32MiB"
POISON = 0xA5


def disk(path: Path, size: str = "32MiB") -> str:
    return f"disk://{path}?size={size}&segment=8MiB"


def opened(*tiers, header=HEADER, **config) -> ByteStore:
    """A store of URLs, or of tiers that are made already."""
    if tiers and not isinstance(tiers[0], str):
        return ByteStore(ByteStoreConfig(num_threads=2, **config), header, tiers)
    return ByteStore(ByteStoreConfig(tiers or (MEMORY,), num_threads=2, **config), header)


def key_of(number: int) -> bytes:
    return b"key %d" % number


def data_of(number: int, size: int) -> bytes:
    return random.Random(number).randbytes(size)


def room(size: int) -> bytearray:
    """Memory that no record can have left as it is."""
    return bytearray([POISON]) * size


def in_pieces(data: bytearray, cuts: list[int]) -> list[memoryview]:
    """The memory, cut at these places."""
    places = [0, *cuts, len(data)]
    return [memoryview(data)[begin:end] for begin, end in zip(places[:-1], places[1:], strict=True)]


def as_kinds(data: bytes) -> list[object]:
    """The bytes in every kind of buffer that can hold them."""
    array = np.frombuffer(bytearray(data), np.uint8)
    tensor = torch.from_numpy(array.copy())
    return [data, bytearray(data), memoryview(data), array, tensor]
