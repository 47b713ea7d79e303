"""until: wait for a change that another thread is about to make."""

import time
from collections.abc import Callable


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not come to be so in {seconds} s"
        time.sleep(0.001)
