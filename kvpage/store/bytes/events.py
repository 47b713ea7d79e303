"""ByteEvents: what is stored in the tiers of a ByteStore and leaves them, by the callers' keys."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvpage.store.stack.tier_feed import TierFeed, TierNote
from kvpage.store.tiers.tier import Key

MAX_NAMES = 1 << 20  # of which the keys are known; about 200 bytes each


@dataclass(frozen=True, slots=True)
class ByteEvent:
    """A record came into a tier, or left it.

    Attributes:
        key: as the caller gave it. None for a record that no call has named since the first listener came, such as one
            of an earlier process or of another header.
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


class ByteEvents:
    """Gives listeners the changes of tiers as events. Thread-safe."""

    def __init__(self, feed: TierFeed) -> None:
        self._feed, self._is_followed = feed, False
        self._keys: dict[Key, bytes] = {}

    def follow(self, listener: Listener) -> Follow:
        """Call the listener from now on."""
        self._is_followed = True

        def tell(notes: list[TierNote]) -> None:
            listener([ByteEvent(self._keys.get(note.key), note.key, note.at, note.reason) for note in notes])

        self._feed.add(tell)
        return Follow(lambda: self._feed.drop(tell))

    def know(self, names: Iterable[Key], keys: Iterable[bytes]) -> None:
        """Remember the keys of names, if anybody listens."""
        if self._is_followed:
            self._keys.update(zip(names, keys, strict=True))
            while len(self._keys) > MAX_NAMES:
                try:
                    self._keys.pop(next(iter(self._keys)), None)
                except (StopIteration, RuntimeError):  # another thread is changing them, and keeps them few
                    break
