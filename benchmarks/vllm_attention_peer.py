"""Runs vLLM's operation of attention on a CPU, for bench_attention_steps: a line of JSON asks, a line answers.

VENV/bin/python benchmarks/vllm_attention_peer.py NUM_THREADS
"""

import time
from typing import Any

import torch
import torch.nn.functional as F
from peer_answers import Answer, answer_by_vllm  # it lies beside this file

BLOCK_SIZE = 128  # as its engine makes it


class PeerStep:
    """The same step as bench_attention_steps.Step, over a cache as vLLM packs it."""

    def __init__(
        self, lengths: list[int], queries: list[int], shared: int, shape: list[int], dtype: str, threads: int
    ) -> None:
        from vllm import _custom_ops as vllm_ops

        torch.set_num_threads(threads)
        self.ops, self.lengths, self.counts = vllm_ops, lengths, queries
        heads, group, size = shape
        kind = getattr(torch, dtype)
        first = shared // BLOCK_SIZE
        own = [-(-n // BLOCK_SIZE) - first for n in lengths]
        ids = torch.randperm(first + sum(own)).to(torch.int32)
        self.tables = torch.zeros(len(own), first + max(own), dtype=torch.int32)
        self.tables[:, :first] = ids[:first]
        for table, some in zip(self.tables, ids[first:].split(own), strict=True):
            table[first : first + len(some)] = some
        self.query = torch.randn(sum(queries), heads * group, size).to(kind)
        self.out, self.scale = torch.empty_like(self.query), size**-0.5
        self.rows = torch.randn(2, len(ids) * BLOCK_SIZE, heads, size).to(kind)
        cache = torch.zeros(len(ids), heads, BLOCK_SIZE * 2, size, dtype=kind)
        self.key, self.value = cache.chunk(2, dim=2)
        slots = torch.arange(len(ids) * BLOCK_SIZE)
        vllm_ops.cpu_attn_reshape_and_cache(self.rows[0], self.rows[1], self.key, self.value, slots, "vec")
        self.starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32)
        self.plan = vllm_ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(lengths), num_heads=heads * group, num_kv_heads=heads, head_dim=size,
            seq_lens=self.seq_lens, dtype=kind, query_start_loc=self.starts, causal=True, sliding_window_size=-1,
            isa="vec", enable_kv_split=True,
        )  # fmt: skip

    def attend(self) -> float:
        begin = time.perf_counter()
        self.ops.cpu_attention_with_kv_cache(
            query=self.query, key_cache=self.key, value_cache=self.value, output=self.out,
            query_start_loc=self.starts, seq_lens=self.seq_lens, scale=self.scale, causal=True, alibi_slopes=None,
            sliding_window=-1, block_table=self.tables, softcap=0, scheduler_metadata=self.plan, s_aux=None,
        )  # fmt: skip
        return time.perf_counter() - begin

    def check(self) -> None:
        """Compare the last sequence's first and last query with torch's own attention."""
        self.attend()
        length, count = self.lengths[-1], self.counts[-1]
        slots = (self.tables[-1].long()[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:length]
        for query in (count - 1, 0):
            keys = length - count + query + 1
            key, value = (rows[slots[:keys]].transpose(0, 1).float() for rows in self.rows)
            asked = self.query[len(self.query) - count + query].float().unsqueeze(1)
            want = F.scaled_dot_product_attention(asked[None], key[None], value[None], enable_gqa=True)[0, :, 0]
            got = self.out[len(self.query) - count + query].float()
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def make() -> Answer:
    steps: dict[str, PeerStep] = {}

    def answer(**asked: Any) -> dict[str, float]:
        """Make a step that is asked for, and check it; else run the last one."""
        if not asked:
            return {"seconds": steps["last"].attend()}
        steps["last"] = PeerStep(**asked)
        steps["last"].check()
        return {}

    return answer


if __name__ == "__main__":
    answer_by_vllm(make)
