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
        if not _is_main_thread() or not _is_pythons(signals.getsignal(SIGINT)):
            return
        handler = _Handler(self)
        try:
            signals.signal(SIGINT, handler)
        except ValueError:  # another program has started Python in another thread
            return
        self._handler = handler

    def __exit__(self, *error: object) -> None:
        self.let_go()
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

    def __init__(self, held: HeldInterrupts) -> None:
        self._held, self._pid = weakref.ref(held), os.getpid()

    @property
    def held(self) -> HeldInterrupts | None:
        return self._held() if self._pid == os.getpid() else None

    def __call__(self, signal_number: int, frame: FrameType | None) -> None:
        held = self.held
        if held is None:
            raise KeyboardInterrupt
        if held.is_pending:  # a second Ctrl-C does not wait
            held.let_go()
            held.raise_pending()
        held.is_pending = True


class interruptible:
    """A context manager for work that may end anywhere: Ctrl-C is raised at once, also one that has come before."""

    def __enter__(self) -> None:
        self._handler = signals.getsignal(SIGINT) if _is_main_thread() else None
        held = self._handler.held if isinstance(self._handler, _Handler) else None
        if held is None:
            self._handler = None
            return
        held.raise_pending()
        signals.signal(SIGINT, signals.default_int_handler)
        if held.is_pending:  # it came between the two
            signals.signal(SIGINT, self._handler)
            held.raise_pending()

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
        for one in made:
            undo(one)
        raise


def uninterrupted(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return the function with its whole body in HeldInterrupts."""

    @functools.wraps(function)
    def whole(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        with HeldInterrupts():
            return function(*arguments, **named)

    return whole


def _is_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def _is_pythons(handler: object) -> bool:
    return handler is signals.default_int_handler or (isinstance(handler, _Handler) and handler.held is None)
