"""How near does attention over blocks on a CPU come to reading its keys and values once, and until when does it win?

Decoding must read every key and value once: the bound is the machine's read bandwidth, measured in the same run as a
sum over as many contiguous bytes with as many threads. The second table asks from how many queries a sequence gathering
the blocks and calling torch's scaled_dot_product_attention is faster. Results are checked before anything is timed; the
times are the least of several, the contenders taking turns.
"""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import kvpage._C as _C
from kvpage import CacheLayout, ops
from kvpage.benchmarks.cells import Table
from kvpage.benchmarks.figure import Figure, in_turns
from kvpage.benchmarks.pictures import curve, drawn, groups
from kvpage.benchmarks.script import Options, finish

BLOCK_SIZE = 16
SHAPES = {  # KV heads, query heads of each, head size
    "llama 3 8B": (8, 4, 128),
    "qwen3 0.6B": (8, 2, 128),
    "gpt2": (12, 1, 64),
    "gpt_oss 20B": (8, 8, 64),
}

CROSSED = ("llama 3 8B", "gpt2")
DECODE_COLUMNS = (
    "{model:<12} {dtype:<9} {seqs:>4} {keys:>6} {MiB:>6.1f} {us:>26.1f} {GB/s:>18.1f} {of read:>17.2f} {x sdpa:>17.2f}"
)
CROSSOVER_COLUMNS = "{model:<12} {dtype:<9} {keys:>6} {queries:>7} {paged us:>26.1f} {sdpa us:>26.1f} {x sdpa:>17.2f}"


class Case:
    """Sequences of equal length over blocks in random order, with the last `num_queries` tokens of each as queries."""

    def __init__(self, shape: str, dtype: torch.dtype, num_seqs: int, length: int, num_queries: int) -> None:
        heads, group, size = SHAPES[shape]
        self.layout = CacheLayout(BLOCK_SIZE, heads, size, dtype)
        blocks = -(-length // BLOCK_SIZE)
        self.cache = self.layout.allocate(num_seqs * blocks, 1, torch.device("cpu"))[0].normal_()
        self.tables = torch.randperm(num_seqs * blocks).to(torch.int32).view(num_seqs, blocks)
        self.lengths, self.queries = [length] * num_seqs, [num_queries] * num_seqs
        self.query = torch.randn(num_seqs * num_queries, heads * group, size).to(dtype)
        self.num_bytes = 2 * num_seqs * length * heads * size * dtype.itemsize
        self.gathered = [self.cache.new_empty(num_seqs, length, heads, size) for _ in range(2)]

    def paged(self) -> torch.Tensor:
        return ops.paged_attention(
            self.query, self.cache, self.tables, self.lengths, self.layout, query_lens=self.queries
        )

    def sdpa(self) -> torch.Tensor:
        ops.gather_cache(self.cache, self.tables, self.lengths, self.layout, out=(self.gathered[0], self.gathered[1]))
        num_seqs, num_queries, length = len(self.lengths), self.queries[0], self.lengths[0]
        query = self.query.view(num_seqs, num_queries, *self.query.shape[1:]).transpose(1, 2)
        key, value = (rows.transpose(1, 2) for rows in self.gathered)
        mask = None
        whole = num_queries == length  # then SDPA need not be told, and skips half
        if num_queries > 1 and not whole:
            mask = torch.ones(num_queries, length, dtype=torch.bool).tril(length - num_queries)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=whole, enable_gqa=True)
        return out.transpose(1, 2).reshape(self.query.shape)

    def check(self) -> None:
        tolerance = 1e-4 if self.query.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(self.paged(), self.sdpa(), rtol=tolerance, atol=tolerance)


def decode(shape: str, dtype: torch.dtype, num_seqs: int, keys: int, rounds: int) -> dict[str, Any]:
    """Return how near a step with one query each comes to reading as much. keys: of all sequences."""
    case = Case(shape, dtype, num_seqs, keys // num_seqs, 1)
    case.check()
    plain = torch.ones(case.num_bytes // 4)
    calls: dict[str, Callable[[], object]] = {"paged": case.paged, "sdpa": case.sdpa, "read": plain.sum}
    paged, sdpa, read = in_turns(calls, rounds).values()
    return {
        **names_of(shape, dtype),
        "seqs": num_seqs,
        "keys": keys // num_seqs,
        "MiB": case.num_bytes / 2**20,
        "us": Figure.of(paged, 1e6),
        "GB/s": Figure.rate(case.num_bytes / 1e9, paged),
        "of read": Figure.ratio(read, paged),
        "x sdpa": Figure.ratio(sdpa, paged),
    }


def crossover(shape: str, dtype: torch.dtype, length: int, num_queries: int, rounds: int) -> dict[str, Any]:
    """Return how much faster so many queries of one sequence are than gathering its blocks."""
    case = Case(shape, dtype, 1, length, num_queries)
    case.check()
    paged, sdpa = in_turns({"paged": case.paged, "sdpa": case.sdpa}, rounds).values()
    figures = {"paged us": Figure.of(paged, 1e6), "sdpa us": Figure.of(sdpa, 1e6), "x sdpa": Figure.ratio(sdpa, paged)}
    return {**names_of(shape, dtype), "keys": length, "queries": num_queries, **figures}


def names_of(shape: str, dtype: torch.dtype) -> dict[str, str]:
    return {"model": shape, "dtype": str(dtype).removeprefix("torch.")}


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    with drawn(path, size=(7, 4)) as axes:
        for (model, dtype, keys), of_case in groups(rows, "model", "dtype", "keys").items():
            curve(axes, of_case, "queries", "x sdpa", ".-", label=f"{model}, {dtype}, {keys} keys")
        axes.axhline(1.0, color="gray", linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlabel="queries", ylabel="speed, in gather + scaled_dot_product_attention")
        axes.legend(fontsize="small")


def main() -> None:
    parser = Options("paged_attention_cpu", __doc__, rounds=9)
    parser.add("--keys", 16384, help="in the cache, over all sequences")
    parser.add("--queries", [1, 4, 16, 64, 512, 2048])
    options = parser.parse()
    torch.manual_seed(0)
    kernel, dtypes = _C.attention_kernels()[0], (torch.float32, torch.bfloat16)
    print(f"kernel {kernel}, {torch.get_num_threads()} threads\n")
    found: dict[str, list[dict[str, Any]]] = {"decode": [], "crossover": []}
    table = Table(DECODE_COLUMNS)
    for shape, dtype, num_seqs in itertools.product(SHAPES, dtypes, (1, 16)):
        found["decode"].append(decode(shape, dtype, num_seqs, options.keys, options.rounds))
        table.show(found["decode"][-1])
    table = Table(CROSSOVER_COLUMNS)
    for shape, dtype, length, count in itertools.product(CROSSED, dtypes, (512, 2048), options.queries):
        if count <= length:
            found["crossover"].append(crossover(shape, dtype, length, count, options.rounds))
            table.show(found["crossover"][-1])
    finish(
        options, functools.partial(plot, found["crossover"]), kernel=kernel, threads=torch.get_num_threads(), **found
    )


if __name__ == "__main__":
    main()
