"""The operations on caches and sequences that were checked when they were bound, as a step calls them for each layer.

A BoundCache, Sequences or Attention is never replaced by something else: the calls take the types on trust.
"""

import random
from typing import Any

import torch
from fuzz_caches import HEAD_SIZE, CacheWorld, lengths_of
from fuzz_case import Case

from kvpage import ops


class BoundWorld(CacheWorld):
    """One layer's cache, bound, and the sequences of a step, which have one query each."""

    covers = tuple(f"kvpage.ops.{name}" for name in ("BoundCache", "Sequences", "attend", "write_and_attend"))

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.bound = ops.BoundCache(self.caches[0], self.layout, self.scales)
        self.options = ops.Attention(scale=0.5, value_size=HEAD_SIZE)

    def case(self, rng: random.Random) -> Case:
        layered = (self.write_and_attend,) if self.has_values else ()
        return rng.choice((self.bind, self.sequences, self.attend, *layered))()

    def bind(self) -> Case:
        args = {"tensor": self.caches[0], "layout": self.layout, "scales": self.scales}
        return Case("ops.BoundCache", ops.BoundCache, args)

    def sequences(self) -> Case:
        return Case("ops.Sequences", ops.Sequences, self._step(), fixed=("cache",))

    def attend(self) -> Case:
        step = self._step()
        query = self._query(step["num_tokens"])
        args = {
            "query": query,
            "cache": self.bound,
            "sequences": ops.Sequences(**step),
            "attention": self.options,
            "out": self.place(tuple(query.shape), query.dtype),
        }
        return Case("ops.attend", ops.attend, args, fixed=("cache", "sequences", "attention"))

    def write_and_attend(self) -> Case:
        """The query is fixed as well: rows may have been written where it is wrong."""
        step = self._step()
        num_tokens = step["num_tokens"]
        query, key = self._query(num_tokens), self.tokens(num_tokens)
        value = self.tokens(num_tokens, None, key.dtype)
        args = {
            "query": query.transpose(0, 1)[None],
            "key": key.transpose(0, 1)[None],
            "value": value.transpose(0, 1)[None],
            "cache": self.bound,
            "slot_mapping": self.slots(num_tokens),
            "sequences": ops.Sequences(**step),
            "attention": self.options,
        }
        fixed = ("query", "cache", "sequences", "attention")
        return Case("ops.write_and_attend", ops.write_and_attend, args, fixed=fixed)

    # --- inside ---

    def _step(self) -> dict[str, Any]:
        lengths = [n for n in lengths_of(self.rng) if n]
        args = {"cache": self.bound, "num_tokens": len(lengths), "block_tables": self.tables(lengths)}
        return args | {"seq_lens": lengths, "query_lens": None, "max_query_len": None, "max_seq_len": None}

    def _query(self, num_tokens: int) -> torch.Tensor:
        dtype = torch.float32 if self.layout.is_quantized else self.layout.dtype
        shape = num_tokens, 2 * self.layout.num_kv_heads, HEAD_SIZE
        return torch.randn(shape, generator=self.torch_rng).to(dtype)
