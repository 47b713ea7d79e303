"""HostPages: the pages of one pool of SGLang's host memory, as buffers and keys of a ByteStore.

addresses ─► pieces where they lie; a page may have one, two (K and V) or two a layer
copies    ─► where the pool gives no addresses: a page is one flat tensor, made for the call
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from kvpage.integrations.sglang.shard import Shard
from kvpage.store.bytes.pieces import Pieces
from kvpage.store.doors.sglang_prompt import page_key

PIECES, FLAT, LOGICAL = "pieces", "flat", "logical"
NO_ADDRESSES = (ValueError, NotImplementedError, AttributeError)
"""The errors of a pool whose layout has no address for a whole page."""


class HostPages:
    """One pool. Its memory is SGLang's; nothing here keeps a page.

    Args:
        name: The pool's name in SGLang, such as "kv".
        pool: The HostKVCache.
        shard: The rank that has it.
        by_address: False reads and writes copies of pages. True does so only where the pool gives no addresses.
    """

    def __init__(self, name: str, pool: Any, shard: Shard, by_address: bool = True) -> None:
        self.name, self.pool = name, pool
        self.page_size = int(getattr(pool, "logical_page_size", None) or pool.page_size)
        way = _way_of(pool, self.page_size)
        self.is_logical = way == LOGICAL
        """Whether the pool has no bytes: its pages are only the anchors of other pools' pages."""
        self.by_address = way == PIECES and by_address
        self.scope = shard.scope(name, pool, PIECES if self.by_address else FLAT)

    def keys(self, page_keys: Sequence[str]) -> list[bytes]:
        """Return the keys of the records.

        Args:
            page_keys: SGLang's hashes of the pages.
        """
        return [page_key(self.scope, key) for key in page_keys]

    def check(self, num_keys: int, host_indices: torch.Tensor | None) -> torch.Tensor:
        """Return the indices of the pages' tokens.

        Args:
            num_keys: Pages.
            host_indices: Indices of tokens in the pool, `page_size` a page.

        Raises:
            ValueError: There are none, or another number of them.
        """
        num_indices = None if host_indices is None else host_indices.numel()
        if host_indices is None or num_indices != num_keys * self.page_size:
            num_expected = num_keys * self.page_size
            raise ValueError(
                f"host_indices of {num_keys} pages of pool {self.name} must be {num_expected}, got {num_indices}"
            )
        return host_indices.detach().cpu().reshape(-1)

    def pieces(self, num_keys: int, host_indices: torch.Tensor) -> list[Pieces]:
        """Return the memory of each page, where it lies.

        Args:
            num_keys: Pages.
            host_indices: As `check` returns it.

        Raises:
            ValueError: The pool's pages have different numbers of pieces.
        """
        if not num_keys:
            return []
        addresses, sizes = self.pool.get_page_buffer_meta(host_indices)
        num_sizes = len(addresses) if isinstance(sizes, int) else len(sizes)
        if len(addresses) % num_keys or num_sizes != len(addresses):
            raise ValueError(
                f"pieces of {num_keys} pages of pool {self.name} must be as many a page, "
                f"got {len(addresses)} addresses and {num_sizes} sizes"
            )
        runs = np.empty((len(addresses), 2), np.int64)
        runs[:, 0], runs[:, 1] = addresses, sizes
        return [Pieces(page_runs[page_runs[:, 1] > 0], [self.pool]) for page_runs in np.split(runs, num_keys)]

    def copies(self, num_keys: int, host_indices: torch.Tensor) -> list[torch.Tensor]:
        """Return a copy of each page.

        Args:
            num_keys: Pages.
            host_indices: As `check` returns it.
        """
        firsts = self._firsts(num_keys, host_indices)
        return [self.pool.get_data_page(first, flat=True).detach().cpu().contiguous() for first in firsts]

    def rooms(self, num_keys: int, host_indices: torch.Tensor) -> tuple[list[torch.Tensor], Callable[[int], None]]:
        """Return memory for a copy of each page, and a function that writes one to its place.

        Args:
            num_keys: Pages.
            host_indices: As `check` returns it.
        """
        rooms = [self.pool.get_dummy_flat_data_page() for _ in range(num_keys)]
        firsts = list(self._firsts(num_keys, host_indices))
        return rooms, lambda index: self.pool.set_from_flat_data_page(firsts[index], rooms[index])

    def _firsts(self, num_keys: int, host_indices: torch.Tensor) -> Iterator[int]:
        return (int(host_indices[index * self.page_size]) for index in range(num_keys))


def _way_of(pool: Any, page_size: int) -> str:
    try:
        return LOGICAL if pool.get_page_buffer_meta(torch.arange(page_size)) is None else PIECES
    except NO_ADDRESSES:
        return FLAT
