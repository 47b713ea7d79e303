"""TreeWatch: reports the blocks that a PrefixTree has cached and evicted, once a step. Without one nothing is recorded.

tree ─► changes, in order ─► BlockEvents (hashes, for routers)
                          └► BlockResidency (how long blocks stay)
"""

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpage._C import PrefixTree

DEFAULT_MAX_BYTES = 64 << 20


class ChangeKind(IntEnum):
    """The first column of TreeChanges.changes. The second is a block's id, and the third depends on the kind.

    Attributes:
        INSERTED: A device block; the block before it, of either tier (see `before`), or NOTHING_BEFORE.
        INSERTED_HOST: The same of a host block; in a restart only.
        PROMOTED: A device block; the host block that it is a copy of.
        WRITTEN: A host block; the device block that it is a copy of.
        LEFT_DEVICE: A device block; when it was last used, on the clock of TreeChanges.now, or 0 if that is unknown.
        LEFT_HOST: The same of a host block.
    """

    INSERTED = 0
    INSERTED_HOST = 1
    PROMOTED = 2
    WRITTEN = 3
    LEFT_DEVICE = 4
    LEFT_HOST = 5


NOTHING_BEFORE = -1


class TreeChanges(NamedTuple):
    """Changes of cached blocks since the last answer.

    Attributes:
        is_restart: Whether the listener has to forget earlier changes. Then the changes are all cached blocks, as if
            they were inserted now.
        now: Nanoseconds of a steady clock.
        changes: int64 [num_changes, 3], in order; see ChangeKind.
        tokens: int32 [number of insertions, block_size], in the same order.
        namespaces: Namespaces of the insertions with nothing before them.
    """

    is_restart: bool
    now: int
    changes: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int32]
    namespaces: list[bytes]


def before(value: int) -> tuple[bool, int] | None:
    """Return the block before an inserted one: whether the id is a device id, and the id. None: NOTHING_BEFORE."""
    if value == NOTHING_BEFORE:
        return None
    return (True, value) if value >= 0 else (False, -2 - value)


class TreeWatch:
    """Follows a tree until `close`.

    max_bytes: The limit of the tree's log between two calls of `poll`. When the log exceeds it, or memory is lacking,
    the listeners get a restart.
    """

    def __init__(self, tree: PrefixTree, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
            raise ValueError(f"max_bytes must be a positive integer, got {max_bytes!r}")
        self.listeners: list[Callable[[TreeChanges], object]] = []
        self._tree = tree
        tree.log_changes(max_bytes)

    def poll(self) -> None:
        """Report the changes since the last call to every listener; the first call reports all that is cached."""
        changes = TreeChanges(*self._tree.take_changes())
        for listener in self.listeners:
            listener(changes)

    def restart(self) -> None:
        """Have the next `poll` report all that is cached."""
        self._tree.lose_changes()

    def close(self) -> None:
        """End the tree's record. `poll` must not be called again."""
        self._tree.log_changes(0)
