"""StoredWindows: groups of layers with windows, between an engine and a store of chunks. It knows blocks, no requests.

    full layers      |   chunk 0   |   chunk 1   |      |       as long as the store's chunks
    a window         | . | . | x | x | . | x | x | x |          a chunk for each block
                                 ^               ^
    A prompt can go on after whole blocks to which full layers' chunks lead, and whose last window is there.

Each group has records of its own. Tokens that have left the windows before a prompt was stored are not stored. A load
that lacks anything is none: its blocks are freed, and the request computes.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpage.blocks.explain import Ending, Explanation, GroupReach
from kvpage.blocks.groups.held_blocks import HeldBlocks
from kvpage.blocks.manager import BlockManager
from kvpage.blocks.sequence_state import Allocation, Ids
from kvpage.cache.cache_engine import CacheEngine
from kvpage.checks.errors import OutOfBlocks
from kvpage.checks.values import runs_of
from kvpage.serving.loop.moves.block_transfers import BlockTransfers
from kvpage.serving.loop.moves.store_load import StoreLoad
from kvpage.serving.loop.moves.stored_group import Hold, Loading, StoredGroup
from kvpage.store.block_store import BlockStore, TokenIds


class StoredWindows(StoredGroup):
    """The blocks of one engine, in a store that keeps groups of layers apart. ValueError for another store.

    cache: of full layers, of which there may be none. caches: of each window. transfers: of full layers' blocks.
    """

    def __init__(
        self,
        store: BlockStore,
        cache: CacheEngine,
        caches: Sequence[CacheEngine],
        manager: BlockManager,
        transfers: BlockTransfers,
    ) -> None:
        self.block_size, self.device = manager.block_size, cache.device
        self._full = store.layers(cache) if cache.gpu_cache else None
        self._windows = [store.layers(window, self.block_size) for window in caches]
        self._caches, self._manager, self._transfers = caches, manager, transfers

    def lookup(self, tokens: TokenIds, namespace: bytes) -> int:
        """Return the longest position that can be loaded, and leaves a token to compute: whole blocks."""
        return self._longest(self._usable(tokens, namespace))

    def explain(self, tokens: TokenIds, namespace: bytes) -> Explanation:
        usable = self._usable(tokens, namespace)
        names = ["attention", *(f"window of {window.blocks.window.num_tokens}" for window in self._manager.windows)]
        groups = []
        for name, flags in zip(names, usable, strict=True):
            reach = int(np.flatnonzero(flags)[-1])
            ending = Ending.PROMPT if reach == len(flags) - 1 else Ending.NOT_CACHED
            groups.append(GroupReach(name, reach * self.block_size, ending))
        return Explanation(len(tokens), self._longest(usable), tuple(groups))

    def prefetch(self, tokens: TokenIds, namespace: bytes) -> None:
        """Bring K and V of whole blocks nearer: what each group has of them."""
        for layers in (self._full, *self._windows):
            if layers is not None:
                layers.prefetch(tokens, namespace)

    def num_cached(self, tokens: TokenIds, namespace: bytes) -> int:
        return self._manager.num_cached(tokens, namespace)

    def begin_load(self, load: StoreLoad[Any], num_tokens: int, allocation: Allocation) -> Loading:
        """Make all groups ready.

        Where there are other sequences, a quarter of each window's blocks is left to them: they would be preempted for
        this load.
        """
        manager, has_others = self._manager, self._manager.stats().num_sequences > 1
        for blocks in [window.blocks for window in manager.windows] if has_others else ():
            num_needed, num_left = blocks.num_needed(num_tokens), blocks.num_free - blocks.pool.num_blocks // 4
            if num_needed > num_left:
                raise OutOfBlocks(num_needed, num_left)
        starts = [allocation.num_cached_tokens, *manager.windows.skip_to(load, num_tokens)]
        self._transfers.run()
        for window, cache in zip(manager.windows, self._caches, strict=True):
            window.blocks.do_moves(cache.do_move)  # they read blocks that may have been given to this load
        rows = [window.tables([load])[0] for window in manager.windows]
        tables = [allocation.block_ids[: num_tokens // self.block_size], *rows]
        return Loading(starts[0], partial(self._load, load.tokens, num_tokens, tables, starts, load.namespace))

    def hold(self, tokens: TokenIds, namespace: bytes) -> Hold | None:
        blocks = self._manager.hold_cached(tokens, namespace)
        if not blocks.num_tokens:
            blocks.release()
            return None
        return Hold(blocks.num_tokens, blocks.block_ids, partial(self._put, blocks), blocks.release)

    # --- in threads ---------------------------------------------------------------------------------------------------

    def _put(self, blocks: HeldBlocks, tokens: TokenIds, namespace: bytes) -> int:
        """Store K and V of the tokens, whole blocks; return how many of them a longer prompt can load now."""
        if self._full is not None:
            self._full.put(tokens, blocks.block_ids, 0, namespace)
        for layers, window in zip(self._windows, blocks.windows, strict=True):
            for first, end in runs_of(window.has):
                layers.put(tokens[: end * self.block_size], window.block_ids, first, namespace)
        return self._longest(self._usable_of(tokens, len(tokens) // self.block_size, namespace))

    def _load(self, tokens: TokenIds, end: int, tables: Sequence[Ids], starts: Sequence[int], namespace: bytes) -> int:
        """Load K and V before the position `end`, which `lookup` has returned for these tokens; return it, or 0.

        tables: the blocks of full layers, then those of each window, all with room for `end` tokens alone. starts: the
        first token to load in each group. Where anything lacks, the bytes of all blocks mean nothing.
        """
        whole = self._whole(tokens)
        there = []  # each is read, so that all damage is seen at once
        for layers, table, start in zip((self._full, *self._windows), tables, starts, strict=True):
            if layers is not None and start < end:
                read = whole[: -(-end // layers.chunk_size) * layers.chunk_size]
                there.append(layers.load(read, table, start, namespace) >= end)
        return end if all(there) else 0

    def _whole(self, tokens: TokenIds) -> TokenIds:
        """Return the tokens of whole blocks, as they are stored."""
        return tokens[: len(tokens) // self.block_size * self.block_size]

    def _longest(self, usable: Sequence[npt.NDArray[np.bool_]]) -> int:
        """Return the tokens of the longest position at which all groups can go on."""
        return int(np.flatnonzero(np.logical_and.reduce(usable))[-1]) * self.block_size

    def _usable(self, tokens: TokenIds, namespace: bytes) -> list[npt.NDArray[np.bool_]]:
        return self._usable_of(self._whole(tokens), (len(tokens) - 1) // self.block_size, namespace)

    def _usable_of(self, tokens: TokenIds, most: int, namespace: bytes) -> list[npt.NDArray[np.bool_]]:
        """Return, by group, whether a prompt can go on after each number of blocks in [0, most]: bool [most + 1].

        tokens: whole blocks. most: their number, or one less.
        """
        size, ends = self.block_size, np.arange(most + 1)
        reach = len(tokens)
        if self._full is not None:
            full = self._full.there(tokens, namespace)
            reach = (full.index(False) if False in full else len(full)) * self._full.chunk_size
        usable = [ends * size <= reach]
        for layers, group in zip(self._windows, self._manager.windows, strict=True):
            lacks = np.cumsum([0, *(not there for there in layers.there(tokens[: most * size], namespace))])
            firsts = np.array([min(group.blocks.first_block(end * size), end) for end in ends.tolist()])
            usable.append(np.asarray(lacks[ends] == lacks[firsts]))
        return usable
