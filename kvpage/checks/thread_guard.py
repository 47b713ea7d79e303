"""ThreadGuard: an object for one thread, which has taken it. Its use on any other raises an error."""

import threading


class ThreadGuard:
    """Remembers the thread that an object was given to. While no thread owns it, any thread may use it, one at a time.

    name: The object's name in the error, such as "the engine".
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._taken = threading.Lock()
        self._owner: str | None = None
        self._thread_id: int | None = None

    def take(self, owner: str) -> None:
        """Refuse all threads from now on, but for the one that calls `enter`.

        owner: who takes it, in the error.

        Raises:
            RuntimeError: It is taken.
        """
        if not self._taken.acquire(blocking=False):
            raise RuntimeError(f"{self._name} must not be taken twice, {self._owner} has it")
        self._owner = owner

    def enter(self) -> None:
        """Let this thread use the object."""
        self._thread_id = threading.get_ident()

    def let_go(self) -> None:
        """Let any thread use it again."""
        self._thread_id = self._owner = None
        self._taken.release()

    @property
    def is_mine(self) -> bool:
        """Whether this thread may use it."""
        return self._owner is None or self._thread_id == threading.get_ident()

    def check(self) -> None:
        """Raise RuntimeError on a thread that may not use it."""
        if self._owner is not None and self._thread_id != threading.get_ident():
            raise RuntimeError(f"{self._name} must be used by way of {self._owner}, which has it")
