"""CtrlC: Ctrl-C at a line of kvpage's Python, and how many lines there are."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import kvpage

ROOT = str(Path(kvpage.__file__).parent)
WITH = {"__enter__", "__exit__"}  # between whose lines and those of the block Ctrl-C may always come


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
        if event == "line" and frame.f_code.co_name not in WITH:
            self.num_lines += 1
            if self.num_lines == self.nth:
                self.place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self._trace
