"""Closing a KVStore: it waits for calls and for what is written in the background, and can be interrupted."""

import signal
import threading
from pathlib import Path

import pytest
from support.ctrl_c import pythons_handler  # noqa: F401, a fixture for all that is here
from support.insides import refuses_calls
from support.store_kv import (
    KV,
    TOKENS,
    Between,
    C,
    kv_of,
    make,
    same,
)
from support.waiting import until

from kvpage.store import TierError
from kvpage.store.disk.disk_tier import SLOT_BYTES, DiskTier


@pytest.mark.parametrize("call", ["store", "retrieve", "remove", "lookup", "pin"])
def test_closing_waits_for_calls_and_refuses_others(call: str) -> None:
    method = {"store": "commit", "retrieve": "open", "remove": "remove", "lookup": "contains", "pin": "open"}[call]
    tier, tokens = Between(method, after=False), list(range(3 * C))
    store, kv = make(tiers=[tier]), kv_of(tokens)
    if call != "store":
        store.store(tokens, kv)
    calls = {
        "store": lambda: store.store(tokens, kv).result(),
        "retrieve": lambda: same(store.retrieve(tokens)[0], kv),
        "remove": lambda: store.remove(tokens),
        "lookup": lambda: store.lookup(tokens),
        "pin": lambda: store.pin(tokens).num_tokens,
    }
    closer, refused = threading.Thread(target=store.close), []

    def close() -> None:
        closer.start()
        until(lambda: refuses_calls(store))
        for other in calls.values():
            with pytest.raises(ValueError, match="the store is closed") as error:
                other()
            refused.append(error)

    tier.then = close
    tier.begin()
    assert calls[call]() == {"store": 3, "retrieve": True, "remove": 3, "lookup": 3 * C, "pin": 3 * C}[call]
    closer.join()
    assert len(refused) == len(calls)
    with pytest.raises(TierError, match="is closed"):
        tier.contains([])


class SlowDisk(DiskTier):
    """Waits for `go` before it makes room for a record."""

    def __init__(self, path: Path) -> None:
        super().__init__([path], 64 * SLOT_BYTES, segment_bytes=32 * SLOT_BYTES)
        self.go, self.is_asked = threading.Event(), threading.Event()

    def create(self, key: bytes, num_bytes: int):
        self.is_asked.set()
        self.go.wait(60)
        return super().create(key, num_bytes)


def on_disk(path: Path) -> int:
    """Return how many of the tokens a store finds that is opened anew."""
    with make(tiers=[DiskTier([path], 64 * SLOT_BYTES, segment_bytes=32 * SLOT_BYTES)]) as store:
        found, mask = store.retrieve(TOKENS)
        assert same(found, KV[:, :, : int(mask.sum())])
        return int(mask.sum())


def test_a_store_whose_closing_was_interrupted_closes_its_tiers_the_next_time(tmp_path: Path) -> None:
    """Ctrl-C while the background writes: all is written, and the directory's lock is given back."""
    disk = SlowDisk(tmp_path)
    store = make(tiers=[disk])
    stored = store.store(TOKENS, KV, blocking=False)
    until(disk.is_asked.is_set)
    pressing = threading.Timer(0.3, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT])
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        store.close()
    disk.go.set()
    store.close()
    assert stored.result(0) == 3 and on_disk(tmp_path) == len(TOKENS)
