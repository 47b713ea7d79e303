"""KVPageHiCache: the storage backend that SGLang's HiCache loads by its "dynamic" backend.

HiCache          ─► KVPageHiCache                          ─► PageStorage
batch_exists        how many pages from the first one on      found
batch_get_v1        K and V of pages                          load
batch_get_v2        the same of other pools: states, windows  load
batch_get           copies of pages, without interface_v1     load_copies
"""

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache import hicache_storage
from sglang.version import __version__

from kvpage.integrations.sglang.hits import BLOCK_GROUPS, leading, lengths
from kvpage.integrations.sglang.interface import check_interface
from kvpage.integrations.sglang.page_storage import KV, PageStorage
from kvpage.integrations.sglang.settings import HiCacheSettings
from kvpage.integrations.sglang.shard import Shard
from kvpage.integrations.sglang.weights import ServedModel
from kvpage.store import ByteStoreStats

Flags = list[bool]
Tensors = Sequence[torch.Tensor] | None


class KVPageHiCache(hicache_storage.HiCacheStorage):  # type: ignore[misc]  # SGLang has no types for mypy
    """HiCache's storage over a ByteStore: a miss, or exactly the bytes that were stored.

    Args:
        storage_config: SGLang's HiCacheStorageConfig. Its `extra_config` has HiCacheSettings.
        kwargs: Further arguments of SGLang's factory. Not used.

    Raises:
        ValueError: A setting breaks a rule or is unknown, the weights have no name, or a folder belongs to another
            process.
        RuntimeError: This version of SGLang has another interface.
        OSError, ImportError, TypeError: A tier cannot be opened, or a file of the weights not read.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        check_interface(__version__, hicache_storage)
        settings = HiCacheSettings.from_extra_config(storage_config.extra_config)
        self._has_metrics = bool(storage_config.enable_storage_metrics)
        self._storage = PageStorage(settings, Shard.of(storage_config), __version__, served=ServedModel.here())

    # --- pools -------------------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the pool of K and V. Raises ValueError where its bytes do not tell their dtype."""
        super().register_mem_pool_host(mem_pool_host)
        self._storage.register(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take another pool of a hybrid model."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._storage.register(_name(host_pool_name), host_pool)

    # --- K and V, by addresses ---------------------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Return whether some tier has a page's K and V."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """Return how many pages are there, from the first one on."""
        return leading(self._storage.found(KV, keys))

    def batch_get_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> Flags:
        """Read pages into host memory, and return a flag for each. Raises ValueError for indices that do not fit."""
        return self._storage.load(KV, keys, host_indices)

    def batch_set_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> Flags:
        """Store pages of host memory, and return a flag for each. Raises ValueError for indices that do not fit."""
        return self._storage.keep(KV, keys, host_indices)

    # --- several pools -----------------------------------------------------------------------------------------------

    def batch_exists_v2(self, keys: Sequence[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """Return which beginnings all pools can serve, as a PoolTransferResult."""
        is_anchor = self._storage.pages(KV).is_logical
        num_kv = len(keys) if is_anchor else self.batch_exists(keys)
        hits = {hicache_storage.PoolName.KV: num_kv} if num_kv else {}
        served = list(range(1, num_kv + 1))
        for transfer in pool_transfers or ():
            if not served:
                break
            if transfer.hit_policy == BLOCK_GROUPS:  # never gates a hit; without a verdict SGLang learns nothing
                continue
            policy = getattr(transfer.hit_policy, "value", transfer.hit_policy)
            flags = self._storage.found(_name(transfer.name), keys[:num_kv])
            pool_lengths = lengths(flags, policy, len(transfer.keys or ()) or 1)
            if pool_lengths:
                hits[transfer.name] = pool_lengths[-1]
            served = sorted(set(served) & set(pool_lengths))
        return hicache_storage.PoolTransferResult(served[-1] if served else 0, hits, served)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, Flags]:
        """Read pages of several pools into host memory, and return flags by the pools' names."""
        return {
            transfer.name: self._storage.load(_name(transfer.name), transfer.keys or (), transfer.host_indices)
            for transfer in transfers
        }

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, Flags]:
        """Store pages of several pools, and return flags by the pools' names."""
        return {
            transfer.name: self._storage.keep(_name(transfer.name), transfer.keys or (), transfer.host_indices)
            for transfer in transfers
        }

    # --- copies of pages ---------------------------------------------------------------------------------------------

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Read a page into a tensor, and return it; None for a miss."""
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(
        self, keys: Sequence[str], target_locations: Tensors = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Read each page into its tensor, and return the pages that were found."""
        if target_locations is None:
            return [None] * len(keys)
        flags = self._storage.load_copies(keys, target_locations)
        return [page if flag else None for page, flag in zip(target_locations, flags, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a page."""
        return self.batch_set([key], None if value is None else [value])

    def batch_set(
        self, keys: Sequence[str], values: Tensors = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store pages, and return whether all are there."""
        return values is not None and all(self._storage.keep_copies(keys, values))

    # --- the store ---------------------------------------------------------------------------------------------------

    def clear(self) -> bool:
        """Forget all records in the tiers. Raises RuntimeError if a tier keeps its own: weights may have changed."""
        self._storage.clear()
        return True

    def get_stats(self) -> Any:
        """Return the pages and speeds since the last call, as SGLang's StorageMetrics; None with metrics off."""
        if not self._has_metrics:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        reads, read_speeds, writes, write_speeds = self._storage.traffic.taken()
        return StorageMetrics(reads, writes, read_speeds, write_speeds)

    def store_stats(self) -> ByteStoreStats:
        """Return counters and the state of each tier."""
        return self._storage.stats()

    def close(self) -> None:
        """Write the waiting pages, and close the tiers. Calling it again has no effect."""
        self._storage.close()


def _name(name: Any) -> str:
    return str(getattr(name, "value", name))
