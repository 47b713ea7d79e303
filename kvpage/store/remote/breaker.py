"""Breaker: stops calls to a server that does not answer, so that a miss costs no waiting.

                   max_failures in a row                cooldown seconds
        closed ──────────────────────────► open ──────────────────────────► half-open: one trial
          ▲                                  ▲                                 │           │
          │                                  └──────────── it fails ───────────┘           │
          └──────────────────────────────────────────────── it succeeds ───────────────────┘

Closed, every call is admitted; open, none; half-open, one trial, whose result decides. The tier decides which calls
have failed (`fault`).
"""

import threading
import time
from collections.abc import Callable


class Breaker:
    """A circuit breaker, thread-safe. Each admitted call reports `succeeded` or `failed` once.

    max_failures: in a row, until it opens. cooldown: seconds until a trial. clock: seconds, never going back.
    """

    def __init__(
        self, max_failures: int = 3, cooldown: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if max_failures < 1:
            raise ValueError(f"max_failures must be positive, got {max_failures}")
        if not cooldown >= 0:
            raise ValueError(f"cooldown must be at least 0, got {cooldown}")
        self._max_failures, self._cooldown, self._clock = max_failures, cooldown, clock
        self._lock = threading.Lock()
        self._num_failures = 0  # in a row
        self._opened_at: float | None = None  # None: closed
        self._in_trial = False

    @property
    def is_open(self) -> bool:
        """Return whether calls are refused, but for one trial after the cooldown."""
        with self._lock:
            return self._opened_at is not None

    def admit(self) -> bool:
        """Return whether a call may be made now. The one admitted after the cooldown is the trial."""
        with self._lock:
            if self._opened_at is None:
                return True
            if self._in_trial or self._clock() - self._opened_at < self._cooldown:
                return False
            self._in_trial = True
            return True

    def succeeded(self) -> bool:
        """Close it, even if the call began before it opened: the server answers. Return whether it was open."""
        with self._lock:
            was_open = self._opened_at is not None
            self._num_failures, self._opened_at, self._in_trial = 0, None, False
            return was_open

    def failed(self, is_new: bool = True) -> bool:
        """Count a failure. A failed trial opens it anew; other late failures change nothing.

        is_new: whether the failure counts while it is closed; False for one that was counted before.
        Returns whether it was closed and is open now.
        """
        with self._lock:
            self._num_failures += is_new
            opens = self._opened_at is None and self._num_failures >= self._max_failures
            if self._in_trial or opens:
                self._opened_at, self._in_trial = self._clock(), False
            return opens
