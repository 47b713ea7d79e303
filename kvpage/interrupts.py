"""Ctrl-C amid what must not be left half done: it waits for the end of it.

    with HeldInterrupts():          Ctrl-C here is raised behind it,
        schedule()
        with interruptible():
            model(tokens)           here at once,
        commit()                    and the second one anywhere

As asyncio does it: only in the main thread, where KeyboardInterrupt is raised, and only in place of Python's own
handler. Whoever has another one, as most servers have, is not concerned.
"""

import functools
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class HeldInterrupts:
    """Inside, Ctrl-C waits: KeyboardInterrupt is raised when it ends. One inside another does nothing. 10 us."""

    def __init__(self) -> None:
        self._is_holding = self._is_pending = False

    def __enter__(self) -> None:
        if _is_main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._is_holding = True
            signal.signal(signal.SIGINT, self)

    def __exit__(self, *error: object) -> None:
        if self._is_holding:
            self._let_go()
            self.raise_pending()

    def __call__(self, signal_number: int, frame: FrameType | None) -> None:
        """The handler of the signal. The second one finds somebody who will not wait."""
        if self._is_pending:
            self._let_go()
            self.raise_pending()
        self._is_pending = True

    def raise_pending(self) -> None:
        """KeyboardInterrupt if Ctrl-C has come."""
        if self._is_pending:
            self._is_pending = False
            raise KeyboardInterrupt

    def _let_go(self) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._is_holding = False


class interruptible:  # noqa: N801, read as a statement
    """Inside, Ctrl-C is raised at once, one that has come before included: for long work that may end anywhere."""

    def __enter__(self) -> None:
        handler = signal.getsignal(signal.SIGINT) if _is_main_thread() else None
        self._held = handler if isinstance(handler, HeldInterrupts) else None
        if self._held:
            self._held.raise_pending()
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *error: object) -> None:
        if self._held:
            signal.signal(signal.SIGINT, self._held)


def uninterrupted(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The function, all of it in HeldInterrupts."""

    @functools.wraps(function)
    def whole(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        with HeldInterrupts():
            return function(*arguments, **named)

    return whole


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
