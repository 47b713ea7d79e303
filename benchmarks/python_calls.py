"""How many Python functions of kvpage's own a call enters: a cost that does not depend on the machine."""

import sys
from collections.abc import Callable
from types import FrameType


def num_calls(call: Callable[[], object]) -> int:
    """Return the functions that a repeated call enters, without those of the benchmarks."""
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        name = frame.f_globals.get("__name__", "")
        count += event == "call" and name.startswith("kvpage.") and not name.startswith("kvpage.benchmarks.")

    call()
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return count
