"""Python's allocator fails once, at each of a call's allocations in turn: who has changed something still tells what,
and who could not tell has changed nothing.

Calls that return a Match are not tried: pybind11 writes to the object before it looks whether there is one.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvpage import BlockPool, PrefixTree
from kvpage._C import SequenceRows, SlotTree
from kvpage.blocks.config import BlockConfig, HostPolicy
from kvpage.blocks.space import BlockSpace
from kvpage.extras.slots import SlotAllocator

_testcapi = pytest.importorskip("_testcapi")
B, NUM_BLOCKS = 2, 300  # more than the integers that Python has made beforehand
TOKENS = np.arange(B * NUM_BLOCKS + 1, dtype=np.int32)
ENOUGH = 6  # calls in a row that went well: the failing allocation comes after all of theirs
CODE_IN_PYTHON = pytest.mark.skipif(
    sys.version_info >= (3, 12),
    reason="Python 3.12 lets go of a function's code once too often where its frame finds no memory, and crashes",
)
RAISED = (MemoryError, RuntimeError, TypeError)  # the last two are pybind11's, where it cannot make an object


def tries(make: Callable[[], Any], call: Callable[[Any], Any]) -> list[tuple[Any, Any]]:
    """(what `make` gave, what `call` returned, or None where it raised), for each allocation that fails."""
    done: list[tuple[Any, Any]] = []
    num_well = 0
    while num_well < ENOUGH:
        made, result = make(), None
        _testcapi.set_nomemory(len(done), len(done) + 1)
        try:
            result = call(made)
        except RAISED:
            pass
        finally:
            _testcapi.remove_mem_hooks()
        num_well = 0 if result is None else num_well + 1
        done.append((made, result))
    assert any(result is None for _, result in done), "no allocation has failed"
    return done


class Tree:
    """A tree of two tiers with one cached path, on the device or on the host alone, and blocks of the caller's."""

    def __init__(self, is_demoted: bool) -> None:
        self.pool, self.host_pool = BlockPool(2 * NUM_BLOCKS), BlockPool(2 * NUM_BLOCKS)
        self.tree = PrefixTree(self.pool, B, self.host_pool)
        self.tree.release(self.tree.insert(TOKENS[:-1], self.pool.allocate(NUM_BLOCKS)))
        if is_demoted:
            self.tree.demote(NUM_BLOCKS)
        self.match = self.tree.match(TOKENS)
        self.ids = self.pool.allocate(NUM_BLOCKS)

    def counts(self) -> tuple[int, ...]:
        self.tree.check(self.ids, [])
        tree = self.tree
        return tree.num_cached, tree.num_host_cached, tree.num_matches, tree.num_evictable, self.pool.num_free


CALLS: dict[str, Callable[[Tree], Any]] = {
    "promote": lambda made: made.tree.promote(made.match, made.ids),
    "write_out": lambda made: made.tree.write_out(made.match),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_tree_tells_what_has_changed_or_nothing_has(name):
    def make() -> Tree:
        return Tree(is_demoted=name == "promote")

    before = make().counts()
    for made, result in tries(make, CALLS[name]):
        if result is None:
            assert made.counts() == before
        elif name in ("promote", "write_out"):
            assert len(result) == NUM_BLOCKS


def test_a_demotion_tells_its_pairs_or_there_is_none():
    def make() -> PrefixTree:
        made = Tree(is_demoted=False)
        made.tree.release(made.match)
        return made.tree

    for tree, result in tries(make, lambda tree: tree.demote(NUM_BLOCKS)):
        num_freed, pairs = (0, ()) if result is None else result
        assert len(pairs) == num_freed == tree.num_host_cached == NUM_BLOCKS - tree.num_cached


@pytest.mark.parametrize("call", [lambda pool: pool.allocate(NUM_BLOCKS), lambda pool: pool.allocate_one()])
def test_a_pool_loses_no_block(call):
    def make() -> BlockPool:
        pool = BlockPool(2 * NUM_BLOCKS)
        pool.allocate(NUM_BLOCKS // 2 * 3 - 190)  # the next id is none of the integers made beforehand
        return pool

    before = make().num_free
    for pool, result in tries(make, call):
        assert pool.num_free == before - (0 if result is None else np.size(result))
        pool.check()


def test_slots_lose_neither_slot_nor_pin():
    def make() -> tuple[SlotAllocator, SlotTree]:
        slots, tree = SlotAllocator(400), SlotTree(10_000)
        for _ in range(NUM_BLOCKS):
            slots.alloc()
        tree.insert(TOKENS, 299, 1)
        return slots, tree

    for (slots, _), result in tries(make, lambda made: made[0].alloc()):
        assert slots.free_count == 400 - NUM_BLOCKS - (result is not None)
    for (_, tree), result in tries(make, lambda made: made[1].pin(TOKENS, None)):
        assert tree.num_pins == 1 + (result is not None)
        tree.check()


def filled_space(policy: HostPolicy | None = None) -> BlockSpace:
    space = BlockSpace(BlockConfig(NUM_BLOCKS, B, num_host_blocks=NUM_BLOCKS, host_policy=policy))
    space.tree.release(space.tree.insert(TOKENS[:-1], space.take(NUM_BLOCKS)))
    return space


@CODE_IN_PYTHON
def test_what_left_the_device_is_copied():
    for space, _ in tries(filled_space, lambda space: space.take(NUM_BLOCKS - 20)):
        assert space.take_moves().num_blocks("swap_out") == space.tree.num_host_cached


def test_what_a_sequence_has_moved_is_copied() -> None:
    """Its prefix comes back from the host, and others go there for it."""

    def make() -> tuple[BlockSpace, SequenceRows, tuple[Any, Any]]:
        space = BlockSpace(BlockConfig(NUM_BLOCKS, B, num_host_blocks=2 * NUM_BLOCKS))
        space.tree.release(space.tree.insert(TOKENS[:-1], space.take(NUM_BLOCKS)))
        space.pool.release(space.take(NUM_BLOCKS))
        space.tree.release(space.tree.insert(-1 - TOKENS[:-1], space.take(NUM_BLOCKS)))
        space.take_moves()
        return space, SequenceRows(space.tree, True), space.native

    def begin(made: tuple[BlockSpace, SequenceRows, tuple[Any, Any]]) -> Any:
        _, rows, native = made
        return rows.begin({}, 0, TOKENS[:-1], b"", 0, 1, True, 0, True, *native)

    for (space, _, _), _ in tries(make, begin):
        moves, (_, num_demoted, _, num_promoted, _) = space.take_moves(), space.tree.counts
        assert moves.num_blocks("swap_out") == num_demoted - NUM_BLOCKS
        assert moves.num_blocks("swap_in") == num_promoted


@CODE_IN_PYTHON
def test_what_is_written_out_early_is_copied():
    def make() -> tuple[BlockSpace, Any]:
        space = filled_space(HostPolicy(after_hits=0))
        return space, space.tree.match(TOKENS)

    for (space, _), _ in tries(make, lambda made: made[0].write_out(made[1]) or True):
        assert space.take_moves().num_blocks("swap_out") == space.tree.num_host_cached
