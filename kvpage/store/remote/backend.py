"""Backend: what a store has to offer to be a tier: values by key, in batches.

class Mine(Backend):        RemoteTier(Mine(...)) is then a tier, with deadlines, a circuit breaker, checked
    get, put                records and, if wished, a MAC
    contains, remove
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from kvpage.store.tiers.tier import Key, RecordInfo


class Backend(ABC):
    """A store of values by key: what is to be written for a tier of one's own.

    Every batch is one call, and may come from several threads at once. A method may raise whatever it likes: the tier
    makes it a TierError. timeout: the seconds that are left, None for no limit. Whoever overruns it is left behind, so
    there is no need to be exact; but a method that never returns holds a thread forever.
    """

    @abstractmethod
    def get(self, keys: Sequence[Key], timeout: float | None) -> Sequence[object]:
        """For each key its value (anything with the buffer protocol, contiguous), or None. The tier reads it until the
        reader is closed, so it must not change.
        """

    @abstractmethod
    def put(self, items: Sequence[tuple[Key, memoryview]], timeout: float | None) -> Sequence[bool]:
        """Stores each value whole or not at all, in the place of what was there; whether it is there now. The views
        are not to be kept.
        """

    @abstractmethod
    def contains(self, keys: Sequence[Key], timeout: float | None) -> Sequence[bool]: ...

    @abstractmethod
    def remove(self, keys: Sequence[Key], timeout: float | None) -> int:
        """How many were there."""

    def infos(self) -> Iterator[RecordInfo]:
        """What is there; num_bytes is the length of the value."""
        raise NotImplementedError(f"{type(self).__name__} cannot list its records")

    def clear(self) -> None:
        """Removes all records and nothing else."""
        self.remove([info.key for info in self.infos()], None)

    def give_up(self, thread_id: int) -> None:  # noqa: B027, nothing is a fine default
        """The call that the thread (threading.get_ident) is in is late: make it return soon, by closing its connection
        for instance. It may have returned already. Called again until it has.
        """

    def close(self) -> None:  # noqa: B027
        """Lets go of everything; no call is made afterwards."""
