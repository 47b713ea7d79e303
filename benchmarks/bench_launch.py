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
"""

import itertools
from collections.abc import Callable, Iterator

import torch

from kvpage import CacheLayout, ops
from kvpage.benchmarks.cells import Row, shown
from kvpage.benchmarks.fake_device import FakeDevice, fake_device
from kvpage.benchmarks.figure import Figure, in_turns, thread_seconds
from kvpage.benchmarks.pictures import grouped
from kvpage.benchmarks.python_calls import num_calls
from kvpage.benchmarks.script import finish, option, parse
from kvpage.layout.attention import Attention
from kvpage.layout.rotation import Rotation
from kvpage.ops.cuda import blend, chunks

LAYOUT = CacheLayout(16, 8, 128, torch.bfloat16)
NUM_SEQS, NUM_LAYERS, CHUNK_TOKENS, NUM_BLOCKS = 64, 32, 256, 64
TARGETS_US = {"write rows": 8}
COLUMNS = "{operation:<14} {launches:>8} {calls:>6}{repeated us:>24.1f}{anew us:>24.1f}{bound us:>24.1f}"
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
    launches = []
    for forget in (False, True):
        if forget:
            device.forget()
        device.launches.clear()
        call()
        launches.append(  # without addresses: a call may allocate
            [
                (name, grid, [value for value in arguments if not isinstance(value, int) or value < LEAST_ADDRESS])
                for name, grid, arguments in device.launches
            ]
        )
    assert launches[0] == launches[1], "a repeated launch must be the one that is made anew"
    return len(launches[0])


def bound_of(device: FakeDevice, call: Call) -> Call:
    """Return the launcher's part of a call: no more than to be called with the arguments."""
    device.launches.clear()
    call()
    launches = [(device.launcher_cls(None, None), grid, arguments) for _, grid, arguments in device.launches]

    def launch() -> None:
        for launcher, grid, arguments in launches:
            launcher(*grid, 7, "", None, None, None, None, *arguments)

    return launch


def measure(rounds: int, number: int) -> Iterator[Row]:
    with torch.no_grad(), fake_device() as device:
        for name, call in make_calls(device).items():
            device.keeps = True
            num_launches, bound, count = check(device, call), bound_of(device, call), num_calls(call)
            device.keeps = False

            def anew(call: Call = call) -> None:
                device.forget()
                call()

            taken = in_turns({"repeated": call, "anew": anew, "bound": bound}, rounds, number, thread_seconds)
            row = {"operation": name, "launches": num_launches, "calls": count}
            yield row | {f"{kind} us": Figure.of(each, 1e6) for kind, each in taken.items()}


def main() -> None:
    options = parse("launch", __doc__, rounds=15, number=option(100, "calls in a row that make one measurement"))
    print("us of a call: median (25th to 75th percentile)")
    rows = shown(COLUMNS, measure(options.rounds, options.number))
    by_name = {row["operation"]: row for row in rows}
    met = all(by_name[name]["repeated us"].median <= target for name, target in TARGETS_US.items())
    series = {kind: [row[f"{kind} us"] for row in rows] for kind in ("repeated", "anew")}
    label = "us of the host a call"
    finish(options, lambda path: grouped(path, list(by_name), series, label), rows=rows, targets_met=met)


if __name__ == "__main__":
    main()
