"""started_pool: a pool of threads that all run from the beginning; begun: a call in one, even if none can be started.

A pool of the standard library starts its threads when they are needed. Where the system can start no more, `submit`
raises, and yet the job stays queued. It would run after its caller has given up, and write into memory that belongs to
another owner by then.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def started_pool(num_threads: int, name: str) -> ThreadPoolExecutor:
    """Return a pool whose threads have all been started.

    Raises:
        RuntimeError: The threads cannot be started. Then none is left running.
    """
    pool, started = ThreadPoolExecutor(num_threads, thread_name_prefix=name), threading.Event()
    try:
        for _ in range(num_threads):
            pool.submit(started.wait)  # an idle thread would take the next one, and none would be started for it
    except BaseException:
        started.set()
        pool.shutdown(cancel_futures=True)
        raise
    started.set()
    return pool


def begun(begin: Callable[[], "Future[Result]"]) -> "Future[Result]":
    """Return the future of a call, so that a call which cannot begin fails like one that fails later.

    Args:
        begin: Begins the call, and raises RuntimeError where no thread can be started.

    Returns:
        The future; one that has failed already where the call did not begin.
    """
    try:
        return begin()
    except RuntimeError as error:
        failed: Future[Result] = Future()
        failed.set_exception(error)
        return failed
