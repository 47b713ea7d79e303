"""What does a layer of a decode step cost on a CPU besides its native calls?

The bound is the two native calls of a layer, one that writes rows and one that attends: the same arguments are given to
the extension again, in the same run. The rest is the time of the same layer while these calls return at once: checks, a
new output, and the arguments. It is also measured for plain tensors, which bind the cache anew and check everything.

Each output is compared with kvpage.ops.reference before anything is timed. Each figure is a median of rounds, with the
25th and 75th percentile, of the thread's own time, which other processes on the machine disturb less.
Targets: 25 us besides the native calls, and 25 Python calls of kvpage's own.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import kvpage._C as _C
from kvpage import CacheConfig, CacheEngine, ModelConfig, ops
from kvpage.benchmarks.cells import Row, shown
from kvpage.benchmarks.figure import Figure, in_turns, thread_seconds
from kvpage.benchmarks.pictures import grouped
from kvpage.benchmarks.python_calls import num_calls
from kvpage.benchmarks.script import finish, option, parse
from kvpage.ops import reference
from kvpage.serving.model.attention import paged_attention
from kvpage.serving.model.step import Step

BLOCK_SIZE = 16
SHAPES = {"llama 3 8B": (8, 4, 128), "qwen3 0.6B": (8, 2, 128), "gpt2": (12, 1, 64)}  # KV heads, group, head size
BATCHES = (1, 16)
NUM_KEYS = 64  # of each sequence: the fewer, the more the rest counts
MAX_MICROSECONDS, MAX_CALLS = 25, 25
COLUMNS = "{model:<12} {dtype:<9} {seqs:>4} {calls:>5}" + "".join(
    f"{{{name} us:>24.1f}}" for name in ("layer", "native", "besides", "unbound")
)
Call = Callable[[], object]
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


def without_native(call: Call, number: int) -> float:
    """Seconds of a call whose native calls return at once."""
    with replaced(lambda own: lambda *args: None):
        return thread_seconds(call, number)


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
        return paged_attention(module, self.query, self.key, self.value, None, scaling=self.scale, kvpage=self.step)[0]

    def attend_unbound(self) -> torch.Tensor:
        """The same operations, given tensors."""
        query, key, value = (rows[0].transpose(0, 1) for rows in (self.query, self.key, self.value))
        ops.reshape_and_cache(key, value, self.cache, self.step.slot_mapping, self.layout)
        tables, lengths = self.step.block_tables, self.step.seq_lens
        return ops.paged_attention(query, self.cache, tables, lengths, self.layout, scale=self.scale)

    def native_calls(self) -> tuple[list[Call], object]:
        """The layer's calls of the extension, to be made again, and the output, which has to be held for them."""
        made: list[Call] = []

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


def measure(shape: str, dtype: torch.dtype, num_seqs: int, rounds: int, number: int) -> Row:
    layer = Layer(shape, num_seqs, dtype)
    layer.check()
    native, held = layer.native_calls()
    whole: dict[str, Call] = {"layer": layer.attend, "native": lambda: [call() for call in native]}
    rest: dict[str, Call] = {"besides": layer.attend, "unbound": layer.attend_unbound}
    taken = in_turns(whole, rounds, number, thread_seconds) | in_turns(rest, rounds, number, without_native)
    del held
    names = {"model": shape, "dtype": str(dtype).removeprefix("torch."), "seqs": num_seqs}
    names["calls"] = num_calls(layer.attend)
    return names | {f"{name} us": Figure.of(each, 1e6) for name, each in taken.items()}


def main() -> None:
    options = parse(
        "layer_overhead", __doc__, rounds=21, number=option(200, "calls in a row that make one measurement")
    )
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the clock is that of one thread
    cases = itertools.product(SHAPES, (torch.float32, torch.bfloat16), BATCHES)
    print("us of a layer: median (25th to 75th percentile)")
    with torch.no_grad():
        rows = shown(COLUMNS, (measure(*case, options.rounds, options.number) for case in cases))
    met = all(row["calls"] <= MAX_CALLS and row["besides us"].median <= MAX_MICROSECONDS for row in rows)
    names = [f"{row['model']}, {row['dtype']}, {row['seqs']}" for row in rows]
    labels = {"a layer of a step": "besides us", "plain tensors": "unbound us"}
    series = {label: [row[column] for row in rows] for label, column in labels.items()}
    draw = functools.partial(grouped, names=names, series=series, label="us besides the native calls")
    finish(options, lambda path: draw(path, lines=[MAX_MICROSECONDS]), rows=rows, targets_met=met)


if __name__ == "__main__":
    main()
