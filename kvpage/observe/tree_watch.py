"""TreeWatch: tells others what a PrefixTree has cached and given up, once a step. Nothing is recorded without one.

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
    """The first column of TreeChanges.changes; the second is a block's id, the third depends on it.

    INSERTED: a device block; the block before it, of either tier (see `before`), or NOTHING_BEFORE.
    INSERTED_HOST: the same of a host block; in a restart only.
    PROMOTED: a device block; the host block that it is a copy of. WRITTEN: a host block; the device block, likewise.
    LEFT_DEVICE, LEFT_HOST: a block; when it was last used, on the clock of TreeChanges.now, or 0 if nobody knows.
    """

    INSERTED = 0
    INSERTED_HOST = 1
    PROMOTED = 2
    WRITTEN = 3
    LEFT_DEVICE = 4
    LEFT_HOST = 5


NOTHING_BEFORE = -1


class TreeChanges(NamedTuple):
    """What has happened to cached blocks since the last answer.

    is_restart: forget what is known: the changes are all that is cached now, as if it were inserted.
    now: nanoseconds of a steady clock.
    changes: int64 [num_changes, 3], in order. tokens: int32 [number of insertions, block_size], in the same order.
    namespaces: of the insertions with nothing before them.
    """

    is_restart: bool
    now: int
    changes: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int32]
    namespaces: list[bytes]


def before(value: int) -> tuple[bool, int] | None:
    """Of an insertion: whether the block before it is named by its device id, and this id; None for NOTHING_BEFORE."""
    if value == NOTHING_BEFORE:
        return None
    return (True, value) if value >= 0 else (False, -2 - value)


class TreeWatch:
    """Follows a tree until `close`.

    max_bytes: of the tree's log between two calls of `poll`; beyond it, or where memory lacks, the listeners get a
        restart.
    """

    def __init__(self, tree: PrefixTree, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
            raise ValueError(f"max_bytes must be a positive integer, got {max_bytes!r}")
        self.listeners: list[Callable[[TreeChanges], object]] = []
        self._tree = tree
        tree.log_changes(max_bytes)

    def poll(self) -> None:
        """Tells every listener what has happened since the last time: the first time, all that is cached."""
        changes = TreeChanges(*self._tree.take_changes())
        for listener in self.listeners:
            listener(changes)

    def restart(self) -> None:
        """Makes the next `poll` tell all that is cached."""
        self._tree.lose_changes()

    def close(self) -> None:
        """The tree records nothing any more; `poll` must not be called again."""
        self._tree.log_changes(0)
