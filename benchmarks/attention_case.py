"""Attention of a layer on a CPU, over blocks in random order: by kvpage, and by torch over what is gathered."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from kvpage import CacheLayout, ops

BLOCK_SIZE = 16
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
Heads = tuple[int, int, int]
"""KV heads, query heads of each, head size."""


class CpuCase:
    """Random queries, keys and values, and the tables of sequences. queries: how many of each sequence's last tokens
    ask. num_shared: tokens at the beginning that are the same blocks of all.
    """

    def __init__(
        self, heads: Heads, dtype: torch.dtype, lengths: Sequence[int], queries: Sequence[int], num_shared: int = 0
    ) -> None:
        num_kv_heads, group, size = heads
        self.lengths, self.queries = list(lengths), list(queries)
        self.layout = CacheLayout(BLOCK_SIZE, num_kv_heads, size, dtype)
        first = num_shared // BLOCK_SIZE
        own = [-(-length // BLOCK_SIZE) - first for length in self.lengths]
        ids = torch.randperm(first + sum(own)).to(torch.int32)
        self.tables = torch.zeros(len(own), first + max(own), dtype=torch.int32)
        self.tables[:, :first] = ids[:first]
        for table, some in zip(self.tables, ids[first:].split(own), strict=True):
            table[first : first + len(some)] = some
        self.cache = self.layout.allocate(len(ids), 1, torch.device("cpu"))[0].normal_()
        self.query = torch.randn(sum(self.queries), num_kv_heads * group, size).to(dtype)
        self.gathered = [self.cache.new_empty(sum(self.lengths), num_kv_heads, size) for _ in range(2)]
        self.token_bytes = 2 * num_kv_heads * size * dtype.itemsize

    def paged(self) -> torch.Tensor:
        """Attend over the blocks."""
        return ops.paged_attention(
            self.query, self.cache, self.tables, self.lengths, self.layout, query_lens=self.queries
        )

    def sdpa(self) -> torch.Tensor:
        """Gather the blocks, and attend by torch: all sequences at once where they are alike, else one by one."""
        keys, values = self.gathered
        ops.gather_cache(self.cache, self.tables, self.lengths, self.layout, out=(keys, values))
        pairs = list(zip(self.lengths, self.queries, strict=True))
        sizes = [pairs[0]] if len(set(pairs)) == 1 else pairs
        num_each, at, row, outputs = len(pairs) // len(sizes), 0, 0, []
        for length, count in sizes:
            rows, tokens = slice(row, row + num_each * count), slice(at, at + num_each * length)
            parts = ((self.query[rows], count), (keys[tokens], length), (values[tokens], length))
            batch = (part.unflatten(0, (num_each, num)).transpose(1, 2) for part, num in parts)
            outputs.append(_causal(*batch).transpose(1, 2).flatten(0, 1))
            row, at = rows.stop, tokens.stop
        return torch.cat(outputs)

    def check(self) -> None:
        """AssertionError unless both ways give the same."""
        tolerance = TOLERANCES[self.query.dtype]
        torch.testing.assert_close(self.paged(), self.sdpa(), rtol=tolerance, atol=tolerance)


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return torch's attention of the last tokens: [num, heads, tokens, size] each."""
    count, length = query.shape[2], key.shape[2]
    whole, mask = count == length, None  # of a whole prompt SDPA need not be told, and skips half
    if count > 1 and not whole:
        mask = torch.ones(count, length, dtype=torch.bool).tril(length - count)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=whole, enable_gqa=True)
