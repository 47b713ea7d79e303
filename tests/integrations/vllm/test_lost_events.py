"""BlockEvents over a store that loses events: what vLLM is told becomes true again."""

from types import SimpleNamespace

import pytest

from kvpage.integrations.vllm import block_events
from kvpage.integrations.vllm.block_events import BlockEvents
from kvpage.store import ByteEvent

PREFIX = bytes(16)
PLACES = ["memory://?size=1MiB", "disk:///kv"]


class Store:
    """Chunks, each in some of two places, and events that the test tells or loses."""

    def __init__(self) -> None:
        self.there: set[tuple[bytes, int]] = set()
        self.num_lost, self.asked = 0, []

    def follow(self, listener):
        self.tell = listener
        return SimpleNamespace(close=lambda: None)

    def stats(self):
        return SimpleNamespace(lost_events=self.num_lost)

    def contains(self, keys):
        self.asked.append(list(keys))
        return [any(PREFIX + key == one for key, _ in self.there) for one in keys]

    def change(self, key: bytes, tier: int, is_stored: bool, lost: bool = False, knows: bool = True) -> ByteEvent:
        (self.there.add if is_stored else self.there.discard)((key, tier))
        reason, name = "written" if is_stored else "evicted", key.ljust(32)
        event = ByteEvent(PREFIX + key if knows else None, name, tier, reason)
        self.num_lost += lost
        if not lost:
            self.tell([event])
        return event


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def events(store) -> BlockEvents:
    return BlockEvents(store, PLACES, PREFIX)


def test_after_a_loss_the_store_is_asked_for_all_that_it_is_believed_to_have(store, events):
    for key in (b"a", b"b"):
        store.change(key, 0, True)
    assert events.take() == [(False, [b"a", b"b"])] and store.asked == [] and events.num_lost == 0
    store.change(b"a", 0, False, lost=True)
    late = store.change(b"c", 0, True)
    assert events.take() == [(True, [b"a"]), (False, [b"c"])] and events.num_lost == 1
    store.there.discard((b"c", 0))
    store.tell([late])  # it waited since before the loss
    assert events.take() == [(True, [b"c"])]


def test_after_a_loss_each_place_of_a_chunk_counts_again(store, events, monkeypatch):
    monkeypatch.setattr(block_events, "MAX_LATE", 1)
    for tier in range(2):
        store.change(b"a", tier, True)
    store.change(b"b", 0, True, lost=True)
    store.change(b"x", 0, True)
    assert events.take() == [(False, [b"a", b"x"])]  # of b no event has told, and no loss either
    num_asked = len(store.asked)
    store.change(b"y", 0, True)
    assert len(store.asked) == num_asked, "chunks that came later are sure"
    store.change(b"a", 0, False)
    assert events.take() == [(False, [b"y"])]
    store.change(b"a", 1, False)
    store.change(b"y", 0, False)
    assert events.take() == [(True, [b"a", b"y"])] and len(store.asked) == num_asked + 2


def test_a_chunk_is_known_by_name_until_it_has_left(store, events):
    store.change(b"a", 0, True)
    store.change(b"other", 0, True, knows=False)
    store.change(b"a", 0, False, knows=False)
    store.change(b"b", 1, True)
    assert events.take() == [(False, [b"b"])]
    store.change(b"b", 1, False, knows=False)
    assert events.take() == [(True, [b"b"])] and not events._keys and not events._places


def test_of_places_that_do_not_tell_losses_are_counted(store, monkeypatch):
    monkeypatch.setattr(block_events, "MAX_WAITING", 3)
    events = BlockEvents(store, ["redis://h"], PREFIX)
    for number in range(5):
        events.stored([PREFIX + bytes([number])])
    events.stored([b"of older weights"])
    assert events.take() == [(False, [b"\2", b"\3", b"\4"])] and events.num_lost == 2 and events.take() == []
