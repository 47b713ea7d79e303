"""ForkGuard: objects with threads, locks or files do not survive a fork. Their use in a child raises an error.

Without it the child would wait for threads that do not exist there.
"""

import os


class ForkGuard:
    """Remembers the process that made an object, and refuses the object's use in any other.

    name: The object's name in the error, such as "the store".
    """

    def __init__(self, name: str) -> None:
        self._name, self._pid = name, os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is the process that made the object."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise RuntimeError in any other process."""
        if os.getpid() != self._pid:
            raise RuntimeError(f"{self._name} must be used in process {self._pid}, which made it, got {os.getpid()}")
