"""How near does attention on a CPU come to the machine's own speed in the steps of a serving loop?

Two bounds, both measured in the same run; the larger one counts:

    products    two multiplications and additions for each element of each visible key, at the rate of torch's own
                product of two large matrices in fp32 (the softmax's exponentials come on top of that)
    reading     each block in use once, at the rate of a sum over contiguous memory; sequences that begin with the
                same blocks read the same memory

Five kinds of step, over blocks in random order:

    decode          64 sequences of 1,088 tokens, one query each
    decode shared   the same, their first 1,024 tokens being the same blocks
    prefill         a prompt of 2,048 tokens
    chunks          16 sequences, 16 to 64 new tokens each after 1,024 cached ones
    chunks shared   the same, the cached ones being the same blocks

Beside it: gathering the blocks and torch's scaled_dot_product_attention, and with --vllm PYTHON, an interpreter for
which vLLM's CPU build is installed, vLLM's own operation on a cache of its own form, in a process that sleeps while
others run. Results are checked before anything is timed; the contenders take turns; medians with their quartiles.
"""

import functools
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import kvpage._C as _C
from kvpage import CacheLayout, ops
from kvpage.benchmarks.cells import Table
from kvpage.benchmarks.figure import Figure, in_turns, result, seconds
from kvpage.benchmarks.peer_process import PeerProcess, recommended
from kvpage.benchmarks.pictures import bars
from kvpage.benchmarks.script import Options, finish

BLOCK_SIZE = 16
SHAPES = {"small": (2, 4, 64), "llama 3 8B": (8, 4, 128)}  # KV heads, query heads of each, head size
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KEYS = ("step", "shape", "dtype", "threads")
COLUMNS = "{step:<14} {shape:<11} {dtype:<9} {threads:>7} {us:>22.0f} {of bound:>17.2f} {x sdpa:>17.2f} {x vllm:>17.2f}"
PORTIONS = tuple(range(16, 65, 3))[:16]
STEPS: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {  # tokens and queries of each; shared tokens
    "decode": ((1088,) * 64, (1,) * 64, 0),
    "decode shared": ((1088,) * 64, (1,) * 64, 1024),
    "prefill": ((2048,), (2048,), 0),
    "chunks": (tuple(1024 + n for n in PORTIONS), PORTIONS, 0),
    "chunks shared": (tuple(1024 + n for n in PORTIONS), PORTIONS, 1024),
}


class Step:
    """One layer's attention of a step: random queries, keys and values, and the tables of its sequences."""

    def __init__(self, step: str, shape: str, dtype: torch.dtype) -> None:
        lengths, queries, shared = STEPS[step]
        self.lengths, self.queries = list(lengths), list(queries)
        heads, group, size = SHAPES[shape]
        if shape != "small" and step.startswith("decode"):  # a layer of 64 sequences has 570 MB in fp32
            self.lengths, self.queries = self.lengths[:16], self.queries[:16]
        self.layout = CacheLayout(BLOCK_SIZE, heads, size, dtype)
        own = [-(-n // BLOCK_SIZE) - shared // BLOCK_SIZE for n in self.lengths]
        self.num_blocks = shared // BLOCK_SIZE + sum(own)
        ids = torch.randperm(self.num_blocks).to(torch.int32)
        self.tables = torch.zeros(len(own), max(own) + shared // BLOCK_SIZE, dtype=torch.int32)
        self.tables[:, : shared // BLOCK_SIZE] = ids[: shared // BLOCK_SIZE]
        for table, some in zip(self.tables, ids[shared // BLOCK_SIZE :].split(own), strict=True):
            table[shared // BLOCK_SIZE : shared // BLOCK_SIZE + len(some)] = some
        self.cache = self.layout.allocate(self.num_blocks, 1, torch.device("cpu"))[0].normal_()
        self.query = torch.randn(sum(self.queries), heads * group, size).to(dtype)
        self.out = torch.empty_like(self.query)
        held = ops.BoundCache(self.cache, self.layout)
        sequences = ops.Sequences(held, len(self.query), self.tables, self.lengths, self.queries)
        attention = ops.Attention(scale=size**-0.5, value_size=size)
        self.paged = lambda: ops.attend(self.query, held, sequences, attention, self.out)

    @property
    def num_products(self) -> int:
        """Multiplications of a query's element by a key's, and of a weight by a value's."""
        pairs = sum(n * k - n * (n - 1) // 2 for n, k in zip(self.queries, self.lengths, strict=True))
        return 2 * pairs * self.query.shape[1] * self.query.shape[2]

    def sdpa(self) -> torch.Tensor:
        gathered = ops.gather_cache(self.cache, self.tables, self.lengths, self.layout)
        assert gathered is not None
        keys, values = gathered
        assert values is not None
        row, outputs = 0, []
        for seq, (length, count) in enumerate(zip(self.lengths, self.queries, strict=True)):
            begin = sum(self.lengths[:seq])
            key, value = (x[begin : begin + length].transpose(0, 1).unsqueeze(0) for x in (keys, values))
            query = self.query[row : row + count].transpose(0, 1).unsqueeze(0)
            whole, mask = count == length, None
            if count > 1 and not whole:
                mask = torch.ones(count, length, dtype=torch.bool).tril(length - count)
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=whole, enable_gqa=True)
            outputs.append(out[0].transpose(0, 1))
            row += count
        return torch.cat(outputs)

    def check(self) -> None:
        tolerance = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}[self.query.dtype]
        torch.testing.assert_close(self.paged(), self.sdpa(), rtol=tolerance, atol=tolerance)


def product_rate(rounds: int) -> float:
    """Multiplications a second of torch's product of two matrices, the best of a few."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return 1024**3 / min(in_turns({"mm": lambda: a @ b}, rounds)["mm"])


def start_peer(python: Path) -> AbstractContextManager[PeerProcess]:
    return PeerProcess.start(python, "vllm_attention_peer.py", [], recommended(python))


def measure(step: str, shape: str, dtype: str, threads: int, rounds: int, peer: PeerProcess | None) -> dict[str, Any]:
    torch.set_num_threads(threads)
    case = Step(step, shape, DTYPES[dtype])
    case.check()
    num_bytes = case.num_blocks * BLOCK_SIZE * 2 * SHAPES[shape][0] * SHAPES[shape][2] * DTYPES[dtype].itemsize
    plain = torch.ones(num_bytes // 4)
    calls: dict[str, Callable[[], float]] = {
        name: functools.partial(seconds, call)
        for name, call in (("paged", case.paged), ("sdpa", case.sdpa), ("read", plain.sum))
    }
    if peer is not None:
        asked = {"lengths": case.lengths, "queries": case.queries, "shared": STEPS[step][2]}
        peer.ask(**asked, shape=SHAPES[shape], dtype=dtype, threads=threads)
        calls["vllm"] = lambda: peer.ask()["seconds"]
    taken = in_turns(calls, rounds, measure=result)
    products = case.num_products / product_rate(rounds)
    bounds = [max(products, read) for read in taken["read"]]
    row: dict[str, Any] = {"step": step, "shape": shape, "dtype": dtype, "threads": threads}
    row["us"] = Figure.of(taken["paged"], 1e6)
    row["products us"], row["read us"] = products * 1e6, Figure.of(taken["read"], 1e6)
    row["of bound"] = Figure.ratio(bounds, taken["paged"])
    row["x sdpa"] = Figure.ratio(taken["sdpa"], taken["paged"])
    if peer is not None:
        row["x vllm"] = Figure.ratio(taken["vllm"], taken["paged"])
    return row


def main() -> None:
    parser = Options("attention_steps", __doc__, rounds=5)
    for option, names in (("--steps", STEPS), ("--shapes", SHAPES), ("--dtypes", DTYPES)):
        parser.add(option, list(names), choices=names)
    parser.add("--threads", [1, 2])
    parser.add_vllm()
    options = parser.parse()
    torch.manual_seed(0)
    kernel = _C.attention_kernels()[0]
    print(f"kernel {kernel}")
    table, results = Table(COLUMNS), []
    with ExitStack() as stack:
        peer = stack.enter_context(start_peer(options.vllm)) if options.vllm else None
        for case in itertools.product(options.steps, options.shapes, options.dtypes, options.threads):
            results.append(measure(*case, options.rounds, peer))
            table.show(results[-1])
    shares = {", ".join(f"{row[name]}" for name in KEYS): row["of bound"] for row in results}
    draw = functools.partial(bars, values=shares, label="speed, in the larger of the two bounds", lines=[1.0])
    finish(options, draw, kernel=kernel, results=results)


if __name__ == "__main__":
    main()
