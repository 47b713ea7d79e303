"""AnchorTable: blocks known by their ids and generations, as they come and go in both tiers."""

import random

import numpy as np
import pytest

from kvpage import BlockPool
from kvpage._C import AnchorTable

NUM = 6  # blocks of a tier
MOST = 5


class NaiveBlock:
    """A block of the random life, and the ids under which its anchor is known: (tier, id, generation)."""

    def __init__(self) -> None:
        self.ids = [-1, -1]
        self.anchor = -1
        self.uses: dict[int, tuple[int, int]] = {}


class Tiers:
    """Blocks that come, move and go in two pools, and what a table of their anchors has to know."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pools = BlockPool(NUM), BlockPool(NUM)
        self.table = AnchorTable(*self.pools, MOST)
        self.blocks: list[NaiveBlock] = []

    def generation(self, tier: int, block_id: int) -> int:
        return int(self.pools[tier].generations([block_id])[0])

    def step(self) -> None:
        getattr(self, self.rng.choice(("come", "copy", "copy", "leave", "leave", "anchor", "anchor", "remove")))()

    def come(self) -> None:
        tier, block = self.rng.randrange(2), NaiveBlock()
        if self.pools[tier].num_free:
            block.ids[tier] = self.pools[tier].allocate_one()
            self.blocks.append(block)

    def copy(self) -> None:
        """Blocks get a copy in the other tier, and some leave the first one before the table is told."""
        to_host = self.rng.random() < 0.5
        source, target = (0, 1) if to_host else (1, 0)
        pairs = []
        for block in [one for one in self.blocks if one.ids[source] >= 0 and one.ids[target] < 0]:
            if self.rng.random() < 0.6 and self.pools[target].num_free:
                block.ids[target] = self.pools[target].allocate_one()
                pairs.append((block.ids[source], block.ids[target]))
                if block.uses.get(source) == (block.ids[source], self.generation(source, block.ids[source])):
                    block.uses[target] = block.ids[target], self.generation(target, block.ids[target])
                if self.rng.random() < 0.3:
                    self.pools[source].release_one(block.ids[source])
                    block.ids[source] = -1
        self.table.move(np.array(pairs, np.int64).reshape(-1, 2), to_host)

    def leave(self) -> None:
        if self.blocks:
            block, tier = self.rng.choice(self.blocks), self.rng.randrange(2)
            if block.ids[tier] >= 0:
                self.pools[tier].release_one(block.ids[tier])
                block.ids[tier] = -1

    def anchor(self) -> None:
        """Give a block an anchor, or let its anchor learn its ids."""
        cached = [one for one in self.blocks if one.ids != [-1, -1]]
        if not cached:
            return
        block = self.rng.choice(cached)
        found = self.table.find(*block.ids)
        assert found == (block.anchor if self.is_known(block) else -1)
        if found < 0:
            if sum(one.anchor >= 0 for one in self.blocks) == MOST:
                with pytest.raises(ValueError, match="anchors must be at most 5"):
                    self.table.add(True)
                return
            if block.anchor >= 0:  # it is stale: the block came back without the table's knowledge
                self.table.remove(block.anchor)
            block.anchor, block.uses = self.table.add(True), {}
        self.table.learn(block.anchor, *block.ids)
        block.uses.update({t: (i, self.generation(t, i)) for t, i in enumerate(block.ids) if i >= 0})

    def remove(self) -> None:
        self.blocks = [one for one in self.blocks if one.ids != [-1, -1] or one.anchor >= 0]
        with_anchor = [one for one in self.blocks if one.anchor >= 0]
        if with_anchor:
            block = self.rng.choice(with_anchor)
            self.table.remove(block.anchor)
            block.anchor, block.uses = -1, {}

    def is_known(self, block: NaiveBlock) -> bool:
        return any(block.ids[t] == i and self.generation(t, i) == g for t, (i, g) in block.uses.items())

    def compare(self) -> None:
        self.table.check()
        known = [one for one in self.blocks if one.anchor >= 0]
        assert self.table.stale() == sorted(one.anchor for one in known if not self.is_known(one))
        anchors = np.array([one.anchor for one in known], np.int32)
        assert self.table.are_valid(anchors).tolist() == [self.is_known(one) for one in known]
        for one in known:
            assert self.table.is_valid(one.anchor) == self.is_known(one)
            current = {(t, *use) for t, use in one.uses.items() if self.generation(t, use[0]) == use[1]}
            assert current <= set(self.table.uses_of(one.anchor))
            assert all(self.table.is_current(*use) for use in current)
        path = [one for one in self.blocks if one.ids != [-1, -1]]
        ids = np.array([one.ids for one in path], np.int32).reshape(-1, 2).T
        ids = ids if self.rng.random() < 0.5 else np.ascontiguousarray(ids)
        places = [place for place, one in enumerate(path) if self.is_known(one)]
        end = self.rng.randrange(len(path) + 1)
        last = max((place for place in places if place < end), default=-1)
        if ids.flags.c_contiguous:
            each = [one.anchor if self.is_known(one) else -1 for one in path]
            assert self.table.find_each(ids).tolist() == each
            assert self.table.find_last(ids, end) == (last, path[last].anchor if last >= 0 else -1)
        else:
            with pytest.raises(ValueError, match="ids of a tier must be contiguous"):
                self.table.find_last(ids, end)


@pytest.mark.parametrize("seed", range(6))
def test_blocks_come_and_go(seed: int) -> None:
    tiers = Tiers(seed)
    for _ in range(200):
        tiers.step()
        tiers.compare()


def test_an_anchor_follows_its_block() -> None:
    pool, host = BlockPool(4), BlockPool(4)
    table = AnchorTable(pool, host, 2)
    anchor, device_id, host_id = table.add(True), pool.allocate_one(), host.allocate_one()
    table.learn(anchor, device_id, -1)
    ids = np.array([[-1, device_id], [-1, host_id]], np.int32)
    assert table.find_last(ids, 2) == (1, anchor) and table.find(-1, host_id) == -1
    table.move([(device_id, host_id)], to_host=True)
    assert table.find_last(ids, 2) == (1, anchor) and table.find(-1, host_id) == anchor
    pool.release_one(device_id)
    assert table.is_valid(anchor) and table.find(device_id, -1) == -1
    host.release_one(host_id)
    assert table.stale() == [anchor] and not table.is_valid(anchor)


def test_the_start_of_a_namespace_is_always_valid() -> None:
    table = AnchorTable(BlockPool(1), BlockPool(0), 1)
    root = table.add(False)
    assert table.is_valid(root) and table.stale() == [] and table.uses_of(root) == []
    with pytest.raises(ValueError, match="anchor must be one of a block, got 0"):
        table.learn(root, 0, -1)


REFUSED = [
    ("remove", (1,), "anchor must be one in use, got 1"),
    ("is_valid", (-1,), "anchor must be one in use, got -1"),
    ("learn", (0, 4, -1), "device id must be between -1 and num_blocks - 1 = 3, got 4"),
    ("find", (0, -2), "host id must be between -1 and num_blocks - 1 = 2, got -2"),
    ("find_last", (np.zeros((2, 3), np.int32), 4), "end must be between 0 and num_blocks = 3, got 4"),
    ("find_last", (np.zeros(3, np.int32), 0), r"ids must be \[2, num_blocks\], got 1 dimensions"),
    ("find_last", (np.full((2, 1), 3, np.int32), 1), "host id must be between -1 and num_blocks - 1 = 2, got 3"),
    ("move", (np.array([[0, 3]]), True), "host id must be between -1 and num_blocks - 1 = 2, got 3"),
    ("is_current", (2, 0, 0), "tier must be 0 or 1, got 2"),
]


@pytest.mark.parametrize(("verb", "args", "message"), REFUSED)
def test_errors_name_the_rule(verb: str, args: tuple[object, ...], message: str) -> None:
    pool = BlockPool(4)
    table = AnchorTable(pool, BlockPool(3), 2)
    table.learn(table.add(True), pool.allocate_one(), -1)
    with pytest.raises(ValueError, match=message):
        getattr(table, verb)(*args)
    table.check()
    assert table.uses_of(0) == [(0, 0, 1)]
