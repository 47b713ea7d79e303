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

import torch

import kvpage._C as _C
from kvpage import ops
from kvpage.benchmarks.attention_case import CpuCase
from kvpage.benchmarks.cells import Row, shown
from kvpage.benchmarks.figure import Figure, in_turns, result, seconds
from kvpage.benchmarks.peer_process import PeerProcess, vllm_peer
from kvpage.benchmarks.pictures import bars
from kvpage.benchmarks.script import VLLM, finish, option, parse

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


class Step(CpuCase):
    """One layer's attention of a step, as an engine calls it."""

    def __init__(self, step: str, shape: str, dtype: torch.dtype) -> None:
        lengths, queries, num_shared = STEPS[step]
        # A layer of 64 sequences has 570 MB in fp32.
        most = 16 if shape != "small" and step.startswith("decode") else len(lengths)
        super().__init__(SHAPES[shape], dtype, lengths[:most], queries[:most], num_shared)
        out, size = torch.empty_like(self.query), self.query.shape[2]
        bound = ops.BoundCache(self.cache, self.layout)
        sequences = ops.Sequences(bound, len(self.query), self.tables, self.lengths, self.queries)
        attention = ops.Attention(scale=size**-0.5, value_size=size)
        self.attend = lambda: ops.attend(self.query, bound, sequences, attention, out)

    def paged(self) -> torch.Tensor:
        return self.attend()

    @property
    def num_products(self) -> int:
        """Multiplications of a query's element by a key's, and of a weight by a value's."""
        pairs = sum(n * k - n * (n - 1) // 2 for n, k in zip(self.queries, self.lengths, strict=True))
        return 2 * pairs * self.query.shape[1] * self.query.shape[2]


def product_rate(rounds: int) -> float:
    """Multiplications a second of torch's product of two matrices, the best of a few."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return 1024**3 / min(in_turns({"mm": lambda: a @ b}, rounds)["mm"])


def measure(step: str, shape: str, dtype: str, threads: int, rounds: int, peer: PeerProcess | None) -> Row:
    torch.set_num_threads(threads)
    case = Step(step, shape, DTYPES[dtype])
    case.check()
    plain = torch.ones(case.cache.nbytes // 4)
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
    return {
        **dict(zip(KEYS, (step, shape, dtype, threads), strict=True)),
        "us": Figure.of(taken["paged"], 1e6),
        "products us": products * 1e6,
        "read us": Figure.of(taken["read"], 1e6),
        "of bound": Figure.ratio(bounds, taken["paged"]),
        **{f"x {peer}": Figure.ratio(taken[peer], taken["paged"]) for peer in ("sdpa", "vllm") if peer in taken},
    }


def main() -> None:
    options = parse(
        "attention_steps",
        __doc__,
        rounds=5,
        steps=option(list(STEPS), choices=STEPS),
        shapes=option(list(SHAPES), choices=SHAPES),
        dtypes=option(list(DTYPES), choices=DTYPES),
        threads=[1, 2],
        vllm=VLLM,
    )
    torch.manual_seed(0)
    kernel = _C.attention_kernels()[0]
    print(f"kernel {kernel}")
    cases = itertools.product(options.steps, options.shapes, options.dtypes, options.threads)
    with vllm_peer(options.vllm, "vllm_attention_peer.py", max(options.threads), preloads=True) as peer:
        results = shown(COLUMNS, (measure(*case, options.rounds, peer) for case in cases))
    shares = {", ".join(f"{row[name]}" for name in KEYS): row["of bound"] for row in results}
    label = "speed, in the larger of the two bounds"
    finish(options, lambda path: bars(path, shares, label, [1.0]), kernel=kernel, results=results)


if __name__ == "__main__":
    main()
