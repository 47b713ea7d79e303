"""Arena: memory that every byte of is known of, for calls that write by address.

guard | tensor | guard | tensor | guard ...       0xA5 in the guards: whoever writes there has missed
"""

import math

import numpy as np
import torch
from fuzz_case import World

GUARD = 192
POISON = 0xA5


class Arena:
    def __init__(self, num_bytes: int = 1 << 16) -> None:
        self.memory = np.full(num_bytes, POISON, np.uint8)
        self._is_guard = np.ones(num_bytes, bool)
        self._end = GUARD

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous one, of zeros, whose storage ends where it does."""
        num_bytes = math.prod(shape) * dtype.itemsize
        begin, self._end = self._end, -(-(self._end + num_bytes + GUARD) // 64) * 64
        assert self._end <= len(self.memory), "the arena is too small"
        piece = self.memory[begin : begin + num_bytes]
        piece[:] = 0
        self._is_guard[begin : begin + num_bytes] = False
        return torch.from_numpy(piece).view(dtype).view(shape) if num_bytes else torch.empty(shape, dtype=dtype)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        made = self.tensor(tuple(tensor.shape), tensor.dtype)
        return made.copy_(tensor)

    def snapshot(self) -> bytes:
        return self.memory.tobytes()

    def restore(self, snapshot: bytes) -> None:
        self.memory[:] = np.frombuffer(snapshot, np.uint8)

    def check(self) -> None:
        if not (self.memory[self._is_guard] == POISON).all():
            raise AssertionError("something has been written outside of the tensors")


class ArenaWorld(World):
    """What a world is whose calls write by address: all of its state lies in an arena."""

    arena: Arena

    def snapshot(self) -> object:
        return self.arena.snapshot()

    def check(self) -> None:
        self.arena.check()
