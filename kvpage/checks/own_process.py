"""OwnProcess: what has threads, locks or files does not survive a fork. Whoever uses it in the child is told so, and
does not wait for threads that are not there.
"""

import os


class OwnProcess:
    """The process that made something. what: its name in the error, such as "the store"."""

    def __init__(self, what: str) -> None:
        self._what, self._pid = what, os.getpid()

    @property
    def is_here(self) -> bool:
        return os.getpid() == self._pid

    def check(self) -> None:
        """RuntimeError in any other process."""
        if not self.is_here:
            raise RuntimeError(f"{self._what} must be used in process {self._pid}, which made it, got {os.getpid()}")
