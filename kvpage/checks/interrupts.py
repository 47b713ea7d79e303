"""Ctrl-C during work that must not be left half done: the interrupt waits for the work's end.

    with HeldInterrupts():          Ctrl-C here is raised after the block,
        schedule()
        with interruptible():
            model(tokens)           here at once,
        commit()                    and a second Ctrl-C at once anywhere: then nothing is promised

It works as in asyncio: only in the main thread, where KeyboardInterrupt is raised, and only in place of Python's own
handler. A program with a handler of its own, as most servers have, is not affected.
"""

import functools
import os
import threading
import weakref
from collections.abc import Callable
from signal import SIGINT
from types import FrameType
from typing import ParamSpec, TypeVar

# `signal` wraps this module and makes an enum of every number and handler: 3 us a call in place of 0.3.
try:
    import _signal as signals  # type: ignore[import-not-found]
except ImportError:
    import signal as signals

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class HeldInterrupts:
    """A context manager in which Ctrl-C waits. KeyboardInterrupt is raised when the block ends.

    One within another does nothing.
    """

    def __init__(self) -> None:
        self.is_pending = False
        self._handler: _Handler | None = None

    def __enter__(self) -> None:
        before = signals.getsignal(SIGINT)
        if before is not signals.default_int_handler and not (isinstance(before, _Handler) and before.held is None):
            return
        handler = _Handler(self)
        try:
            signals.signal(SIGINT, handler)
        except ValueError:  # another thread than Python's main one
            return
        self._handler = handler

    def __exit__(self, *error: object) -> None:
        if self._handler is not None:
            self.let_go()
        if self.is_pending:
            self.raise_pending()

    def let_go(self) -> None:
        """Restore Python's own handler, unless another handler was set meanwhile."""
        if self._handler and signals.getsignal(SIGINT) is self._handler:
            signals.signal(SIGINT, signals.default_int_handler)
        self._handler = None

    def raise_pending(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C has come."""
        if self.is_pending:
            self.is_pending = False
            raise KeyboardInterrupt


class _Handler:
    """The signal handler of one HeldInterrupts.

    It can outlive that object, where a program keeps it and sets it again, or after a fork. Then it does the same as
    Python's own handler.
    """

    def __init__(self, holder: HeldInterrupts) -> None:
        self._held, self._pid, self.thread_id = weakref.ref(holder), os.getpid(), threading.get_ident()

    @property
    def held(self) -> HeldInterrupts | None:
        return self._held() if self._pid == os.getpid() else None

    def __call__(self, signal_number: int, frame: FrameType | None) -> None:
        holder = self.held
        if holder is None:
            raise KeyboardInterrupt
        if holder.is_pending:  # a second Ctrl-C does not wait
            holder.let_go()
            holder.raise_pending()
        holder.is_pending = True


class interruptible:
    """A context manager for work that may end anywhere: Ctrl-C is raised at once, also one that has come before."""

    def __enter__(self) -> None:
        self._handler: _Handler | None = None
        handler = signals.getsignal(SIGINT)
        holder = handler.held if isinstance(handler, _Handler) and handler.thread_id == threading.get_ident() else None
        if holder is None:
            return
        holder.raise_pending()
        self._handler = handler
        signals.signal(SIGINT, signals.default_int_handler)
        if holder.is_pending:  # it came between the two
            signals.signal(SIGINT, handler)
            holder.raise_pending()

    def __exit__(self, *error: object) -> None:
        if self._handler and signals.getsignal(SIGINT) is signals.default_int_handler:
            signals.signal(SIGINT, self._handler)


def made_or_undone(make: Callable[[], Result], undo: Callable[[Result], object]) -> Result:
    """Return the result of `make`, which Ctrl-C does not interrupt. If Ctrl-C comes meanwhile, undo the result.

    No caller would receive it then.
    """
    made: list[Result] = []
    try:
        with HeldInterrupts():
            made.append(make())
        return made[0]
    except KeyboardInterrupt:
        for result in made:
            undo(result)
        raise


def uninterrupted(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return the function with its whole body in HeldInterrupts."""

    @functools.wraps(function)
    def whole(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        with HeldInterrupts():
            return function(*arguments, **named)

    return whole
