"""How long does the host take to launch an operation on a GPU?

Measured is the time of a call, checks included, up to Triton's launcher, which is replaced: so it runs without a GPU,
and on one nothing but the launcher would be added. Shapes are those of a decode step of Qwen3-0.6B with 64 sequences,
and of a chunk of 256 tokens in 32 layers.

    repeated    a call like an earlier one
    anew        the same where no earlier launch is known: Triton derives from all arguments what to launch
    bound       Triton's launcher alone, given the same arguments

"gather" is of the same lengths each time, as in the layers of a step; "gather others" of other ones than the last.

Arguments and grids of repeated calls are compared with those of calls anew before anything is timed. Figures are
medians of rounds with quartiles, of the thread's own time. Target: rows are written within 8 us.

    python benchmarks/bench_launch.py [--rounds 15] [--number 100] [--plot PATH]
"""

import argparse
import functools
import itertools
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from kvpage import CacheLayout, ops
from kvpage.benchmarks.arguments import positive
from kvpage.benchmarks.fake_device import FakeDevice, fake_device
from kvpage.benchmarks.figure import Figure, dumps, in_turns, seconds
from kvpage.layout.attention import Attention
from kvpage.layout.rotation import Rotation
from kvpage.ops.cuda import blend, chunks

LAYOUT = CacheLayout(16, 8, 128, torch.bfloat16)
NUM_SEQS, NUM_LAYERS, CHUNK_TOKENS, NUM_BLOCKS = 64, 32, 256, 64
TARGETS_US = {"write rows": 8}
Call = Callable[[], object]

LEAST_ADDRESS = 2**22
"""Where a program lies that is linked to a fixed place, with its heap after it. No other argument is so large."""


def make_calls(device: FakeDevice) -> dict[str, Call]:
    """The calls by name; all on one cache."""
    caches = LAYOUT.allocate(NUM_BLOCKS, NUM_LAYERS, torch.device("cpu"))
    cache, ids = device.bound(caches[0], LAYOUT), torch.arange(CHUNK_TOKENS // 16, dtype=torch.int32)
    key, value = (torch.zeros(NUM_SEQS, 8, 128, dtype=torch.bfloat16) for _ in range(2))
    query, slots = torch.zeros(NUM_SEQS, 16, 128, dtype=torch.bfloat16), torch.arange(NUM_SEQS)
    tables = torch.zeros(NUM_SEQS, 32, dtype=torch.int32)
    sequences = ops.Sequences.of_step(cache, NUM_SEQS, tables, torch.full((NUM_SEQS,), 400), None, 1, 512)
    device.sequences.append(sequences)
    chunk = torch.zeros(NUM_LAYERS, 2, CHUNK_TOKENS, 8, 128, dtype=torch.bfloat16)
    attention, angles = Attention(128**-0.5, value_size=128), torch.zeros(NUM_SEQS, 64)
    rotation, views = Rotation(angles, angles, 128, 0, False), LAYOUT.views(caches[0])
    blocks = views[0].rows[..., 0, :]
    lengths, others = [1] * NUM_SEQS, itertools.cycle(([0, 2] * (NUM_SEQS // 2), [2, 0] * (NUM_SEQS // 2)))
    return {
        "write rows": lambda: ops.reshape_and_cache(key, value, cache, slots),
        "attend": lambda: ops.attend(query, cache, sequences, attention),
        "gather": lambda: ops.gather_cache(cache, tables, lengths, out=(key, value)),
        "gather others": lambda: ops.gather_cache(cache, tables, next(others), out=(key, value)),
        "store chunk": lambda: chunks.store_chunk(caches, ids, 0, chunk, LAYOUT, None, [(0, NUM_LAYERS)]),
        "load chunk": lambda: chunks.load_chunk(caches, ids, 0, chunk, LAYOUT, None, [(0, NUM_LAYERS)]),
        "blend rows": lambda: blend.mix_rows(key, blocks, rotation, None, None, None, slots),
    }


def check(device: FakeDevice, call: Call) -> int:
    """Return the number of launches of a call. AssertionError unless a repeated call launches what it does anew."""
    call()
    found = []
    for forget in (False, True):
        if forget:
            device.forget()
        device.launches.clear()
        call()
        found.append([(name, grid, _small(arguments)) for name, grid, arguments in device.launches])
    assert found[0] == found[1], "a repeated launch must be the one that is made anew"
    return len(found[0])


def _small(arguments: list[Any]) -> list[Any]:
    """Without addresses: a call may allocate."""
    return [value for value in arguments if not (isinstance(value, int) and value >= LEAST_ADDRESS)]


def num_calls(call: Call) -> int:
    """Return the Python functions of kvpage's own that a repeated call enters."""
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        name = frame.f_globals.get("__name__", "")
        count += event == "call" and name.startswith("kvpage.") and not name.startswith("kvpage.benchmarks.")

    call()
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return count


def bound_of(device: FakeDevice, call: Call) -> Call:
    """Return the launcher's part of a call: no more than to be called with the arguments."""
    device.launches.clear()
    call()
    launches = [(device.launcher_cls(None, None), grid, arguments) for _, grid, arguments in device.launches]

    def launch() -> None:
        for launcher, grid, arguments in launches:
            launcher(*grid, 7, "", None, None, None, None, *arguments)

    return launch


def measure(rounds: int, number: int) -> list[dict[str, Any]]:
    table = []
    with fake_device() as device:
        for name, call in make_calls(device).items():
            device.keeps = True
            num_launches, bound, count = check(device, call), bound_of(device, call), num_calls(call)
            device.keeps = False

            def anew(call: Call = call) -> None:
                device.forget()
                call()

            calls: dict[str, Call] = {"repeated": call, "anew": anew, "bound": bound}
            taken = in_turns(calls, rounds, number, functools.partial(seconds, clock=time.thread_time))
            row: dict[str, Any] = {"operation": name, "launches": num_launches, "calls": count}
            table.append(row | {f"{kind} us": Figure.of(each, 1e6) for kind, each in taken.items()})
    return table


def report(table: list[dict[str, Any]]) -> bool:
    """Print the table; whether the targets are met."""
    columns = ("repeated us", "anew us", "bound us")
    print("us of a call: median (25th to 75th percentile)")
    print(f"{'operation':14} {'launches':>8} {'calls':>6}" + "".join(f"{name:>24}" for name in columns))
    for row in table:
        cells = "".join(format(row[name], ".1f").rjust(24) for name in columns)
        print(f"{row['operation']:14} {row['launches']:8} {row['calls']:6}{cells}")
    by_name = {row["operation"]: row["repeated us"].median for row in table}
    return all(by_name[name] <= target for name, target in TARGETS_US.items())


def plot(table: list[dict[str, Any]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for offset, column in enumerate(("repeated us", "anew us")):
        places = [place + 0.4 * offset for place in range(len(table))]
        axes.barh(places, [row[column].median for row in table], height=0.4, label=column.removesuffix(" us"))
    axes.set_yticks([place + 0.2 for place in range(len(table))], [row["operation"] for row in table])
    axes.set_xlabel("us of the host a call")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=positive, default=15)
    parser.add_argument("--number", type=positive, default=100, help="calls in a row that make one measurement")
    parser.add_argument("--plot", metavar="PATH")
    options = parser.parse_args()
    with torch.no_grad():
        table = measure(options.rounds, options.number)
    met = report(table)
    if options.plot:
        plot(table, options.plot)
    print(dumps({"benchmark": "launch", "rounds": options.rounds, "rows": table, "targets_met": met}))


if __name__ == "__main__":
    main()
