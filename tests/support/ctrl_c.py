"""CtrlC: Ctrl-C at a line of kvpage's Python, and how many lines there are."""

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

import kvpage

ROOT = str(Path(kvpage.__file__).parent)
# Between whose lines and those of the block, or of the caller, Ctrl-C may come in any Python: a step's outputs are lost
# with the objects to which they are returned.
HANDING_OVER = {"__enter__", "__exit__", "step"}


@pytest.fixture(autouse=True)
def pythons_handler() -> Iterator[None]:
    """For the module that imports it: a process that was begun in the background lacks it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class CtrlC:
    """Counts the lines of kvpage's Python that are run inside; at the nth, Ctrl-C."""

    def __init__(self, nth: int | None = None) -> None:
        self.nth, self.num_lines = nth, 0
        self.place = ""

    def __enter__(self) -> "CtrlC":
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, arg: object) -> Callable | None:
        if not frame.f_code.co_filename.startswith(ROOT):
            return None
        if event == "line" and frame.f_code.co_name not in HANDING_OVER:
            self.num_lines += 1
            if self.num_lines == self.nth:
                self.place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self._trace
