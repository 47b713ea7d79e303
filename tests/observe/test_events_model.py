"""The main test of events: random lives of a tree with two tiers, followed by a router that sees messages only.

After every few operations, whatever they were, the router must hold exactly the blocks that the naive model of the tree
holds, in each tier, with their tokens and parents. So must one that comes late and asks for a replay from anywhere.
"""

import time

import pytest
from blocks.test_two_tiers_model import LIVES, TwoTierLife
from support.mirror_router import MirrorRouter, expected_block

from kvpage.observe.events.block_events import BlockEvents
from kvpage.observe.events.schema import EventBatch, pack
from kvpage.observe.events.window import EventWindow
from kvpage.observe.tree_watch import TreeWatch

NUM_OPERATIONS = 2500
MAX_BYTES = [1 << 20, 1 << 20, 250, 1 << 20, 150, 1 << 20, 1 << 20]  # of the log: too few for some steps of two lives
LORAS = {b"lora": "adapter"}


class FollowedLife(TwoTierLife):
    def __init__(self, seed: int, num_blocks: int, num_host_blocks: int, block_size: int, hash_bits: int) -> None:
        super().__init__(seed, num_blocks, num_host_blocks, block_size, hash_bits)
        for _ in range(100):  # the watch begins with a tree that is not empty
            self.step()
        self.watch = TreeWatch(self.tree, MAX_BYTES[seed - 1])
        self.block_events = BlockEvents(block_size, LORAS if seed % 2 else {})
        self.watch.listeners.append(self.publish)
        self.encoding = "map" if seed % 2 else "array"
        self.window = EventWindow(seed - 1, self.encoding)
        self.router = MirrorRouter()
        self.seq = 0
        self.num_restarts = 0

    def publish(self, changes) -> None:
        if events := self.block_events.events(changes):
            payload = pack(EventBatch(time.time(), events, 0), self.encoding)
            self.window.add(self.seq, payload)
            self.router.take(self.seq, payload)
            self.seq += 1

    def expected(self) -> dict[str, dict[int, tuple]]:
        held: dict[str, dict[int, tuple]] = {"GPU": {}, "CPU": {}}
        loras = LORAS if self.block_events._lora_names else {}
        for key, block in self.naive.blocks.items():
            block_hash, known = expected_block(key, self.block_size, loras)
            if block.device is not None:
                held["GPU"][block_hash] = known
            if block.host is not None:
                held["CPU"][block_hash] = known
        return held

    def follow(self) -> None:
        if self.rng.random() < 0.01:
            self.watch.restart()
            self.num_restarts += 1
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
        oldest = max(self.seq - self.window._size, 0)
        first = start if start >= oldest else oldest - 1
        assert numbers == list(range(first, self.seq))


@pytest.mark.parametrize("seed, num_blocks, num_host_blocks, block_size, hash_bits", LIVES)
def test_a_router_holds_what_the_tree_holds(seed, num_blocks, num_host_blocks, block_size, hash_bits):
    print(f"{seed=}")
    life = FollowedLife(seed, num_blocks, num_host_blocks, block_size, hash_bits)
    life.follow()
    for step in range(NUM_OPERATIONS):
        try:
            life.step()
            if life.rng.random() < 0.7:
                life.follow()
            if step % 50 == 0:
                life.replay()
        except BaseException:
            print(f"{step=}")
            raise
    while life.matches:
        life.release()
    assert life.tree.clear() == life.naive.clear()
    life.follow()
    assert life.router.held == {"GPU": {}, "CPU": {}}
    assert life.counts["demoted"] > 50 or not num_host_blocks
    assert life.seq > 300 and life.num_restarts > 5
    num_losses = life.router.num_clears - life.num_restarts - 1
    assert num_losses > 3 if MAX_BYTES[seed - 1] < 2000 else num_losses == 0
