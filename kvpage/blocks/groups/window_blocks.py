"""WindowBlocks: the blocks of the layers that attend over one window: free, running sequences', or cached.

K and V of such a layer stand for their whole prefix, as in all layers. The prefix tree has an exact prefix for
each block that it caches. So a window's block is cached beside the tree's block of the same tokens:

    the tree's block       17    4    9   30   12          full layers: all of them, on the device or on the host
    its companion           3    8    0    1    2          the number under which this window's blocks are kept
    beside it, device       .    .    2    5    0          this window's: those that are still there
               host         .    7    .    .    .          evicted from the device
                                      |<-window->|         a prompt can go on here: its last window is cached

A block beside one that is gone is never found, and is free again once the tree has told of that. Where there is a host
tier, a block that is evicted goes there.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpage._C import BlockPool
from kvpage.blocks.moves import BlockMove, BlockMoves, Kind
from kvpage.blocks.sequence_state import COMPANION, DEVICE, HOST, NO_BLOCK, PathIds
from kvpage.blocks.space import BlockSpace
from kvpage.checks.values import check_at_least


@dataclass(frozen=True, slots=True)
class Window:
    """A group of layers that attend over the same window.

    Args:
        num_tokens: How many tokens a token attends to, itself included.
        num_blocks: Blocks of the group's pool.
        num_host_blocks: Blocks of the group on the host, for evicted ones and for sequences that are swapped out.

    Raises:
        ValueError: A number is out of range.
        TypeError: An argument is of another type.
    """

    num_tokens: int
    num_blocks: int
    num_host_blocks: int = 0

    def __post_init__(self) -> None:
        check_at_least("num_tokens", self.num_tokens, 1)
        check_at_least("num_blocks", self.num_blocks, 1)
        check_at_least("num_host_blocks", self.num_host_blocks, 0)


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
        num_host_blocks: Blocks of the group on the host.
        num_free_host_blocks: Those without contents.
        demoted_blocks: Evicted blocks that went to the host.
        promoted_blocks: Blocks that came back for a prompt.
    """

    num_tokens: int
    num_blocks: int
    num_free_blocks: int
    num_evictable_blocks: int
    evicted_blocks: int
    lost_blocks: int
    num_host_blocks: int = 0
    num_free_host_blocks: int = 0
    demoted_blocks: int = 0
    promoted_blocks: int = 0

    @property
    def num_used_blocks(self) -> int:
        """Blocks that sequences hold."""
        return self.num_blocks - self.num_free_blocks - self.num_evictable_blocks


class WindowBlocks:
    """The blocks of one group. Not thread-safe.

    A cached block has one reference of the group's, and one of each sequence that uses it. On the host it has one.
    """

    def __init__(self, window: Window, space: BlockSpace) -> None:
        self.window, self.block_size = window, space.block_size
        self.pool, self.host_pool = BlockPool(window.num_blocks), BlockPool(window.num_host_blocks)
        self.moves = BlockMoves()
        self._space = space
        # By companion, on the device and on the host; the last entry is that of blocks without a companion.
        self._beside = np.full((2, space.most_companions + 1), NO_BLOCK, np.int32)
        self._was_beside = np.zeros(space.most_companions + 1, bool)
        self._companion_of: dict[int, int] = {}  # of each cached block on the device
        self._unused: OrderedDict[int, None] = OrderedDict()  # cached blocks, least recently used first
        self._on_host: OrderedDict[int, int] = OrderedDict()  # cached blocks there and companions, in the same order
        self._num_evicted = self._num_lost = self._num_demoted = self._num_promoted = 0

    @property
    def num_free(self) -> int:
        """Number of blocks that can be handed out: free ones, and cached ones that no sequence uses."""
        return self.pool.num_free + len(self._unused)

    @property
    def num_free_host(self) -> int:
        """Number of blocks of the host that can be handed out: free ones, and cached ones."""
        return self.host_pool.num_free + len(self._on_host)

    def do_moves(self, do_move: Callable[[BlockMove], object]) -> None:
        """Make all moves of this group in order, before the next step; see BlockMoves.do.

        Args:
            do_move: Makes one move, such as do_move of the CacheEngine of the group's layers.
        """
        self.moves.do(do_move)

    def add_move(self, kind: Kind, pairs: Iterable[tuple[int, int]]) -> None:
        """Add a move of independent pairs (from, to).

        Args:
            kind: As for BlockMoves.
            pairs: Blocks of this group.
        """
        self.moves.add(kind, pairs)

    def first_block(self, num_tokens: int) -> int:
        """Return the place of the first block that the token after `num_tokens` tokens attends to."""
        return max(num_tokens - self.window.num_tokens + 1, 0) // self.block_size

    def num_needed(self, num_tokens: int) -> int:
        """Return how many blocks the last window before `num_tokens` tokens has, whole blocks."""
        return num_tokens // self.block_size - min(self.first_block(num_tokens), num_tokens // self.block_size)

    def num_left_by(self, path: PathIds) -> int:
        """Return how many blocks can be handed out once a sequence uses those beside these."""
        ids = self._beside[DEVICE, path[COMPANION]]
        num_taken: int = sum(block_id == NO_BLOCK or block_id in self._unused for block_id in ids.tolist())
        return self.num_free - num_taken

    # --- what is cached ---

    def has(self, path: PathIds) -> npt.NDArray[np.bool_]:
        """Return whether a block is cached beside each of the tree's blocks, in either tier."""
        return np.asarray((self._beside[:, path[COMPANION]] != NO_BLOCK).any(0))

    def had(self, path: PathIds) -> npt.NDArray[np.bool_]:
        """Return whether a block is cached beside each of the tree's blocks, or was."""
        return np.asarray(self._was_beside[path[COMPANION]])

    def usable_at(self, path: PathIds, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return for each position whether all whole blocks that its token attends to are cached, bool [num_positions].

        Args:
            path: The tree's ids of a prefix.
            positions: Tokens before each, at most the tokens of the prefix and of a part of a block after it.
        """
        num_lacking = np.concatenate([[0], np.cumsum(~self.has(path))])
        ends = positions // self.block_size
        firsts = np.maximum(positions - self.window.num_tokens + 1, 0) // self.block_size
        return np.asarray(num_lacking[ends] == num_lacking[np.minimum(firsts, ends)])

    def to_hold(self, path: PathIds) -> npt.NDArray[np.bool_]:
        """Return which blocks beside these are to be held for a while, bool [num_blocks]: some of those on the device.

        Those of the last window are, and those that sequences use anyway. Of the others the last ones are, as far as a
        quarter of the group stays free.
        """
        ids = self._beside[DEVICE, path[COMPANION]]
        unused = np.fromiter(self._unused, np.int32, len(self._unused))
        has = ids != NO_BLOCK
        is_spare = has & np.isin(ids, unused)
        is_last = np.arange(len(ids)) >= self.first_block(len(ids) * self.block_size)
        most = self.num_free - int((is_spare & is_last).sum()) - self.pool.num_blocks // 4
        is_other = is_spare & ~is_last
        num_from_here = np.cumsum(is_other[::-1])[::-1]
        return np.asarray(has & (~is_other | (num_from_here <= most)))

    def use(self, path: PathIds) -> list[int]:
        """Return the blocks beside these, each with a reference of the caller's. Those of the host come back first.

        Args:
            path: The tree's ids, each of which has one. For those on the host there is room: `num_left_by` is not
                negative.
        """
        companions = path[COMPANION]
        ids = self._beside[DEVICE, companions]
        is_here = ids != NO_BLOCK
        self.pool.share(ids[is_here].tolist())
        for block_id in ids[is_here].tolist():
            self._unused.pop(block_id, None)
        if not is_here.all():
            ids[~is_here] = self._promote(companions[~is_here].tolist())
        used: list[int] = ids.tolist()
        return used

    def cache(self, path: PathIds, block_id: int) -> int:
        """Cache a block beside the tree's block of the same tokens, which is the path, and has a companion.

        Returns:
            The caller's block from now on: another one, if one was cached already.
        """
        companion = int(path[COMPANION, 0])
        before = int(self._beside[DEVICE, companion])
        if before == block_id:
            return block_id
        if before != NO_BLOCK:
            self.use(path)
            self.pool.release_one(block_id)
            return before
        self._put(companion, block_id)
        return block_id

    # --- blocks that come and go ---

    def take(self, num_blocks: int) -> list[int]:
        """Return free blocks, `num_free` at most, with the caller's reference. Cached blocks are evicted for them."""
        if num_blocks > self.pool.num_free:
            self._space.bury_companions()
        if num_blocks > self.pool.num_free:
            self._evict(num_blocks - self.pool.num_free)
        ids: list[int] = self.pool.allocate(num_blocks).tolist()
        return ids

    def take_host(self, num_blocks: int) -> list[int]:
        """Return free blocks of the host, `num_free_host` at most. Cached blocks are evicted there for them."""
        if num_blocks > self.host_pool.num_free:
            self._space.bury_companions()
        while num_blocks > self.host_pool.num_free:
            self._forget_host(next(iter(self._on_host)))
        ids: list[int] = self.host_pool.allocate(num_blocks).tolist()
        return ids

    def release(self, block_ids: Iterable[int]) -> None:
        """Give the caller's references back. Cached blocks stay until they are evicted, the first of them first."""
        for block_id in block_ids:
            self.pool.release_one(block_id)
            if block_id in self._companion_of and self.pool.ref_count(block_id) == 1:
                self._unused[block_id] = None

    def blocks_gone(self, companions: Sequence[int]) -> None:
        """Forget the cached blocks beside blocks that are gone."""
        beside = self._beside[:, companions]
        device_ids, host_ids = (ids[ids != NO_BLOCK].tolist() for ids in beside)
        for block_id in device_ids:
            self._forget(block_id)
        for host_id in host_ids:
            self._forget_host(host_id)
        self._was_beside[companions] = False
        self._num_lost += len(device_ids) + len(host_ids)

    def clear(self) -> None:
        """Forget all cached blocks, in both tiers."""
        for block_id in list(self._companion_of):
            self._forget(block_id)
        for host_id in list(self._on_host):
            self._forget_host(host_id)

    def stats(self) -> WindowStats:
        """Return the counters, and the state of the blocks now."""
        return WindowStats(
            num_tokens=self.window.num_tokens,
            num_blocks=self.pool.num_blocks,
            num_free_blocks=self.pool.num_free,
            num_evictable_blocks=len(self._unused),
            evicted_blocks=self._num_evicted,
            lost_blocks=self._num_lost,
            num_host_blocks=self.host_pool.num_blocks,
            num_free_host_blocks=self.host_pool.num_free,
            demoted_blocks=self._num_demoted,
            promoted_blocks=self._num_promoted,
        )

    def check(self, held_ids: Sequence[int], held_host_ids: Sequence[int] = ()) -> None:
        """Raise RuntimeError if an invariant is broken. Both: blocks of sequences, each as often as they hold it."""
        for pool, holders in (
            (self.pool, Counter(held_ids) + Counter(list(self._companion_of))),
            (self.host_pool, Counter(held_host_ids) + Counter(list(self._on_host))),
        ):
            pool.check()
            counts = {block_id: pool.ref_count(block_id) for block_id in range(pool.num_blocks)}
            if {block_id: count for block_id, count in counts.items() if count} != dict(holders):
                raise RuntimeError(f"blocks of the window have references {counts} and holders {dict(holders)}")
        used_ids = set(held_ids)
        unused = {block_id for block_id in self._companion_of if block_id not in used_ids}
        if unused != set(self._unused):
            raise RuntimeError(f"cached blocks {sorted(unused)} are not used, in the list are {sorted(self._unused)}")
        for tier, companion_of in ((DEVICE, self._companion_of), (HOST, self._on_host)):
            if any(self._beside[tier, companion] != block_id for block_id, companion in companion_of.items()):
                raise RuntimeError("cached blocks and the tree's blocks do not name each other")
            if int((self._beside[tier] != NO_BLOCK).sum()) != len(companion_of):
                raise RuntimeError(f"{len(companion_of)} blocks are cached, and others stand beside the tree's")

    # --- inside ---

    def _put(self, companion: int, block_id: int) -> None:
        """Cache a block under a companion, with a reference of the group's."""
        self.pool.share([block_id])
        self._beside[DEVICE, companion], self._companion_of[block_id] = block_id, companion
        self._was_beside[companion] = True

    def _promote(self, companions: list[int]) -> list[int]:
        """Bring blocks back from the host, each with a reference of the caller's. Their copies there stay."""
        host_ids = self._beside[HOST, companions].tolist()
        for host_id in host_ids:
            del self._on_host[host_id]  # blocks that are evicted for them do not take their places
        ids = self.take(len(companions))
        self.moves.add("swap_in", zip(host_ids, ids, strict=True))
        for companion, host_id, block_id in zip(companions, host_ids, ids, strict=True):
            self._on_host[host_id] = companion
            self._put(companion, block_id)
        self._num_promoted += len(ids)
        return ids

    def _evict(self, num_blocks: int) -> None:
        """Free cached blocks that no sequence uses, the blocks of pins last. They go to the host where it has room."""
        pinned = self._pinned()
        order = sorted(self._unused, key=pinned.__contains__) if pinned else list(self._unused)
        for block_id in order[:num_blocks]:
            self._demote(block_id)
            self._forget(block_id)
        self._num_evicted += num_blocks

    def _demote(self, block_id: int) -> None:
        """Copy a cached block to the host, if it is not there yet and there is room."""
        companion = self._companion_of[block_id]
        if self._beside[HOST, companion] == NO_BLOCK and self.num_free_host:
            (host_id,) = self.take_host(1)
            self.moves.add("swap_out", [(block_id, host_id)])
            self._beside[HOST, companion], self._on_host[host_id] = host_id, companion
            self._num_demoted += 1

    def _pinned(self) -> set[int]:
        """Return the blocks on the device that the last windows of pinned prefixes have."""
        pinned: set[int] = set()
        for match in self._space.pins.matches:
            first = min(self.first_block(match.num_tokens), match.num_blocks)
            pinned.update(self._beside[DEVICE, match.tier_block_ids(first)[COMPANION]].tolist())
        return pinned

    def _forget(self, block_id: int) -> None:
        self._unused.pop(block_id, None)
        self._beside[DEVICE, self._companion_of.pop(block_id)] = NO_BLOCK
        self.pool.release_one(block_id)

    def _forget_host(self, host_id: int) -> None:
        self._beside[HOST, self._on_host.pop(host_id)] = NO_BLOCK
        self.host_pool.release_one(host_id)
