"""Tiers that are damaged, full, slow or gone: misses, and never a wrong byte. Nothing waits for ever."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.host_pools import PAGE, MadePool, PoolOfCopies, tokens_of
from support.redis_server import RedisServer, needs_redis
from support.store_kv import Troubled

from kvpage.integrations.sglang import HiCacheSettings, PageStorage, Shard
from kvpage.store.tiers.memory_tier import MemoryTier

KEYS = [letter * 64 for letter in "abcdefgh"]


def opened(url: str, pool: Any, tiers: list | None = None, deadline: float = 20.0) -> PageStorage:
    settings = HiCacheSettings((url,), "model@1", interface_v1=True, num_threads=1, deadline=deadline)
    storage = PageStorage(settings, Shard("model", False), "0.5.23", tiers)
    storage.register("kv", pool)
    return storage


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


def load_and_compare(storage: PageStorage, pool: MadePool, wanted: list[torch.Tensor], num_pages: int) -> list[bool]:
    """Load pages behind those that were kept. Those that are found have their bytes; memory of no page changes."""
    pool.fill(9)
    places, before = list(range(num_pages, 2 * num_pages)), pool.bytes.clone()
    flags = storage.load("kv", KEYS[:num_pages], tokens_of(*places))
    for flag, place, page in zip(flags, places, wanted, strict=False):
        assert not flag or same(pool.page(place), page)
        pool.poison(place)
    expected = MadePool(pool.layout, pool.tokens // PAGE, pool.parts, pool.dtype)
    expected.bytes.copy_(before)
    for place in places:
        expected.poison(place)
    assert torch.equal(pool.bytes, expected.bytes)
    return flags


@pytest.mark.parametrize("pool_class", [MadePool, PoolOfCopies])
@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_damage_on_a_disk_is_a_miss(tmp_path: Path, layout: str, pool_class: type[MadePool]):
    url, pool = f"disk://{tmp_path}?size=8MiB&segment=4MiB", pool_class(layout)
    pool.fill(1)
    wanted, storage = [pool.page(page) for page in range(6)], opened(url, pool)
    assert storage.keep("kv", KEYS[:6], tokens_of(*range(6))) == [True] * 6
    storage.close()
    target = wanted[2].flatten().view(torch.uint8).numpy().tobytes()[:40] if pool_class is PoolOfCopies else b""
    spoil(tmp_path, target or pool_bytes(pool, 2))
    storage = opened(url, pool)
    assert load_and_compare(storage, pool, wanted, 6) == [True, True, False, True, True, True]
    assert storage.found("kv", KEYS[:6]) == [True, True, False, True, True, True]
    assert storage.stats().corrupt_records == 1
    pool.fill(1)
    assert storage.keep("kv", KEYS[2:3], tokens_of(2)) == [True]
    assert load_and_compare(storage, pool, wanted, 6) == [True] * 6
    storage.close()


def pool_bytes(pool: MadePool, page: int) -> bytes:
    """Return bytes that only this page has, as its first piece begins."""
    return (
        pool.kv_buffer[0, page * PAGE].flatten().view(torch.uint8).numpy().tobytes()
        if (pool.layout == "page_first")
        else pool.kv_buffer[0, 0, page * PAGE].flatten().view(torch.uint8).numpy().tobytes()
    )


def spoil(folder: Path, target: bytes) -> None:
    """Flip a bit of these bytes, wherever they are on the disk."""
    spoilt = 0
    for path in folder.rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        at = data.find(target)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + 3)
                file.write(bytes([data[at + 3] ^ 1]))
            spoilt += 1
    assert spoilt == 1


def test_a_full_tier_forgets_and_stays_right():
    pool = MadePool()
    pool.fill(1)
    wanted, storage = [pool.page(page) for page in range(6)], opened("memory://?size=12KiB&prefault=no", pool)
    for page in range(6):
        assert storage.keep("kv", KEYS[page : page + 1], tokens_of(page)) == [True]
    flags = load_and_compare(storage, pool, wanted, 6)
    assert 0 < sum(flags) < 6 and flags[-1]
    storage.close()


def test_a_page_larger_than_the_tier_is_not_kept():
    pool = MadePool(num_pages=40)
    big, storage = tokens_of(0), opened("memory://?size=4KiB&prefault=no", pool)
    pool.get_page_buffer_meta = lambda indices: ([pool.kv_buffer.data_ptr()], [pool.kv_buffer[0].nbytes])
    assert storage.keep("kv", KEYS[:1], big) == [False]
    assert storage.load("kv", KEYS[:1], big) == [False] and storage.found("kv", KEYS[:1]) == [False]
    storage.close()


def test_a_clear_that_leaves_pages_fails():
    """Weights may have changed: old pages would be found when the tier is back."""
    pool, fails = MadePool(), threading.Event()
    storage = opened("memory://", pool, [Troubled(fails.is_set)])
    assert storage.keep("kv", KEYS[:1], tokens_of(0)) == [True]
    fails.set()
    with pytest.raises(RuntimeError, match="all tiers must be cleared, but these keep their records: "):
        storage.clear()
    fails.clear()
    assert storage.found("kv", KEYS[:1]) == [True]
    storage.clear()
    assert storage.found("kv", KEYS[:1]) == [False]
    storage.close()


@pytest.mark.parametrize("when", ["before", "between", "always"])
def test_a_tier_that_fails_is_a_miss(when: str):
    pool, fails = MadePool(), threading.Event()
    pool.fill(1)
    wanted, storage = [pool.page(page) for page in range(6)], opened("memory://", pool, [Troubled(fails.is_set)])
    if when != "between":
        fails.set()
    assert storage.keep("kv", KEYS[:6], tokens_of(*range(6))) == [when == "between"] * 6
    fails.set()
    assert storage.found("kv", KEYS[:6]) == [False] * 6
    assert load_and_compare(storage, pool, wanted, 6) == [False] * 6
    if when != "always":
        fails.clear()
        assert load_and_compare(storage, pool, wanted, 6) == [when == "between"] * 6
    fails.clear()
    storage.close()


class Failing(MemoryTier):
    """Not in trouble that tiers name, but with an error of the process."""

    error: Exception | None = None

    def contains(self, *arguments: Any) -> Any:
        return self._or_fail(super().contains, *arguments)

    def open(self, *arguments: Any) -> Any:
        return self._or_fail(super().open, *arguments)

    def create(self, *arguments: Any) -> Any:
        return self._or_fail(super().create, *arguments)

    def _or_fail(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if self.error is not None:
            raise self.error
        return call(*arguments)


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("can't start new thread"), OSError(24, "files")], ids=str
)
@pytest.mark.parametrize("pool_class", [MadePool, PoolOfCopies])
def test_errors_of_the_process_are_misses_and_no_thread_of_sglang_dies(
    error: Exception, pool_class: type[MadePool], caplog: pytest.LogCaptureFixture
):
    tier, pool = Failing(1 << 20, pin_memory=False), pool_class()
    storage = opened("memory://", pool, [tier])
    assert storage.keep("kv", KEYS[:2], tokens_of(0, 1)) == [True, True]
    tier.error = error
    assert storage.keep("kv", KEYS[2:4], tokens_of(2, 3)) == storage.keep_copies(KEYS[4:5], [torch.zeros(3)]) * 2
    assert storage.load("kv", KEYS[:2], tokens_of(2, 3)) == storage.found("kv", KEYS[:2]) == [False, False]
    assert storage.load_copies(KEYS[:1], [torch.zeros(3)]) == [False]
    assert caplog.text.count("count as missing") == 5
    tier.error = None
    assert storage.load("kv", KEYS[:2], tokens_of(2, 3)) == [True, True]
    storage.close()
    assert storage.load("kv", KEYS[:2], tokens_of(2, 3)) == storage.found("kv", KEYS[:2]) == [False, False]
    assert storage.keep("kv", KEYS[:2], tokens_of(0, 1)) == [False, False]
    with pytest.raises(ValueError, match="host_indices of 2 pages"):
        storage.load("kv", KEYS[:2], tokens_of(2))


def test_a_server_that_is_not_there_is_a_miss():
    pool = MadePool()
    pool.fill(1)
    wanted, storage = [pool.page(page) for page in range(3)], opened("redis://127.0.0.1:1/0?deadline=0.2", pool)
    assert storage.keep("kv", KEYS[:3], tokens_of(0, 1, 2)) == [False] * 3
    assert storage.found("kv", KEYS[:3]) == [False] * 3
    assert load_and_compare(storage, pool, wanted, 3) == [False] * 3
    storage.close()


@needs_redis
def test_a_server_that_stops_is_a_miss_until_it_goes_on(tmp_path: Path):
    server, pool = RedisServer(tmp_path), MadePool()
    pool.fill(1)
    url, wanted = f"redis://127.0.0.1:{server.port}/0", [pool.page(page) for page in range(3)]
    hasty, patient = opened(f"{url}?deadline=0.1", pool), opened(f"{url}?deadline=60", pool, deadline=60)
    assert patient.keep("kv", KEYS[:3], tokens_of(0, 1, 2)) == [True] * 3
    server.pause()
    assert load_and_compare(hasty, pool, wanted, 3) == [False] * 3
    assert hasty.found("kv", KEYS[:3]) == [False] * 3
    server.resume()
    assert load_and_compare(patient, pool, wanted, 3) == [True] * 3
    server.kill()
    assert load_and_compare(patient, pool, wanted, 3) == [False] * 3
    assert patient.keep("kv", KEYS[3:4], tokens_of(0)) == [False]
    hasty.close()
    patient.close()


class Stuck(MemoryTier):
    """Waits in `open` until it is let go."""

    def __init__(self) -> None:
        super().__init__(1 << 20, pin_memory=False, name="stuck")
        self.go, self.is_stuck = threading.Event(), False

    def open(self, keys, timeout=None):
        if self.is_stuck and not self.go.wait(timeout):
            return [None] * len(keys)
        return super().open(keys, timeout)


def test_a_slow_tier_is_a_miss_and_writes_nothing_afterwards():
    pool, tier = MadePool(), Stuck()
    pool.fill(1)
    storage = opened("memory://", pool, [tier], deadline=0.05)
    storage.keep("kv", KEYS[:2], tokens_of(0, 1))
    tier.is_stuck = True
    pool.fill(2)
    before = pool.bytes.clone()
    assert storage.load("kv", KEYS[:2], tokens_of(0, 1)) == [False, False]
    pool_is_as_before(pool, before)
    tier.go.set()
    storage.close()  # waits for what is under way
    pool_is_as_before(pool, before)


def pool_is_as_before(pool: MadePool, before: torch.Tensor) -> None:
    assert torch.equal(pool.bytes, before)


def test_what_was_not_read_right_is_never_stored(tmp_path: Path):
    """A load that fails leaves memory that means nothing. Keeping another key from it must not name it as the first."""
    pool, fails = MadePool(), threading.Event()
    pool.fill(1)
    tier: Callable[..., Any] = Troubled(fails.is_set)
    storage, wanted = opened("memory://", pool, [tier]), pool.page(0)
    storage.keep("kv", KEYS[:1], tokens_of(0))
    fails.set()
    pool.fill(3)
    assert storage.load("kv", KEYS[:1], tokens_of(5)) == [False]
    fails.clear()
    assert storage.keep("kv", KEYS[:1], tokens_of(5)) == [True]  # it is there: nothing is written
    assert storage.load("kv", KEYS[:1], tokens_of(6)) == [True]
    assert same(pool.page(6), wanted)
    storage.close()


def test_three_threads_at_once():
    pool = MadePool(num_pages=32)
    pool.fill(1)
    storage, wanted = opened("memory://?size=1MiB&prefault=no", pool), [pool.page(page) for page in range(8)]
    wrong: list[str] = []

    def keep() -> None:
        for _ in range(20):
            storage.keep("kv", KEYS, tokens_of(*range(8)))

    def load() -> None:
        for _ in range(20):
            for flag, place, page in zip(
                storage.load("kv", KEYS, tokens_of(*range(8, 16))), range(8, 16), wanted, strict=True
            ):
                if flag and not same(pool.page(place), page):
                    wrong.append(f"page {place}")

    def find() -> None:
        for _ in range(20):
            storage.found("kv", KEYS)

    threads = [threading.Thread(target=one) for one in (keep, load, find)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and storage.load("kv", KEYS, tokens_of(*range(16, 24))) == [True] * 8
    storage.close()
