"""Measure the cost, for each cached block, of a follower of the cache.

A block is cached and evicted again: without a log, with one, with the log taken, as hashed events, and packed for the
wire. Beside it, in the same run, what none of the latter can be below in Python: one SHA-256 over a block's tokens and
the hash before it. For comparison: a step that computes 16 tokens of an 8-billion-parameter model takes milliseconds.
"""

import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvpage import BlockPool, PrefixTree
from kvpage.benchmarks.cells import Row, shown
from kvpage.benchmarks.figure import Figure, in_turns, result, seconds
from kvpage.benchmarks.pictures import curves
from kvpage.benchmarks.script import finish, parse
from kvpage.observe.events.block_events import BlockEvents
from kvpage.observe.events.schema import BlockRemoved, BlockStored, EventBatch, pack, unpack
from kvpage.observe.tree_watch import TreeChanges

BLOCK_SIZE = 16
BATCHES = [1, 16, 512]  # blocks of a prompt
NUM_BLOCKS = 4096  # a measurement
REPEATS = 15
NAMES = ("no log", "log", "log, taken", "events", "packed", "sha256")
COLUMNS = "{batch:>6}" + "".join(f"{{{name}:>22.3f}}" for name in NAMES)
Follow = Callable[[PrefixTree], Any]


def life(batch: int, follow: Follow | None, log: bool) -> float:
    """Return microseconds for each block of prompts that are cached and evicted."""
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
    """Return microseconds for a block's hash alone."""
    digest, tokens = b"0" * 32, b"1" * (8 * BLOCK_SIZE)
    return seconds(lambda: hashlib.sha256(digest + tokens).digest(), NUM_BLOCKS) * 1e6


def follower() -> Follow:
    events = BlockEvents(BLOCK_SIZE)
    return lambda tree: events.events(TreeChanges(*tree.take_changes()))


def packer() -> Follow:
    follow = follower()
    return lambda tree: pack(EventBatch(0.0, follow(tree), 0))


def verify() -> None:
    """AssertionError unless every block is told once as stored and once as removed."""
    pool, follow = BlockPool(8), packer()
    tree = PrefixTree(pool, BLOCK_SIZE)
    tree.log_changes(1 << 20)
    follow(tree)
    tree.release(tree.insert(list(range(8 * BLOCK_SIZE)), pool.allocate(8)))
    tree.evict(8)
    stored, removed = unpack(follow(tree)).events
    assert isinstance(stored, BlockStored) and isinstance(removed, BlockRemoved)
    assert stored.token_ids == list(range(8 * BLOCK_SIZE))
    assert sorted(stored.block_hashes) == sorted(removed.block_hashes) and len(set(stored.block_hashes)) == 8


def measure() -> Iterator[Row]:
    verify()
    for batch in BATCHES:
        ways = (None, False), (None, True), (PrefixTree.take_changes, True), (follower(), True), (packer(), True)
        calls = [functools.partial(life, batch, follow, log) for follow, log in ways]
        taken = in_turns(dict(zip(NAMES, [*calls, sha256], strict=True)), REPEATS, measure=result, warmups=0)
        yield {"batch": batch, **{name: Figure.of(each) for name, each in taken.items()}}


def main() -> None:
    options = parse("events", __doc__)
    print("microseconds for each block that is cached and evicted; batch: blocks of a prompt")
    rows = shown(COLUMNS, measure())
    labels = {"xlabel": "blocks a prompt", "ylabel": "us a block", "title": "Following the cache"}
    scales = {"xscale": "log", "yscale": "log"}
    finish(options, lambda path: curves(path, rows, "batch", NAMES, **labels, **scales), unit="us", rows=rows)


if __name__ == "__main__":
    main()
