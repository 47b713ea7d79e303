"""Anchors: the cached blocks that checkpoints stand on, by the companions that the tree has given to the blocks.

A cached block stands for an exact prefix, since the tree compares tokens. So a checkpoint is found by the companion of
its last whole block, and no token of the prefix is read again:

    match's ids    device [ 17   4   9   -  ]
                   host   [  -   -   2   5  ]
        companions        [  -   3   0   -  ]     an anchor has the companion 3, or 0, or none has

The anchor of a prefix shorter than a block is the start of its namespace.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from kvpage.blocks.groups.states.checkpoint import Anchor
from kvpage.blocks.sequence_state import COMPANION, PathIds

FEW_BLOCKS = 32
"""The last blocks, among which the longest checkpoint most often stands."""


class Anchors:
    """The anchors of all namespaces. Not thread-safe."""

    def __init__(self, most: int) -> None:
        """Begin with none. most: All companions are less."""
        self._roots: dict[bytes, Anchor] = {}
        self._at: dict[int, Anchor] = {}
        # Whether a block is an anchor, by its companion; the last entry is that of blocks without a companion.
        self._is_anchor = np.zeros(most + 1, bool)

    def __iter__(self) -> Iterator[Anchor]:
        return iter([*self._roots.values(), *self._at.values()])

    # --- looking up ---

    def root(self, namespace: bytes) -> Anchor | None:
        """Return the anchor of the start of a namespace."""
        return self._roots.get(namespace)

    def on_path(self, ids: PathIds) -> Iterator[Anchor]:
        """Yield the anchors of a match's blocks, the last first. Most callers take the first alone."""
        companions = ids[COMPANION]
        for companion in companions[: -FEW_BLOCKS - 1 : -1].tolist():
            if companion in self._at:
                yield self._at[companion]
        end, num_looked_at = len(companions) - FEW_BLOCKS, 8 * FEW_BLOCKS
        while end > 0:
            last = companions[max(end - num_looked_at, 0) : end]
            for companion in last[self._is_anchor[last]][::-1].tolist():
                yield self._at[companion]
            end, num_looked_at = end - len(last), 8 * num_looked_at

    def last(self, ids: PathIds, namespace: bytes) -> Anchor | None:
        """Return the anchor of a match's last block, or of the start of a namespace for a match without blocks."""
        return self._at.get(int(ids[COMPANION, -1])) if ids.shape[1] else self.root(namespace)

    def of(self, companions: Sequence[int]) -> list[Anchor]:
        """Return the anchors of blocks. Any thread may ask."""
        return [anchor for companion in companions if (anchor := self._at.get(companion)) is not None]

    # --- anchors that come and go ---

    def at(self, namespace: bytes, num_blocks: int, companion: int) -> Anchor:
        """Return the anchor of a cached block, or of the start of a namespace; a new one where there is none."""
        anchor = self._at.get(companion) if num_blocks else self.root(namespace)
        if anchor is None:
            anchor = Anchor(companion, namespace, num_blocks)
            if num_blocks:
                self._at[companion], self._is_anchor[companion] = anchor, True
            else:
                self._roots[namespace] = anchor
        return anchor

    def remove(self, anchor: Anchor) -> None:
        """Forget an anchor without checkpoints."""
        if anchor.num_blocks:
            del self._at[anchor.companion]
            self._is_anchor[anchor.companion] = False
        else:
            del self._roots[anchor.namespace]
