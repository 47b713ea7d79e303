"""PageStorage: pages of SGLang's host pools in a ByteStore. A page is one record; a miss never ends a call.

keep   pages ─► records of one pool, all or none of each page
load   records ─► pages; True means exactly the bytes that were kept
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvpage.integrations.sglang.hits import leading
from kvpage.integrations.sglang.host_pages import HostPages
from kvpage.integrations.sglang.settings import HiCacheSettings
from kvpage.integrations.sglang.shard import Shard
from kvpage.integrations.sglang.traffic import Traffic
from kvpage.integrations.sglang.weights import ServedModel
from kvpage.store import ByteStore, ByteStoreStats, Placed, Tier
from kvpage.store.doors.sglang_prompt import packed, scopes_key
from kvpage.store.stack.call_gate import ClosedStore

logger = logging.getLogger(__name__)

KV = "kv"
TROUBLE = (MemoryError, OSError, RuntimeError, ClosedStore)
"""Errors of a store besides its tiers': no memory, no thread, a store that was closed. SGLang's threads go on."""
Buffers = Sequence[Any]


class PageStorage:
    """The pages of one rank. Thread-safe; SGLang looks up, loads and keeps in three threads.

    Trouble of the store is logged, and the pages of that call count as missing.

    Args:
        settings: Tiers, and the facts that SGLang does not know.
        shard: The rank.
        version: Of SGLang.
        tiers: Tiers that are made already, in place of the settings' tiers.
        served: The configuration of SGLang, which names the weights where the settings do not. None for none.

    Raises:
        ValueError: No rank but one would find anything, or the weights have no name.
        OSError, ImportError, TypeError: A tier cannot be opened, or a file of the weights not read.
    """

    def __init__(
        self,
        settings: HiCacheSettings,
        shard: Shard,
        version: str,
        tiers: Sequence[Tier | Placed] | None = None,
        served: ServedModel | None = None,
    ) -> None:
        if shard.is_replicated and shard.tp[1] > 1 and settings.all_local:
            raise ValueError(
                "tiers must have one that all ranks reach, such as redis://, since one rank alone keeps latents, "
                f"got {', '.join(settings.tiers)}"
            )
        self.settings, self.shard, self.traffic = settings, shard, Traffic()
        header = shard.header(settings.model, settings.kv_cache_dtype, version, served or ServedModel())
        self._names_dtype = header["kv_cache_dtype"] is not None
        self._store = ByteStore(settings.store_config(shard.name), header, tiers)
        self._pools: dict[str, HostPages] = {}
        self._scopes_key = scopes_key(shard.name)
        self._scopes = self._stored_scopes = packed([])

    def register(self, name: str, pool: Any) -> None:
        """Take a pool of host memory, in place of one that had its name.

        Args:
            name: The pool's name in SGLang.
            pool: The HostKVCache.

        Raises:
            ValueError: The pool's bytes do not tell their dtype, and neither do the settings or SGLang.
        """
        pages = HostPages(name, pool, self.shard, name != KV or self.settings.interface_v1)
        unnamed = getattr(pool, "dtype", None) == torch.uint8 and not self._names_dtype
        if name == KV and unnamed and not pages.is_logical:
            raise ValueError(
                "kv_cache_dtype must be named in the extra config, since this cache's bytes do not tell it, got None"
            )
        self._pools[name] = pages
        self._scopes = packed([pool.scope for pool in self._pools.values()])

    def pages(self, name: str) -> HostPages:
        """Return a pool.

        Args:
            name: Its name.

        Raises:
            ValueError: No such pool was registered.
        """
        if name not in self._pools:
            raise ValueError(f"a pool must be one of {', '.join(sorted(self._pools)) or 'none yet'}, got {name!r}")
        return self._pools[name]

    def found(self, name: str, keys: Sequence[str]) -> list[bool]:
        """Return for each page whether some tier has it.

        Args:
            name: The pool.
            keys: SGLang's hashes of the pages.

        Raises:
            ValueError: No such pool was registered.
        """
        names = self.pages(name).keys(keys)
        flags = _attempt(len(keys), lambda: self._store.contains(names, deadline=self.settings.deadline))
        self._tell("look-up", name, flags)
        return flags

    def load(self, name: str, keys: Sequence[str], host_indices: torch.Tensor | None) -> list[bool]:
        """Read pages into host memory.

        Args:
            name: The pool.
            keys: SGLang's hashes of the pages.
            host_indices: Indices of their tokens in the pool.

        Returns:
            A flag for each page. The memory of one that was missed means nothing.

        Raises:
            ValueError: There is no such pool, or the indices do not fit.
        """
        pages = self.pages(name)
        indices = pages.check(len(keys), host_indices)
        if pages.is_logical:
            return [True] * len(keys)
        load = self._load_pieces if pages.by_address else self._load_flat
        flags = _attempt(len(keys), lambda: load(pages, keys, indices))
        self._tell("load", name, flags)
        return flags

    def keep(self, name: str, keys: Sequence[str], host_indices: torch.Tensor | None) -> list[bool]:
        """Store pages of host memory.

        Args:
            name: The pool.
            keys: SGLang's hashes of the pages.
            host_indices: Indices of their tokens in the pool.

        Returns:
            A flag for each page: whether some tier has it now.

        Raises:
            ValueError: There is no such pool, or the indices do not fit.
        """
        pages = self.pages(name)
        indices = pages.check(len(keys), host_indices)
        if pages.is_logical:
            return [True] * len(keys)
        way = pages.pieces if pages.by_address else pages.copies
        return _attempt(len(keys), lambda: self._write(pages.keys(keys), way(len(keys), indices)))

    def load_copies(self, keys: Sequence[str], copies: Sequence[torch.Tensor]) -> list[bool]:
        """Read pages of K and V into tensors of their own.

        Args:
            keys: SGLang's hashes of the pages.
            copies: A contiguous tensor a page, of its bytes.

        Returns:
            A flag for each page.

        Raises:
            ValueError: A tensor is not contiguous, or there are more or fewer than pages.
        """
        names = self.pages(KV).keys(keys)
        flags = _attempt(len(keys), lambda: self._read(names, copies))
        self._tell("load", KV, flags)
        return flags

    def keep_copies(self, keys: Sequence[str], copies: Sequence[torch.Tensor]) -> list[bool]:
        """Store pages of K and V from tensors of their own.

        Args:
            keys: SGLang's hashes of the pages.
            copies: A tensor a page, of its bytes.

        Returns:
            A flag for each page.

        Raises:
            ValueError: There are more or fewer tensors than pages.
        """
        names = self.pages(KV).keys(keys)
        return _attempt(len(keys), lambda: self._write(names, [page.detach().cpu().contiguous() for page in copies]))

    def clear(self) -> None:
        """Forget all records in the tiers.

        Raises:
            RuntimeError: A tier keeps its own, which may be of former weights.
        """
        tiers = self._store.clear()
        if tiers:
            raise RuntimeError(f"all tiers must be cleared, but these keep their records: {', '.join(tiers)}")

    def stats(self) -> ByteStoreStats:
        """Return counters and the state of each tier."""
        return self._store.stats()

    def close(self) -> None:
        """Write the waiting pages, and close the tiers. Calling it again has no effect."""
        self._store.close()

    def _tell(self, call: str, pool: str, flags: Sequence[bool]) -> None:
        """Write a line of the log, if the settings ask for it."""
        if self.settings.log_requests:
            refused = self._store.refused() or "none"
            num_first = leading(flags)
            logger.info(
                "%s in pool %s: the store had %d of %d pages, %d from the first one on; refused until now: %s",
                call, pool, sum(flags), len(flags), num_first, refused,
            )  # fmt: skip

    def _load_pieces(self, pages: HostPages, keys: Sequence[str], indices: torch.Tensor) -> list[bool]:
        return self._read(pages.keys(keys), pages.pieces(len(keys), indices))

    def _load_flat(self, pages: HostPages, keys: Sequence[str], indices: torch.Tensor) -> list[bool]:
        rooms, scatter = pages.rooms(len(keys), indices)
        flags = self._read(pages.keys(keys), rooms)
        for index, flag in enumerate(flags):
            if flag:
                scatter(index)
        return flags

    def _read(self, keys: list[bytes], buffers: Buffers) -> list[bool]:
        start = time.perf_counter()
        flags = self._store.get_into(keys, buffers, deadline=self.settings.deadline)
        self.traffic.read(flags, buffers, time.perf_counter() - start)
        return flags

    def _put(self, keys: list[bytes], buffers: Buffers) -> list[bool]:
        """Store pages, and the scopes of the pools for who explains a prompt, again where they were evicted."""
        if not keys:
            return []
        deadline, scopes = self.settings.deadline, self._scopes
        if scopes != self._stored_scopes:
            [is_stored] = self._store.put([self._scopes_key], [scopes], skip_existing=False, deadline=deadline)
            self._stored_scopes = scopes if is_stored else self._stored_scopes
        return self._store.put([*keys, self._scopes_key], [*buffers, scopes], deadline=deadline)[:-1]

    def _write(self, keys: list[bytes], buffers: Buffers) -> list[bool]:
        # A key that comes twice in a call names the same bytes: chained hashes. The store takes each once.
        once = list({key: index for index, key in reversed(list(enumerate(keys)))}.values())
        start = time.perf_counter()
        flags = self._put([keys[i] for i in once], [buffers[i] for i in once])
        self.traffic.wrote(flags, [buffers[i] for i in once], time.perf_counter() - start)
        by_key = {keys[index]: flag for index, flag in zip(once, flags, strict=True)}
        return [by_key[key] for key in keys]


def _attempt(num_pages: int, call: Callable[[], list[bool]]) -> list[bool]:
    """Return the result of a call, or a miss of each page where the store is in trouble."""
    try:
        return call()
    except TROUBLE as error:
        logger.error("the store failed; %d pages count as missing", num_pages, exc_info=error)
        return [False] * num_pages
