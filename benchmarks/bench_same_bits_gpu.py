"""What do the kernels of `same_bits` cost on a GPU, and do their rows have the same bits in every batch?

    product      kvpage.kernels.linear beside torch's F.linear
    attention    splits at fixed positions beside kvpage's kernel, whose splits follow from the lengths
    logarithms   kvpage.kernels.log_softmax beside torch's

Before anything is timed, rows are computed alone, in parts and together, and their bits compared; and all of them with
the other way, up to rounding. A case that differs ends the run. Bounds: a copy of as many bytes as a case reads and
writes once, measured in the same run, and "TFLOP/s" beside what the device multiplies. Untried on a device so far.

    kvpage bench same_bits_gpu [--device cuda] [--plot PATH]
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from kvpage import CacheLayout, ops
from kvpage.benchmarks.bench_shared_prefix import Measure, measure_on
from kvpage.benchmarks.cells import Row, shown
from kvpage.benchmarks.figure import Figure, in_turns, result
from kvpage.benchmarks.pictures import curves
from kvpage.benchmarks.script import DEVICE, finish, option, parse
from kvpage.benchmarks.serving_workloads import DTYPES
from kvpage.ops.cuda.layers import device_linear
from kvpage.serving.sampling.log_softmax import log_softmax

BLOCK_SIZE, KV_HEADS, HEADS, SIZE = 16, 8, 32, 128  # of Llama 3 8B
TOLERANCE = 2e-2
COLUMNS = (
    "{case:<12} {dtype:>5} {rows:>5} {keys:>6} {fixed us:>26.1f} {other us:>26.1f} {times:>18.2f} {of bound:>18.2f} "
    "{TFLOP/s:>18.1f}"
)
Compute = Callable[[int, int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """fixed, other: compute rows [begin, end). num_bytes: read and written once. num_products: of two numbers."""

    fixed: Compute
    other: Compute
    num_rows: int
    num_bytes: int
    num_products: int

    def check(self) -> None:
        """AssertionError unless a row has the same bits everywhere, and all are near the other way's."""
        whole = self.fixed(0, self.num_rows)
        middle = self.num_rows // 2
        for begin, end in {(0, 1), (middle, middle + 1), (middle, self.num_rows), (0, max(middle, 1))}:
            assert torch.equal(self.fixed(begin, end), whole[begin:end]), f"rows {begin} to {end} have other bits"
        torch.testing.assert_close(whole, self.other(0, self.num_rows), rtol=TOLERANCE, atol=TOLERANCE)


def product_case(num_rows: int, size: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Return products of rows with a square weight."""
    rows = torch.randn(num_rows, size, device=device).to(dtype)
    weight = (torch.randn(size, size, device=device) * size**-0.5).to(dtype)

    def fixed(begin: int, end: int) -> torch.Tensor:
        out = device_linear(rows[begin:end], weight, None) if rows.is_cuda else None
        return ops.linear(rows[begin:end], weight) if out is None else out

    num_bytes = (weight.numel() + 2 * rows.numel()) * rows.element_size()
    return Case(
        fixed, lambda begin, end: F.linear(rows[begin:end], weight), num_rows, num_bytes, num_rows * size * size
    )


def logarithm_case(num_rows: int, vocab_size: int, device: torch.device) -> Case:
    """Return logarithms of softmax."""
    scores = torch.randn(num_rows, vocab_size, device=device)

    return Case(
        lambda begin, end: log_softmax(scores[begin:end]),
        lambda begin, end: scores[begin:end].log_softmax(-1),
        num_rows,
        2 * scores.nbytes,
        0,
    )


def attention_case(num_rows: int, length: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Return decodes of as many sequences of `length` tokens."""
    layout, blocks_each = CacheLayout(BLOCK_SIZE, KV_HEADS, SIZE, dtype), -(-length // BLOCK_SIZE)
    cache = ops.BoundCache(layout.allocate(num_rows * blocks_each, 1, device)[0].normal_(), layout)
    ids = torch.randperm(num_rows * blocks_each).to(torch.int32)
    tables = ids.view(num_rows, blocks_each).to(device)
    query = torch.randn(num_rows, HEADS, SIZE, device=device).to(dtype)

    def compute(begin: int, end: int, is_fixed: bool) -> torch.Tensor:
        lengths = torch.full((end - begin,), length, device=device)
        sequences = ops.Sequences(cache, end - begin, tables[begin:end], lengths, None, max_seq_len=length)
        if is_fixed:
            sequences.fix_order()
        return ops.attend(query[begin:end], cache, sequences, ops.Attention(SIZE**-0.5))

    num_keys = num_rows * length
    num_bytes = num_keys * 2 * KV_HEADS * SIZE * query.element_size()
    return Case(partial(compute, is_fixed=True), partial(compute, is_fixed=False), num_rows, num_bytes, 0)


def cases(
    dtype: torch.dtype, all_rows: list[int], size: int, vocab_size: int, keys: list[int], device: torch.device
) -> Iterator[tuple[str, int, Case]]:
    """Yield a name, the keys and the case."""
    for num_rows in all_rows:
        yield "product", 0, product_case(num_rows, size, dtype, device)
    yield "logarithms", 0, logarithm_case(min(max(all_rows), 64), vocab_size, device)
    for length, num_rows in itertools.product(keys, sorted({1, min(max(all_rows), 64)})):
        yield "attention", length, attention_case(num_rows, length, dtype, device)


def measure(name: str, dtype: str, keys: int, case: Case, clock: Measure, rounds: int, device: torch.device) -> Row:
    case.check()
    source, target = torch.ones(2, max(case.num_bytes // 2, 1), dtype=torch.uint8, device=device)
    calls: dict[str, Callable[[], object]] = {
        "fixed": partial(case.fixed, 0, case.num_rows),
        "other": partial(case.other, 0, case.num_rows),
        "bound": lambda: target.copy_(source),
    }
    taken = in_turns({way: partial(clock, call, 1) for way, call in calls.items()}, rounds, measure=result)
    return {
        **{"case": name, "dtype": dtype, "rows": case.num_rows, "keys": keys},
        **{f"{way} us": Figure.of(taken[way], 1e6) for way in calls},
        "times": Figure.ratio(taken["fixed"], taken["other"]),
        "of bound": Figure.ratio(taken["bound"], taken["fixed"]),
        "TFLOP/s": Figure.of([2 * case.num_products / 1e12 / one for one in taken["fixed"]]),
    }


def main() -> None:
    options = parse(
        "same_bits_gpu",
        __doc__,
        device=DEVICE,
        rounds=9,
        rows=option([1, 64, 2048], "multiplied together"),
        size=option(4096, "of a row, and of products"),
        vocab=option(128256, "scores of a row"),
        keys=option([512, 8192], "of a sequence"),
        dtypes=option(["bf16", "fp32"], "of rows, weights and blocks", choices=list(DTYPES)),
        seconds=option(math.inf, "after which no further case begins"),
    )
    torch.manual_seed(0)
    device, deadline = torch.device(options.device), time.monotonic() + options.seconds
    clock = measure_on(device)
    found = (
        (dtype, *one)
        for dtype in options.dtypes
        for one in cases(DTYPES[dtype], options.rows, options.size, options.vocab, options.keys, device)
    )
    begun = (one for at, one in enumerate(found) if at == 0 or time.monotonic() < deadline)
    rows = shown(
        COLUMNS,
        (measure(name, dtype, keys, case, clock, options.rounds, device) for dtype, name, keys, case in begun),
    )
    finish(
        options,
        lambda path: curves(path, rows, "rows", ["times"], ("case", "dtype", "keys"), lines=[1.0], ylabel="times"),
        results=rows,
    )


if __name__ == "__main__":
    main()
