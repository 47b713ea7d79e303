"""Products of rows with weights, norms of rows, and linear recurrences: kvpage.ops.linear and its kin.

Where arguments do not fit, torch's own errors are allowed.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from fuzz_case import Case
from fuzz_memory import Arena, ArenaWorld

from kvpage import ops
from kvpage.ops.cpu.experts import grouped_linear
from kvpage.ops.cpu.linear import ACTIVATIONS
from kvpage.ops.cpu.recurrence import recurrence

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SIZES = (0, 1, 3, 8, 16, 17, 33)
TORCHS = (RuntimeError, IndexError)


class ProductWorld(ArenaWorld):
    """Rows, weights and the memory of results in an arena."""

    covers = tuple(f"kvpage.ops.{name}" for name in ("linear", "gated_linear", "rms_norm", "add_rms_norm"))
    covers += ("kvpage._C.grouped_linear", "kvpage._C.recurrence")

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.arena = rng, Arena(1 << 17)
        self.torch_rng = torch.Generator().manual_seed(rng.getrandbits(32))
        self.memory = self.arena.tensor((1 << 15,), torch.uint8)
        self.results = self.arena.tensor((1 << 15,), torch.uint8)

    def case(self, rng: random.Random) -> Case:
        self.dtype, self.used = rng.choice(DTYPES), 0
        return rng.choice((self.linear, self.gated, self.norm, self.added_norm, self.grouped, self.recurrence))()

    def linear(self) -> Case:
        size, num_columns = self.rng.choice(SIZES), self.rng.choice(SIZES)
        x, weight = self.rows(size), self.place((num_columns, size))
        bias = self.rng.choice((None, self.place((num_columns,))))
        args = {"x": x, "weight": weight, "bias": bias, "out": self.out((*x.shape[:-1], num_columns))}
        return self._case(ops.linear, args)

    def gated(self) -> Case:
        size, num_columns = self.rng.choice(SIZES), self.rng.choice(SIZES)
        x, gate, up = self.rows(size), self.place((num_columns, size)), self.place((num_columns, size))
        activation = self.rng.choice(sorted(ACTIVATIONS))
        args = {"x": x, "gate": gate, "up": up, "activation": activation}
        args["out"] = self.out((*x.shape[:-1], num_columns))
        return self._case(ops.gated_linear, args)

    def norm(self) -> Case:
        args = self._norm_args()
        args["out"] = self.rng.choice((None, args["x"], self.out(tuple(args["x"].shape))))
        return self._case(ops.rms_norm, args)

    def added_norm(self) -> Case:
        args = self._norm_args()
        x = args["x"]
        return self._case(ops.add_rms_norm, {"x": x, "residual": self.place(tuple(x.shape)), **args})

    def grouped(self) -> Case:
        self.dtype = self.rng.choice(DTYPES[:3])
        num_groups, num_columns, size = self.rng.randrange(1, 4), *self.rng.choices(SIZES[1:5], k=2)
        x, num_rows = self.place((3, size)), self.rng.randrange(6)
        ends = np.sort([*(self.rng.randint(0, num_rows) for _ in range(num_groups - 1)), num_rows]).astype(np.int64)
        rows = np.array([self.rng.randrange(3) for _ in range(num_rows)], np.int64)
        args = {"x": x, "rows": rows, "ends": ends, "weight": self.place((num_groups, num_columns, size))}
        args["bias"] = self.rng.choice((None, self.place((num_groups, num_columns))))
        args["num_threads"] = self.rng.choice((1, 2))
        return Case("grouped_linear", grouped_linear, args, 5, errors=(*TORCHS, OverflowError))

    def recurrence(self) -> Case:
        self.dtype = torch.float32
        num_sequences, num_tokens, num_heads = (self.rng.randrange(1, 3) for _ in range(3))
        num_keys, num_columns = self.rng.choices(SIZES[1:6], k=2)
        rows = num_sequences, num_tokens, num_heads
        args = {name: self.place((*rows, num_keys)) for name in ("query", "key")}
        args["value"] = self.place((*rows, num_columns))
        args["decay"] = -self.place(rows).abs()
        args["state"] = self.place((num_sequences, num_heads, num_keys, num_columns))
        args["factor"] = self.rng.choice((None, self.place(rows)))
        args |= {"rates": None, "num_threads": self.rng.choice((1, 2))}
        return Case("recurrence", recurrence, args, 5, errors=TORCHS)

    # --- what calls are made of ---

    def rows(self, size: int) -> torch.Tensor:
        """Rows of one to three dimensions, maybe between others."""
        shape = self.rng.choice(((), (0,), (1,), (3,), (7,), (2, 3)))
        if self.rng.random() < 0.3 and shape:
            return self.place((*shape, size + 5))[..., 2 : 2 + size]
        return self.place((*shape, size))

    def place(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return numbers in the arena, of the case's dtype."""
        num_bytes = torch.Size(shape).numel() * self.dtype.itemsize
        piece = self.memory[self.used : self.used + num_bytes].view(self.dtype).view(shape)
        self.used += -(-num_bytes // 8) * 8
        return piece.copy_(torch.randn(shape, generator=self.torch_rng) / max(shape[-1], 1) ** 0.5)

    def out(self, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Return memory to write into, or None."""
        if self.rng.random() < 0.4:
            return None
        num_bytes = torch.Size(shape).numel() * self.dtype.itemsize
        return self.results[:num_bytes].view(self.dtype).view(shape)

    def _norm_args(self) -> dict[str, Any]:
        size = self.rng.choice(SIZES[1:])
        return {
            "x": self.rows(size),
            "weight": self.place((size,)),
            "eps": self.rng.choice((1e-6, 1e-5)),
            "weight_offset": self.rng.choice((0.0, 1.0)),
            "rounds_before_weight": self.rng.choice((True, False)),
        }

    def _case(self, function: Callable[..., Any], args: dict[str, Any]) -> Case:
        return Case(f"ops.{function.__name__}", function, args, self.rng.choice((0, 2)), errors=TORCHS)
