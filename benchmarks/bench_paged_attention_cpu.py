"""How near does attention over blocks on a CPU come to reading its keys and values once, and until when does it win?

Decoding must read every key and value once: the bound is the machine's read bandwidth, measured in the same run as a
sum over as many contiguous bytes with as many threads. The second table asks from how many queries a sequence gathering
the blocks and calling torch's scaled_dot_product_attention is faster. Results are checked before anything is timed; the
times are the least of several, the contenders taking turns.

    python benchmarks/bench_paged_attention_cpu.py [--keys N] [--queries N ...] [--plot PATH]
"""

import argparse
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import kvpage._C as _C
from kvpage import CacheLayout, ops
from kvpage.benchmarks.figure import Figure, dumps, in_turns

BLOCK_SIZE = 16
SHAPES = {  # KV heads, query heads of each, head size
    "llama 3 8B": (8, 4, 128),
    "qwen3 0.6B": (8, 2, 128),
    "gpt2": (12, 1, 64),
    "gpt_oss 20B": (8, 8, 64),
}


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


def decode(keys: int, rounds: int) -> list[dict[str, Any]]:
    results = []
    print("{:12} {:9} {:>4} {:>6} {:>6} {:>9} {:>6} {:>8} {:>7}".format(
        "model", "dtype", "seqs", "keys", "MiB", "us", "GB/s", "of read", "x sdpa"))  # fmt: skip
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            for num_seqs in (1, 16):
                case = Case(shape, dtype, num_seqs, keys // num_seqs, 1)
                case.check()
                plain = torch.ones(case.num_bytes // 4)
                calls: dict[str, Callable[[], object]] = {"paged": case.paged, "sdpa": case.sdpa, "read": plain.sum}
                paged, sdpa, read = in_turns(calls, rounds).values()
                row: dict[str, Any] = {
                    "model": shape,
                    "dtype": str(dtype).removeprefix("torch."),
                    "seqs": num_seqs,
                    "keys": keys // num_seqs,
                    "MiB": case.num_bytes / 2**20,
                    "us": Figure.of(paged, 1e6),
                    "GB/s": Figure.rate(case.num_bytes / 1e9, paged),
                    "of read": Figure.ratio(read, paged),
                    "x sdpa": Figure.ratio(sdpa, paged),
                }
                results.append(row)
                print("{model:12} {dtype:9} {seqs:4} {keys:6} {MiB:6.1f} {us:.1f} {GB/s:.1f} "
                      "{of read:.2f} {x sdpa:.2f}".format(**row))  # fmt: skip
    return results


def crossover(num_queries: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    results = []
    print(f"\n{'model':12} {'dtype':9} {'keys':>6} {'queries':>7} {'paged us':>10} {'sdpa us':>10} {'x sdpa':>7}")
    for shape in ("llama 3 8B", "gpt2"):
        for dtype in (torch.float32, torch.bfloat16):
            for length in (512, 2048):
                for count in num_queries:
                    if count > length:
                        continue
                    case = Case(shape, dtype, 1, length, count)
                    case.check()
                    paged, sdpa = in_turns({"paged": case.paged, "sdpa": case.sdpa}, rounds).values()
                    row: dict[str, Any] = {
                        "model": shape,
                        "dtype": str(dtype).removeprefix("torch."),
                        "keys": length,
                        "queries": count,
                        "paged us": Figure.of(paged, 1e6),
                        "sdpa us": Figure.of(sdpa, 1e6),
                        "x sdpa": Figure.ratio(sdpa, paged),
                    }
                    results.append(row)
                    print("{model:12} {dtype:9} {keys:6} {queries:7} {paged us:.1f} {sdpa us:.1f} "
                          "{x sdpa:.2f}".format(**row))  # fmt: skip
    return results


def plot(results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for model, dtype, keys in dict.fromkeys((r["model"], r["dtype"], r["keys"]) for r in results):
        rows = [r for r in results if (r["model"], r["dtype"], r["keys"]) == (model, dtype, keys)]
        axes.plot(
            [r["queries"] for r in rows],
            [r["x sdpa"].median for r in rows],
            ".-",
            label=f"{model}, {dtype}, {keys} keys",
        )
    axes.axhline(1.0, color="gray", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="queries", ylabel="speed, in gather + scaled_dot_product_attention")
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, default=16384, help="in the cache, over all sequences")
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 4, 16, 64, 512, 2048])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"kernel {_C.attention_kernels()[0]}, {torch.get_num_threads()} threads\n")
    results = {"decode": decode(options.keys, options.rounds), "crossover": crossover(options.queries, options.rounds)}
    if options.plot:
        plot(results["crossover"], options.plot)
    environment = {
        "machine": platform.processor() or platform.machine(),
        "kernel": _C.attention_kernels()[0],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(dumps({**environment, **results}))


if __name__ == "__main__":
    main()
