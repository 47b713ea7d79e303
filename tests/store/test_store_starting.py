"""A store whose threads cannot start lets go of its disks, and leaves the tiers of others open."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.byte_stores import disk
from support.byte_stores import opened as opened_bytes
from support.store_kv import make

from kvpage.store import KVStoreConfig, KVStoreMetadata, Tier
from kvpage.store.kv_store import KVStore
from kvpage.store.tiered_store import TieredStore
from kvpage.store.tiers.memory_tier import MemoryTier


def opened_kv(*tiers: str | Tier) -> KVStore:
    if isinstance(tiers[0], str):
        config = KVStoreConfig(chunk_size=16, tiers=tiers, num_threads=2)
        return KVStore(config, KVStoreMetadata("m@1"))
    return make(tiers=tiers)


@pytest.mark.parametrize("number", [1, 2, 3], ids=["none", "one thread", "all but one"])
@pytest.mark.parametrize("opened", [opened_bytes, opened_kv], ids=["bytes", "kv"])
def test_threads_that_cannot_start(
    opened: Callable[..., TieredStore], number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, submit, calls = set(threading.enumerate()), ThreadPoolExecutor.submit, []

    def fails(pool: ThreadPoolExecutor, *arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == number:
            raise RuntimeError("can't start new thread")
        return submit(pool, *arguments)

    for tiers in ([disk(tmp_path)], [MemoryTier(1 << 20, pin_memory=False)]):
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(ThreadPoolExecutor, "submit", fails)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                opened(*tiers)
        assert set(threading.enumerate()) == before
        opened(*tiers).close()  # the disk is nobody's, the tier of others is open
