"""Measure the cost, for each cached block, of a follower of the cache.

A block is cached and evicted again: without a log, with one, with the log taken, as hashed events, and packed for the
wire. Beside it, in the same run, what none of the latter can be below in Python: one SHA-256 over a block's tokens and
the hash before it. For comparison: a step that computes 16 tokens of an 8-billion-parameter model takes milliseconds.
"""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvpage import BlockPool, PrefixTree
from kvpage.benchmarks.cells import show_all
from kvpage.benchmarks.figure import Figure, in_turns, result, seconds
from kvpage.benchmarks.pictures import curve, drawn
from kvpage.benchmarks.script import Options, finish
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

    def live() -> None:
        for prompt in prompts:
            tree.release(tree.insert(prompt, pool.allocate(batch)))
            tree.evict(batch)
            if follow:
                follow(tree)

    taken = seconds(live)
    assert tree.num_cached == 0 and pool.num_free == NUM_BLOCKS
    return taken / NUM_BLOCKS * 1e6


def sha256() -> float:
    """Microseconds for a block's hash alone."""
    digest, tokens = b"0" * 32, b"1" * (8 * BLOCK_SIZE)

    def chain() -> None:
        nonlocal digest
        digest = hashlib.sha256(digest + tokens).digest()

    return seconds(chain, NUM_BLOCKS) * 1e6


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
        calls: dict[str, Callable[[], float]] = {
            name: functools.partial(life, batch, follow, log) for name, (follow, log) in followers().items()
        }
        taken = in_turns({**calls, "sha256": sha256}, REPEATS, measure=result, warmups=0)
        rows.append({"batch": batch, **{name: Figure.of(each) for name, each in taken.items()}})
    return rows


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    with drawn(path, size=(7, 4)) as axes:
        for name in list(rows[0])[1:]:
            curve(axes, rows, "batch", name, "o--" if name == "sha256" else "o-", label=name)
        axes.set(xscale="log", yscale="log", xlabel="blocks a prompt", ylabel="us a block", title="Following the cache")
        axes.legend()
        axes.grid(alpha=0.3)


def main() -> None:
    options = Options("events", __doc__).parse()
    rows = measure()
    print("microseconds for each block that is cached and evicted; batch: blocks of a prompt")
    show_all("{batch:>6}" + "".join(f"{{{name}:>22.3f}}" for name in list(rows[0])[1:]), rows)
    finish(options, functools.partial(plot, rows), unit="us", rows=rows)


if __name__ == "__main__":
    main()
