"""AsyncEngineConfig: the limits of an AsyncEngine."""

import math
import numbers
from dataclasses import dataclass

from kvpage.checks.values import check_at_least


@dataclass(frozen=True, slots=True)
class AsyncEngineConfig:
    """The limits of an AsyncEngine. It checks itself.

    Attributes:
        max_num_waiting: Requests that wait at most, preempted ones included. More are refused by QueueFull.
        max_buffered_tokens: Tokens of one request that its reader has not taken, at most. A request whose reader falls
            further back is aborted. A token takes about 150 bytes until it is taken. So does each log-probability
            beside it, which counts as one more.
        drain_timeout: Seconds that `drain` waits for unfinished requests. It aborts them then.

    Raises:
        TypeError: A value is of another type.
        ValueError: A value is out of its range.
    """

    max_num_waiting: int = 1024
    max_buffered_tokens: int = 65_536
    drain_timeout: float = 30.0

    def __post_init__(self) -> None:
        check_at_least("max_num_waiting", self.max_num_waiting, 1)
        check_at_least("max_buffered_tokens", self.max_buffered_tokens, 1)
        check_seconds("drain_timeout", self.drain_timeout)


def check_seconds(name: str, value: float) -> float:
    """Return the value. TypeError unless it is a number, ValueError if it is negative or not finite."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number of seconds, got {type(value).__name__}")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be finite and not negative, got {value!r}")
    return value
