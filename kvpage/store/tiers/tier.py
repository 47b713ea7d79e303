"""Tier: where records lie. Memory, disk and remote stores look alike to KVStore, and so does a tier of one's own.

    create(key, n) ─► Writer.piece(0, a), piece(a, b), ...  ─► commit([writer, ...])    now it can be found
    open([key, ..]) ─► Reader.piece(0, a), piece(a, b), ...  ─► close                     it stays while it is read

A record goes in and comes out in pieces, so that what fills, checks and copies them meets each while the CPU's cache
still holds it. A tier knows nothing of what a record says but its key and its length: whether the bytes are the right
ones is the reader's to check (`kvpage.store.records.record`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

from kvpage.store.tiers.stretches import Runs

__all__ = ["Key", "Reader", "RecordGone", "RecordInfo", "Tier", "TierError", "TierRests", "TierStats", "Writer"]

Key = bytes
"""32 bytes, a SHA-256."""


class TierError(Exception):
    """A tier failed or ran out of time. KVStore counts it and goes on: what was asked for is a miss."""


class TierRests(TierError):
    """A tier is known to be in trouble: it was not asked, or has failed again. KVStore counts it and does not log it;
    the tier logs when its state changes.
    """


class RecordGone(TierError):
    """The record that a reader has open was removed or replaced by somebody who does not wait for readers. A miss."""


class RecordInfo(NamedTuple):
    """What a tier knows of a record. last_used: seconds of time.time(), or None where the tier does not know."""

    key: Key
    num_bytes: int
    last_used: float | None = None


@dataclass(frozen=True, slots=True)
class TierStats:
    """State now and counters since the tier was made. capacity: None where the tier has no limit of its own."""

    name: str
    num_records: int | None
    num_bytes: int | None
    capacity: int | None
    evicted: int = 0
    corrupted: int = 0
    errors: int = 0


class Reader(ABC):
    """A record, kept as it is until `close`; a context manager that closes.

    is_in_memory: pieces are the record itself, so that small ones gain nothing.
    """

    num_bytes: int
    is_in_memory = False

    @abstractmethod
    def piece(self, begin: int, end: int) -> memoryview:
        """The bytes [begin, end), read-only or to be left alone; valid until the next call. TierError if they cannot
        be had; ValueError outside [0, num_bytes].
        """

    def rest(self) -> None:  # noqa: B027, nothing is a fine default
        """Gives the memory of the last piece back; the record stays open."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of the record. Twice is fine."""

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Writer(ABC):
    """Room for one record, found by nobody before Tier.commit; a context manager that gives uncommitted room back.

    is_in_memory: pieces are where the record stays, so that small ones gain nothing. takes_runs: `write_runs` can be
    called.
    """

    key: Key
    num_bytes: int
    is_in_memory = False
    takes_runs = False

    def write_runs(self, runs: Runs, stretch_bytes: int, num_threads: int) -> bytes:
        """Takes the record's next bytes, all that the runs have, from where they lie; the digests of their stretches.
        They should not change meanwhile: if they do, a digest is wrong. After a TierError the writer is as it was.
        """
        raise NotImplementedError(f"{type(self).__name__} takes pieces alone")

    @abstractmethod
    def piece(self, begin: int, end: int) -> memoryview:
        """Room for the bytes [begin, end), to be filled before the next call. Pieces are asked for in order and without
        gaps. TierError if the one before cannot be written.
        """

    @abstractmethod
    def close(self) -> None:
        """Gives up what is not committed. Twice is fine."""

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Tier(ABC):
    """Records by key, each immutable; evicted as the tier's policy says when room lacks.

    Every method may raise TierError and nothing else for what is the tier's own trouble; timeouts are in seconds, None
    for none, and hold for the whole call. A tier is thread-safe: the serving thread reads while another stores.
    """

    name: str

    @abstractmethod
    def contains(self, keys: Sequence[Key], timeout: float | None = None) -> list[bool]:
        """Whether each record is there (or was, a moment ago). Does not count as a use."""

    @abstractmethod
    def open(self, keys: Sequence[Key], timeout: float | None = None) -> list[Reader | None]:
        """A reader for each record, None for a miss, in one round trip where there is one. A use of each."""

    @abstractmethod
    def create(self, key: Key, num_bytes: int) -> Writer | None:
        """Room for a record, evicting others if need be; None if there can be none now (too large, all in use)."""

    @abstractmethod
    def commit(self, writers: Sequence[Writer], timeout: float | None = None) -> list[bool]:
        """Publishes whole records, in one round trip where there is one; whether each is there now. A record of the
        same key is replaced: readers that have it open keep it.
        """

    @abstractmethod
    def remove(self, keys: Sequence[Key], timeout: float | None = None) -> int:
        """Forgets records; how many were there. One that is being read stays, unfindable, until its readers close."""

    @abstractmethod
    def infos(self) -> Iterator[RecordInfo]:
        """What is there, in no particular order. A tier that cannot tell raises TierError."""

    @abstractmethod
    def clear(self) -> None:
        """Forgets all records."""

    @abstractmethod
    def flush(self, sync: bool = False) -> None:
        """Waits for what the tier still writes; with `sync`, until it would survive a loss of power (where it can)."""

    @abstractmethod
    def stats(self) -> TierStats: ...

    @abstractmethod
    def close(self) -> None:
        """Flushes and lets go of everything. Twice is fine; anything else afterwards raises TierError."""
