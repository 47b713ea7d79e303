"""The parts of an AsyncEngine by themselves: the inbox, deadlines, the rate of ends, limits, guards of threads."""

import math
import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest

from kvpage.checks.thread_guard import ThreadGuard
from kvpage.checks.wait_limit import WaitLimit, wait_for_one
from kvpage.serving import AsyncEngine, AsyncEngineConfig, SamplingParams
from kvpage.serving.live.errors import QueueFull
from kvpage.serving.live.mailbox import Mailbox, Wakeups
from kvpage.serving.live.stepping.admission import LEAST, MOST, UNKNOWN, Admission, FinishRate
from kvpage.serving.live.stepping.deadlines import Deadlines
from kvpage.serving.live.stepping.inbox import Inbox
from kvpage.serving.loop.outputs import StepOutput
from kvpage.serving.loop.request import Request
from kvpage.serving.text.token_logprobs import TokenLogprobs


def mailbox(deadline: float | None = None) -> Mailbox:
    request = Request("r", np.arange(3, dtype=np.int32), SamplingParams(max_tokens=2), 0)
    return Mailbox(request, keeps_tokens=True, deadline=deadline)


def end(one: Mailbox) -> None:
    one.put(StepOutput("r", None, 0, "abort", one.request.output()), Wakeups())


def test_work_comes_in_order_and_rings_the_bell():
    inbox = Inbox()
    works = [lambda number=number: number for number in range(4)]
    inbox.leave(works[0])
    assert inbox.bell().done(), "work that was there already"
    assert inbox.take() == works[:1] and inbox.take() == []
    bell = inbox.bell()
    inbox.leave(works[1])
    assert not bell.done()
    inbox.put(works[2])
    inbox.put(works[3])
    assert bell.done() and inbox.wait(math.inf) == works[1:]
    assert inbox.wait(time.monotonic()) == [] and inbox.wait(time.monotonic() + 0.001) == []


def test_a_waiting_thread_is_woken_by_work():
    inbox, got = Inbox(), []
    thread = threading.Thread(target=lambda: got.extend(inbox.wait(math.inf)))
    thread.start()
    inbox.leave(len)
    thread.join()
    assert got == [len]


def test_deadlines_come_in_order_without_those_that_have_ended():
    deadlines, boxes = Deadlines(), [mailbox(when) for when in (5.0, 1.0, None, 3.0, 4.0)]
    for one in boxes:
        deadlines.add(one)
    end(boxes[3])
    assert deadlines.next == 1.0 and deadlines.take(0.5) == []
    assert deadlines.take(4.0) == [boxes[1], boxes[4]]
    assert deadlines.next == 5.0
    end(boxes[0])
    assert deadlines.next == math.inf and deadlines.take(99.0) == []


def test_deadlines_of_ended_requests_are_forgotten():
    deadlines = Deadlines()
    for _ in range(1000):
        one = mailbox(1e9)
        deadlines.add(one)
        end(one)
    assert len(deadlines._heap) <= 65


def test_the_rate_of_ends_says_how_long_a_queue_takes():
    rate = FinishRate(num_remembered=4)
    assert rate.seconds_until(9) == UNKNOWN
    for now in range(10, 20):
        rate.note(float(now))
    assert rate.seconds_until(5, now=20.0) == 5 * 4.0 / 4
    assert rate.seconds_until(0, now=20.0) == LEAST and rate.seconds_until(10**6, now=20.0) == MOST
    assert rate.seconds_until(1, now=36.0) == 5.0, "nothing has ended since"


def test_the_rate_of_ends_leaves_idle_time_out():
    rate = FinishRate()
    for begin in (0.0, 1000.0, 2000.0):
        rate.begin(begin)
        rate.begin(begin + 0.5)
        rate.note(begin + 1.0)
        rate.note(begin + 2.0, is_last=True)
    rate.begin(5000.0)
    assert rate.seconds_until(6, now=5001.0) == 6.0, "six ends in 6 s with requests"


def test_log_probabilities_count_in_a_mailbox():
    one, wakeups = mailbox(), Wakeups()
    assert one.put(StepOutput("r", 1), wakeups) == 1
    top = TokenLogprobs(-1.0, 1, [(1, -1.0), (2, -2.0), (3, -3.0)])
    assert one.put(StepOutput("r", 1, logprobs=top), wakeups) == 6
    assert len(one.take()) == 2 and one.put(StepOutput("r", 1), wakeups) == 1


def test_a_wait_ends_at_the_first_of_all():
    done: Future[None] = Future()
    done.set_result(None)
    never: Future[None] = Future()
    far = time.monotonic() + 1e4
    wait_for_one([never, done], far)
    wait_for_one([never], far, WaitLimit(done, far))
    wait_for_one([never], far, WaitLimit(never, 0.0))
    wait_for_one([never], 0.0, WaitLimit(never, math.inf))
    assert WaitLimit(done, math.inf).is_reached and WaitLimit(never, 0.0).is_reached
    assert not WaitLimit(never, math.inf).is_reached


def test_requests_that_wait_are_counted_once():
    """Amid its way from the inbox to the engine's queue a request is in both."""
    queued: list[str] = []
    admission = Admission(Inbox(), 3, FinishRate(), lambda: len(queued))
    for name in "ab":
        admission.enter(name, lambda: None)
    refused: list[QueueFull] = []

    def check() -> None:
        try:
            admission.check()
        except QueueFull as error:
            refused.append(error)

    asker = threading.Thread(target=check)
    with admission.arriving():
        queued.append("a")
        asker.start()
        asker.join(0.1)  # it waits for the lock; without one it would count the request twice
    asker.join()
    assert not refused and admission.num_arriving == 1
    admission.enter("c", lambda: None)
    with pytest.raises(QueueFull, match="3 requests wait"):
        admission.check()
    assert admission.num_refused == 1


def test_a_guarded_object_is_one_threads_until_it_is_let_go():
    guard = ThreadGuard("the engine")
    guard.check()
    guard.take("somebody")
    assert not guard.is_mine
    with pytest.raises(RuntimeError, match="the engine must be used by way of somebody, which has it"):
        guard.check()
    with pytest.raises(RuntimeError, match="the engine must not be taken twice, somebody has it"):
        guard.take("another")
    guard.enter()
    guard.check()
    failed = []
    thread = threading.Thread(target=lambda: failed.append(guard.is_mine))
    thread.start()
    thread.join()
    assert failed == [False]
    guard.let_go()
    guard.take("another")


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"max_num_waiting": 0}, ValueError),
        ({"max_num_waiting": True}, ValueError),
        ({"max_buffered_tokens": 0}, ValueError),
        ({"drain_timeout": -1.0}, ValueError),
        ({"drain_timeout": math.inf}, ValueError),
        ({"drain_timeout": None}, TypeError),
        ({"drain_timeout": True}, TypeError),
    ],
)
def test_a_config_checks_itself(fields, error):
    with pytest.raises(error, match=next(iter(fields))):
        AsyncEngineConfig(**fields)


def test_only_an_engine_is_taken():
    with pytest.raises(TypeError, match="engine must be an Engine, got str"):
        AsyncEngine("model")
