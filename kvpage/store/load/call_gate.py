"""CallGate: what is under way in a store, for which closing waits: nothing writes into anybody's blocks afterwards.

retrieve ─► [ enter ........ leave ]                 a call that comes when it is closing is refused
                         close ─► [ waits ] ─► close the tiers
"""

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from kvpage.checks.fork_guard import ForkGuard
from kvpage.checks.interrupts import HeldInterrupts, interruptible

P = ParamSpec("P")
T = TypeVar("T")


class CallGate:
    """Thread-safe; a context manager, inside of which a call is under way. what: such as "the store"."""

    def __init__(self, what: str) -> None:
        self._what, self._process = what, ForkGuard(what)
        self._changed = threading.Condition()
        self._num_under_way = 0
        self._is_closed = False

    def check(self) -> None:
        """RuntimeError in a forked process."""
        self._process.check()

    def enter(self) -> None:
        """ValueError when it is closed, or closing; RuntimeError in a forked process."""
        self.check()
        with self._changed:
            if self._is_closed:
                raise ValueError(f"{self._what} is closed")
            self._num_under_way += 1

    def leave(self) -> None:
        with self._changed:
            self._num_under_way -= 1
            self._changed.notify_all()

    def close(self) -> bool:
        """Refuses calls from now on, and waits for those under way, as often as it is called. False in a forked
        process.
        """
        if not self._process.is_here:
            return False
        with self._changed:
            self._is_closed = True
            with interruptible():
                self._changed.wait_for(lambda: self._num_under_way == 0)
        return True

    def __enter__(self) -> None:
        self.enter()

    def __exit__(self, *error: object) -> None:
        self.leave()


class HasGate(Protocol):
    @property
    def gate(self) -> CallGate: ...


S = TypeVar("S", bound=HasGate)


def gated(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """A method that counts as a call of its owner while it runs. Ctrl-C is raised behind it: what threads still write
    for it is somebody's blocks.
    """

    @functools.wraps(method)
    def counted(self: S, *args: P.args, **named: P.kwargs) -> T:
        with HeldInterrupts(), self.gate:
            return method(self, *args, **named)

    return counted
