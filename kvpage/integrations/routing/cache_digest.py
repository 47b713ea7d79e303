"""CacheDigest: the blocks that an engine caches, as a report of bounded size for routers.

depth     1   2   3   4   5   6   7   8
blocks    a ─ b ─ c ─ d ─ e ─ f ─ g ─ h       64-bit hashes; each one stands for all before it, too
report        b       d       f       h       where too many are cached: blocks at every 2nd, 4th, ... depth
"""

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpage.checks.values import check_at_least
from kvpage.observe.events.block_events import BlockEvents
from kvpage.observe.events.schema import AllBlocksCleared, BlockStored, Event
from kvpage.observe.tree_watch import TreeChanges


@dataclass(frozen=True, slots=True)
class DigestReport:
    """The cached blocks of one replica at one time.

    Attributes:
        block_size: Tokens of a block.
        stride: Only blocks at every so-manieth depth are named.
        hashes: Their hashes, as `block_hashes` gives them.
    """

    block_size: int
    stride: int
    hashes: frozenset[int]

    def to_wire(self) -> dict[str, Any]:
        """Return plain values, for any transport: 8 bytes a block."""
        packed = np.array(sorted(self.hashes), "<u8").tobytes()
        return {"block_size": self.block_size, "stride": self.stride, "hashes": packed}

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> "DigestReport | None":
        """Return the report in such values; None for a dict without one.

        Args:
            wire: As `to_wire` returned it.
        """
        if "hashes" not in wire:
            return None
        hashes = frozenset(np.frombuffer(wire["hashes"], "<u8").tolist())
        return cls(int(wire["block_size"]), int(wire["stride"]), hashes)


class CacheDigest:
    """Follows the tree of an engine: give it to `engine.telemetry.follow`. `report` may be called by any thread.

    Args:
        block_size: Tokens of a block.
        max_blocks: Blocks that a report names at most.

    Raises:
        ValueError: A number is not positive.
    """

    def __init__(self, block_size: int, max_blocks: int = 4096) -> None:
        check_at_least("block_size", block_size, 1)
        check_at_least("max_blocks", max_blocks, 1)
        self.block_size, self.max_blocks = block_size, max_blocks
        self._events = BlockEvents(block_size)
        self._lock = threading.Lock()
        self._depths: dict[int, int] = {}
        self._media: dict[int, set[str | None]] = {}

    def __call__(self, changes: TreeChanges) -> None:
        """Take the changes of a step."""
        events = self._events.events(changes)
        if events:
            with self._lock:
                for event in events:
                    self._take(event)

    def report(self) -> DigestReport:
        """Return the blocks that are cached now, in any tier."""
        with self._lock:
            depths = list(self._depths.items())
        stride = 1
        while len(depths) > self.max_blocks:
            stride *= 2
            depths = [(block, depth) for block, depth in depths if depth % stride == 0]
        return DigestReport(self.block_size, stride, frozenset(block for block, _ in depths))

    def _take(self, event: Event) -> None:
        if isinstance(event, AllBlocksCleared):
            self._depths, self._media = {}, {}
        elif isinstance(event, BlockStored):
            depth = 0 if event.parent_block_hash is None else self._depths[event.parent_block_hash]
            for block in event.block_hashes:
                depth += 1
                self._depths[block] = depth
                self._media.setdefault(block, set()).add(event.medium)
        else:
            for block in event.block_hashes:
                self._media[block].discard(event.medium)
                if not self._media[block]:
                    del self._media[block], self._depths[block]
