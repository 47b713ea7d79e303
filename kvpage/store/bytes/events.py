"""ByteEvents: records that come into the tiers of a ByteStore or leave them, by the callers' keys."""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvpage.store.stack.tier_feed import TierFeed, TierNote
from kvpage.store.tiers.tier import Key

MAX_KEY_BYTES = 256 << 20  # of keys that are known by their names
NAME_BYTES = 200  # of an entry beside its key


@dataclass(frozen=True, slots=True)
class ByteEvent:
    """A record came into a tier, or left it.

    Attributes:
        key: as the caller gave it. None for a record that no call has named since the first listener came, such as one
            of an earlier process or of another header. None also for one that was named long ago: the keys of a
            million names are kept, or fewer where keys are long.
        name: the record's name in the tiers, 32 bytes.
        tier: the number of the tier in the configuration.
        reason: "written", or why it left: "evicted" for others, "removed" by a call or since its bytes were wrong,
            "damaged" or "lost" with its file.
    """

    key: bytes | None
    name: bytes
    tier: int
    reason: str

    @property
    def is_stored(self) -> bool:
        """Whether the record is in the tier now."""
        return self.reason == "written"


Listener = Callable[[Sequence[ByteEvent]], None]


class Follow:
    """A listener of a ByteStore, until `close`. Use it in `with`, or close it. Made by `ByteStore.follow`.

    Args:
        end: called by `close`.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    def close(self) -> None:
        """Return when the listener is called no more; in the listener itself, at once. A second call does nothing."""
        self._end()

    def __enter__(self) -> "Follow":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class KnownKeys:
    """The keys of names that calls have used, the latest first to stay. Thread-safe.

    Args:
        max_bytes: of keys and their entries.
    """

    def __init__(self, max_bytes: int = MAX_KEY_BYTES) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._keys: dict[Key, bytes] = {}
        self._lock = threading.Lock()

    def learn(self, names: Iterable[Key], keys: Iterable[bytes]) -> None:
        """Remember the keys of names, and forget the least recently used where there are too many."""
        with self._lock:
            for name, key in zip(names, keys, strict=True):
                self._forget(name)
                self._keys[name] = key
                self._num_bytes += len(key) + NAME_BYTES
            while self._num_bytes > self._max_bytes:
                self._forget(next(iter(self._keys)))

    def of(self, names: Iterable[Key]) -> list[bytes | None]:
        """Return the key of each name; None for one that is not known."""
        with self._lock:
            return [self._keys.get(name) for name in names]

    def _forget(self, name: Key) -> None:
        key = self._keys.pop(name, None)
        if key is not None:
            self._num_bytes -= len(key) + NAME_BYTES


class ByteEvents:
    """Gives listeners the changes of tiers as events. Thread-safe."""

    def __init__(self, feed: TierFeed) -> None:
        self._feed, self._is_followed = feed, False
        self._keys = KnownKeys()

    def follow(self, listener: Listener) -> Follow:
        """Call the listener from now on."""
        self._is_followed = True

        def tell(notes: list[TierNote]) -> None:
            keys = self._keys.of(note.key for note in notes)
            listener([ByteEvent(key, note.key, note.at, note.reason) for key, note in zip(keys, notes, strict=True)])

        self._feed.add(tell)
        return Follow(lambda: self._feed.drop(tell))

    def know(self, names: Iterable[Key], keys: Iterable[bytes]) -> None:
        """Remember the keys of names, if anybody listens."""
        if self._is_followed:
            self._keys.learn(names, keys)
