"""Objects in forked children, pools whose threads all run, and ends on another thread."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvpage.checks.close_later import close_later
from kvpage.checks.fork_guard import ForkGuard
from kvpage.checks.started_pool import started_pool


def test_a_guard_refuses_other_processes(monkeypatch):
    guard, here = ForkGuard("the store"), os.getpid()
    guard.check()
    assert guard.is_here
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    assert not guard.is_here
    with pytest.raises(RuntimeError, match=f"the store must be used in process {here}, which made it, got {here + 1}"):
        guard.check()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_all_threads_of_a_pool_run(num_threads):
    with started_pool(num_threads, "some") as pool:
        names = {thread.name for thread in threading.enumerate() if thread.name.startswith("some_")}
        assert len(names) == num_threads
        assert list(pool.map(lambda n: n + 1, range(8))) == list(range(1, 9))


def test_a_pool_that_cannot_start_leaves_no_thread(monkeypatch):
    before, submit, calls = set(threading.enumerate()), ThreadPoolExecutor.submit, []

    def second_fails(pool, *arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise RuntimeError("can't start new thread")
        return submit(pool, *arguments)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", second_fails)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        started_pool(3, "none")
    assert set(threading.enumerate()) == before


def test_an_end_comes_on_another_thread():
    ended, threads = threading.Event(), []

    def close():
        threads.append(threading.current_thread())
        ended.set()

    close_later(close)
    assert ended.wait(120)
    assert threads[0] is not threading.current_thread() and not threads[0].daemon
