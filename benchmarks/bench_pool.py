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
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np

from kvpage import BlockPool
from kvpage.benchmarks.cells import Row, shown
from kvpage.benchmarks.figure import Figure, in_turns, thread_seconds
from kvpage.benchmarks.pictures import curves
from kvpage.benchmarks.script import finish, parse

NUM_BLOCKS = 1_000_000
BATCHES = [1, 10, 100, 1000, 10_000]
KINDS = ("pool", "numpy_copy", "array", "list")
COLUMNS = "{batch:>8}" + "".join(f"{{{kind}_ns:>28.0f}}" for kind in KINDS) + "{a block:>12.1f}"


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


def make_pools() -> tuple[BlockPool, ArrayPool, ListPool]:
    """Return pools whose ids are in no order, as after some hours of service."""
    ids, pool = np.random.default_rng(0).permutation(NUM_BLOCKS).astype(np.int32), BlockPool(NUM_BLOCKS)
    pool.allocate(NUM_BLOCKS)
    for part in np.array_split(ids, 1000):
        pool.release(part)
    pools = pool, ArrayPool(ids), ListPool(ids)
    for kind in cast("tuple[Any, ...]", pools):
        first, second = kind.allocate(1000), kind.allocate(1000)
        assert len({*map(int, first), *map(int, second)}) == 2000
        kind.release(first)
        kind.release(second)
    return pools


def cycles(pools: tuple[BlockPool, ArrayPool, ListPool], batch: int | None) -> dict[str, Callable[[], object]]:
    """Return an allocation with its release, of each kind. None: BlockPool's single calls."""
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


def measure(rounds: int) -> Iterator[Row]:
    pools = make_pools()
    for batch in (None, *BATCHES):
        number = max(10, 20_000 // (batch or 1))
        taken = in_turns(cycles(pools, batch), rounds, number, thread_seconds, warmups=0)
        figures = {f"{kind}_ns": Figure.of(each, 1e9) for kind, each in taken.items()}
        yield {"batch": batch or "one", "a block": figures["pool_ns"].median / (batch or 1), **figures}
    pools[0].check()


def main() -> None:
    options = parse("pool", __doc__, rounds=21)
    print("ns a cycle: median (25th to 75th percentile)")
    rows = shown(COLUMNS, measure(options.rounds))
    met = rows[0]["pool_ns"].median <= 400 and all(row["a block"] <= 10 for row in rows[3:])
    by_block = [{**row, **{kind: row[f"{kind}_ns"] * (1 / row["batch"]) for kind in KINDS}} for row in rows[1:]]
    draw = functools.partial(curves, rows=by_block, x="batch", values=KINDS, xscale="log", yscale="log", lines=[10])
    label = "ns a block, allocate and release"
    finish(options, lambda path: draw(path, ylabel=label), rows=rows, targets_met=met)


if __name__ == "__main__":
    main()
