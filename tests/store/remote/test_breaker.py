"""The circuit breaker by a clock that the test turns; calls with a deadline against functions that never return."""

import random
import threading
import time

import pytest

from kvpage.store.remote.breaker import Breaker
from kvpage.store.remote.deadline_pool import DeadlinePool

SOON = 120.0  # seconds, for what has to come at once


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_calls_from_before_it_opened():
    clock = Clock()
    breaker = Breaker(1, 5.0, clock)
    assert breaker.admit() and breaker.admit() and breaker.admit()
    breaker.failed()
    clock.now += 3.0
    breaker.failed()  # late: the cooldown goes on
    clock.now += 2.0
    assert breaker.admit()
    breaker.failed()
    assert not breaker.admit()
    breaker.succeeded()  # the third: the server is well
    assert breaker.admit()


@pytest.mark.parametrize("seed", range(20))
def test_as_a_naive_model(seed):
    """The model keeps the whole history: open if the last max_failures outcomes of its closed time are failures."""
    rng, clock = random.Random(seed), Clock()
    most, cooldown = rng.randint(1, 4), rng.choice([0.0, 2.0])
    breaker = Breaker(most, cooldown, clock)
    row, opened = 0, None
    for _ in range(300):
        clock.now += rng.choice([0.0, 1.0])
        admitted = opened is None or clock.now - opened >= cooldown
        assert breaker.admit() == admitted, seed
        if not admitted:
            continue
        if rng.random() < 0.7:
            breaker.failed()
            row += 1
            opened = clock.now if opened is not None or row >= most else None
        else:
            breaker.succeeded()
            row, opened = 0, None
        assert breaker.is_open == (opened is not None), seed


@pytest.mark.parametrize("arguments", [(0,), (-1,), (1, -0.1), (1, float("nan"))])
def test_a_breaker_that_cannot_be(arguments):
    with pytest.raises(ValueError, match="max_failures|cooldown"):
        Breaker(*arguments)


def test_results_and_errors_come_through():
    caller = DeadlinePool()
    assert caller.call(lambda: 7, None) == 7 and caller.call(lambda: 8, SOON) == 8
    with pytest.raises(KeyError, match="mine"):
        caller.call(lambda: {}["mine"], SOON)
    with pytest.raises(TimeoutError, match="its own"):
        caller.call(lambda: (_ for _ in ()).throw(TimeoutError("its own")), SOON)
    caller.close()
    with pytest.raises(RuntimeError, match="closed"):
        caller.call(lambda: 7, None)


def test_it_is_given_up_until_it_returns():
    """The first time may be before the call waits for anything that could be closed."""
    closed, times = threading.Event(), []

    def give_up(thread_id: int) -> None:
        times.append(thread_id)
        if len(times) == 3:
            closed.set()

    caller = DeadlinePool(1, give_up)
    with pytest.raises(TimeoutError, match="no answer"):
        caller.call(lambda: closed.wait(SOON), 0.01)
    assert closed.wait(SOON)
    assert caller.call(lambda: 7, SOON) == 7
    caller.close()


def test_idle_threads_end_and_calls_go_on(monkeypatch):
    monkeypatch.setattr("kvpage.store.remote.deadline_pool.IDLE_SECONDS", 0.001)
    caller, seen = DeadlinePool(2), set()
    for i in range(200):
        assert caller.call(lambda: (seen.add(threading.current_thread()), i)[1], SOON) == i  # noqa: B023
        time.sleep(0.0005 * (i % 5))
    for thread in seen:
        thread.join(SOON)
    assert len(seen) > 1 and not any(thread.is_alive() for thread in seen)
    assert caller.call(lambda: 7, SOON) == 7
    caller.close()


def test_a_thread_that_cannot_be_started_holds_no_place(monkeypatch):
    caller = DeadlinePool(1)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("no more threads")))
        with pytest.raises(RuntimeError, match="no more"):
            caller.call(lambda: 7, SOON)
    assert caller.call(lambda: 7, SOON) == 7
    caller.close()


def test_a_caller_that_cannot_be():
    with pytest.raises(ValueError, match="max_threads"):
        DeadlinePool(0)
