"""PrefixHandle: the cached beginning of a prompt, as mini-sglang keeps it with a request."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from kvpage._C import Match, PrefixTree


class PrefixHandle:
    """The cached beginning of a prompt. A PrefixSlots makes and locks it.

    Args:
        tree: has the tokens.
        tokens: token ids, whole pages of them.
        slots_of: gives the slots of pages.
    """

    def __init__(
        self,
        tree: PrefixTree,
        tokens: npt.NDArray[np.int64],
        slots_of: Callable[[npt.NDArray[np.int32]], torch.Tensor],
    ) -> None:
        self.tree = tree
        self._tokens, self._slots_of = tokens, slots_of
        self._locks: list[Match] = []

    @property
    def cached_len(self) -> int:
        """Number of tokens."""
        return len(self._tokens)

    def get_matched_indices(self) -> torch.Tensor:
        """Return the slot of each token, int32 [cached_len]. They stay as they are while the handle is locked.

        Raises:
            RuntimeError: the handle is not locked, and some of its tokens were evicted.
        """
        match = self.tree.pin(self._locks[-1]) if self._locks else self._match()
        try:
            return self._slots_of(match.block_ids)
        finally:
            self.tree.release(match)

    def lock(self) -> None:
        """Pin the tokens once more.

        Raises:
            RuntimeError: some were evicted.
        """
        self._locks.append(self._match())

    def unlock(self) -> None:
        """Unpin the tokens once.

        Raises:
            ValueError: they are not pinned.
        """
        if not self._locks:
            raise ValueError("handle must be locked before it is unlocked, got one that is not")
        self.tree.release(self._locks.pop())

    def _match(self) -> Match:
        match = self.tree.match(self._tokens, num_left_over=0)
        if match.num_tokens < self.cached_len:
            self.tree.release(match)
            raise RuntimeError(f"handle must have its {self.cached_len} tokens cached, got {match.num_tokens}")
        return match
