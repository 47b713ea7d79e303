"""Worlds of a GroupLife: managers of every combination of groups, with few blocks and slots, in one tier or two."""

from collections.abc import Callable
from dataclasses import dataclass

from support.group_life import GroupLife
from support.whim import Whim

from kvpage import BlockManager, States, Window
from kvpage.blocks.config import HostPolicy
from kvpage.blocks.load_or_compute import LoadOrCompute


def from_two_blocks(seed: int, block_size: int) -> LoadOrCompute:
    """A rule by which one block is not worth its way back, and several are."""
    return LoadOrCompute(1, block_size, bytes_per_second=1.0, tokens_per_second=block_size / 1.1, latency=0.15)


@dataclass(frozen=True)
class World:
    """rule: of a seed and the block size."""

    num_blocks: int
    block_size: int
    groups: tuple[Window | States, ...] = ()
    num_host_blocks: int = 0
    after_hits: int | None = None
    is_caching: bool = True
    rule: Callable[[int, int], LoadOrCompute] | None = None
    pin_quota: int = 6
    shares_parts: bool = False

    @property
    def states(self) -> States | None:
        return next((group for group in self.groups if isinstance(group, States)), None)

    def life(self, seed: int) -> GroupLife:
        manager = BlockManager(
            self.num_blocks,
            self.block_size,
            self.is_caching,
            num_host_blocks=self.num_host_blocks,
            share_parts=self.shares_parts,
            host_policy=HostPolicy(self.after_hits),
            rule=self.rule(seed, self.block_size) if self.rule else None,
            pin_quota=self.pin_quota,
            groups=self.groups,
        )
        return GroupLife(manager, seed)


ALONE = [
    World(24, 4),
    World(16, 4, num_host_blocks=20, after_hits=1),
    World(12, 1, num_host_blocks=8, rule=Whim),
    World(24, 4, shares_parts=True),
    World(24, 4, num_host_blocks=6, shares_parts=True),
    World(24, 4, num_host_blocks=60, rule=Whim, shares_parts=True),
    World(24, 4, num_host_blocks=12, after_hits=0, shares_parts=True),
    World(24, 4, num_host_blocks=6, after_hits=2, is_caching=False, shares_parts=True),
]
WINDOWS = [
    World(64, 4, (Window(5, 64),)),
    World(40, 4, (Window(1, 12), Window(9, 12))),
    World(20, 4, (Window(6, 20), Window(4, 20)), is_caching=False),
    World(24, 4, (Window(5, 24, 64),), 64),
    World(24, 4, (Window(1, 12, 8), Window(9, 12, 8)), 16, 1),
    World(20, 4, (Window(6, 12, 2), Window(4, 12, 2)), 40, 0),
    World(40, 4, (Window(7, 9, 40),), 4),
    World(20, 4, (Window(5, 10, 10),), 20, is_caching=False),
    World(16, 4, (Window(6, 16, 20),), 40, rule=from_two_blocks),
]
STATES = [
    World(24, 4, (States(8),)),
    World(16, 4, (States(12, 6, 5),), 40),
    World(24, 4, (States(7, 8, checkpoint_every=3),), 40, 0),
    World(10, 2, (States(8, 4),), 12, 2),
    World(20, 1, (States(16, 6),), 20),
    World(24, 4, (States(40, 0, 20, 4),)),
    World(12, 4, (States(14, 30),), 60),
    World(24, 4, (States(4, 4),), 8, is_caching=False),
    World(20, 4, (States(2, 1, checkpoint_every=5),), 20),
    World(16, 4, (States(10, 6),), 40, rule=Whim),
    World(16, 4, (States(10, 6),), 40, rule=from_two_blocks),
]
BOTH = [
    World(24, 4, (Window(5, 24), States(8))),
    World(16, 4, (Window(6, 14, 20), States(12, 6, 5)), 40),
    World(24, 4, (Window(3, 12, 9), Window(9, 16, 4), States(7, 8, checkpoint_every=3)), 40, 0),
    World(20, 2, (Window(5, 20, 6), States(10, 4, checkpoint_every=1)), 12, 1),
    World(16, 4, (Window(6, 16, 20), States(10, 6)), 40, rule=from_two_blocks),
    World(24, 4, (Window(5, 12), States(6)), is_caching=False),
]
WORLDS = [*ALONE, *WINDOWS, *STATES, *BOTH]
