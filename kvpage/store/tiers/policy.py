"""Policies of eviction: which record goes first. `lru` and `slru` are as of blocks in the prefix tree."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator


class Policy(ABC):
    """An order of keys. Every method but `victims` takes O(1)."""

    @abstractmethod
    def add(self, key: bytes) -> None:
        """Add a key that is not there yet."""

    @abstractmethod
    def use(self, key: bytes) -> None:
        """Note that a key was read."""

    @abstractmethod
    def remove(self, key: bytes) -> None:
        """Take a key out. Raises KeyError if it is not there."""

    @abstractmethod
    def victims(self) -> Iterator[bytes]:
        """Walk over all keys, the first to go first. The policy must not be changed meanwhile."""


class FIFO(Policy):
    """The record that was added first goes first."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def add(self, key: bytes) -> None:
        self._keys[key] = None

    def use(self, key: bytes) -> None:
        """Change nothing."""

    def remove(self, key: bytes) -> None:
        del self._keys[key]

    def victims(self) -> Iterator[bytes]:
        return iter(self._keys)


class LRU(FIFO):
    """The least recently used record goes first."""

    def use(self, key: bytes) -> None:
        self._keys.move_to_end(key)


class LFU(Policy):
    """The least often used record goes first; of several, the least recently used.

    counts   1: [c d]   2: [a]   7: [b]       each an LRU; read once, d becomes 2: [a d]
    """

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}
        self._keys: dict[int, OrderedDict[bytes, None]] = {}

    def add(self, key: bytes) -> None:
        self._put(key, 1)

    def use(self, key: bytes) -> None:
        count = self._counts[key]
        self.remove(key)
        self._put(key, count + 1)

    def remove(self, key: bytes) -> None:
        count = self._counts.pop(key)
        del self._keys[count][key]
        if not self._keys[count]:
            del self._keys[count]

    def victims(self) -> Iterator[bytes]:
        for count in sorted(self._keys):
            yield from self._keys[count]

    def _put(self, key: bytes, count: int) -> None:
        self._counts[key] = count
        self._keys.setdefault(count, OrderedDict())[key] = None


class SLRU(Policy):
    """The least recently used record goes first; those that were read go after the others, up to four fifths of all.

    new    [e c f]        the first to go
    read   [a d b]        first once they are more than four fifths
    """

    def __init__(self) -> None:
        self._new, self._read = LRU(), LRU()
        self._is_read: dict[bytes, bool] = {}
        self._num_read = 0

    def add(self, key: bytes) -> None:
        self._new.add(key)
        self._is_read[key] = False

    def use(self, key: bytes) -> None:
        if self._is_read[key]:
            self._read.use(key)
            return
        self._new.remove(key)
        self._read.add(key)
        self._is_read[key] = True
        self._num_read += 1

    def remove(self, key: bytes) -> None:
        is_read = self._is_read.pop(key)
        self._num_read -= is_read
        (self._read if is_read else self._new).remove(key)

    def victims(self) -> Iterator[bytes]:
        parts = [self._new, self._read]
        if 5 * self._num_read > 4 * len(self._is_read):
            parts.reverse()
        for part in parts:
            yield from part.victims()


POLICIES: dict[str, type[Policy]] = {"lru": LRU, "slru": SLRU, "lfu": LFU, "fifo": FIFO}


def make_policy(name: str) -> Policy:
    """Return a new policy. Raises ValueError for a name that is not lru, slru, lfu or fifo."""
    if name not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {name!r}")
    return POLICIES[name]()
