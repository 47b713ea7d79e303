"""Measure the cost of allocating and releasing a block, the call from Python included.

Beside it, in the same run:
- numpy copy: what merely carrying the ids costs in Python: two reads of a property, as empty native calls, and for a
  batch numpy.empty with a copy of as many ids.
- array: the fair peer in Python, a free list in a numpy array whose end is sliced off, and counts set by one indexing.
  It refuses no block that is named twice, and knows no threads.
- list: a free list in plain Python, with a loop over the counts.

Each figure is a median of rounds, with the 25th and 75th percentile, of the thread's own time, which other processes
on the machine disturb less. The candidates take turns within a round.
Targets: 10 ns a block in batches of 100 and more; 400 ns for one block.

    python benchmarks/bench_pool.py [--rounds 21] [--plot pool.png]
"""

import argparse
import time
import timeit
from collections.abc import Callable
from typing import Any

import numpy as np

from kvpage import BlockPool
from kvpage.benchmarks.figure import Figure, dumps

NUM_BLOCKS = 1_000_000
BATCHES = [1, 10, 100, 1000, 10_000]
KINDS = ("pool", "numpy_copy", "array", "list")

Cycle = Callable[[], object]


class ArrayPool:
    """The least that a pool of Python over numpy does: ids in an array, of which the first num_free are free."""

    def __init__(self, ids: np.ndarray) -> None:
        self.free, self.num_free, self.counts = ids.copy(), len(ids), np.zeros(len(ids), np.int32)

    def allocate(self, n: int) -> np.ndarray:
        if n > self.num_free:
            raise MemoryError(n)
        self.num_free -= n
        ids = self.free[self.num_free : self.num_free + n].copy()
        self.counts[ids] = 1
        return ids

    def release(self, ids: np.ndarray) -> None:
        counts = self.counts[ids] - 1
        if (counts < 0).any():
            raise ValueError(ids)
        self.counts[ids] = counts
        freed = ids if not counts.any() else ids[counts == 0]
        self.free[self.num_free : self.num_free + len(freed)] = freed
        self.num_free += len(freed)


class ListPool:
    """The same with lists and loops."""

    def __init__(self, ids: np.ndarray) -> None:
        self.free, self.counts = ids.tolist(), [0] * len(ids)

    def allocate(self, n: int) -> list[int]:
        if n > len(self.free):
            raise MemoryError(n)
        ids = self.free[len(self.free) - n :]
        del self.free[len(self.free) - n :]
        for i in ids:
            self.counts[i] = 1
        return ids

    def release(self, ids: list[int]) -> None:
        for i in ids:
            self.counts[i] -= 1
            if self.counts[i] == 0:
                self.free.append(i)


def shuffled(seed: int) -> np.ndarray:
    """Ids in no order, as after some hours of service."""
    ids = np.arange(NUM_BLOCKS, dtype=np.int32)
    np.random.default_rng(seed).shuffle(ids)
    return ids


def used_pool(ids: np.ndarray) -> BlockPool:
    pool = BlockPool(NUM_BLOCKS)
    pool.allocate(NUM_BLOCKS)
    for part in np.array_split(ids, 1000):
        pool.release(part)
    return pool


def verify(pool: Any) -> None:
    first, second = pool.allocate(1000), pool.allocate(1000)
    assert len({*map(int, first), *map(int, second)}) == 2000
    pool.release(first)
    pool.release(second)


def cycles(pools: tuple[BlockPool, ArrayPool, ListPool], batch: int | None) -> dict[str, Cycle]:
    """One allocation with its release, of each kind. None: BlockPool's single calls."""
    pool, array, plain = pools
    n = batch or 1
    ids = np.arange(n, dtype=np.int32)

    def copy() -> None:
        _ = pool.num_blocks, pool.num_blocks
        if batch:
            np.copyto(np.empty(n, np.int32), ids)

    return {
        "pool": (lambda: pool.release(pool.allocate(n))) if batch else lambda: pool.release_one(pool.allocate_one()),
        "numpy_copy": copy,
        "array": lambda: array.release(array.allocate(n)),
        "list": lambda: plain.release(plain.allocate(n)),
    }


def nanoseconds(calls: dict[str, Cycle], number: int, rounds: int) -> dict[str, Figure]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(timeit.timeit(call, timer=time.thread_time, number=number))
    return {name: Figure.of(taken, 1e9 / number) for name, taken in times.items()}


def measure(rounds: int) -> list[dict[str, Any]]:
    ids = shuffled(0)
    pools = used_pool(ids), ArrayPool(ids), ListPool(ids)
    for pool in pools:
        verify(pool)
    rows = []
    for batch in (None, *BATCHES):
        found = nanoseconds(cycles(pools, batch), max(10, 20_000 // (batch or 1)), rounds)
        rows.append({"batch": batch or "one", **{f"{kind}_ns": figure for kind, figure in found.items()}})
    pools[0].check()
    return rows


def report(rows: list[dict[str, Any]]) -> bool:
    print("ns a cycle: median (25th to 75th percentile)")
    print(f"{'batch':>8}" + "".join(f"{kind:>28}" for kind in KINDS) + f"{'ns a block':>12}")
    for row in rows:
        cells = "".join(format(row[f"{kind}_ns"], ".0f").rjust(28) for kind in KINDS)
        print(f"{row['batch']:>8}{cells}{a_block(row):12.1f}")
    return rows[0]["pool_ns"].median <= 400 and all(a_block(row) <= 10 for row in rows[3:])


def a_block(row: dict[str, Any]) -> float:
    return row["pool_ns"].median / (1 if row["batch"] == "one" else row["batch"])


def plot(rows: list[dict[str, Any]], path: str) -> None:
    import matplotlib.pyplot as plt

    batches = [row["batch"] for row in rows[1:]]
    labels = ("BlockPool", "a copy of the ids", "numpy array", "Python list")
    for kind, label in zip(KINDS, labels, strict=True):
        low, middle, high = (
            [getattr(row[f"{kind}_ns"], part) / row["batch"] for row in rows[1:]] for part in ("low", "median", "high")
        )
        (line,) = plt.plot(batches, middle, "o-", label=label)
        plt.fill_between(batches, low, high, color=line.get_color(), alpha=0.2)
    plt.axhline(10, color="gray", linestyle=":", label="target")
    plt.xscale("log")
    plt.yscale("log")
    plt.xlabel("blocks a call")
    plt.ylabel("ns a block, allocate and release")
    plt.legend()
    plt.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--plot", metavar="PATH")
    args = parser.parse_args()
    rows = measure(args.rounds)
    met = report(rows)
    if args.plot:
        plot(rows, args.plot)
    print(dumps({"benchmark": "pool", "rounds": args.rounds, "rows": rows, "targets_met": met}))


if __name__ == "__main__":
    main()
