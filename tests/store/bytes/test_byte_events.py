"""Events of a ByteStore: in order, by key and tier, with the reason; told outside of every lock."""

import logging
import threading

import pytest
from support.byte_stores import MEMORY, data_of, disk, key_of, opened, room
from support.insides import names_of, refuses_calls
from support.store_kv import corrupt
from support.waiting import until

from kvpage.store import ByteEvent, ByteStore, Placed
from kvpage.store.bytes.events import NAME_BYTES, KnownKeys
from kvpage.store.stack.tier_feed import TierFeed, TierNote
from kvpage.store.tiers.memory_tier import MemoryTier
from kvpage.store.tiers.policy import POLICIES


def told(store: ByteStore) -> list[ByteEvent]:
    """A list that takes all events."""
    events: list[ByteEvent] = []
    store.follow(events.extend)
    return events


def plain(events: list[ByteEvent]) -> list[tuple[bytes | None, int, str]]:
    return [(event.key, event.tier, event.reason) for event in events]


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_what_comes_and_goes_is_told_in_order(kind: str, tmp_path) -> None:
    with opened(MEMORY if kind == "memory" else disk(tmp_path)) as store:
        store.put([b"before"], [b"x"])
        events = told(store)
        store.put([b"a", b"b"], [b"1", b"2"])
        store.put([b"a"], [b"1"])
        store.put([b"a"], [b"3"], skip_existing=False)
        store.remove([b"b", b"none"])
        store.get_into([b"a"], [room(1)])
        store.clear()
        store.flush()
        first = {(b"a", 0, "written"), (b"b", 0, "written")}
        assert set(plain(events[:2])) == first
        assert plain(events[2:4]) == [(b"a", 0, "written"), (b"b", 0, "removed")]
        assert set(plain(events[4:])) == {(b"a", 0, "removed"), (None, 0, "removed")}, "`before` is known by name alone"
        assert [event.is_stored for event in events] == [True, True, True, False, False, False]
        assert all(len(event.name) == 32 for event in events)


@pytest.mark.parametrize("kind", ["memory", "disk"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_follower_knows_at_each_moment_what_is_there(kind: str, policy: str, tmp_path) -> None:
    url = "memory://?size=64KiB" if kind == "memory" else disk(tmp_path, "128KiB").replace("8MiB", "128KiB")
    with opened(f"{url}&policy={policy}") as store:
        there: set[bytes] = set()

        def follow(events) -> None:
            for event in events:
                (there.add if event.is_stored else there.remove)(event.key)

        store.follow(follow)
        keys = [key_of(number) for number in range(60)]
        for number in range(0, 60, 5):
            store.put(keys[number : number + 5], [data_of(one, 9000) for one in range(number, number + 5)])
            store.flush()
            assert there == {key for key, is_there in zip(keys, store.contains(keys), strict=True) if is_there}
        assert store.stats().tiers[0].evicted > 0


def test_each_tier_has_its_number_and_a_damaged_record_leaves() -> None:
    tiers = [MemoryTier(1 << 20, pin_memory=False, name=name) for name in ("a", "b")]
    with opened(tiers[0], Placed(tiers[1], is_written_back=True)) as store:
        events = told(store)
        store.put([b"k"], [b"x" * 5000])
        store.flush()
        assert plain(events) == [(b"k", 0, "written"), (b"k", 1, "written")]
        events.clear()
        corrupt(tiers[0], names_of(store, [b"k"])[0], 4000)
        assert store.get_into([b"k"], [room(5000)]) == [True]
        store.flush()
        assert plain(events) == [(b"k", 0, "removed"), (b"k", 0, "written")], "promoted anew"


def test_a_closed_listening_is_told_nothing_more_and_others_are() -> None:
    with opened() as store:
        first, second = [], []
        with store.follow(first.extend) as follow:
            store.follow(second.extend)
            store.put([b"a"], [b"1"])
            store.flush()
        store.put([b"b"], [b"1"])
        store.flush()
        follow.close()
        assert len(first) == 1 and len(second) == 2


def test_a_listener_may_call_the_store_close_itself_and_fail(caplog) -> None:
    with opened() as store:
        seen, follows = [], []

        def listener(events) -> None:
            seen.append((store.contains([events[0].key]), threading.current_thread().name))
            store.flush()
            follows[0].close()
            raise RuntimeError("a listener's own")

        follows.append(store.follow(listener))
        others = told(store)
        with caplog.at_level(logging.CRITICAL, logger="kvpage"):
            store.put([b"a"], [b"1"])
            store.flush()
            store.put([b"b"], [b"1"])
            store.flush()
        assert seen == [([True], "kvpage-store-events")] and len(others) == 2


def test_closing_tells_what_is_left() -> None:
    store, go = opened(), threading.Event()
    events = []

    def slow(some) -> None:
        assert go.wait(120)
        events.extend(some)

    store.follow(slow)
    store.put([key_of(number) for number in range(50)], [b"x"] * 50)
    threading.Timer(0.05, go.set).start()
    store.close()
    assert len(events) == 50
    with pytest.raises(ValueError, match="closed"):
        store.follow(slow)


def test_a_listener_must_be_callable() -> None:
    with opened() as store, pytest.raises(TypeError, match="listener must be callable, got int"):
        store.follow(5)


def test_a_thread_that_cannot_start_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with opened() as store:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start"):
                store.follow(lambda events: None)
        store.put([b"a"], [b"1"])
        store.flush()
        events = told(store)
        store.put([b"b"], [b"2"])
        store.flush()
        assert plain(events) == [(b"b", 0, "written")]


def test_a_listener_that_ends_its_thread_leaves_the_others(caplog: pytest.LogCaptureFixture) -> None:
    def leave(events: list[ByteEvent]) -> None:
        raise SystemExit

    with opened() as store:
        store.follow(leave)
        events = told(store)
        for key in (b"a", b"b"):
            store.put([key], [key])
            store.flush()
        assert plain(events) == [(b"a", 0, "written"), (b"b", 0, "written")]
    assert caplog.text.count("a listener of a store failed") == 2


@pytest.mark.parametrize("is_closing", [False, True], ids=["alone", "while another thread closes"])
def test_a_listener_cannot_close_the_store(is_closing: bool, caplog: pytest.LogCaptureFixture) -> None:
    store, refused = opened(), []
    closer = threading.Thread(target=store.close)

    def listener(events: list[ByteEvent]) -> None:
        if is_closing:
            closer.start()
            until(lambda: refuses_calls(store))
        with pytest.raises(RuntimeError, match="close must not be called by a listener") as error:
            store.close()
        refused.append(error)
        store.close()

    store.follow(listener)
    store.put([b"a"], [b"1"])
    until(lambda: refused)
    if is_closing:
        closer.join()
    else:
        assert store.contains([b"a"]) == [True]
        store.close()
    assert "close must not be called by a listener" in caplog.text


@pytest.mark.parametrize("max_waiting", [1, 3, 4])
def test_a_listener_that_waits_costs_no_more_than_so_many_events(max_waiting: int) -> None:
    tier, go, is_blocked, told_keys = MemoryTier(1 << 20, pin_memory=False), threading.Event(), threading.Event(), []

    def slow(notes: list[TierNote]) -> None:
        is_blocked.set()
        assert go.wait(120)
        told_keys.extend(note.key for note in notes)

    feed = TierFeed([Placed(tier)], max_waiting)
    feed.add(slow)
    feed._note(0, b"first", "written")
    assert is_blocked.wait(20)
    keys = [key_of(number) for number in range(4)]
    for key in keys:
        feed._note(0, key, "written")
    assert feed.num_lost == 4 - max_waiting
    go.set()
    feed.flush()
    assert told_keys == [b"first", *keys[:max_waiting]]
    feed._note(0, b"last", "written")
    feed.close()
    assert told_keys[-1] == b"last" and feed.num_lost == 4 - max_waiting


def test_keys_are_known_up_to_so_many_bytes_and_the_last_named_stay() -> None:
    known = KnownKeys(3 * (NAME_BYTES + 10))
    known.learn([b"A", b"B", b"C"], [b"a" * 10, b"b" * 10, b"c" * 10])
    known.learn([b"A", b"A"], [b"a" * 10] * 2)
    assert known.of([b"A", b"B", b"C", b"D"]) == [b"a" * 10, b"b" * 10, b"c" * 10, None]
    known.learn([b"D"], [b"d"])
    assert known.of([b"A", b"B", b"C", b"D"]) == [b"a" * 10, None, b"c" * 10, b"d"]
    known.learn([b"E"], [b"e" * 10000])
    assert known.of([b"A", b"C", b"D", b"E"]) == [None] * 4 and known._num_bytes == 0
