"""Backend: the calls that a store must offer to be a tier: values by key, in batches.

class Mine(Backend):        RemoteTier(Mine(...)) is then a tier, with deadlines, a circuit breaker, checked
    get, put                records and, if wished, a MAC
    contains, remove
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from kvpage.store.remote.fault import Fault
from kvpage.store.tiers.tier import Key, RecordInfo


class Backend(ABC):
    """A store of values by key; subclass it for a remote tier of your own.

    Every batch is one call, and several threads may call at once. In place of a key's answer there may be a `Fault`,
    which is a miss of that key alone. A method may raise any error: the tier makes it a TierError, and each key is a
    miss. A few of them in a row open the circuit breaker; a raised Fault counts only if it is the server's.

    timeout: the seconds that are left, None for no limit. A call that overruns it is abandoned, so it need not be
    exact. A method that never returns holds a thread forever.
    """

    @abstractmethod
    def get(self, keys: Sequence[Key], timeout: float | None) -> Sequence[object]:
        """Return for each key its value (contiguous, with the buffer protocol), None or a Fault.

        The tier reads it until the reader is closed, so it must not change.
        """

    @abstractmethod
    def put(self, items: Sequence[tuple[Key, memoryview]], timeout: float | None) -> Sequence[bool | Fault]:
        """Store each value whole or not at all, in place of the old one; return whether it is there now, or a Fault.

        The views must not be kept.
        """

    @abstractmethod
    def contains(self, keys: Sequence[Key], timeout: float | None) -> Sequence[bool | Fault]:
        """Return for each key whether there is a value, or a Fault."""

    @abstractmethod
    def remove(self, keys: Sequence[Key], timeout: float | None) -> int:
        """Remove values; return the number that were there. Raises an error if one may be there still."""

    def infos(self) -> Iterator[RecordInfo]:
        """Walk over the values; num_bytes is the length of each."""
        raise NotImplementedError(f"{type(self).__name__} cannot list its records")

    def clear(self) -> None:
        """Remove all records and nothing else."""
        self.remove([info.key for info in self.infos()], None)

    def give_up(self, thread_id: int) -> None:  # noqa: B027, nothing is a fine default
        """Make the late call of a thread (threading.get_ident) return soon, for instance by closing its connection.

        It may have returned already. This is called again until it has.
        """

    def close(self) -> None:  # noqa: B027
        """Let go of everything; no call is made afterwards."""
