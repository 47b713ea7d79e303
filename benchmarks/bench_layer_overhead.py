"""What does a layer of a decode step cost on a CPU besides its native calls?

The bound is the two native calls of a layer, one that writes rows and one that attends: the same arguments are given to
the extension again, in the same run. The rest is the time of the same layer while these calls return at once: checks, a
new output, and the arguments. It is also measured for plain tensors, which bind the cache anew and check everything.

Each output is compared with kvpage.ops.reference before anything is timed. Each figure is a median of rounds, with the
25th and 75th percentile, of the thread's own time, which other processes on the machine disturb less.
Targets: 25 us besides the native calls, and 25 Python calls of kvpage's own.

    python benchmarks/bench_layer_overhead.py [--rounds 21] [--number 200] [--plot layer_overhead.png]
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import torch

import kvpage._C as _C
from kvpage import CacheConfig, CacheEngine, ModelConfig, ops
from kvpage.benchmarks.figure import Figure, dumps, in_turns, seconds
from kvpage.ops import reference
from kvpage.serving.model.attention import paged_attention
from kvpage.serving.model.step import Step

BLOCK_SIZE = 16
SHAPES = {"llama 3 8B": (8, 4, 128), "qwen3 0.6B": (8, 2, 128), "gpt2": (12, 1, 64)}  # KV heads, group, head size
BATCHES = (1, 16)
NUM_KEYS = 64  # of each sequence: the fewer, the more the rest counts
MAX_MICROSECONDS, MAX_CALLS = 25, 25
NATIVE = ("reshape_and_cache", "paged_attention")


@contextmanager
def replaced(make: Callable[[Callable[..., object]], Callable[..., object]]) -> Iterator[None]:
    """Inside, the native calls of a layer are what `make` makes of them."""
    originals = {name: getattr(_C, name) for name in NATIVE}
    try:
        for name, own in originals.items():
            setattr(_C, name, make(own))
        yield
    finally:
        for name, own in originals.items():
            setattr(_C, name, own)


def without_native(call: Callable[[], object], number: int) -> float:
    """Seconds of a call whose native calls return at once."""
    with replaced(lambda own: lambda *args: None):
        return seconds(call, number, time.thread_time)


def call_all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


class Layer:
    """A layer of a decode step: `num_seqs` sequences with one new token each."""

    def __init__(self, shape: str, num_seqs: int, dtype: torch.dtype) -> None:
        heads, group, size = SHAPES[shape]
        blocks = -(-NUM_KEYS // BLOCK_SIZE)
        config = CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=num_seqs * blocks)
        engine = CacheEngine(config, ModelConfig(size, heads, ("full_attention",), dtype))
        self.layout, self.cache = engine.layout, engine.gpu_cache[0].normal_()
        ids = np.random.default_rng(0).permutation(num_seqs * blocks).astype(np.int32).reshape(num_seqs, blocks)
        last = NUM_KEYS - 1
        slots = ids[:, last // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + last % BLOCK_SIZE
        self.step = Step.make(engine, slots, ids, [last] * num_seqs, [NUM_KEYS] * num_seqs)
        self.query = torch.randn(1, heads * group, num_seqs, size).to(dtype)
        self.key, self.value = (torch.randn(1, heads, num_seqs, size).to(dtype) for _ in range(2))
        self.module, self.scale = SimpleNamespace(layer_idx=0), size**-0.5

    def attend(self) -> torch.Tensor:
        """The call that a model makes."""
        self.step.calls.clear()
        module: Any = self.module
        output, _ = paged_attention(
            module, self.query, self.key, self.value, None, scaling=self.scale, kvpage=self.step
        )
        return output

    def attend_unbound(self) -> torch.Tensor:
        """The same operations, given tensors."""
        query, key, value = (rows[0].transpose(0, 1) for rows in (self.query, self.key, self.value))
        ops.reshape_and_cache(key, value, self.cache, self.step.slot_mapping, self.layout)
        tables, lengths = self.step.block_tables, self.step.seq_lens
        return ops.paged_attention(query, self.cache, tables, lengths, self.layout, scale=self.scale)

    def native_calls(self) -> tuple[list[Callable[[], object]], object]:
        """The layer's calls of the extension, to be made again, and the output, which has to be held for them."""
        made: list[Callable[[], object]] = []

        def record(own: Callable[..., object]) -> Callable[..., object]:
            def call(*args: Any) -> object:
                made.append(functools.partial(own, *args))
                return own(*args)

            return call

        with replaced(record):
            output = self.attend()
        return made, output

    def check(self) -> None:
        """AssertionError unless both ways give what the reference gives."""
        query, tables, lengths = self.query[0].transpose(0, 1), self.step.block_tables, torch.tensor(self.step.seq_lens)
        found = self.attend()[0], self.attend_unbound()
        want = reference.paged_attention(query, self.cache, tables, lengths, self.layout, scale=self.scale)
        tolerance = 1e-4 if self.query.dtype == torch.float32 else 2e-2
        for output in found:
            torch.testing.assert_close(output, want, rtol=tolerance, atol=tolerance)

    def num_calls(self) -> int:
        """Python functions of kvpage that one call enters."""
        count = 0

        def profile(frame: FrameType, event: str, argument: object) -> None:
            nonlocal count
            count += event == "call" and frame.f_globals.get("__name__", "").startswith("kvpage.")

        before = sys.getprofile()
        layer = self.attend
        sys.setprofile(profile)
        try:
            layer()
        finally:
            sys.setprofile(before)
        return count - 1  # without the benchmark's own


def measure(rounds: int, number: int) -> list[dict[str, Any]]:
    rows = []
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            for num_seqs in BATCHES:
                layer = Layer(shape, num_seqs, dtype)
                layer.check()
                native, held = layer.native_calls()
                whole: dict[str, Callable[[], object]] = {
                    "layer": layer.attend,
                    "native": functools.partial(call_all, native),
                }
                rest: dict[str, Callable[[], object]] = {"besides": layer.attend, "unbound": layer.attend_unbound}
                taken = in_turns(whole, rounds, number, functools.partial(seconds, clock=time.thread_time))
                taken |= in_turns(rest, rounds, number, without_native)
                del held
                rows.append(
                    {
                        "model": shape,
                        "dtype": str(dtype).removeprefix("torch."),
                        "seqs": num_seqs,
                        "calls": layer.num_calls(),
                        "layer us": Figure.of(taken["layer"], 1e6),
                        "native us": Figure.of(taken["native"], 1e6),
                        "besides us": Figure.of(taken["besides"], 1e6),
                        "unbound us": Figure.of(taken["unbound"], 1e6),
                    }
                )
    return rows


def report(rows: list[dict[str, Any]]) -> bool:
    """Print the table; whether the targets are met."""
    print("us of a layer: median (25th to 75th percentile)")
    columns = ("layer us", "native us", "besides us", "unbound us")
    print(f"{'model':12} {'dtype':9} {'seqs':>4} {'calls':>5}" + "".join(f"{name:>24}" for name in columns))
    for row in rows:
        cells = "".join(format(row[name], ".1f").rjust(24) for name in columns)
        print(f"{row['model']:12} {row['dtype']:9} {row['seqs']:4} {row['calls']:5}{cells}")
    return all(row["calls"] <= MAX_CALLS and row["besides us"].median <= MAX_MICROSECONDS for row in rows)


def plot(rows: list[dict[str, Any]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    names = [f"{row['model']}, {row['dtype']}, {row['seqs']}" for row in rows]
    for offset, (column, label) in enumerate((("besides us", "a layer of a step"), ("unbound us", "plain tensors"))):
        places = [place + 0.4 * offset for place in range(len(rows))]
        axes.barh(places, [row[column].median for row in rows], height=0.4, label=label)
    axes.axvline(MAX_MICROSECONDS, color="gray", linestyle=":", label="target")
    axes.set_yticks([place + 0.2 for place in range(len(rows))], names, fontsize="small")
    axes.set_xlabel("us besides the native calls")
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--number", type=int, default=200, help="calls in a row that make one measurement")
    parser.add_argument("--plot", metavar="PATH")
    options = parser.parse_args()
    torch.manual_seed(0)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the clock is that of one thread
    try:
        with torch.no_grad():
            rows = measure(options.rounds, options.number)
    finally:
        torch.set_num_threads(num_threads)
    met = report(rows)
    if options.plot:
        plot(rows, options.plot)
    print(dumps({"benchmark": "layer_overhead", "rounds": options.rounds, "rows": rows, "targets_met": met}))


if __name__ == "__main__":
    main()
