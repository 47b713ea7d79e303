"""How far the blocks of a window reach into a prompt, and why not further."""

from collections.abc import Set as AbstractSet
from dataclasses import replace

import numpy as np

from kvpage.blocks.explain import Ending, GroupReach
from kvpage.blocks.groups.window_blocks import DEVICE, PathIds, WindowBlocks


def reach_of_window(blocks: WindowBlocks, path: PathIds, full: GroupReach, to_follow: AbstractSet[int]) -> GroupReach:
    """Return how far a window's blocks reach.

    What lacks was evicted if there was a block beside the tree's. A load brings the last window alone, without those
    before it.

    Args:
        blocks: Of the window.
        path: The tree's ids of the prompt, int32 [2, num_blocks].
        full: How far these reach, and why not further.
        to_follow: The tree's blocks beside which one is yet to be cached.
    """
    name, num_blocks = f"window of {blocks.window.num_tokens}", int(np.flatnonzero(blocks.usable(path))[-1])
    num_tokens = num_blocks * blocks.block_size
    if num_blocks == path.shape[1]:
        return replace(full, group=name, num_tokens=num_tokens)
    lacking = np.ascontiguousarray(path[:, ~blocks.has(path)])
    was_there = to_follow.isdisjoint(lacking[DEVICE].tolist()) and bool(blocks.had(lacking).any())
    return GroupReach(name, num_tokens, Ending.KV_EVICTED if was_there else Ending.NOT_CACHED)
