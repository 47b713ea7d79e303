"""WaitLimit: an early end of a wait for futures, for a thread that others need meanwhile."""

import time
from collections.abc import Iterable
from concurrent.futures import Future, wait
from typing import Any, NamedTuple


class WaitLimit(NamedTuple):
    """The end of a wait: when `bell` is done, or at `deadline`, in seconds of time.monotonic()."""

    bell: "Future[None]"
    deadline: float

    @property
    def is_reached(self) -> bool:
        """Whether the wait must end now."""
        return self.bell.done() or time.monotonic() >= self.deadline


def wait_for_one(futures: Iterable["Future[Any]"], deadline: float, limit: WaitLimit | None = None) -> None:
    """Wait until one of the futures is done, at most until `deadline`, and no longer than `limit`."""
    awaited = list(futures)
    if limit is not None:
        awaited.append(limit.bell)
        deadline = min(deadline, limit.deadline)
    wait(awaited, timeout=max(deadline - time.monotonic(), 0.0), return_when="FIRST_COMPLETED")
