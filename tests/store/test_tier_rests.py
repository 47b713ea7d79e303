"""A tier that rests is logged when its state changes, and counted each time."""

import logging

import pytest

from kvpage.store import KVStore, KVStoreConfig, KVStoreMetadata
from kvpage.store.remote.backend import Backend
from kvpage.store.remote.breaker import Breaker
from kvpage.store.remote.remote_tier import RemoteTier


class Switched(Backend):
    """Empty. Fails while it is down."""

    is_down = False

    def contains(self, keys, timeout):
        if self.is_down:
            raise ConnectionError("refused")
        return [False] * len(keys)

    def get(self, keys, timeout):
        return [None] * len(keys)

    def put(self, items, timeout):
        return [False] * len(items)

    def remove(self, keys, timeout):
        return 0


def test_a_store_warns_once_when_a_tier_rests_and_once_when_it_answers(caplog: pytest.LogCaptureFixture) -> None:
    """Every call is counted all the same."""
    now = [1000.0]
    backend = Switched()
    tier = RemoteTier(backend, "mine", breaker=Breaker(3, 5.0, lambda: now[0]))
    with KVStore(KVStoreConfig(8), KVStoreMetadata("m"), [tier]) as store:

        def warnings(num_lookups: int) -> list[str]:
            caplog.clear()
            for _ in range(num_lookups):
                assert store.lookup(range(8)) == 0
            return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]

        assert warnings(2) == []
        backend.is_down = True
        assert len(warnings(2)) == 2  # each by itself: the breaker is closed
        (opening,) = warnings(500)
        assert "mine: ConnectionError: refused" in opening and "left alone" in opening
        now[0] += 5.0
        assert warnings(500) == []  # a trial, which fails
        assert store.stats().tier_errors == 1002 and tier.stats().errors == 1002
        backend.is_down = False
        assert warnings(5) == []
        now[0] += 5.0
        (closing,) = warnings(500)
        assert "mine answers again" in closing
        assert store.stats().tier_errors == 1007
        backend.is_down = True
        assert len(warnings(100)) == 3  # and it can open again


def test_a_breaker_tells_of_its_changes_alone() -> None:
    now = [0.0]
    breaker = Breaker(2, 5.0, lambda: now[0])
    assert [breaker.failed(), breaker.succeeded(), breaker.failed(), breaker.failed()] == [False, False, False, True]
    assert breaker.failed() is False  # a call that began before
    now[0] = 5.0
    assert breaker.admit() and breaker.failed() is False and breaker.is_open
    now[0] = 10.0
    assert breaker.admit() and breaker.succeeded() and not breaker.is_open and not breaker.succeeded()
