"""CallGate: counts the calls that are under way in a store. Closing waits for them, so that none writes afterwards.

retrieve ─► [ enter ........ leave ]                 a call during or after closing is refused
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


class ClosedStore(ValueError):
    """A call came during or after the closing of its store."""


class CallGate:
    """Thread-safe; a context manager, in which a call is under way.

    name: of the object in errors, such as "the store".
    """

    def __init__(self, name: str) -> None:
        self._name, self._process = name, ForkGuard(name)
        self._changed = threading.Condition()
        self._num_under_way = 0
        self._is_closed = False

    def check(self) -> None:
        """Raise RuntimeError in a forked process."""
        self._process.check()

    def enter(self) -> None:
        """Begin a call. Raises ClosedStore when the gate is closed or closing; RuntimeError in a forked process."""
        self._process.check()
        with self._changed:
            if self._is_closed:
                raise ClosedStore(f"{self._name} is closed")
            self._num_under_way += 1

    def leave(self, *error: object) -> None:
        """End a call."""
        with self._changed:
            self._num_under_way -= 1
            self._changed.notify_all()

    def close(self) -> bool:
        """Refuse calls from now on, and wait for calls under way, as often as it is called.

        Returns False in a forked process, where nothing happens.
        """
        if not self._process.is_here:
            return False
        with self._changed:
            self._is_closed = True
            with interruptible():
                self._changed.wait_for(lambda: self._num_under_way == 0)
        return True

    __enter__, __exit__ = enter, leave


class HasGate(Protocol):
    """An object whose methods are calls through its gate."""

    @property
    def gate(self) -> CallGate: ...


S = TypeVar("S", bound=HasGate)


def gated(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Return a method that passes its owner's gate. Ctrl-C is raised after it, when no thread writes for it."""

    def counted(self: S, /, *args: P.args, **named: P.kwargs) -> T:
        with HeldInterrupts(), self.gate:
            return method(self, *args, **named)

    functools.update_wrapper(counted, method)
    return counted
