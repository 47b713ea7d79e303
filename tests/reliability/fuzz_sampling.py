"""The choice of tokens: kvpage.ops.sample_rows, and torch.ops.kvpage.sample_rows.

A valid call's tokens, and the tables in which it counts them, are compared with kvpage.ops.reference.
"""

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from fuzz_case import Case
from fuzz_memory import Arena, ArenaWorld
from fuzz_ops import _with_schema
from fuzz_values import with_number

from kvpage import ops
from kvpage.ops import reference

MAX_ROWS = 4
WRONG_NUMBERS = {
    "temperature": (-1.0, math.nan, math.inf),
    "top_k": (-1, -(2**63)),
    "top_p": (0.0, -0.5, 1.5, math.nan),
    "least_score": (0.5, math.nan, math.inf),
}


class SamplingWorld(ArenaWorld):
    """Logits, tables and tokens in an arena. Addresses in records are the caller's word, so they are right ones."""

    covers = ("kvpage.ops.sample_rows", "torch.ops.kvpage.sample_rows")

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.arena, self.vocab_size = rng, Arena(1 << 17), rng.choice((1, 2, 7, 256, 300, 515))
        self.torch_rng = torch.Generator().manual_seed(rng.getrandbits(32))
        self.memory = ops.SamplingMemory.make(MAX_ROWS, self.vocab_size, "cpu")
        self.logits = {
            dtype: self.arena.tensor((MAX_ROWS, self.vocab_size + 3), dtype)
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        }
        self.words = self.arena.tensor((MAX_ROWS, self.vocab_size), torch.int32)
        self.biases = self.arena.tensor((MAX_ROWS, self.vocab_size), torch.float32)
        self.biases.copy_(torch.randn(self.biases.shape, generator=self.torch_rng))
        self.tokens = self.arena.tensor((MAX_ROWS,), torch.int32)

    def case(self, rng: random.Random) -> Case:
        num_rows = rng.randrange(MAX_ROWS + 1)
        self._fill_words()
        args: dict[str, Any] = {
            "logits": self._logits(num_rows),
            "records": self._records(num_rows),
            "positions": torch.tensor([rng.choice((0, 1, 5, 2**40)) for _ in range(num_rows)], dtype=torch.int64),
            "out": self.tokens[:num_rows],
        }
        if rng.random() < 0.3:
            return self._wrong_numbers(args)
        before = self.arena.snapshot()

        def judge(_: object) -> None:
            done = self.arena.snapshot()
            self.arena.restore(before)
            args["out"].copy_(reference.sample_rows(*list(args.values())[:3]))
            assert self.arena.snapshot() == done, "the tokens or counts differ from the reference's"

        memory, by_torch = rng.choice((None, self.memory)), rng.random() < 0.3
        if not by_torch:
            named = {**args, "memory": memory}
            sample = self._of_one_vocabulary(ops.sample_rows)
            return Case("ops.sample_rows", sample, named, rng.choice((0, 4)), fixed=("records",), judge=judge)
        names = ("tops", "shares", "lists", "held") if memory is not None else ()
        named = args | {name: getattr(memory, name) for name in names}
        operation = self._of_one_vocabulary(_with_schema(torch.ops.kvpage.sample_rows))
        return Case("torch.ops.kvpage.sample_rows", operation, named, fixed=("records",), judge=judge)

    def _of_one_vocabulary(self, sample: Callable[..., object]) -> Callable[..., object]:
        """Return the call that refuses logits of another width: addresses in records are of rows of this one."""

        def call(logits: object, *args: object, **named: object) -> object:
            is_plain = isinstance(logits, torch.Tensor) and logits.layout is torch.strided and not logits.is_nested
            if is_plain and logits.dim() and logits.shape[-1] != self.vocab_size:
                raise ValueError(f"logits must be [num_rows, {self.vocab_size}], got {list(logits.shape)}")
            return sample(logits, *args, **named)

        return call

    def _wrong_numbers(self, args: dict[str, Any]) -> Case:
        """Records of another shape, or with a number that is out of range."""
        records, num_rows, rng = args["records"], len(args["records"]), self.rng
        if num_rows and rng.random() < 0.6:
            name = rng.choice(sorted(WRONG_NUMBERS))
            numbers = records.numpy().view(ops.SAMPLING_RECORD)
            numbers[name][rng.randrange(num_rows)] = rng.choice(WRONG_NUMBERS[name])
        elif num_rows and rng.random() < 0.5:
            args["positions"] = with_number(args["positions"], rng)
        else:
            makers = (records[:-1], records.t(), records.int(), records[:, :-1], records.tolist(), None, records[None])
            args["records"] = rng.choice(makers)
        may_raise = (ValueError, TypeError)
        return Case("ops.sample_rows", ops.sample_rows, args, may_raise=may_raise, fixed=tuple(args))

    def _logits(self, num_rows: int) -> torch.Tensor:
        logits = self.logits[self.rng.choice(list(self.logits))][:num_rows]
        numbers = torch.randn(logits.shape, generator=self.torch_rng) * self.rng.choice((0.1, 3.0, 30.0))
        numbers[torch.rand(logits.shape, generator=self.torch_rng) < 0.1] = -math.inf
        if num_rows and self.rng.random() < 0.3:
            numbers[self.rng.randrange(num_rows), self.rng.randrange(3 + self.vocab_size)] = self.rng.choice(
                (math.nan, math.inf, -math.nan, 0.0)
            )
        return logits.copy_(numbers)[:, 1 : 1 + self.vocab_size]

    def _records(self, num_rows: int) -> torch.Tensor:
        rng, records = self.rng, np.zeros(num_rows, ops.SAMPLING_RECORD)
        for row, record in enumerate(records):
            record["seed"], record["temperature"] = rng.getrandbits(64), rng.choice((0, 0.7, 1, 9))
            record["top_k"], record["top_p"] = rng.choice((0, 1, 5, 2**31 - 1)), rng.choice((1, 0.9, 0.3, 1e-9))
            record["least_score"] = rng.choice((-math.inf, -3.0, 0.0, -100.0))
            record["repetition"], record["presence"], record["frequency"] = rng.choice(((1, 0, 0), (1.3, 0.2, -0.4)))
            record["barred_until"], record["first_at"] = rng.choice((0, 3)), rng.choice((-1, 0))
            record["biases"] = self.biases[row].data_ptr() if rng.random() < 0.4 else 0
            if rng.random() < 0.5:
                record["words"], record["counts"] = self.words[row].data_ptr(), rng.choice((0, 1))
        return torch.from_numpy(records.view(np.int64).reshape(num_rows, ops.SAMPLING_RECORD_WORDS))

    def _fill_words(self) -> None:
        counts = torch.randint(0, 3, self.words.shape, generator=self.torch_rng, dtype=torch.int32)
        bits = torch.randint(0, 16, self.words.shape, generator=self.torch_rng, dtype=torch.int32) << 27
        is_named = torch.rand(self.words.shape, generator=self.torch_rng) < 0.3
        self.words.copy_(torch.where(is_named, bits | counts, 0))
