"""Anchors: the cached blocks that checkpoints stand on, known by their ids in both tiers.

A cached block stands for an exact prefix, since the tree compares tokens. Its id does so as long as its generation is
the same. So a checkpoint is found by the block's id, and no token of the prefix is read again:

    match's ids    device [ 17   4   9   -  ]     the table has an anchor for some ids
                   host   [  -   -   2   5  ]
    anchor         device 9 @ 7 | host 2 @ 3      valid while one of the two has this generation

The anchor of a prefix shorter than a block is the start of its namespace. It is always valid.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvpage.blocks.groups.states.checkpoint import Anchor
from kvpage.blocks.space import BlockSpace

PathIds = npt.NDArray[np.int32]  # [2, num_blocks]: on the device, on the host; -1 for none


class Anchors:
    """The anchors of both tiers. Not thread-safe."""

    def __init__(self, space: BlockSpace, most: int) -> None:
        self.table = space.new_anchors(most)
        self._roots: dict[bytes, Anchor] = {}
        self._at: list[Anchor | None] = [None] * most

    def __iter__(self) -> Iterator[Anchor]:
        return (anchor for anchor in self._at if anchor is not None)

    # --- looking up ---

    def root(self, namespace: bytes) -> Anchor | None:
        """Return the anchor of the start of a namespace."""
        return self._roots.get(namespace)

    def on_path(self, ids: PathIds) -> Iterator[Anchor]:
        """Yield the valid anchors of a match's blocks, the last first."""
        block_index, index = self.table.find_last(ids, ids.shape[1])
        while block_index >= 0:
            if (anchor := self._at[index]) is not None:
                yield anchor
            block_index, index = self.table.find_last(ids, block_index)

    def seek(self, device_id: int, host_id: int) -> Anchor | None:
        """Return the valid anchor of a cached block. Nothing is changed."""
        index = self.table.find(device_id, host_id)
        return self._at[index] if index >= 0 else None

    def last(self, ids: PathIds, namespace: bytes) -> Anchor | None:
        """Return the valid anchor of a match's last block, or of the start of a namespace for a match without blocks.

        Nothing is changed. ids: int32 [2, num_blocks].
        """
        if not ids.shape[1]:
            return self.root(namespace)
        device_id, host_id = ids[:, -1].tolist()
        return self.seek(device_id, host_id)

    def at_block(self, namespace: bytes, num_blocks: int, device_id: int, host_id: int) -> Anchor:
        """Return the anchor of a cached block; a new one where there is none."""
        anchor = self.seek(device_id, host_id)
        if anchor is None:
            anchor = self._new(namespace, num_blocks)
            self.table.learn(anchor.index, device_id, host_id)
        return anchor

    def at_root(self, namespace: bytes) -> Anchor:
        """Return the anchor of the start of a namespace; a new one where there is none."""
        anchor = self._roots.get(namespace)
        if anchor is None:
            anchor = self._roots[namespace] = self._new(namespace, 0)
        return anchor

    def uses_of(self, anchor: Anchor) -> list[tuple[int, int, int]]:
        """Return (tier, id, generation) of the anchor's block."""
        return self.table.uses_of(anchor.index)

    def is_current(self, tier: int, block_id: int, generation: int) -> bool:
        """Return whether the id still names the block that had it in that generation."""
        return self.table.is_current(tier, block_id, generation)

    # --- blocks that come and go ---

    def stale(self) -> list[Anchor]:
        """Return the anchors whose block is in no tier any more. Any thread may ask."""
        return [anchor for index in self.table.stale() if (anchor := self._at[index]) is not None]

    def remove(self, anchor: Anchor) -> None:
        """Forget an anchor without checkpoints."""
        if anchor.num_blocks == 0:
            del self._roots[anchor.namespace]
        self.table.remove(anchor.index)
        self._at[anchor.index] = None

    def is_valid(self, anchor: Anchor) -> bool:
        """Return whether the anchor's block is in a tier."""
        return self.table.is_valid(anchor.index)

    # --- inside ---

    def _new(self, namespace: bytes, num_blocks: int) -> Anchor:
        anchor = Anchor(self.table.add(num_blocks > 0), namespace, num_blocks)
        self._at[anchor.index] = anchor
        return anchor
