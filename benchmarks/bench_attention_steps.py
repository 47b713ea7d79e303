"""How near does attention on a CPU come to the machine's own speed in the steps of a serving loop?

Two bounds, both measured in the same run; the larger one counts:

    products    two multiplications and additions for each element of each visible key, at the rate of torch's own
                product of two large matrices in fp32 (the softmax's exponentials come on top of that)
    reading     each block in use once, at the rate of a sum over contiguous memory; sequences that begin with the
                same blocks read the same memory

Kinds of step, over blocks in random order:

    decode          64 sequences of 1,088 tokens, one query each
    decode shared   the same, their first 1,024 tokens being the same blocks
    prefill         a prompt of 2,048 tokens
    chunks          16 sequences, 16 to 64 new tokens each after 1,024 cached ones
    chunks shared   the same, the cached ones being the same blocks
    decode 1, 16    16,384 tokens, of one sequence or of 16
    4 of 512, ...   the last queries of one sequence: from how many of them on is gathering its blocks faster?

Beside it: gathering the blocks and torch's scaled_dot_product_attention, and with --vllm PYTHON, an interpreter for
which vLLM's CPU build is installed, vLLM's own operation on a cache of its own form, in a process that sleeps while
others run. Results are checked before anything is timed; the contenders take turns; medians with their quartiles.
"""

import functools
import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F

import kvpage._C as _C
from kvpage import CacheLayout, ops
from kvpage.benchmarks.cells import Row, shown
from kvpage.benchmarks.figure import Figure, in_turns, result, seconds
from kvpage.benchmarks.peer_process import PeerProcess, vllm_peer
from kvpage.benchmarks.pictures import bars
from kvpage.benchmarks.script import VLLM, finish, option, parse

SHAPES = {  # KV heads, query heads of each, head size
    "small": (2, 4, 64), "llama 3 8B": (8, 4, 128), "qwen3 0.6B": (8, 2, 128), "gpt2": (12, 1, 64),
    "gpt_oss 20B": (8, 8, 64),
}  # fmt: skip
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
KEYS = ("step", "shape", "dtype", "threads")
COLUMNS = "{step:<14} {shape:<11} {dtype:<9} {threads:>7} {us:>22.0f} {of bound:>17.2f} {x sdpa:>17.2f} {x vllm:>17.2f}"
BLOCK_SIZE = 16
PORTIONS = tuple(range(16, 65, 3))[:16]
STEPS: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {  # tokens and queries of each; shared tokens
    "decode": ((1088,) * 64, (1,) * 64, 0),
    "decode shared": ((1088,) * 64, (1,) * 64, 1024),
    "prefill": ((2048,), (2048,), 0),
    "chunks": (tuple(1024 + n for n in PORTIONS), PORTIONS, 0),
    "chunks shared": (tuple(1024 + n for n in PORTIONS), PORTIONS, 1024),
}
OTHER_STEPS = {f"decode {num}": ((16384 // num,) * num, (1,) * num, 0) for num in (1, 16)} | {
    f"{num} of {length}": ((length,), (num,), 0)
    for length in (512, 2048)
    for num in (1, 4, 16, 64, 512, 2048)
    if num <= length
}


class Step:
    """One layer's attention of a step, as an engine calls it: random queries, keys and values."""

    def __init__(self, step: str, shape: str, dtype: torch.dtype) -> None:
        lengths, queries, num_shared = (STEPS | OTHER_STEPS)[step]
        # A layer of 64 sequences has 570 MB in fp32.
        most = 16 if shape != "small" and step.startswith("decode") else len(lengths)
        self.lengths, self.queries = list(lengths[:most]), list(queries[:most])
        num_kv_heads, group, size = SHAPES[shape]
        self.layout = CacheLayout(BLOCK_SIZE, num_kv_heads, size, dtype)
        first = num_shared // BLOCK_SIZE
        num_others = [-(-length // BLOCK_SIZE) - first for length in self.lengths]
        ids = torch.randperm(first + sum(num_others)).to(torch.int32)
        self.tables = torch.zeros(len(num_others), first + max(num_others), dtype=torch.int32)
        self.tables[:, :first] = ids[:first]
        for table, others in zip(self.tables, ids[first:].split(num_others), strict=True):
            table[first : first + len(others)] = others
        self.cache = self.layout.allocate(len(ids), 1, torch.device("cpu"))[0].normal_()
        self.query = torch.randn(sum(self.queries), num_kv_heads * group, size).to(dtype)
        self.gathered = [self.cache.new_empty(sum(self.lengths), num_kv_heads, size) for _ in range(2)]
        out, bound = torch.empty_like(self.query), ops.BoundCache(self.cache, self.layout)
        sequences = ops.Sequences(bound, len(self.query), self.tables, self.lengths, self.queries)
        attention = ops.Attention(scale=size**-0.5, value_size=size)
        self.paged = lambda: ops.attend(self.query, bound, sequences, attention, out)

    @property
    def num_products(self) -> int:
        """Multiplications of a query's element by a key's, and of a weight by a value's."""
        pairs = sum(n * k - n * (n - 1) // 2 for n, k in zip(self.queries, self.lengths, strict=True))
        return 2 * pairs * self.query.shape[1] * self.query.shape[2]

    def sdpa(self) -> torch.Tensor:
        """Gather the blocks, and attend by torch: all sequences at once where they are alike, else one by one."""
        keys, values = self.gathered
        ops.gather_cache(self.cache, self.tables, self.lengths, self.layout, out=(keys, values))
        pairs = list(zip(self.lengths, self.queries, strict=True))
        sizes = [pairs[0]] if len(set(pairs)) == 1 else pairs
        num_alike, at, row, outputs = len(pairs) // len(sizes), 0, 0, []
        for length, count in sizes:
            rows, tokens = slice(row, row + num_alike * count), slice(at, at + num_alike * length)
            parts = ((self.query[rows], count), (keys[tokens], length), (values[tokens], length))
            batch = (part.unflatten(0, (num_alike, num)).transpose(1, 2) for part, num in parts)
            outputs.append(_causal(*batch).transpose(1, 2).flatten(0, 1))
            row, at = rows.stop, tokens.stop
        return torch.cat(outputs)


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return torch's attention of the last tokens: [num, heads, tokens, size] each."""
    count, length = query.shape[2], key.shape[2]
    whole, mask = count == length, None  # of a whole prompt SDPA need not be told, and skips half
    if count > 1 and not whole:
        mask = torch.ones(count, length, dtype=torch.bool).tril(length - count)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=whole, enable_gqa=True)


def measure(step: str, shape: str, dtype: str, threads: int, rounds: int, peer: PeerProcess | None) -> Row:
    torch.set_num_threads(threads)
    case, tolerance = Step(step, shape, DTYPES[dtype]), TOLERANCES[DTYPES[dtype]]
    torch.testing.assert_close(case.paged(), case.sdpa(), rtol=tolerance, atol=tolerance)
    plain, a, b = torch.ones(case.cache.nbytes // 4), torch.randn(1024, 1024), torch.randn(1024, 1024)
    calls: dict[str, Callable[[], float]] = {
        name: functools.partial(seconds, call)
        for name, call in (("paged", case.paged), ("sdpa", case.sdpa), ("read", plain.sum))
    }
    if peer is not None:
        asked = {"lengths": case.lengths, "queries": case.queries, "shared": (STEPS | OTHER_STEPS)[step][2]}
        peer.ask(**asked, shape=SHAPES[shape], dtype=dtype, threads=threads)
        calls["vllm"] = lambda: peer.ask()["seconds"]
    turns = in_turns(calls, rounds, measure=result)
    products = case.num_products * min(in_turns({"mm": lambda: a @ b}, rounds)["mm"]) / 1024**3
    return {
        **dict(zip(KEYS, (step, shape, dtype, threads), strict=True)),
        "us": Figure.of(turns["paged"], 1e6),
        "products us": products * 1e6,
        "read us": Figure.of(turns["read"], 1e6),
        "of bound": Figure.ratio([max(products, read) for read in turns["read"]], turns["paged"]),
        **{f"x {peer}": Figure.ratio(turns[peer], turns["paged"]) for peer in ("sdpa", "vllm") if peer in turns},
    }


def main() -> None:
    options = parse(
        "attention_steps",
        __doc__,
        rounds=5,
        steps=option(list(STEPS), choices=[*STEPS, *OTHER_STEPS]),
        shapes=option(list(SHAPES)[:2], choices=SHAPES),
        dtypes=option(list(DTYPES), choices=DTYPES),
        threads=[1, 2],
        vllm=VLLM,
    )
    torch.manual_seed(0)
    kernel = _C.attention_kernels()[0]
    print(f"kernel {kernel}")
    cases = itertools.product(options.steps, options.shapes, options.dtypes, options.threads)
    with vllm_peer(options.vllm, "attention", max(options.threads), preloads=True) as peer:
        results = shown(COLUMNS, (measure(*case, options.rounds, peer) for case in cases))
    shares = {", ".join(f"{row[name]}" for name in KEYS): row["of bound"] for row in results}
    label = "speed, in the larger of the two bounds"
    finish(options, lambda path: bars(path, shares, label, [1.0]), kernel=kernel, results=results)


if __name__ == "__main__":
    main()
