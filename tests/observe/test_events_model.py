"""The main test of events: random lives of a tree with two tiers, followed by a router that sees messages only.

After every few operations, whatever they were, the router must hold exactly the blocks that the naive model of the tree
holds, in each tier, with their tokens and parents. So must one that comes late and asks for a replay from anywhere.
"""

import time

import pytest
from support.mirror_router import MirrorRouter, expected_block
from support.seeds import seed_of
from support.tree_life import TreeLife, TreeWorld

from kvpage.observe.events.block_events import BlockEvents
from kvpage.observe.events.schema import EventBatch, pack
from kvpage.observe.events.window import EventWindow
from kvpage.observe.tree_watch import TreeWatch

NUM_OPERATIONS = 600
WORLDS = [  # and the bytes of the log: too few for some steps of two lives
    (TreeWorld(16, 16, 1), 1 << 20),
    (TreeWorld(16, 40, 2), 1 << 20),
    (TreeWorld(24, 6, 2, 0), 120),
    (TreeWorld(12, None, 2), 1 << 20),
    (TreeWorld(20, 0, 2), 100),
    (TreeWorld(8, 64, 3), 1 << 20),
]
LORAS = {b"lora": "adapter"}


class FollowedLife(TreeLife):
    def __init__(self, number: int, world: TreeWorld, max_bytes: int) -> None:
        super().__init__(seed_of(number), world)
        for _ in range(100):  # the watch begins with a tree that is not empty
            self.insert()
        self.loras = LORAS if number % 2 else {}
        self.watch = TreeWatch(self.tree, max_bytes)
        self.block_events = BlockEvents(world.block_size, self.loras)
        self.watch.listeners.append(self.publish)
        self.encoding = "map" if number % 2 else "array"
        self.window_size = number
        self.window = EventWindow(number, self.encoding)
        self.router = MirrorRouter()
        self.seq = self.num_restarts = 0
        self.follow()

    def publish(self, changes) -> None:
        if events := self.block_events.events(changes):
            payload = pack(EventBatch(time.time(), events, 0), self.encoding)
            self.window.add(self.seq, payload)
            self.router.take(self.seq, payload)
            self.seq += 1

    def expected(self) -> dict[str, dict[int, tuple]]:
        held: dict[str, dict[int, tuple]] = {"GPU": {}, "CPU": {}}
        for key, block in self.naive.blocks.items():
            block_hash, known = expected_block(key, self.block_size, self.loras)
            if block.device is not None:
                held["GPU"][block_hash] = known
            if block.host is not None:
                held["CPU"][block_hash] = known
        return held

    def compare(self) -> None:
        if self.rng.random() < 0.02:
            self.watch.restart()
            self.num_restarts += 1
            self.follow()
        if self.rng.random() < 0.7:
            self.follow()
        if self.rng.random() < 0.02:
            self.replay()

    def follow(self) -> None:
        self.watch.poll()
        assert self.router.held == self.expected()

    def replay(self) -> None:
        """From any number on, to a router that has seen what was before it."""
        late, start = MirrorRouter(), 0
        batches = list(self.window.since(start))
        late.last_seq = batches[0][0] - 1
        for seq, payload in batches:
            late.take(seq, payload)
        assert late.last_seq == self.seq - 1 and late.held == self.router.held
        start = self.rng.randrange(self.seq + 2)
        numbers = [seq for seq, _ in self.window.since(start)]
        oldest = max(self.seq - self.window_size, 0)
        first = start if start >= oldest else oldest - 1
        assert numbers == list(range(first, self.seq))

    def end(self) -> None:
        super().end()
        self.follow()
        assert self.router.held == {"GPU": {}, "CPU": {}}


@pytest.mark.parametrize("number", range(len(WORLDS)))
def test_a_router_holds_what_the_tree_holds(number):
    world, max_bytes = WORLDS[number]
    life = FollowedLife(number, world, max_bytes)
    life.live(NUM_OPERATIONS)
    assert life.figures["demoted"] > 0 or not world.num_host_blocks
    assert life.seq > 0 and life.num_restarts > 0
    num_losses = life.router.num_clears - life.num_restarts - 1
    assert num_losses > 0 if max_bytes < 2000 else num_losses == 0
