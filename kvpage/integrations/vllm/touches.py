"""Touches: which chunks the device has, told to the store a step at a time, so that it keeps them longer."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

MAX_KEYS = 1 << 16  # that wait to be told


class Touches:
    """The uses of a step. For one thread.

    Args:
        touch: Tells the store of keys, and returns at once.
    """

    def __init__(self, touch: Callable[[Sequence[bytes]], "Future[list[bool]]"]) -> None:
        self._touch = touch
        self._unsent: dict[bytes, None] = {}
        self._sent: Future[list[bool]] | None = None

    def add(self, keys: Iterable[bytes]) -> None:
        """Note uses, the last ones at the end. If the store is slow, the first of many are forgotten.

        Args:
            keys: Of the chunks.
        """
        for key in keys:
            self._unsent.pop(key, None)
            self._unsent[key] = None
        while len(self._unsent) > MAX_KEYS:
            del self._unsent[next(iter(self._unsent))]

    def send(self) -> None:
        """Tell the store, unless it has not taken the last ones yet."""
        if self._unsent and (self._sent is None or self._sent.done()):
            keys, self._unsent = list(self._unsent), {}
            self._sent = self._touch(keys)
