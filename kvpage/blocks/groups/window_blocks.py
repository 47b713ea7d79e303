"""WindowBlocks: the blocks of the layers that attend over one window: free, running sequences', or cached.

K and V of such a layer stand for their whole prefix, as those of all layers do. The prefix tree has an exact prefix for
each block that it caches. So a window's block is cached beside the tree's block of the same tokens, known by its id:

    the tree's block       17    4    9   30   12          full layers: all of them
    beside it               .    .    2    5    0          this window's: those that are still there
                                      |<-window->|         a prompt can go on here: its last window is cached

An id stands for its prefix as long as its generation is the same. A block beside one that is gone is never found.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpage._C import BlockPool
from kvpage.blocks.moves import BlockMove, BlockMoves
from kvpage.blocks.states import Ids
from kvpage.checks.values import as_list, check_at_least

NO_BLOCK = -1


@dataclass(frozen=True, slots=True)
class Window:
    """A group of layers that attend over the same window.

    Args:
        num_tokens: How many tokens a token attends to, itself included.
        num_blocks: Blocks of the group's pool.

    Raises:
        ValueError: A number is out of range.
        TypeError: An argument is of another type.
    """

    num_tokens: int
    num_blocks: int

    def __post_init__(self) -> None:
        check_at_least("num_tokens", self.num_tokens, 1)
        check_at_least("num_blocks", self.num_blocks, 1)


def checked_windows(windows: Iterable[Window]) -> list[Window]:
    """Return the windows of a manager.

    Args:
        windows: At least one.

    Raises:
        ValueError: There is none.
        TypeError: One is no Window.
    """
    found = as_list("windows", windows)
    if not found:
        raise ValueError("windows must be one or more, got 0")
    for window in found:
        if not isinstance(window, Window):
            raise TypeError(f"windows must be Windows, got {type(window).__name__}")
    return found


@dataclass(frozen=True, slots=True)
class WindowStats:
    """The blocks of a window's group now, and counters since it was made.

    Attributes:
        num_tokens: Tokens of the window.
        num_blocks: Blocks of the group.
        num_free_blocks: Blocks without contents.
        num_evictable_blocks: Cached blocks that no sequence uses.
        evicted_blocks: Cached blocks that made room for others.
        lost_blocks: Cached blocks that were dropped, since the tree's blocks beside them are gone.
    """

    num_tokens: int
    num_blocks: int
    num_free_blocks: int
    num_evictable_blocks: int
    evicted_blocks: int
    lost_blocks: int

    @property
    def num_used_blocks(self) -> int:
        """Blocks that sequences hold."""
        return self.num_blocks - self.num_free_blocks - self.num_evictable_blocks


class WindowBlocks:
    """The blocks of one group. Not thread-safe.

    Args:
        window: The group.
        block_size: Tokens of a block.
        full_pool: The blocks of the prefix tree.
    """

    def __init__(self, window: Window, block_size: int, full_pool: BlockPool) -> None:
        self.window = window
        self.block_size = block_size
        self.pool = BlockPool(window.num_blocks)  # a cached block has one reference, and one of each sequence
        self.moves = BlockMoves()
        self._full_pool = full_pool
        self._beside = np.full(full_pool.num_blocks, NO_BLOCK, np.int32)  # by the tree's id
        every = np.arange(full_pool.num_blocks, dtype=np.int32)
        self._generations = full_pool.generations(every) - np.uint32(1)  # of the tree's block, by its id: not that one
        self._full_of: dict[int, int] = {}  # the tree's id of each cached block
        self._unused: OrderedDict[int, None] = OrderedDict()  # cached blocks, least recently used first
        self._num_evicted = self._num_lost = 0

    @property
    def num_free(self) -> int:
        """Number of blocks that can be handed out: free ones, and cached ones that no sequence uses."""
        return self.pool.num_free + len(self._unused)

    def do_moves(self, do_move: Callable[[BlockMove], object]) -> None:
        """Make all copies of this group in order, before the next step; see BlockMoves.do.

        Args:
            do_move: Makes one move, such as do_move of the CacheEngine of the group's layers.
        """
        self.moves.do(do_move)

    def first_block(self, num_tokens: int) -> int:
        """Return the place of the first block that the token after so many attends to, or those before it."""
        return max(num_tokens - self.window.num_tokens + 1, 0) // self.block_size

    def num_needed(self, num_tokens: int) -> int:
        """Return how many blocks the last window before so many tokens has, whole blocks."""
        return num_tokens // self.block_size - min(self.first_block(num_tokens), num_tokens // self.block_size)

    def num_left_by(self, full_ids: Ids) -> int:
        """Return how many blocks can be handed out once a sequence uses those beside these.

        Args:
            full_ids: The tree's ids, each of which has one.
        """
        return self.num_free - sum(block_id in self._unused for block_id in self._beside[full_ids].tolist())

    # --- what is cached ---

    def has(self, full_ids: Ids) -> npt.NDArray[np.bool_]:
        """Return whether a block is cached beside each of the tree's blocks.

        Args:
            full_ids: The tree's ids, int32 [num_blocks].
        """
        return np.asarray((self._beside[full_ids] != NO_BLOCK) & self.had(full_ids))

    def had(self, full_ids: Ids) -> npt.NDArray[np.bool_]:
        """Return whether a block is cached beside each of the tree's blocks, or was.

        Args:
            full_ids: The tree's ids, int32 [num_blocks].
        """
        return np.asarray(self._full_pool.generations(full_ids) == self._generations[full_ids])

    def usable(self, full_ids: Ids) -> npt.NDArray[np.bool_]:
        """Return for each number of blocks of a prefix whether its last window is cached, bool [num_blocks + 1].

        Args:
            full_ids: The tree's ids of the prefix, int32 [num_blocks].
        """
        num_lacking = np.concatenate([[0], np.cumsum(~self.has(full_ids))])
        ends = np.arange(len(full_ids) + 1)
        firsts = np.maximum(ends * self.block_size - self.window.num_tokens + 1, 0) // self.block_size
        return np.asarray(num_lacking[ends] == num_lacking[np.minimum(firsts, ends)])

    def to_hold(self, full_ids: Ids) -> npt.NDArray[np.bool_]:
        """Return which blocks beside these are to be held for a while, bool [num_blocks].

        Those of the last window are, and those that sequences use anyway. Of the others the last ones are, as far as a
        quarter of the group stays free.

        Args:
            full_ids: The tree's ids of a prefix, int32 [num_blocks].
        """
        has, unused = self.has(full_ids), np.fromiter(self._unused, np.int32, len(self._unused))
        is_spare = has & np.isin(self._beside[full_ids], unused)
        is_last = np.arange(len(full_ids)) >= self.first_block(len(full_ids) * self.block_size)
        most = self.num_free - int((is_spare & is_last).sum()) - self.pool.num_blocks // 4
        is_other = is_spare & ~is_last
        num_from_here = np.cumsum(is_other[::-1])[::-1]
        return np.asarray(has & (~is_other | (num_from_here <= most)))

    def use(self, full_ids: Ids) -> list[int]:
        """Return the blocks beside these, each with a reference of the caller's.

        Args:
            full_ids: The tree's ids, each of which has one.
        """
        ids: list[int] = self._beside[full_ids].tolist()
        self.pool.share(ids)
        for block_id in ids:
            self._unused.pop(block_id, None)
        return ids

    def cache(self, full_id: int, block_id: int) -> int:
        """Cache a block beside the tree's block of the same tokens.

        Args:
            full_id: The tree's id.
            block_id: The caller's block.

        Returns:
            The caller's block from now on: another one, if one was cached already.
        """
        if self._full_of.get(block_id) == full_id:
            return block_id
        before = int(self._beside[full_id])
        if before != NO_BLOCK and self.has(np.array([full_id], np.int32))[0]:
            self.use(np.array([full_id], np.int32))
            self.pool.release_one(block_id)
            return before
        if before != NO_BLOCK:
            self._forget(before)
            self._num_lost += 1
        self.pool.share([block_id])
        self._beside[full_id], self._full_of[block_id] = block_id, full_id
        self._generations[full_id] = self._full_pool.generations([full_id])[0]
        return block_id

    # --- blocks that come and go ---

    def take(self, num_blocks: int) -> list[int]:
        """Return free blocks, with a reference of the caller's. Cached blocks are evicted where too few are free.

        Args:
            num_blocks: At most num_free.
        """
        if num_blocks > self.pool.num_free:
            self.drop_stale()
        while num_blocks > self.pool.num_free:
            self._forget(next(iter(self._unused)))
            self._num_evicted += 1
        ids: list[int] = self.pool.allocate(num_blocks).tolist()
        return ids

    def release(self, block_ids: Iterable[int]) -> None:
        """Give the caller's references back. Cached blocks stay until they are evicted, the first of them first."""
        for block_id in block_ids:
            self.pool.release_one(block_id)
            if block_id in self._full_of and self.pool.ref_count(block_id) == 1:
                self._unused[block_id] = None

    def drop_stale(self) -> None:
        """Free the cached blocks beside blocks that are gone."""
        unused = np.fromiter(self._unused, np.int32, len(self._unused))
        full_ids = np.array([self._full_of[block_id] for block_id in unused.tolist()], np.int32)
        for block_id in unused[~self.has(full_ids)].tolist():
            self._forget(block_id)
            self._num_lost += 1

    def clear(self) -> None:
        """Forget all cached blocks."""
        for block_id in list(self._full_of):
            self._forget(block_id)

    def stats(self) -> WindowStats:
        """Return the counters, and the state of the blocks now."""
        return WindowStats(
            num_tokens=self.window.num_tokens,
            num_blocks=self.pool.num_blocks,
            num_free_blocks=self.pool.num_free,
            num_evictable_blocks=len(self._unused),
            evicted_blocks=self._num_evicted,
            lost_blocks=self._num_lost,
        )

    def check(self, held_ids: Sequence[int]) -> None:
        """Raise RuntimeError if an invariant is broken.

        Args:
            held_ids: The blocks of all sequences, each as often as it is held.
        """
        self.pool.check()
        holders = Counter(held_ids) + Counter(list(self._full_of))
        counts = {block_id: self.pool.ref_count(block_id) for block_id in range(self.pool.num_blocks)}
        if {block_id: count for block_id, count in counts.items() if count} != dict(holders):
            raise RuntimeError(f"blocks of the window have references {counts} and holders {dict(holders)}")
        unused = {block_id for block_id in self._full_of if holders[block_id] == 1}
        if unused != set(self._unused):
            raise RuntimeError(f"cached blocks {sorted(unused)} are not used, in the list are {sorted(self._unused)}")
        if any(self._beside[full_id] != block_id for block_id, full_id in self._full_of.items()):
            raise RuntimeError("cached blocks and the tree's blocks do not name each other")
        if int((self._beside != NO_BLOCK).sum()) != len(self._full_of):
            raise RuntimeError(f"{len(self._full_of)} blocks are cached, and others stand beside the tree's")

    def _forget(self, block_id: int) -> None:
        self._unused.pop(block_id, None)
        self._beside[self._full_of.pop(block_id)] = NO_BLOCK
        self.pool.release_one(block_id)
