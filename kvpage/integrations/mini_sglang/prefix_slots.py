"""PrefixSlots: mini-sglang's prefix cache over a PrefixTree. The engine owns the slots, the tree knows their tokens.

    match_prefix ─► PrefixHandle ─► lock ─► slots that stay ─► unlock
    insert_prefix(tokens, slots) ─► new pages become the tree's, after its pages
    evict(size) ─► pages leave the tree, the least recently used first ─► slots, the engine's again

Two requests may compute the same tokens at once. The tree has the slots of the first. The second keeps its own until it
ends, and nothing of it is cached. Told that its tokens are cached already, mini-sglang would free its slots at once,
although the request still reads them.

The pool of the tree has no free page at any time. A page is the engine's, with one reference, or the tree's. So pages
that become free in an eviction are exactly the evicted ones.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvpage._C import BlockPool, PrefixTree
from kvpage.integrations.mini_sglang.prefix_handle import PrefixHandle


class SizeInfo(NamedTuple):
    """Cached tokens. evictable_size: tokens that no handle locks. protected_size: the others."""

    evictable_size: int
    protected_size: int

    @property
    def total_size(self) -> int:
        """All cached tokens."""
        return self.evictable_size + self.protected_size


class MatchResult(NamedTuple):
    """The cached beginning of a prompt. host_handle: None; kvpage's host tier is its store."""

    cuda_handle: PrefixHandle
    host_handle: None = None


class InsertResult(NamedTuple):
    """An insertion's result. cached_len: tokens whose slots were the cache's. handle: of all whose slots are now."""

    cached_len: int
    handle: PrefixHandle


class PrefixSlots:
    """A prefix cache with the methods that mini-sglang calls. For one thread, as the engine's scheduler is.

    Args:
        num_pages: pages of the engine's pool; slots are below num_pages * page_size.
        page_size: tokens of a page. Only whole pages are cached.
        device: of the slots that are returned.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(self, num_pages: int, page_size: int, device: torch.device | str = "cpu") -> None:
        self.page_size, self.device = page_size, torch.device(device)
        self._pool = BlockPool(num_pages)
        self._tree = PrefixTree(self._pool, page_size)
        self._pool.allocate(num_pages)  # the engine's

    def match_prefix(self, input_ids: torch.Tensor) -> MatchResult:
        """Find the longest cached beginning of the tokens.

        Args:
            input_ids: token ids, [tokens], of any integer dtype.

        Returns:
            A handle, which locks nothing yet.
        """
        tokens = on_host(input_ids)
        match = self._tree.match(tokens, num_left_over=0)
        self._tree.release(match)
        return MatchResult(self._handle(tokens[: match.num_tokens]))

    def insert_prefix(self, input_ids: torch.Tensor, indices: torch.Tensor) -> InsertResult:
        """Cache the whole pages of the tokens. The slots of tokens that were not cached become the cache's.

        If some are cached under other slots, none are cached: all slots after the last common one stay the engine's.

        Args:
            input_ids: token ids, [tokens].
            indices: the slot of each token, [tokens].

        Returns:
            How many tokens were cached before, under these slots. And a handle of the tokens that are now: of all whole
            pages, unless some are cached under other slots. It locks nothing yet.

        Raises:
            ValueError: there is not a slot for each token, slots are no whole pages, or a page that is to become the
                cache's is its already. Nothing is cached.
        """
        tokens, slots = on_host(input_ids), on_host(indices)
        if len(tokens) != len(slots):
            raise ValueError(f"indices must be one a token, got {len(slots)} for {len(tokens)} tokens")
        num_whole = len(tokens) // self.page_size * self.page_size
        pages, tokens = self._pages_of(slots[:num_whole]), tokens[:num_whole]
        match = self._tree.match(tokens, num_left_over=0)
        common = int((match.block_ids == pages[: match.num_blocks]).cumprod().sum())
        if common < match.num_blocks:
            self._tree.release(match)
            return InsertResult(common * self.page_size, self._handle(tokens[: common * self.page_size]))
        try:
            path = self._tree.insert(tokens[match.num_tokens :], pages[match.num_blocks :], after=match)
        except ValueError:
            self._tree.release(match)
            raise
        self._tree.release(path)
        return InsertResult(match.num_tokens, self._handle(tokens))

    def lock_handle(self, handle: PrefixHandle, unlock: bool = False) -> None:
        """Keep the handle's tokens cached until it is unlocked as often as it was locked.

        Args:
            handle: of this cache.
            unlock: unlock it once.

        Raises:
            TypeError: the handle is not one of kvpage's.
            ValueError: it is of another cache, or is unlocked more often than locked.
            RuntimeError: some of its tokens were evicted since it was made.
        """
        if not isinstance(handle, PrefixHandle):
            raise TypeError(f"handle must be a PrefixHandle, got {type(handle).__name__}")
        if handle.tree is not self._tree:
            raise ValueError("handle must be of this cache, got one of another")
        if unlock:
            handle.unlock()
        else:
            handle.lock()

    def evict(self, size: int) -> torch.Tensor:
        """Forget the least recently used tokens that are not locked, a prefix after its continuations.

        Args:
            size: how many tokens at least; it is rounded up to whole pages.

        Returns:
            Their slots, int32 [evicted], page by page. They are the engine's again.

        Raises:
            ValueError: the size is negative.
            RuntimeError: fewer tokens can be evicted. None was.
        """
        num_pages = -(-size // self.page_size)
        if num_pages > self._tree.num_evictable:
            raise RuntimeError(f"size must be at most the {self.size_info.evictable_size} evictable tokens, got {size}")
        return self._slots_of(self._pool.allocate(self._tree.evict(num_pages)))

    def reset(self) -> None:
        """Forget everything. All slots are the engine's again.

        Raises:
            RuntimeError: a handle is locked. Nothing is forgotten.
        """
        if self._tree.num_matches:
            raise RuntimeError(f"handles must be unlocked before a reset, got {self._tree.num_matches} locks")
        self._pool.allocate(self._tree.clear())

    @property
    def size_info(self) -> SizeInfo:
        """How many tokens are cached."""
        evictable = self._tree.num_evictable
        return SizeInfo(evictable * self.page_size, (self._tree.num_cached - evictable) * self.page_size)

    def check_integrity(self) -> None:
        """Check tree and pool. It takes time in proportion to the cached tokens.

        Raises:
            RuntimeError: an invariant is broken; the message names it.
        """
        self._pool.check()
        self._tree.check()
        if self._pool.num_free:
            raise RuntimeError(f"pages must be the engine's or the cache's, got {self._pool.num_free} of neither")

    def _handle(self, tokens: npt.NDArray[np.int64]) -> PrefixHandle:
        return PrefixHandle(self._tree, tokens.copy(), self._slots_of)

    def _slots_of(self, pages: npt.NDArray[np.int32]) -> torch.Tensor:
        """Return the slots of pages, int32 [pages * page_size], on the cache's device."""
        slots = pages[:, None] * self.page_size + np.arange(self.page_size, dtype=np.int32)
        return torch.from_numpy(slots.reshape(-1)).to(self.device)

    def _pages_of(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        by_page = slots.reshape(-1, self.page_size)
        pages = by_page[:, 0] // self.page_size
        if (by_page != pages[:, None] * self.page_size + np.arange(self.page_size)).any():
            raise ValueError(f"indices must be whole pages of {self.page_size} slots in order, got others")
        return pages


def on_host(ids: torch.Tensor) -> npt.NDArray[np.int64]:
    """Return the ids in host memory, int64; a copy unless they are so already."""
    return ids.to("cpu", torch.int64).numpy()
