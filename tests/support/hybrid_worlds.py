"""Worlds of a HybridLife: managers with few blocks and slots, in one tier or two."""

from collections.abc import Callable
from dataclasses import dataclass

from support.hybrid_life import HybridLife
from support.managers import manager_of_states
from support.whim import Whim

from kvpage.blocks.load_or_compute import LoadOrCompute
from kvpage.blocks.space import HostPolicy


def from_two_blocks(seed: int, block_size: int) -> LoadOrCompute:
    """A rule by which one block is not worth its way back, and several are."""
    return LoadOrCompute(1, block_size, bytes_per_second=1.0, tokens_per_second=block_size / 1.1, latency=0.15)


@dataclass(frozen=True)
class World:
    num_blocks: int
    block_size: int
    num_slots: int
    num_host_blocks: int = 0
    num_host_slots: int = 0
    checkpoint_every: int | None = None
    after_hits: int | None = None
    is_caching: bool = True
    rule: Callable[[int, int], LoadOrCompute] | None = None  # of a seed and the block size
    num_checkpoints: int | None = None

    def life(self, seed: int) -> HybridLife:
        manager = manager_of_states(
            self.num_blocks,
            self.block_size,
            self.is_caching,
            num_slots=self.num_slots,
            num_host_slots=self.num_host_slots,
            num_checkpoints=self.num_checkpoints,
            checkpoint_every=self.checkpoint_every,
            num_host_blocks=self.num_host_blocks,
            host_policy=HostPolicy(self.after_hits),
            rule=self.rule(seed, self.block_size) if self.rule else None,
            pin_quota=6,
        )
        return HybridLife(seed, manager)


WORLDS = [
    World(24, 4, 8),
    World(16, 4, 12, 40, 6, num_checkpoints=5),
    World(24, 4, 7, 40, 8, 3, 0),
    World(10, 2, 8, 12, 4, None, 2),
    World(20, 1, 16, 20, 6),
    World(24, 4, 40, checkpoint_every=4, num_checkpoints=20),
    World(12, 4, 14, 60, 30),
    World(24, 4, 4, 8, 4, is_caching=False),
    World(20, 4, 2, 20, 1, 5),
    World(16, 4, 10, 40, 6, rule=Whim),
    World(16, 4, 10, 40, 6, rule=from_two_blocks),
]
