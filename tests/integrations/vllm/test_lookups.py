"""Lookups against a store whose answers come when the test says so, and a clock of the test's own."""

import logging
import random
from concurrent.futures import Future

import pytest

from kvpage.integrations.vllm.lookups import Asked, Lookups, RequestLog

PATIENCE = 2.0


class Store:
    def __init__(self) -> None:
        self.calls: list[tuple[list[bytes], Future[list[bool]]]] = []
        self.now = 100.0

    def contains(self, keys):
        self.calls.append((list(keys), Future()))
        return self.calls[-1][1]

    def clock(self) -> float:
        return self.now

    def answer(self, *there: bytes) -> None:
        keys, future = self.calls.pop(0)
        future.set_result([key in there for key in keys])


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def lookups(store) -> Lookups:
    return Lookups(store.contains, PATIENCE, store.clock)


def test_a_step_is_one_call_and_each_key_is_asked_once(store, lookups):
    assert [lookups.ask(key, "r") for key in (b"a", b"b", b"a")] == [None] * 3
    assert lookups.ask(b"b", "other") is None
    assert store.calls == []
    lookups.send()
    lookups.send()
    assert [keys for keys, _ in store.calls] == [[b"a", b"b"]]
    store.answer(b"b")
    assert [lookups.ask(key, "r") for key in (b"a", b"b")] == [False, True]
    lookups.send()
    assert store.calls == []


def test_a_call_under_way_holds_back_the_next(store, lookups):
    lookups.ask(b"a", "r")
    lookups.send()
    lookups.ask(b"b", "r")
    lookups.send()
    assert len(store.calls) == 1
    store.answer()
    lookups.send()
    assert [keys for keys, _ in store.calls] == [[b"b"]]


@pytest.mark.parametrize(("seconds", "expected"), [(PATIENCE, None), (PATIENCE + 0.001, False)])
def test_patience_ends(store, lookups, seconds, expected):
    lookups.ask(b"a", "r")
    lookups.send()
    store.now += seconds
    assert lookups.ask(b"a", "r") is expected
    assert lookups.num_given_up == (expected is False)
    store.answer(b"a")
    assert lookups.ask(b"a", "later") is True
    assert lookups.ask(b"a", "r") is (None if expected else expected is None)


def test_after_patience_ended_nothing_waits_until_the_store_has_answered(store, lookups):
    lookups.ask(b"a", "r")
    lookups.send()
    store.now += PATIENCE + 1
    assert [lookups.ask(key, name) for key, name in ((b"a", "r"), (b"b", "r"), (b"b", "s"))] == [False] * 3
    lookups.send()
    assert lookups.num_given_up == 3 and len(store.calls) == 1
    store.answer(b"a")
    assert lookups.ask(b"b", "s") is None and lookups.ask(b"a", "s") is True
    lookups.send()
    assert [keys for keys, _ in store.calls] == [[b"b"]]


def test_a_question_that_was_not_sent_is_no_sign_of_a_slow_store(store, lookups):
    lookups.ask(b"a", "r")
    store.now += PATIENCE + 1
    assert lookups.ask(b"a", "r") is False and lookups.ask(b"b", "r") is None


def test_a_failed_load_is_a_miss_for_those_who_asked_and_asked_anew_by_others(store, lookups):
    for name in ("r", "s"):
        lookups.ask(b"a", name)
    lookups.send()
    store.answer(b"a")
    assert lookups.ask(b"a", "r") is True
    lookups.mark_failed([b"a", b"unknown"])
    assert [lookups.ask(b"a", name) for name in ("r", "s")] == [False, False]
    assert lookups.ask(b"a", "t") is None
    lookups.send()
    store.answer(b"a")
    assert [lookups.ask(b"a", name) for name in ("r", "s", "t")] == [False, False, True]


def test_what_was_stored_is_there(store, lookups):
    lookups.ask(b"a", "r")
    lookups.send()
    lookups.mark_stored([b"a", b"unknown"])
    assert lookups.ask(b"a", "r") is True
    store.answer()  # older than the store
    assert lookups.ask(b"a", "r") is True


@pytest.mark.parametrize("end", ["error", "cancelled"])
def test_a_call_that_fails_is_a_miss(store, lookups, end):
    lookups.ask(b"a", "r")
    lookups.send()
    keys, future = store.calls.pop()
    assert future.cancel() if end == "cancelled" else future.set_exception(RuntimeError()) is None
    assert lookups.ask(b"a", "r") is False


def test_requests_that_ended_leave_nothing(store, lookups):
    lookups.ask(b"a", "r")
    lookups.send()
    lookups.ask(b"b", "r")
    lookups.forget("r")
    lookups.forget("unknown")
    assert len(lookups) == 0
    store.answer(b"a")
    lookups.send()
    assert store.calls == []
    assert lookups.ask(b"a", "s") is None


@pytest.mark.parametrize("seed", range(20))
def test_random_requests_get_answers_that_the_store_gave(store, lookups, seed):
    rng, there, running = random.Random(seed), {bytes([number]) for number in range(0, 20, 2)}, {}
    for _ in range(300):
        name = f"r{rng.randrange(6)}"
        key = bytes([rng.randrange(20)])
        running.setdefault(name, set()).add(key)
        answer = lookups.ask(key, name)
        assert answer in (None, key in there)
        if rng.random() < 0.4:
            lookups.send()
        if store.calls and rng.random() < 0.5:
            store.answer(*there)
        if rng.random() < 0.1:
            lookups.forget(name)
            running.pop(name)
        assert len(lookups) == len({key for keys in running.values() for key in keys})


def test_a_request_is_told_of_each_chunk_once(store, lookups):
    """What it stores itself later does not count as there."""
    assert lookups.asked("r") == (0, 0, 0, 0)
    for key in (b"a", b"b", b"c"):
        lookups.ask(key, "r")
    assert lookups.asked("r") == Asked(unanswered=3)
    lookups.send()
    store.answer(b"a", b"b")
    assert [lookups.ask(key, "r") for key in (b"a", b"b", b"c")] == [True, True, False]
    assert lookups.asked("r") == Asked(there=2, absent=1)
    lookups.mark_failed([b"b"])
    lookups.mark_stored([b"b", b"c"])
    assert lookups.ask(b"b", "r") is False and lookups.asked("r") == Asked(there=1, absent=1, failed=1)
    lookups.forget("r")
    assert lookups.asked("r") == (0, 0, 0, 0)


def test_an_answer_that_came_too_late_is_none(store, lookups):
    lookups.ask(b"a", "r")
    lookups.send()
    store.now += PATIENCE + 1
    assert lookups.ask(b"a", "r") is False
    store.answer(b"a")
    assert lookups.ask(b"a", "r") is False and lookups.asked("r") == Asked(unanswered=1)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (Asked(there=2), "2 of the 2 chunks asked for, of 16 tokens each; all that were asked for are there"),
        (Asked(there=1, absent=1), "1 of the 2 chunks asked for, of 16 tokens each; 1 are not there"),
        (Asked(unanswered=3, absent=1), "0 of the 4 chunks asked for, of 16 tokens each; 3 had no answer in time"),
        (Asked(there=1, failed=2), "1 of the 3 chunks asked for, of 16 tokens each; 2 could not be loaded"),
    ],
)
def test_the_line_of_a_request(monkeypatch, caplog, asked, text):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    refused = {"key": 1}
    log = RequestLog(16, lambda: refused)
    refused["damaged"] = 2
    with caplog.at_level("INFO"):
        log.tell("r", Asked())
        log.tell("r", asked)
        log.tell("s", asked)
    first, second = caplog.messages
    assert first == f"request r: the store had {text}; refused since the last line: {{'damaged': 2}}"
    assert second.endswith("refused since the last line: none")
