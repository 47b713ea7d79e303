"""Tier: a place that keeps records. Memory, disk, remote servers and a tier of your own look alike to KVStore.

    create(key, n) ─► Writer.piece(0, a), piece(a, b), ...  ─► commit([writer, ...])    now it can be found
    open([key, ..]) ─► Reader.piece(0, a), piece(a, b), ...  ─► close                     it stays while it is read

A record goes in and comes out in pieces. So each piece is filled, checked and copied while the CPU's cache still holds
it. A tier knows only a record's key and length. KVStore checks the bytes (`kvpage.store.records.record`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

from kvpage.store.tiers.stretches import Runs

__all__ = ["Key", "Reader", "RecordGone", "RecordInfo", "Tier", "TierError", "TierRests", "TierStats", "Writer"]

Key = bytes
"""32 bytes, a SHA-256."""


Note = Callable[[Key, str], None]
"""note(key, reason): a record came or went."""


class TierError(Exception):
    """A tier failed or ran out of time. KVStore counts it and goes on: the call is a miss."""


class TierRests(TierError):
    """A tier is known to be in trouble: it was not asked, or has failed again.

    KVStore counts it and does not log it. The tier logs when its state changes.
    """


class RecordGone(TierError):
    """A reader's record was removed or replaced by another process, which does not wait for readers. A miss."""


class RecordInfo(NamedTuple):
    """A record as a tier knows it. last_used: seconds of time.time(); None if the tier does not know."""

    key: Key
    num_bytes: int
    last_used: float | None = None


@dataclass(frozen=True, slots=True)
class TierStats:
    """The state of a tier now, and counters since it was made.

    Attributes:
        name: the tier's name.
        num_records: records that are there; None if the tier does not know.
        num_bytes: bytes of these records; None if the tier does not know.
        capacity: bytes that there may be; None if the tier has no limit of its own.
        evicted: records that went to make place for others.
        corrupted: records that were found damaged.
        errors: errors of the operating system or the server.
    """

    name: str
    num_records: int | None
    num_bytes: int | None
    capacity: int | None
    evicted: int = 0
    corrupted: int = 0
    errors: int = 0


class Reader(ABC):
    """A record that stays as it is until `close`; a context manager that closes.

    Attributes:
        num_bytes: bytes of the record.
        is_in_memory: whether pieces are the record itself, so that small ones gain nothing.
        takes_runs: whether `read_runs` can be called.
        has_proved: whether all bytes that it gives are those that were written, so that digests prove nothing more.
    """

    num_bytes: int
    is_in_memory = False
    takes_runs = False
    has_proved = False

    def read_runs(self, begin: int, runs: Runs, stretch_bytes: int, num_threads: int) -> bytes | None:
        """Read the record's bytes from `begin` on, straight into the memory that the `runs` name.

        Args:
            runs: int64 [n, 2], address and length of each run; the bytes of a run at address 0 are hashed alone.
            stretch_bytes: bytes of each stretch that is hashed.
            num_threads: threads that read and hash.

        Returns:
            The digests of the stretches, 16 bytes each. The bytes count only if these are right. None from a reader
            that has proved the bytes itself, and raises where it cannot.

        Raises:
            TierError: the bytes cannot be read; some may have been written.
        """
        raise NotImplementedError(f"{type(self).__name__} gives pieces alone")

    @abstractmethod
    def piece(self, begin: int, end: int) -> memoryview:
        """Return the bytes [begin, end) of the record: a read-only view that is valid until the next call.

        Raises:
            TierError: the bytes cannot be read.
            ValueError: begin and end are not in order within [0, num_bytes].
        """

    def release_piece(self) -> None:  # noqa: B027, nothing is a fine default
        """Give back the memory of the last piece; the record stays open."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the record. A second call does nothing."""

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Writer(ABC):
    """Space for one record, which cannot be found before Tier.commit.

    As a context manager it gives uncommitted space back.

    Attributes:
        key: the record's key.
        num_bytes: bytes of the record.
        is_in_memory: whether pieces are where the record stays, so that small ones gain nothing.
        takes_runs: whether `write_runs` can be called.
    """

    key: Key
    num_bytes: int
    is_in_memory = False
    takes_runs = False

    def write_runs(self, runs: Runs, stretch_bytes: int, num_threads: int) -> bytes | None:
        """Write the record's next bytes, straight from the memory that the runs name.

        Args:
            runs: int64 [n, 2], address and length of each run. Bytes must not change meanwhile: a digest
                would be wrong, and a seal would hold what was read.
            stretch_bytes: bytes of each stretch that is hashed.
            num_threads: threads that hash and write.

        Returns:
            The digests of the stretches, 16 bytes each. None from a writer whose readers have proved all bytes.

        Raises:
            TierError: the bytes cannot be written; the writer is as it was, or takes no more.
        """
        raise NotImplementedError(f"{type(self).__name__} takes pieces alone")

    @abstractmethod
    def piece(self, begin: int, end: int) -> memoryview:
        """Return memory for the bytes [begin, end), which follow the piece before, to be filled before the next call.

        Raises:
            TierError: the piece before cannot be written.
        """

    @abstractmethod
    def close(self) -> None:
        """Give up a record that is not committed. A second call does nothing."""

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Tier(ABC):
    """Immutable records by key, evicted by the tier's policy when it is full.

    Every method may raise TierError, and nothing else for the tier's own trouble. `timeout` is in seconds, None for
    none, and bounds the whole call. A tier is thread-safe: the serving thread reads while another stores.

    Attributes:
        name: the tier's name in messages and statistics.
        is_in_memory: whether its readers are, so that opening one costs nothing.
        is_read_only: whether others write it, so that a store only reads here.
    """

    name: str
    is_in_memory = False
    is_read_only = False

    def watch(self, note: Note | None) -> None:  # noqa: B027, a tier need not tell
        """Note each record that comes or goes from now on, in the order in which that happens.

        A tier that cannot tell does nothing. It need not tell of changes by others.

        Args:
            note: called with a record's key and a reason: "written", "evicted", "removed", "damaged" or "lost". A
                replaced record is only written. Called with locks held: it returns at once, and calls nothing of the
                tier. None to note no more.
        """

    @abstractmethod
    def contains(self, keys: Sequence[Key], timeout: float | None = None) -> list[bool]:
        """Return for each of the `keys` whether its record is there, or was a moment ago, within `timeout`.

        That is not a use.
        """

    def touch(self, keys: Sequence[Key], timeout: float | None = None) -> list[bool]:
        """Return for each of the `keys` whether it is there, and a use without reading was noted within `timeout`.

        A tier that orders its records by use puts them last to go. A tier that notes no use returns False.
        """
        return [False] * len(keys)

    @abstractmethod
    def open(self, keys: Sequence[Key], timeout: float | None = None) -> list[Reader | None]:
        """Return a reader for each of the `keys`, None for a miss, within `timeout`. That is a use of each record.

        It takes one round trip if there is one.
        """

    @abstractmethod
    def create(self, key: Key, num_bytes: int) -> Writer | None:
        """Return a writer of the record of a `key`, of `num_bytes`; None if it is too large, or all others are in use.

        Others are evicted if need be.
        """

    @abstractmethod
    def commit(self, writers: Sequence[Writer], timeout: float | None = None) -> list[bool]:
        """Publish the whole records of `writers` within `timeout`, in one round trip if there is one.

        The writers are this tier's, filled to their ends. A record of the same key is replaced; readers that have it
        open keep it.

        Returns:
            For each writer whether its record is there now.
        """

    @abstractmethod
    def remove(self, keys: Sequence[Key], timeout: float | None = None) -> int:
        """Return how many records of the `keys` were there. They are forgotten, within `timeout`.

        A record that is being read stays, unfindable, until its readers close.
        """

    @abstractmethod
    def infos(self) -> Iterator[RecordInfo]:
        """Iterate over the records, in no particular order. A TierError says that the tier cannot list them."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all records."""

    @abstractmethod
    def flush(self, sync: bool = False) -> None:
        """Wait until the tier has written everything; with `sync`, until it would survive a loss of power."""

    @abstractmethod
    def stats(self) -> TierStats:
        """Return state and counters."""

    @abstractmethod
    def close(self) -> None:
        """Flush, and let go of everything. A second call does nothing; any other call then raises TierError."""


class ReadOnlyTier(Tier):
    """A tier that others write. Calls that would change a record raise TierError."""

    is_read_only = True

    def create(self, key: Key, num_bytes: int) -> Writer | None:
        raise self._refusal()

    def commit(self, writers: Sequence[Writer], timeout: float | None = None) -> list[bool]:
        raise self._refusal()

    def remove(self, keys: Sequence[Key], timeout: float | None = None) -> int:
        raise self._refusal()

    def clear(self) -> None:
        raise self._refusal()

    def flush(self, sync: bool = False) -> None:
        """Do nothing: nothing is written."""

    def _refusal(self) -> TierError:
        return TierError(f"{self.name} is open for reading only, nothing can be changed")
