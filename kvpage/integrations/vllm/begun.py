"""begun: a call of the store that is begun, also where the system can start no more threads."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def begun(begin: Callable[[], "Future[Result]"]) -> "Future[Result]":
    """Return the future of a call, so that a call which cannot begin fails like one that fails later.

    Args:
        begin: Begins the call. It raises RuntimeError where no thread can be started.

    Returns:
        The future; one that has failed already where the call did not begin.
    """
    try:
        return begin()
    except RuntimeError as error:
        failed: Future[Result] = Future()
        failed.set_exception(error)
        return failed
