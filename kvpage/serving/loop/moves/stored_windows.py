"""StoredWindows: between the groups of an engine with windows and a store of chunks. It knows blocks, and no requests.

    full layers      |   chunk 0   |   chunk 1   |      |       as long as the store's chunks
    a window         | . | . | x | x | . | x | x | x |          a chunk for each block
                                 ^               ^
    A prompt can go on after whole blocks to which full layers' chunks lead, and whose last window is there.

Each group has records of its own. What windows have left before a prompt was stored is not stored.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvpage.blocks.explain import Ending, GroupReach
from kvpage.blocks.groups.held_blocks import HeldBlocks
from kvpage.blocks.groups.windowed_manager import WindowedManager
from kvpage.blocks.states import Ids
from kvpage.cache.cache_engine import CacheEngine
from kvpage.checks.values import runs_of
from kvpage.store.block_store import BlockStore, TokenIds


class StoredWindows:
    """The blocks of one engine, for the threads that load and store.

    Args:
        store: One that keeps groups of layers apart.
        manager: Of the blocks.
        cache: Those of full layers, of which there may be none.
        caches: Those of each window.
    """

    def __init__(
        self, store: BlockStore, manager: WindowedManager, cache: CacheEngine, caches: Sequence[CacheEngine]
    ) -> None:
        self._size, self._groups = manager.block_size, manager.windows
        self._full = store.layers(cache) if cache.gpu_cache else None
        self._windows = [store.layers(one, self._size) for one in caches]
        self.device: torch.device = caches[0].device

    def lookup(self, tokens: TokenIds, namespace: bytes) -> int:
        """Return the longest position that can be loaded, and leaves a token to compute: whole blocks."""
        return int(np.flatnonzero(np.logical_and.reduce(self._usable(tokens, namespace)))[-1]) * self._size

    def look(self, tokens: TokenIds, namespace: bytes) -> tuple[int, tuple[GroupReach, ...]]:
        """Return what `lookup` does, and how far each group reaches."""
        usable = self._usable(tokens, namespace)
        names = ["attention", *(f"window of {group.window.num_tokens}" for group in self._groups)]
        groups = []
        for name, one in zip(names, usable, strict=True):
            reach = int(np.flatnonzero(one)[-1])
            ending = Ending.PROMPT if reach == len(one) - 1 else Ending.NOT_CACHED
            groups.append(GroupReach(name, reach * self._size, ending))
        return int(np.flatnonzero(np.logical_and.reduce(usable))[-1]) * self._size, tuple(groups)

    def store(self, tokens: TokenIds, held: HeldBlocks, namespace: bytes) -> int:
        """Store K and V of the tokens, whole blocks; return how many of them a longer prompt can load now."""
        if self._full is not None:
            self._full.put(tokens, held.block_ids, 0, namespace)
        for layers, window in zip(self._windows, held.windows, strict=True):
            for first, end in runs_of(window.has):
                layers.put(tokens[: end * self._size], window.block_ids, first, namespace)
        usable = self._usable_of(tokens, len(tokens) // self._size, namespace)
        return int(np.flatnonzero(np.logical_and.reduce(usable))[-1]) * self._size

    def load(
        self,
        tokens: TokenIds,
        end: int,
        tables: Sequence[Ids],
        starts: Sequence[int],
        namespace: bytes,
    ) -> bool:
        """Load K and V before the position `end`, which `lookup` has returned for these tokens.

        Args:
            tokens: A prompt.
            end: The position.
            tables: The blocks of full layers, then those of each window, all with room for `end` tokens alone.
            starts: The first token to load in each group.
            namespace: Of the tokens.

        Returns:
            Whether all of it is there. Otherwise the bytes of all blocks mean nothing.
        """
        whole = self._whole(tokens)
        groups = [self._full, *self._windows]
        there = []  # each is read, so that all damage is found at once
        for layers, table, start in zip(groups, tables, starts, strict=True):
            if layers is not None and start < end:
                read = whole[: -(-end // layers.chunk_size) * layers.chunk_size]
                there.append(layers.load(read, table, start, namespace) >= end)
        return all(there)

    def prefetch(self, tokens: TokenIds, namespace: bytes) -> None:
        """Bring K and V of whole blocks nearer within the store: what each group has of them."""
        for layers in (self._full, *self._windows):
            if layers is not None:
                layers.prefetch(tokens, namespace)

    def _whole(self, tokens: TokenIds) -> TokenIds:
        """Return the tokens of whole blocks, as they are stored."""
        return tokens[: len(tokens) // self._size * self._size]

    def _usable(self, tokens: TokenIds, namespace: bytes) -> list[npt.NDArray[np.bool_]]:
        return self._usable_of(self._whole(tokens), (len(tokens) - 1) // self._size, namespace)

    def _usable_of(self, tokens: TokenIds, most: int, namespace: bytes) -> list[npt.NDArray[np.bool_]]:
        """Return for each group whether a prompt can go on after so many blocks, [0, most]: bool [most + 1] each.

        tokens: whole blocks. most: so many blocks, or one less.
        """
        places = np.arange(most + 1)
        reach = len(tokens)
        if self._full is not None:
            full = self._full.there(tokens, namespace)
            reach = (full.index(False) if False in full else len(full)) * self._full.chunk_size
        usable = [places * self._size <= reach]
        for layers, group in zip(self._windows, self._groups, strict=True):
            lacks = np.cumsum([0, *(not one for one in layers.there(tokens[: most * self._size], namespace))])
            firsts = np.array([min(group.first_block(place * self._size), place) for place in places.tolist()])
            usable.append(np.asarray(lacks[places] == lacks[firsts]))
        return usable
