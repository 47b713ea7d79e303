"""Measure the cost, for each cached block, of a follower of the cache.

A block is cached and evicted again: without a log, with one, with the log taken, as hashed events, and packed for the
wire. Beside it, in the same run, what none of the latter can be below in Python: one SHA-256 over a block's tokens and
the hash before it. For comparison: a step that computes 16 tokens of an 8-billion-parameter model takes milliseconds.

    python benchmarks/bench_events.py [--plot events.png]
"""

import argparse
import hashlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvpage import BlockPool, PrefixTree
from kvpage.benchmarks.figure import Figure, dumps
from kvpage.observe.events.block_events import BlockEvents
from kvpage.observe.events.schema import BlockRemoved, BlockStored, EventBatch, pack, unpack
from kvpage.observe.tree_watch import TreeChanges

BLOCK_SIZE = 16
BATCHES = [1, 16, 512]  # blocks of a prompt
NUM_BLOCKS = 4096  # a measurement
REPEATS = 15


def life(batch: int, follow: Callable[[PrefixTree], object] | None, log: bool) -> float:
    """Microseconds for each block of prompts that are cached and evicted."""
    pool = BlockPool(NUM_BLOCKS)
    tree = PrefixTree(pool, BLOCK_SIZE)
    if log:
        tree.log_changes(64 << 20)
        tree.take_changes()
    prompts = [np.full(batch * BLOCK_SIZE, i, np.int32) for i in range(NUM_BLOCKS // batch)]
    begin = time.perf_counter()
    for prompt in prompts:
        tree.release(tree.insert(prompt, pool.allocate(batch)))
        tree.evict(batch)
        if follow:
            follow(tree)
    seconds = time.perf_counter() - begin
    assert tree.num_cached == 0 and pool.num_free == NUM_BLOCKS
    return seconds / NUM_BLOCKS * 1e6


def sha256() -> float:
    """Microseconds for a block's hash alone."""
    digest, tokens = b"0" * 32, b"1" * (8 * BLOCK_SIZE)
    begin = time.perf_counter()
    for _ in range(NUM_BLOCKS):
        digest = hashlib.sha256(digest + tokens).digest()
    return (time.perf_counter() - begin) / NUM_BLOCKS * 1e6


def followers() -> dict[str, tuple[Callable[[PrefixTree], object] | None, bool]]:
    hashed, packed = BlockEvents(BLOCK_SIZE), BlockEvents(BLOCK_SIZE)

    def events(tree: PrefixTree) -> None:
        hashed.events(TreeChanges(*tree.take_changes()))

    def payload(tree: PrefixTree) -> None:
        pack(EventBatch(0.0, packed.events(TreeChanges(*tree.take_changes())), 0))

    return {
        "no log": (None, False),
        "log": (None, True),
        "log, taken": (lambda tree: tree.take_changes(), True),
        "events": (events, True),
        "packed": (payload, True),
    }


def verify() -> None:
    """Every block is told once as stored and once as removed."""
    pool = BlockPool(8)
    tree = PrefixTree(pool, BLOCK_SIZE)
    tree.log_changes(1 << 20)
    events = BlockEvents(BLOCK_SIZE)
    events.events(TreeChanges(*tree.take_changes()))
    tree.release(tree.insert(list(range(8 * BLOCK_SIZE)), pool.allocate(8)))
    tree.evict(8)
    made = events.events(TreeChanges(*tree.take_changes()))
    stored, removed = unpack(pack(EventBatch(0.0, made, 0))).events
    assert isinstance(stored, BlockStored) and isinstance(removed, BlockRemoved)
    assert stored.token_ids == list(range(8 * BLOCK_SIZE))
    assert sorted(stored.block_hashes) == sorted(removed.block_hashes) and len(set(stored.block_hashes)) == 8


def measure() -> list[dict[str, Any]]:
    verify()
    rows = []
    for batch in BATCHES:
        times: dict[str, list[float]] = {name: [] for name in followers()}
        for _ in range(REPEATS):  # in turns, so that company on the machine is shared
            for name, (follow, log) in followers().items():
                times[name].append(life(batch, follow, log))
        rows.append({"batch": batch, **{name: Figure.of(taken) for name, taken in times.items()}})
        rows[-1]["sha256"] = Figure.of(sha256() for _ in range(REPEATS))
    return rows


def report(rows: list[dict[str, Any]]) -> None:
    names = list(rows[0])[1:]
    print("microseconds for each block that is cached and evicted\n")
    print(f"{'blocks a prompt':>15}" + "".join(f"{name:>22}" for name in names))
    for row in rows:
        cells = (f"{row[name]:.3f}" for name in names)
        print(f"{row['batch']:>15}" + "".join(f"{cell:>22}" for cell in cells))


def plot(rows: list[dict[str, Any]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name in list(rows[0])[1:]:
        style = "--" if name == "sha256" else "-"
        axes.plot([row["batch"] for row in rows], [row[name].median for row in rows], style, marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="blocks a prompt", ylabel="us a block", title="Following the cache")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", metavar="PATH")
    args = parser.parse_args()
    rows = measure()
    report(rows)
    if args.plot:
        plot(rows, args.plot)
    print(dumps({"benchmark": "events", "unit": "us", "rows": rows}))


if __name__ == "__main__":
    main()
