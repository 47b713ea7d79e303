"""How near do products of rows with weights come to what a core can multiply, and to how fast it reads the weights?

Two bounds, measured in the same run: a loop of fused multiply-adds in registers, and the bandwidth at which a sum reads
as many bytes as the weight has. A product's bound is the larger of both times. Where a core multiplies pairs of bf16 in
one instruction, bf16 may be above it. Beside `ops.linear`: torch's `F.linear`,
torch's product on packed weights (`mkldnn`, where this torch has it), and with --vllm PYTHON vLLM's oneDNN handler on
packed weights, in the interpreter that has vLLM.

Shapes are those of the small Llama of bench_serving (512 wide, 1,536 in its MLP, 8,192 tokens) and of a model that is
1,024 wide. Rows are those of decode steps and of a prompt. Every result is compared with a product in double before
anything is timed. Calls take turns, medians with their quartiles; one thread is timed by its own clock.
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

import torch
import torch.nn.functional as F

import kvpage._C as _C
from kvpage import ops
from kvpage.benchmarks.cells import Row, shown
from kvpage.benchmarks.figure import Figure, in_turns, seconds
from kvpage.benchmarks.peer_process import PeerProcess, vllm_peer
from kvpage.benchmarks.pictures import panels
from kvpage.benchmarks.script import VLLM, finish, option, parse
from kvpage.benchmarks.serving_bound import packed_product

SHAPES = ((512, 512), (1536, 512), (512, 1536), (8192, 512), (1024, 1024), (4096, 1024), (1024, 4096))  # out, in
ROWS = (1, 8, 32, 64, 256, 2048)
DTYPES = ("float32", "bfloat16", "float16")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SPEEDS = ("kvpage GF/s", "torch GF/s", "packed GF/s", "vllm GF/s")
COLUMNS = "{dtype:<9} {rows:>5} {columns:>7} {size:>5}" + "".join(f" {{{name}:>20.1f}}" for name in SPEEDS)
COLUMNS += " {of bound:>18.2f} {of torch:>18.2f}"
TURN = 0.004  # seconds of calls in one measurement
FMA_ROUNDS = 500_000  # of some milliseconds in all


def measured(calls: Mapping[str, Callable[[], object]], number: int, rounds: int) -> dict[str, list[float]]:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    return in_turns(calls, rounds, number, functools.partial(seconds, clock=clock))


def peak_flops(rounds: int) -> Figure:
    """Return a core's multiplications and additions per second in registers alone, times the threads."""
    work = _C._multiply_adds(FMA_ROUNDS) * torch.get_num_threads()
    return Figure.rate(work, measured({"fma": lambda: _C._multiply_adds(FMA_ROUNDS)}, 1, rounds)["fma"])


def read_rate(num_bytes: int, rounds: int) -> Figure:
    """Return the bytes per second at which a sum reads so much memory."""
    memory = torch.ones(max(num_bytes // 4, 1))
    number = max(1, int(TURN * 10e9 / num_bytes))
    return Figure.rate(num_bytes, measured({"sum": memory.sum}, number, rounds)["sum"])


def check(name: str, found: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> None:
    expected = x.double() @ w.double().T
    wrong = ((found.double() - expected).abs() > TOLERANCE[x.dtype] * (1 + expected.abs())).sum()
    if wrong:
        raise SystemExit(f"{name} is wrong in {wrong} of {found.numel()} numbers")


def measure_shape(
    rows: int, columns: int, size: int, dtype: torch.dtype, flops: Figure, rounds: int, peer: PeerProcess | None
) -> Row:
    x, w = torch.randn(rows, size).to(dtype), (torch.randn(columns, size) / size**0.5).to(dtype)
    out = torch.empty(rows, columns, dtype=dtype)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "kvpage": lambda: ops.linear(x, w, out=out),
        "torch": lambda: F.linear(x, w),
    }
    with suppress(AttributeError, RuntimeError, NotImplementedError):  # this torch has none
        calls["packed"] = functools.partial(packed_product(w, rows), x)
        calls["packed"]()
    for name, call in calls.items():
        check(name, call(), x, w)
    work, num_bytes = 2 * rows * columns * size, w.numel() * w.element_size()
    read = read_rate(num_bytes, rounds)
    bound = max(work / flops.median, num_bytes / read.median)
    number = max(1, int(TURN / (bound * 1.5)))
    taken = measured(calls, number, rounds)
    row: Row = {"dtype": str(dtype).removeprefix("torch."), "rows": rows, "columns": columns, "size": size}
    if peer:
        taken["vllm"] = peer.ask(**row, number=number, rounds=rounds)["seconds"]
    row |= {f"{name} GF/s": Figure.rate(work / 1e9, each) for name, each in taken.items()}
    return row | {
        "of bound": Figure.of(bound / each for each in taken["kvpage"]),
        "of torch": Figure.ratio(taken["torch"], taken["kvpage"]),
    }


def measure(dtypes: list[str], rows: list[int], rounds: int, peer: PeerProcess | None) -> Iterator[Row]:
    flops = peak_flops(rounds)
    print(f"bound: {flops.median / 1e9:.0f} GF/s of fused multiply-adds, {torch.get_num_threads()} threads")
    for dtype, (columns, size), num_rows in itertools.product(dtypes, SHAPES, rows):
        yield measure_shape(num_rows, columns, size, getattr(torch, dtype), flops, rounds, peer)


def main() -> None:
    dtypes = option(list(DTYPES[:2]), choices=DTYPES)
    options = parse("linear", __doc__, rounds=7, threads=1, dtypes=dtypes, rows=ROWS, vllm=VLLM)
    torch.manual_seed(0)
    with vllm_peer(options.vllm, "linear", options.threads) as peer:
        rows = shown(COLUMNS, measure(options.dtypes, options.rows, options.rounds, peer))
    scales = {"xscale": "log", "ylabel": "GF/s", "style": "o"}
    finish(options, lambda path: panels(path, rows, "dtype", x="rows", values=SPEEDS, **scales), rows=rows)


if __name__ == "__main__":
    main()
