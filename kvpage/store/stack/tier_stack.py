"""TierStack: several tiers as one, the fastest first. A tier in trouble is counted and logged, and is a miss.

put     ─► every tier that lacks it; those written back get it later, from the first that has it and keeps it
read    ─► the first tier that has it ─► verified ─► copied into the faster ones
"""

import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from kvpage.store.records.kinds import RecordKind
from kvpage.store.records.payload import Source
from kvpage.store.records.record import CorruptRecord, RecordHead, UnreadableRecord
from kvpage.store.records.record_io import copy_record, encoded, write_record
from kvpage.store.stack.chunk_threads import ChunkThreads, num_leading
from kvpage.store.stack.placed import Placed
from kvpage.store.stack.record_copies import Change, RecordCopies, RecordCopy
from kvpage.store.tiers.tier import Key, Reader, RecordInfo, TierError, TierRests, TierStats

WINDOW = 8  # records that are open at once
logger = logging.getLogger(__name__)
T = TypeVar("T")


class _Back(NamedTuple):
    """A record on its way into a tier that is written back. at: the tier's number. reader: keeps it where it is."""

    at: int
    key: Key
    reader: Reader
    copy: RecordCopy


class TierStack:
    """Thread-safe. num_threads: for the records of one call."""

    def __init__(self, tiers: Sequence[Placed], num_threads: int) -> None:
        self.tiers = list(tiers)
        self.counts: Counter[str] = Counter()
        self._reads: Counter[int] = Counter()  # by the tier's number
        self._lock = threading.Lock()
        self.threads = ChunkThreads(num_threads)
        self.copies = RecordCopies(len(self.tiers))
        self._replacing = threading.Lock()

    # --- writing ---

    def put(self, keys: Sequence[Key], record: Callable[[int], tuple[RecordKind, Source]], skip_existing: bool) -> int:
        """Write records into the tiers that lack them, or into all; return the number that were new to a tier.

        record(index) returns the record to write. For a tier that is written back, a faster one keeps the record until
        it is written; a record that none can keep is written at once. With `skip_existing` False a tier that did not
        take a record forgets its old one, unless it is out of reach.
        """
        if skip_existing:
            there = [self.contains(one, keys) for one in self.tiers]
            lacking = [[at for at, has in enumerate(there) if not has[index]] for index in range(len(keys))]
            return self._put(keys, lacking, record, None)
        with self._replacing, self.copies.change(keys) as change:
            return self._put(keys, [list(range(len(self.tiers)))] * len(keys), record, change)

    def _put(
        self,
        keys: Sequence[Key],
        lacking: Sequence[Sequence[int]],
        record: Callable[[int], tuple[RecordKind, Source]],
        change: Change | None,
    ) -> int:
        """Put records. lacking: the numbers of the tiers to write each into. change: of records that may be there."""
        wanted = [index for index in range(len(keys)) if lacking[index]]
        num_threads = self.threads.each(len(wanted))
        backs: list[_Back] = []
        put_one = functools.partial(self._put_one, keys, lacking, record, num_threads, backs, change)
        try:
            num_written = sum(self.threads.map(put_one, wanted))
        finally:
            if backs:
                self.later(lambda: self._write_back(backs))
        self.count(stored_chunks=num_written)
        return num_written

    def later(self, job: Callable[[], int]) -> "Future[int]":
        """Run the job in the background, after those before it."""
        return self.threads.later(job)

    # --- reading ---

    def locate(self, keys: Sequence[Key]) -> list[int | None]:
        """Return for each key the number of the first tier that has it; None if none has it."""
        located: list[int | None] = [None] * len(keys)
        for at, one in enumerate(self.tiers):
            left = [index for index, tier in enumerate(located) if tier is None]
            if not left:
                break
            for index, is_there in zip(left, self.contains(one, [keys[index] for index in left]), strict=True):
                if is_there:
                    located[index] = at
        return located

    def contains(self, one: Placed, keys: Sequence[Key]) -> list[bool]:
        """Return for each key whether the tier has it."""
        there = self.ask(one, one.tier.contains, keys, one.deadline) or []
        return there if len(there) == len(keys) else [False] * len(keys)

    def open(self, keys: Sequence[Key], located: Sequence[int | None]) -> list[Reader | None]:
        """Return a reader of each key in its tier; None if it is gone."""
        readers: list[Reader | None] = [None] * len(keys)
        for at, one in enumerate(self.tiers):
            mine = [index for index, tier in enumerate(located) if tier == at]
            opened = self._open(one, [keys[index] for index in mine]) if mine else []
            for index, reader in zip(mine, opened, strict=True):
                readers[index] = reader
        return readers

    def read(self, keys: Sequence[Key], read: Callable[[int, Reader, int], None]) -> int:
        """Read records in order until one is missing; return the number that were read.

        read(index, reader, num_threads) raises CorruptRecord for a wrong record, which is dropped.
        """
        return self.read_located(keys, self.locate(keys), read)

    def read_located(
        self, keys: Sequence[Key], located: Sequence[int | None], read: Callable[[int, Reader, int], None]
    ) -> int:
        """Do as `read` for keys that are located already."""
        count = num_leading(tier is not None for tier in located)
        for begin in range(0, count, WINDOW):
            end = min(begin + WINDOW, count)
            num_read = self._read_window(keys[begin:end], located[begin:end], begin, read)
            if num_read < end - begin:
                return begin + num_read
        return count

    def _read_window(
        self,
        keys: Sequence[Key],
        located: Sequence[int | None],
        begin: int,
        read: Callable[[int, Reader, int], None],
    ) -> int:
        """Return the number of leading records that were read. begin: the index of the first."""
        copy, num_threads = self.copies.begin(keys), self.threads.each(len(keys))
        try:
            readers = self.open(keys, located)

            def read_one(index: int) -> bool:
                def take(found: Reader) -> None:
                    read(begin + index, found, num_threads)

                return self._read_one(keys[index], located[index] or 0, readers[index], copy, take)

            return num_leading(self.threads.map(read_one, range(len(keys))))
        finally:
            self.copies.end(copy)

    def first(self, key: Key, read: Callable[[Reader], T]) -> T | None:
        """Return the result of `read` for the first tier's record that is not corrupt; None if there is none."""
        for one in self.tiers:
            for reader in self._open(one, [key]):
                if reader is not None:
                    with reader:
                        found = self.verified(one, key, lambda reader=reader: read(reader))  # type: ignore[misc]
                    if found is not None:
                        return found
        return None

    def verified(self, one: Placed, key: Key, read: Callable[[], T]) -> T | None:
        """Return the result of `read`; None for a corrupt record, which is dropped, and for trouble."""
        try:
            return self.ask(one, read)
        except UnreadableRecord as error:
            logger.info("%s: %s", one.tier.name, error)
            return None
        except CorruptRecord as error:
            logger.warning("%s: a record was dropped: %s", one.tier.name, error)
            self.count(corrupt_records=1)
            self.ask(one, one.tier.remove, [key], one.deadline)
            return None

    def open_leading(self, keys: Sequence[Key]) -> list[tuple[Placed, Reader]]:
        """Return the tiers and readers of the leading records that are there."""
        located = self.locate(keys)
        readers = self.open(keys, located)
        count = num_leading(reader is not None for reader in readers)
        for reader in readers[count:]:
            if reader is not None:
                reader.close()
        pairs = zip(located[:count], readers[:count], strict=True)
        return [(self.tiers[at], reader) for at, reader in pairs if at is not None and reader is not None]

    # --- all of them ---

    def infos(self) -> list[list[RecordInfo]]:
        """Return the records of each tier; none of a tier that cannot list them."""
        return [self.ask(one, lambda one=one: list(one.tier.infos())) or [] for one in self.tiers]

    def remove(self, keys: Sequence[Key]) -> int:
        """Remove records; return the number that the tier with most of them had."""
        with self.copies.change(keys):
            return max(self._remove(at, keys) for at in range(len(self.tiers)))

    def clear(self) -> None:
        """Remove all records from all tiers."""
        with self.copies.change(None):
            for at, one in enumerate(self.tiers):
                self.copies.settle(at)
                self.ask(one, one.tier.clear)

    def drain(self) -> None:
        """Wait until nothing is written in the background."""
        self.threads.drain()

    def flush(self, sync: bool) -> None:
        self.drain()
        for one in self.tiers:
            self.ask(one, one.tier.flush, sync)

    def stats(self) -> tuple[TierStats | None, ...]:
        """Return the statistics of each tier; None for a tier in trouble."""
        return tuple(self.ask(one, one.tier.stats) for one in self.tiers)

    def close(self) -> None:
        self.flush(sync=False)
        self.threads.close()
        for one in self.tiers:
            self.ask(one, one.tier.close)

    def count(self, **counts: int) -> None:
        with self._lock:
            self.counts.update(counts)

    def count_reads(self, ones: Sequence[Placed]) -> None:
        """Count a chunk that each of these tiers has given; a tier may be there several times."""
        with self._lock:
            self._reads.update(self.tiers.index(one) for one in ones)

    def reads(self) -> tuple[int, ...]:
        """Return how many chunks each tier has given."""
        with self._lock:
            return tuple(self._reads[at] for at in range(len(self.tiers)))

    def ask(self, one: Placed, call: Callable[..., T], *args: object) -> T | None:
        """Return the result of a call of the tier; None when it is in trouble."""
        try:
            return call(*args)
        except TierError as error:
            self._count_trouble(one, error)
            return None

    # --- inside ---

    def _count_trouble(self, one: Placed, error: TierError) -> None:
        if not isinstance(error, TierRests):
            logger.warning("%s: %s", one.tier.name, error)
        self.count(tier_errors=1)

    def _open(self, one: Placed, keys: Sequence[Key]) -> list[Reader | None]:
        opened = self.ask(one, one.tier.open, keys, one.deadline) or []
        return opened if len(opened) == len(keys) else [None] * len(keys)

    def _remove(self, at: int, keys: Sequence[Key]) -> int:
        """Remove records from one tier, amid a change of these keys."""
        self.copies.settle(at)
        return self.ask(self.tiers[at], self.tiers[at].tier.remove, keys, self.tiers[at].deadline) or 0

    def _put_one(
        self,
        keys: Sequence[Key],
        lacking: Sequence[Sequence[int]],
        record: Callable[[int], tuple[RecordKind, Source]],
        num_threads: int,
        backs: list[_Back],
        change: Change | None,
        index: int,
    ) -> bool:
        """Return whether a tier has the record that had not, or will have it."""
        key, made, is_new = keys[index], None, False
        for at in lacking[index]:
            if self.tiers[at].is_written_back and at:
                if change:
                    self._remove(at, [key])
                back = self._keep(at, key, change)
                if back is not None:
                    backs.append(back)
                    continue
            made = made or encoded(*record(index))
            if change:
                self.copies.settle(at)
            is_written = self._write(self.tiers[at], *made, num_threads)
            if change and not is_written:
                self._remove(at, [key])
            is_new = is_written or is_new
        return is_new

    def _write(self, one: Placed, head: RecordHead, payload: Source, num_threads: int) -> bool:
        """Return whether the tier took the record."""
        try:
            writer = one.tier.create(head.key, head.num_bytes)
            if writer is None:
                return False
            with writer:
                write_record(writer, head, payload, num_threads)
                return one.tier.commit([writer], one.deadline)[0]
        except TierError as error:
            self._count_trouble(one, error)
            return False

    def _keep(self, at: int, key: Key, change: Change | None) -> _Back | None:
        """Keep the record in a faster tier until it is written back; return None if none has it."""
        copy = self.copies.begin([key], change)
        for source in self.tiers[:at]:
            for reader in self._open(source, [key]):
                if reader is not None:
                    return _Back(at, key, reader, copy)
        self.copies.end(copy)
        return None

    def _write_back(self, backs: Sequence[_Back]) -> int:
        return sum([self._copy_back(back) for back in backs])

    def _copy_back(self, back: _Back) -> bool:
        """Write the record back, unless it was removed meanwhile; return whether it was written."""
        try:
            with back.reader:
                return self._copy_to(back.at, back.key, back.reader, back.copy)
        finally:
            self.copies.end(back.copy)

    def _copy_to(self, at: int, key: Key, reader: Reader, under_way: RecordCopy) -> bool:
        one = self.tiers[at]

        def copy() -> bool:
            writer = one.tier.create(key, reader.num_bytes) if self.copies.is_wanted(under_way, key) else None
            if writer is None:
                return False
            with writer:
                copy_record(reader, writer, key)
                with self.copies.finish(at, under_way, key) as is_wanted:
                    return is_wanted and one.tier.commit([writer], one.deadline)[0]

        try:
            return self.ask(one, copy) or False
        except CorruptRecord:  # its next reader reports it
            return False

    def _read_one(
        self, key: Key, located: int, reader: Reader | None, copy: RecordCopy, read: Callable[[Reader], None]
    ) -> bool:
        """Read a record from the tier where it was found, or from a slower one; return whether that succeeded."""
        for at in range(located, len(self.tiers)):
            one = self.tiers[at]
            found = reader if at == located else self._open(one, [key])[0]
            if found is None:
                continue
            with found:
                if self.verified(one, key, lambda found=found: _true(read(found))):  # type: ignore[misc, func-returns-value]
                    self._promote(at, key, found, copy)
                    self.count_reads([one])
                    return True
        return False

    def _promote(self, at: int, key: Key, reader: Reader, copy: RecordCopy) -> None:
        for faster in range(at):
            if self.tiers[faster].promotes and self._copy_to(faster, key, reader, copy):
                self.count(promoted_chunks=1)


def _true(_: None) -> bool:
    return True
