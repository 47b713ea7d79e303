"""Attention of a layer on a device: sequences of equal length over blocks, and the check that all contenders pass."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kvpage import CacheLayout, ops
from kvpage.ops import reference

BF16, E4M3, INT8 = torch.bfloat16, torch.float8_e4m3fn, torch.int8
CHECKED_ROWS = 8  # of the first sequence, the last ones: they see the most
MOST_CACHE_BYTES = 12 * 2**30


class Model(NamedTuple):
    """One layer's attention. Latents have no value part: V is the first value_size elements of K."""

    backend: str
    num_kv_heads: int
    num_heads: int
    key_size: int
    value_size: int
    block_size: int

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of K and V in one layer."""
        parts = 1 if self.backend == "mla" else 2
        scale = 4 if dtype == INT8 else 0
        return parts * self.num_kv_heads * (self.key_size * dtype.itemsize + scale)


class Case:
    """Sequences of equal length over blocks in random order, with the last `num_queries` tokens of each as queries."""

    def __init__(
        self, model: Model, dtype: torch.dtype, num_seqs: int, length: int, num_queries: int, device: str = "cuda"
    ) -> None:
        self.model, self.num_seqs, self.length, self.num_queries = model, num_seqs, length, num_queries
        self.layout = CacheLayout(model.block_size, model.num_kv_heads, model.key_size, dtype, model.backend)
        blocks = -(-length // model.block_size)
        self.cache = self.layout.allocate(num_seqs * blocks, 1, torch.device(device))[0]
        if dtype.itemsize == 1:  # all of them numbers: none is 0x7f or 0xff; so are the scales of int8
            self.cache.view(torch.uint8).random_(0, 0x40)
        else:
            self.cache.normal_()
        self.tables = torch.randperm(num_seqs * blocks, device=device).to(torch.int32).view(num_seqs, blocks)
        self.lengths = torch.full((num_seqs,), length, dtype=torch.int32, device=device)
        self.queries = None if num_queries == 1 else torch.full_like(self.lengths, num_queries)
        self.query = torch.randn(num_seqs * num_queries, model.num_heads, model.key_size, device=device).to(BF16)
        self.out = self.query.new_empty(*self.query.shape[:2], model.value_size)

    def in_blocks_of(self, block_size: int) -> "Case":
        """Return such a case with other blocks."""
        model = self.model._replace(block_size=block_size)
        device = self.cache.device.type
        return Case(model, self.layout.dtype, self.num_seqs, self.length, self.num_queries, device)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of K and V that the call must read."""
        return self.num_seqs * self.length * self.model.token_bytes(self.layout.dtype)

    @property
    def num_operations(self) -> int:
        visible = self.num_seqs * (self.num_queries * self.length - self.num_queries * (self.num_queries - 1) // 2)
        return 2 * (self.model.key_size + self.model.value_size) * self.model.num_heads * visible

    def paged(self) -> torch.Tensor:
        return ops.paged_attention(
            self.query, self.cache, self.tables, self.lengths, self.layout, query_lens=self.queries,
            value_size=self.model.value_size, out=self.out, max_query_len=self.num_queries, max_seq_len=self.length,
        )  # fmt: skip

    def contiguous(self) -> Callable[[], torch.Tensor] | None:
        """SDPA over K and V in bf16 [num_seqs, heads, length, size]; None where it has no room, or no such kernel."""
        if self.layout.dtype != BF16 or self.layout.backend == "mla" or self.num_bytes > MOST_CACHE_BYTES // 2:
            return None
        if self.num_queries not in (1, self.length):  # it takes the first of several queries for the first token
            return None
        shape = self.num_seqs, self.model.num_kv_heads, self.length, self.model.key_size
        key, value = (torch.empty(shape, dtype=BF16, device="cuda").normal_() for _ in range(2))  # zeros run faster
        query = self.query.view(self.num_seqs, self.num_queries, *self.query.shape[1:]).transpose(1, 2)
        causal = self.num_queries > 1
        return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)

    def check_paged(self) -> None:
        """Compare one head of each group, and let no block be reported."""
        self.check(self.paged(), slice(None, None, self.model.num_heads // self.model.num_kv_heads))
        ops.check_device()

    def check(self, found: torch.Tensor, heads: slice = slice(None)) -> None:
        """AssertionError unless the first sequence's last rows are those of the reference. heads: to compare."""
        few = slice(max(self.num_queries - CHECKED_ROWS, 0), self.num_queries)
        want = reference.paged_attention(
            self.query[few, heads], self.cache, self.tables[:1], torch.tensor([self.length]), self.layout,
            query_lens=torch.tensor([few.stop - few.start]), value_size=self.model.value_size,
        )  # fmt: skip
        torch.testing.assert_close(found[few, heads], want, rtol=3e-2, atol=3e-2)
