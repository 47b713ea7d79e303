"""Drive: one directory of segments, with its errors, its pauses, and the calls at its files."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kvpage.store.tiers.tier import TierError

Result = TypeVar("Result")


class DriveError(TierError):
    """A drive is in trouble."""

    def __init__(self, drive: "Drive", message: str) -> None:
        super().__init__(f"{drive.path}: {message}")
        self.drive = drive


class Drive:
    """Counts errors and users. `enter`, `leave` and `retire` need the tier's lock; the rest is thread-safe.

    num_users: calls at the drive's files; nothing is closed until they leave.
    num_errors: errors of the operating system so far.
    """

    def __init__(self, path: Path, retry_seconds: float) -> None:
        self.path = path
        self.num_users = self.num_errors = 0
        self._retry_seconds = retry_seconds
        self._paused_until = self._full_until = 0.0
        self._lock = threading.Lock()
        self._when_unused: Callable[[], None] | None = None

    @property
    def is_paused(self) -> bool:
        """Return whether it failed a moment ago, so that other drives are preferred."""
        return time.monotonic() < self._paused_until

    @property
    def is_full(self) -> bool:
        """Return whether it refused space a moment ago."""
        return time.monotonic() < self._full_until

    def fill(self) -> None:
        """Count a refusal of space, and ask for none for a while."""
        self.count_error()
        self._full_until = time.monotonic() + self._retry_seconds

    def run(self, call: Callable[..., Result], *args: object) -> Result:
        """Return the result of a call at the drive's files. Raises DriveError for an OSError, which is counted."""
        try:
            return call(*args)
        except OSError as error:
            self.fail()
            raise DriveError(self, error.strerror or str(error)) from error

    def fail(self) -> None:
        """Count an error, and prefer other drives for a while."""
        self.count_error()
        self._paused_until = time.monotonic() + self._retry_seconds

    def count_error(self) -> None:
        """Count an error that says nothing about the other files."""
        with self._lock:
            self.num_errors += 1

    def enter(self) -> None:
        self.num_users += 1

    def leave(self) -> None:
        self.num_users -= 1
        if self.num_users == 0 and self._when_unused is not None:
            self._when_unused()

    def retire(self, when_unused: Callable[[], None]) -> None:
        """Call `when_unused` as soon as the drive has no users, at once if it has none."""
        self._when_unused = when_unused
        if self.num_users == 0:
            when_unused()
