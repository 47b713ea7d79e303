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

    One within another does nothing. It is the signal handler of its block. A program may keep that handler and set it
    again, and a fork inherits it: outside of the block and of its process it does the same as Python's own handler.
    """

    is_pending = False
    _thread: tuple[int, int] | None = None  # process and thread, while it is the handler

    def __enter__(self) -> None:
        before = signals.getsignal(SIGINT)
        if before is not signals.default_int_handler and not (isinstance(before, HeldInterrupts) and before.is_idle):
            return
        self._thread = os.getpid(), threading.get_ident()
        try:
            signals.signal(SIGINT, self)
        except ValueError:  # another thread than Python's main one
            self._thread = None

    def __exit__(self, *error: object) -> None:
        if self._thread is not None:
            if signals.getsignal(SIGINT) is self:  # else another handler was set meanwhile
                signals.signal(SIGINT, signals.default_int_handler)
            self._thread = None
        if self.is_pending:
            self.raise_pending()

    def __call__(self, signal_number: int, frame: FrameType | None) -> None:
        """Note Ctrl-C. A second one does not wait."""
        if self.is_idle:
            raise KeyboardInterrupt
        if self.is_pending:
            self.__exit__()
        self.is_pending = True

    @property
    def is_idle(self) -> bool:
        """Whether it holds back nothing in this process."""
        return self._thread is None or self._thread[0] != os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether it holds back what interrupts this thread."""
        return self._thread == (os.getpid(), threading.get_ident())

    def raise_pending(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C has come."""
        if self.is_pending:
            self.is_pending = False
            raise KeyboardInterrupt


class interruptible:
    """A context manager for work that may end anywhere: Ctrl-C is raised at once, also one that has come before."""

    def __enter__(self) -> None:
        self._holder: HeldInterrupts | None = None
        holder = signals.getsignal(SIGINT)
        if not isinstance(holder, HeldInterrupts) or not holder.is_here:
            return
        holder.raise_pending()
        self._holder = holder
        signals.signal(SIGINT, signals.default_int_handler)
        if holder.is_pending:  # it came between the two
            signals.signal(SIGINT, holder)
            holder.raise_pending()

    def __exit__(self, *error: object) -> None:
        if self._holder and signals.getsignal(SIGINT) is signals.default_int_handler:
            signals.signal(SIGINT, self._holder)


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
