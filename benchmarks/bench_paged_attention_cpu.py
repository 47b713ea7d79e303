"""How near does attention over blocks on a CPU come to reading its keys and values once, and until when does it win?

Decoding must read every key and value once: the bound is the machine's read bandwidth, measured in the same run as a
sum over as many contiguous bytes with as many threads. The second table asks from how many queries a sequence gathering
the blocks and calling torch's scaled_dot_product_attention is faster. Results are checked before anything is timed; the
times are the least of several, the contenders taking turns.
"""

import itertools
from collections.abc import Callable

import torch

import kvpage._C as _C
from kvpage.benchmarks.attention_case import CpuCase
from kvpage.benchmarks.cells import Row, shown
from kvpage.benchmarks.figure import Figure, in_turns
from kvpage.benchmarks.pictures import curves
from kvpage.benchmarks.script import finish, option, parse

SHAPES = {  # KV heads, query heads of each, head size
    "llama 3 8B": (8, 4, 128),
    "qwen3 0.6B": (8, 2, 128),
    "gpt2": (12, 1, 64),
    "gpt_oss 20B": (8, 8, 64),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CROSSED = ("llama 3 8B", "gpt2")
DECODE_COLUMNS = (
    "{model:<12} {dtype:<9} {seqs:>4} {keys:>6} {MiB:>6.1f} {us:>26.1f} {GB/s:>18.1f} {of read:>17.2f} {x sdpa:>17.2f}"
)
CROSSOVER_COLUMNS = "{model:<12} {dtype:<9} {keys:>6} {queries:>7} {paged us:>26.1f} {sdpa us:>26.1f} {x sdpa:>17.2f}"


def decode(shape: str, dtype: str, num_seqs: int, keys: int, rounds: int) -> Row:
    """Return how near a step with one query each comes to reading as much. keys: of all sequences."""
    case = CpuCase(SHAPES[shape], DTYPES[dtype], [keys // num_seqs] * num_seqs, [1] * num_seqs)
    case.check()
    num_bytes = sum(case.lengths) * case.token_bytes
    plain = torch.ones(num_bytes // 4)
    calls: dict[str, Callable[[], object]] = {"paged": case.paged, "sdpa": case.sdpa, "read": plain.sum}
    paged, sdpa, read = in_turns(calls, rounds).values()
    return {
        "model": shape,
        "dtype": dtype,
        "seqs": num_seqs,
        "keys": keys // num_seqs,
        "MiB": num_bytes / 2**20,
        "us": Figure.of(paged, 1e6),
        "GB/s": Figure.rate(num_bytes / 1e9, paged),
        "of read": Figure.ratio(read, paged),
        "x sdpa": Figure.ratio(sdpa, paged),
    }


def crossover(shape: str, dtype: str, length: int, num_queries: int, rounds: int) -> Row:
    """Return how much faster so many queries of one sequence are than gathering its blocks."""
    case = CpuCase(SHAPES[shape], DTYPES[dtype], [length], [num_queries])
    case.check()
    paged, sdpa = in_turns({"paged": case.paged, "sdpa": case.sdpa}, rounds).values()
    row = {"model": shape, "dtype": dtype, "keys": length, "queries": num_queries}
    figures = {"paged us": Figure.of(paged, 1e6), "sdpa us": Figure.of(sdpa, 1e6), "x sdpa": Figure.ratio(sdpa, paged)}
    return row | figures


def main() -> None:
    options = parse(
        "paged_attention_cpu",
        __doc__,
        rounds=9,
        keys=option(16384, "in the cache, over all sequences"),
        queries=[1, 4, 16, 64, 512, 2048],
    )
    torch.manual_seed(0)
    kernel, threads = _C.attention_kernels()[0], torch.get_num_threads()
    print(f"kernel {kernel}, {threads} threads\n")
    steps = itertools.product(SHAPES, DTYPES, (1, 16))
    decodes = shown(DECODE_COLUMNS, (decode(*step, options.keys, options.rounds) for step in steps))
    cases = [case for case in itertools.product(CROSSED, DTYPES, (512, 2048), options.queries) if case[3] <= case[2]]
    crossovers = shown(CROSSOVER_COLUMNS, (crossover(*case, options.rounds) for case in cases))
    scales = {"xscale": "log", "yscale": "log", "ylabel": "speed, in gather + scaled_dot_product_attention"}
    finish(
        options,
        lambda path: curves(path, crossovers, "queries", ["x sdpa"], ("model", "dtype", "keys"), lines=[1.0], **scales),
        kernel=kernel,
        threads=threads,
        decode=decodes,
        crossover=crossovers,
    )


if __name__ == "__main__":
    main()
