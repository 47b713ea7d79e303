"""Anchors: the cached blocks that checkpoints stand on, known by their ids in both tiers.

A cached block stands for an exact prefix, since the tree compares tokens. Its id does so as long as its generation is
the same. So a checkpoint is found by the block's id, and no token of the prefix is read again:

    match's ids    device [ 17   4   9   -  ]     a flag for each id says whether an anchor has it
                   host   [  -   -   2   5  ]
    anchor         device 9 @ 7 | host 2 @ 3      valid while one of the two has this generation

The anchor of a prefix shorter than a block is the start of its namespace. It is always valid.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvpage._C import BlockPool
from kvpage.blocks.hybrid.checkpoint import Anchor
from kvpage.blocks.moves import Pairs
from kvpage.blocks.states import Ids

DEVICE, HOST = 0, 1
NO_BLOCK = -1


class Anchors:
    """The anchors of both tiers. Not thread-safe.

    Args:
        pool: The device tier's blocks.
        host_pool: The host tier's blocks.
        most: How many anchors there are at most.
    """

    def __init__(self, pool: BlockPool, host_pool: BlockPool, most: int) -> None:
        self._pools = (pool, host_pool)
        self._ids = np.full((2, most), NO_BLOCK, np.int32)  # by anchor
        self._generations = np.zeros((2, most), np.uint32)
        self._by_id: tuple[dict[int, Anchor], dict[int, Anchor]] = {}, {}
        self._flags = tuple(np.zeros(one.num_blocks, np.bool_) for one in self._pools)  # by id
        self._roots: dict[bytes, Anchor] = {}
        self._at: list[Anchor | None] = [None] * most
        self._free = list(range(most))

    def __iter__(self) -> Iterator[Anchor]:
        return (anchor for anchor in self._at if anchor is not None)

    # --- looking up ---

    def root(self, namespace: bytes) -> Anchor | None:
        """Return the anchor of the start of a namespace."""
        return self._roots.get(namespace)

    def places(self, ids: npt.NDArray[np.int32]) -> list[int]:
        """Return the places in a match that may have an anchor, the last first. ids: int32 [2, num_blocks]."""
        found = self._flagged(DEVICE, ids[DEVICE]) | self._flagged(HOST, ids[HOST])
        return [int(place) for place in np.flatnonzero(found)[::-1]]

    def find(self, device_id: int, host_id: int) -> Anchor | None:
        """Return the valid anchor of a cached block, and learn the ids that it has got meanwhile."""
        anchor = self.seek(device_id, host_id)
        if anchor is not None:
            self._learn(anchor, device_id, host_id)
        return anchor

    def seek(self, device_id: int, host_id: int) -> Anchor | None:
        """Return the valid anchor of a cached block. Nothing is changed."""
        for tier, block_id in ((DEVICE, device_id), (HOST, host_id)):
            anchor = self._by_id[tier].get(block_id)
            if anchor is not None and self._is_current(tier, anchor):
                return anchor
        return None

    def at_block(self, namespace: bytes, num_blocks: int, device_id: int, host_id: int) -> Anchor:
        """Return the anchor of a cached block; a new one where there is none."""
        anchor = self.find(device_id, host_id)
        if anchor is None:
            anchor = self._new(namespace, num_blocks)
            self._learn(anchor, device_id, host_id)
        return anchor

    def at_root(self, namespace: bytes) -> Anchor:
        """Return the anchor of the start of a namespace; a new one where there is none."""
        anchor = self._roots.get(namespace)
        if anchor is None:
            anchor = self._roots[namespace] = self._new(namespace, 0)
        return anchor

    def uses_of(self, anchor: Anchor) -> list[tuple[int, int, int]]:
        """Return (tier, id, generation) of the anchor's block."""
        ids, generations = self._ids[:, anchor.index].tolist(), self._generations[:, anchor.index].tolist()
        return [(tier, ids[tier], generations[tier]) for tier in (DEVICE, HOST) if ids[tier] >= 0]

    def is_current(self, tier: int, block_id: int, generation: int) -> bool:
        """Return whether the id still names the block that had it in that generation."""
        return self._generation(tier, block_id) == generation

    # --- blocks that come and go ---

    def moved(self, pairs: Pairs, to_host: bool) -> None:
        """Learn the ids of blocks that have just got a copy in the other tier. pairs: (from, to)."""
        source, target = (DEVICE, HOST) if to_host else (HOST, DEVICE)
        if not len(pairs):
            return
        seen: set[int] = set()
        for place in np.flatnonzero(self._flags[source][pairs[:, 0]])[::-1].tolist():
            from_id, to_id = pairs[place].tolist()
            anchor = self._by_id[source].get(from_id)
            if to_id not in seen and anchor is not None and self._was_current(source, anchor):
                self._use(target, anchor, to_id)
            seen.add(to_id)

    def stale(self) -> list[Anchor]:
        """Return the anchors whose block is in no tier any more."""
        is_valid = np.zeros(len(self._at), np.bool_)
        for tier in (DEVICE, HOST):
            ids, generations = self._ids[tier].copy(), self._generations[tier].copy()  # any thread may ask
            has_id = np.flatnonzero(ids >= 0)
            now = self._pools[tier].generations(ids[has_id])
            is_valid[has_id[now == generations[has_id]]] = True
        return [anchor for anchor in self if anchor.num_blocks > 0 and not is_valid[anchor.index]]

    def remove(self, anchor: Anchor) -> None:
        """Forget an anchor without checkpoints."""
        if anchor.num_blocks == 0:
            del self._roots[anchor.namespace]
        for tier in (DEVICE, HOST):
            self._forget_id(tier, anchor)
        self._at[anchor.index] = None
        self._free.append(anchor.index)

    def is_valid(self, anchor: Anchor) -> bool:
        """Return whether the anchor's block is in a tier."""
        return anchor.num_blocks == 0 or any(self._is_current(tier, anchor) for tier in (DEVICE, HOST))

    # --- inside ---

    def _flagged(self, tier: int, ids: Ids) -> npt.NDArray[np.bool_]:
        has_id = ids >= 0
        has_id[has_id] = self._flags[tier][ids[has_id]]
        return has_id

    def _new(self, namespace: bytes, num_blocks: int) -> Anchor:
        anchor = Anchor(self._free.pop(), namespace, num_blocks)
        self._at[anchor.index] = anchor
        return anchor

    def _generation(self, tier: int, block_id: int) -> int:
        return int(self._pools[tier].generations([block_id])[0])

    def _is_current(self, tier: int, anchor: Anchor) -> bool:
        block_id = int(self._ids[tier, anchor.index])
        return block_id >= 0 and self._generation(tier, block_id) == int(self._generations[tier, anchor.index])

    def _was_current(self, tier: int, anchor: Anchor) -> bool:
        """Whether the anchor's block has its id now, or had it until the move that is told of made the id free."""
        now = self._generation(tier, int(self._ids[tier, anchor.index]))
        return int(self._generations[tier, anchor.index]) in (now, (now - 1) % 2**32)

    def _learn(self, anchor: Anchor, device_id: int, host_id: int) -> None:
        for tier, block_id in ((DEVICE, device_id), (HOST, host_id)):
            if block_id >= 0 and not (self._by_id[tier].get(block_id) is anchor and self._is_current(tier, anchor)):
                self._use(tier, anchor, block_id)

    def _use(self, tier: int, anchor: Anchor, block_id: int) -> None:
        generation = self._generation(tier, block_id)
        if generation % 2 == 0:  # it is free already
            return
        before = self._by_id[tier].get(block_id)
        if before is not None:
            self._forget_id(tier, before)
        self._forget_id(tier, anchor)
        self._ids[tier, anchor.index], self._generations[tier, anchor.index] = block_id, generation
        self._by_id[tier][block_id] = anchor
        self._flags[tier][block_id] = True

    def _forget_id(self, tier: int, anchor: Anchor) -> None:
        block_id = int(self._ids[tier, anchor.index])
        if block_id >= 0:
            self._ids[tier, anchor.index] = NO_BLOCK
            del self._by_id[tier][block_id]
            self._flags[tier][block_id] = False
