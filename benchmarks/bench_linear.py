"""How near do products of rows with weights come to what a core can multiply, and to how fast it reads the weights?

Two bounds, measured in the same run: a loop of fused multiply-adds in registers, and the bandwidth at which a sum reads
as many bytes as the weight has. A product's bound is the larger of both times. Where a core multiplies pairs of bf16 in
one instruction, bf16 may be above it. Beside `ops.linear`: torch's `F.linear`,
torch's product on packed weights (`mkldnn`, where this torch has it), and with --vllm PYTHON vLLM's oneDNN handler on
packed weights, in the interpreter that has vLLM.

Shapes are those of the small Llama of bench_serving (512 wide, 1,536 in its MLP, 8,192 tokens) and of a model that is
1,024 wide. Rows are those of decode steps and of a prompt. Every result is compared with a product in double before
anything is timed. Calls take turns, medians with their quartiles; one thread is timed by its own clock.

    python benchmarks/bench_linear.py [--threads N] [--rounds N] [--rows M ...] [--vllm PYTHON] [--plot PATH]
"""

import argparse
import functools
import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import kvpage._C as _C
from kvpage import ops
from kvpage.benchmarks.arguments import positive
from kvpage.benchmarks.figure import Figure, dumps, in_turns

SHAPES = ((512, 512), (1536, 512), (512, 1536), (8192, 512), (1024, 1024), (4096, 1024), (1024, 4096))  # out, in
ROWS = (1, 8, 32, 64, 256, 2048)
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
TURN = 0.004  # seconds of calls in one measurement
FMA_ROUNDS = 500_000  # of some milliseconds in all

PEER = """
import json, sys, time, torch
import vllm._custom_ops as custom
torch.set_num_threads(int(sys.argv[1]))
clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
for line in sys.stdin:
    rows, columns, size, dtype, number, rounds = json.loads(line)
    x, w = (torch.randn(n, size).to(getattr(torch, dtype)) for n in (rows, columns))
    handler = custom.create_onednn_mm(w.t())
    custom.onednn_mm(handler, x, None)
    taken = []
    for _ in range(rounds):
        before = clock()
        for _ in range(number):
            custom.onednn_mm(handler, x, None)
        taken.append((clock() - before) / number)
    print("peer", json.dumps(taken), flush=True)
"""


class VllmPeer:
    """vLLM's oneDNN products, in the interpreter that has vLLM."""

    def __init__(self, python: str, num_threads: int) -> None:
        command = [python, "-c", PEER, str(num_threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def seconds(self, rows: int, columns: int, size: int, dtype: torch.dtype, number: int, rounds: int) -> list[float]:
        asked = [rows, columns, size, str(dtype).removeprefix("torch."), number, rounds]
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("peer "):
                return json.loads(line.removeprefix("peer "))
        raise RuntimeError(f"vLLM's interpreter ended with code {self._process.wait()}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def clock() -> Callable[[], float]:
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def measured(calls: Mapping[str, Callable[[], object]], number: int, rounds: int) -> dict[str, list[float]]:
    now = clock()

    def seconds(call: Callable[[], object], number: int) -> float:
        before = now()
        for _ in range(number):
            call()
        return (now() - before) / number

    return in_turns(calls, rounds, number, seconds, warmups=1)


def peak_flops(rounds: int) -> Figure:
    """Return a core's multiplications and additions per second in registers alone, times the threads."""
    work = _C._multiply_adds(FMA_ROUNDS) * torch.get_num_threads()
    return Figure.rate(work, measured({"fma": lambda: _C._multiply_adds(FMA_ROUNDS)}, 1, rounds)["fma"])


def read_rate(num_bytes: int, rounds: int) -> Figure:
    """Return the bytes per second at which a sum reads so much memory."""
    memory = torch.ones(max(num_bytes // 4, 1))
    number = max(1, int(TURN * 10e9 / num_bytes))
    return Figure.rate(num_bytes, measured({"sum": memory.sum}, number, rounds)["sum"])


def packed_linear(x: torch.Tensor, w: torch.Tensor) -> Callable[[], torch.Tensor] | None:
    """Return torch's product on packed weights, where this torch has one."""
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(w, len(x))
        call = functools.partial(torch.ops.mkldnn._linear_pointwise, x, packed, None, "none", [], "")
        call()
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    return call


def check(name: str, found: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> None:
    expected = x.double() @ w.double().T
    wrong = ((found.double() - expected).abs() > TOLERANCE[x.dtype] * (1 + expected.abs())).sum()
    if wrong:
        raise SystemExit(f"{name} is wrong in {wrong} of {found.numel()} numbers")


def measure_shape(
    rows: int, columns: int, size: int, dtype: torch.dtype, flops: Figure, rounds: int, peer: VllmPeer | None
) -> dict[str, Any]:
    x, w = torch.randn(rows, size).to(dtype), (torch.randn(columns, size) / size**0.5).to(dtype)
    out = torch.empty(rows, columns, dtype=dtype)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "kvpage": lambda: ops.linear(x, w, out=out),
        "torch": lambda: F.linear(x, w),
    }
    if packed := packed_linear(x, w):
        calls["packed"] = packed
    for name, call in calls.items():
        check(name, call(), x, w)
    work, num_bytes = 2 * rows * columns * size, w.numel() * w.element_size()
    read = read_rate(num_bytes, rounds)
    bound = max(work / flops.median, num_bytes / read.median)
    number = max(1, int(TURN / (bound * 1.5)))
    taken = measured(calls, number, rounds)
    if peer:
        taken["vllm"] = peer.seconds(rows, columns, size, dtype, number, rounds)
    row = {"dtype": str(dtype).removeprefix("torch."), "rows": rows, "columns": columns, "size": size}
    row |= {f"{name} GF/s": Figure.rate(work / 1e9, each) for name, each in taken.items()}
    return row | {
        "of bound": Figure.of(bound / each for each in taken["kvpage"]),
        "of torch": Figure.ratio(taken["torch"], taken["kvpage"]),
    }


def measure(rows: list[int], rounds: int, peer: VllmPeer | None) -> Iterator[dict[str, Any]]:
    flops = peak_flops(rounds)
    print(f"bound: {flops.median / 1e9:.0f} GF/s of fused multiply-adds, {torch.get_num_threads()} threads")
    for dtype in DTYPES:
        for columns, size in SHAPES:
            for num_rows in rows:
                yield measure_shape(num_rows, columns, size, dtype, flops, rounds, peer)


def shown(row: dict[str, Any]) -> str:
    shape = f"{row['dtype']:9} {row['rows']:5} x {row['columns']:5} x {row['size']:5}"
    figures = [f"{name} {each:.1f}" for name, each in row.items() if name.endswith("GF/s")]
    return f"{shape}  {'  '.join(figures)}  bound {row['of bound']:.2f}  torch {row['of torch']:.2f}"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(DTYPES), figsize=(12, 5), sharey=True)
    for axis, dtype in zip(axes, DTYPES, strict=True):
        of_type = [row for row in rows if row["dtype"] == str(dtype).removeprefix("torch.")]
        for name in ("kvpage GF/s", "torch GF/s", "packed GF/s", "vllm GF/s"):
            found = [row for row in of_type if name in row]
            axis.plot([row["rows"] for row in found], [row[name].median for row in found], "o", label=name, alpha=0.6)
        axis.set(title=str(dtype), xlabel="rows", ylabel="GF/s", xscale="log")
        axis.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--rows", type=positive, nargs="+", default=list(ROWS))
    parser.add_argument("--vllm", metavar="PYTHON", help="the interpreter that has vLLM's CPU build")
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    peer = VllmPeer(given.vllm, given.threads) if given.vllm else None
    rows = []
    for row in measure(given.rows, given.rounds, peer):
        rows.append(row)
        print(shown(row), flush=True)
    if peer:
        peer.close()
    if given.plot:
        plot(rows, given.plot)
    print(dumps({"machine": platform.processor(), "threads": given.threads, "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
