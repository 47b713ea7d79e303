"""StoredWindows: between the groups of an engine with windows and a store of chunks. It knows blocks, and no requests.

    chunks             | 0 | 1 | 2 | 3 | 4 |
    full layers          x   x   x   x   x       a prompt can go on after a chunk if these lead to it,
    a window             .   .   x   x   x       and these cover its last window: here after 4 and 5 chunks

Each group has records of its own. What windows have left before a prompt was stored is not stored.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvpage.blocks.explain import Ending, GroupReach
from kvpage.blocks.groups.held_blocks import HeldBlocks
from kvpage.blocks.groups.windowed_manager import WindowedManager
from kvpage.blocks.states import Ids
from kvpage.cache.cache_engine import CacheEngine
from kvpage.serving.loop.moves.block_store import TokenIds


class Layers(Protocol):
    """Chunks of some layers in a store; `kvpage.store.KVStore.layers` returns some. Called in other threads.

    None of the methods raises for trouble of the store's own: that is a miss.
    """

    chunk_size: int

    def there(self, tokens: TokenIds, namespace: bytes) -> list[bool]:
        """Return for each chunk whether it is there. The tokens after the last whole chunk are a shorter one."""

    def put(self, tokens: TokenIds, block_table: Ids, first_chunk: int, namespace: bytes) -> None:
        """Store the chunks of the tokens from one on."""

    def load(self, tokens: TokenIds, block_table: Ids, start: int, namespace: bytes) -> int:
        """Load tokens[start:] as far as the blocks reach; return the token after the last one that is there."""


class LayerStore(Protocol):
    """What a BlockStore for models with windows of their own has besides; `kvpage.store.KVStore` is one."""

    def layers(self, engine: CacheEngine) -> Layers:
        """Return the chunks of a cache's layers."""


class StoredWindows:
    """The blocks of one engine, for the threads that load and store.

    Args:
        store: A LayerStore.
        manager: Of the blocks.
        cache: Those of full layers, of which there may be none.
        caches: Those of each window.
    """

    def __init__(self, store: Any, manager: WindowedManager, cache: CacheEngine, caches: Sequence[CacheEngine]) -> None:
        self._size, self._groups = manager.block_size, manager.windows
        self._full: Layers | None = store.layers(cache) if cache.gpu_cache else None
        self._windows: list[Layers] = [store.layers(one) for one in caches]
        self._chunk_size = self._windows[0].chunk_size
        self.device: torch.device = caches[0].device

    def lookup(self, tokens: TokenIds, namespace: bytes) -> int:
        """Return the longest position that can be loaded, and leaves a token to compute: whole blocks."""
        return self._longest(self._there(self._whole(tokens), namespace), len(tokens) - 1)

    def look(self, tokens: TokenIds, namespace: bytes) -> tuple[int, tuple[GroupReach, ...]]:
        """Return what `lookup` does, and how far each group reaches."""
        each, most = self._there(self._whole(tokens), namespace), len(tokens) - 1
        names = ["attention", *(f"window of {group.window.num_tokens}" for group in self._groups)]
        groups = []
        for at, name in enumerate(names):
            alone = [one if at == group else [True] * len(one) for group, one in enumerate(each)]
            reach = self._longest(alone, most)
            is_all = reach == most // self._size * self._size
            groups.append(GroupReach(name, reach, Ending.PROMPT if is_all else Ending.NOT_CACHED))
        return self._longest(each, most), tuple(groups)

    def store(self, tokens: TokenIds, held: HeldBlocks, namespace: bytes) -> int:
        """Store K and V of the tokens in all groups; return how many leading tokens can be loaded now."""
        if self._full is not None:
            self._full.put(tokens, held.block_ids, 0, namespace)
        for layers, window in zip(self._windows, held.windows, strict=True):
            for first, end in _runs_of(self._whole_chunks(len(tokens), window.has)):
                layers.put(tokens[: end * self._chunk_size], window.block_ids, first, namespace)
        return self._longest(self._there(tokens, namespace), len(tokens))

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
        num_chunks = -(-end // self._chunk_size)
        read = self._whole(tokens)[: num_chunks * self._chunk_size]
        groups: list[Layers | None] = [self._full, *self._windows]
        there = [  # each is read, so that all damage is found at once
            layers is None or start >= end or layers.load(read, table, start, namespace) >= end
            for layers, table, start in zip(groups, tables, starts, strict=True)
        ]
        return all(there)

    def _whole(self, tokens: TokenIds) -> TokenIds:
        """Return the tokens of whole blocks, as they are stored."""
        return tokens[: len(tokens) // self._size * self._size]

    def _there(self, tokens: TokenIds, namespace: bytes) -> list[list[bool]]:
        """Return for each group, and each chunk, whether it is there."""
        windows = [layers.there(tokens, namespace) for layers in self._windows]
        full = [True] * len(windows[0]) if self._full is None else self._full.there(tokens, namespace)
        return [full, *windows]

    def _longest(self, there: Sequence[Sequence[bool]], num_tokens: int) -> int:
        """Return the longest position at whole blocks, of at most so many tokens, where all groups have their part."""
        full, *windows = there
        num_leading = list(full).index(False) if False in full else len(full)
        for num_chunks in range(num_leading, 0, -1):
            position = min(num_chunks * self._chunk_size, num_tokens) // self._size * self._size
            if all(
                all(there_in_one[self._first_chunk(group.first_block, position) : num_chunks])
                for there_in_one, group in zip(windows, self._groups, strict=True)
            ):
                return position
        return 0

    def _first_chunk(self, first_block: Callable[[int], int], position: int) -> int:
        """Return the chunk of the first token that the window before a position has."""
        return first_block(position) * self._size // self._chunk_size

    def _whole_chunks(self, num_tokens: int, has: npt.NDArray[np.bool_]) -> list[bool]:
        """Return for each chunk whether there are blocks for all of its tokens."""
        lacks = np.concatenate([[0], np.cumsum(~has)])
        begins = np.arange(0, num_tokens, self._chunk_size)
        ends = np.minimum(begins + self._chunk_size, num_tokens)
        return list(lacks[begins // self._size] == lacks[-(-ends // self._size)])


def _runs_of(there: Sequence[bool]) -> list[tuple[int, int]]:
    """Return the runs of consecutive True, each as its first place and the one after its last."""
    edges = np.flatnonzero(np.diff(np.array([False, *there, False], np.int8)))
    return [(int(first), int(end)) for first, end in edges.reshape(-1, 2)]
