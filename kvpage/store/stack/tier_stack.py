"""TierStack: several tiers as one, the fastest first. A tier in trouble is counted and logged, and is a miss.

put       ─► every tier that lacks it; those written back get it later, from the first that has it and keeps it
read      ─► the first tier that has it ─► verified ─► copied into the faster ones; the first miss ends it
read_each ─► likewise, but each record by itself
"""

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from kvpage.store.records.kinds import RecordKind
from kvpage.store.records.payload import Source
from kvpage.store.records.record import CorruptRecord, RecordHead, UnreadableRecord
from kvpage.store.records.record_io import copy_record, encoded, write_record
from kvpage.store.stack.chunk_threads import ChunkThreads, num_leading
from kvpage.store.stack.placed import Placed
from kvpage.store.stack.record_copies import Change, RecordCopies, RecordCopy
from kvpage.store.stack.tier_calls import TierCalls
from kvpage.store.stack.time_limit import NO_LIMIT, TimeLimit
from kvpage.store.tiers.tier import Key, Reader

WINDOW = 8  # records that are open at once
logger = logging.getLogger(__name__)
T = TypeVar("T")


Read = Callable[[int, Reader, int], None]
"""read(index, reader, num_threads) raises CorruptRecord for a wrong record, which is dropped."""


class Put(NamedTuple):
    """The result of a put. is_there: for each key whether some tier has its record now. num_new: new to a tier."""

    is_there: list[bool]
    num_new: int


class _Back(NamedTuple):
    """A record on its way into a tier that is written back. at: the tier's number. reader: keeps it where it is."""

    at: int
    key: Key
    reader: Reader
    copy: RecordCopy


class TierStack(TierCalls):
    """Thread-safe. num_threads: for the records of one call."""

    def __init__(self, tiers: Sequence[Placed], num_threads: int) -> None:
        super().__init__(tiers)
        self.threads = ChunkThreads(num_threads)
        self.copies = RecordCopies()
        self._replacing = threading.Lock()
        self._written = [at for at, placed in enumerate(self.tiers) if not placed.tier.is_read_only]

    # --- writing ---

    def put(
        self,
        keys: Sequence[Key],
        record: Callable[[int], tuple[RecordKind, Source]],
        skip_existing: bool,
        limit: TimeLimit = NO_LIMIT,
    ) -> Put:
        """Write records into the tiers that lack them, or into all.

        record(index) returns the record to write. For a tier that is written back, a faster one keeps the record until
        it is written; a record that none can keep is written at once. With `skip_existing` False a tier that did not
        take a record forgets its old one, unless it is out of reach. After the limit no more records are begun.
        """
        if skip_existing:
            return self._put_missing(keys, record, limit)
        with self._replacing, self.copies.change(keys) as change, self.copies.under_way(keys, change) as copy:
            is_new = self._put(keys, [self._written] * len(keys), record, copy, limit)
        return Put(is_new, sum(is_new))

    def _put_missing(
        self, keys: Sequence[Key], record: Callable[[int], tuple[RecordKind, Source]], limit: TimeLimit
    ) -> Put:
        """Write records into the tiers that lack them. One that is changed meanwhile is left to the change."""
        with self.copies.under_way(keys) as copy:
            there = [self.contains(placed, keys, limit) for placed in self.tiers]
            lacking = [[at for at in self._written if not there[at][index]] for index in range(len(keys))]
            is_new = self._put(keys, lacking, record, copy, limit)
        is_there = [new or any(has[index] for has in there) for index, new in enumerate(is_new)]
        changed = [index for index, key in enumerate(keys) if key in copy.unwanted]
        for index, tier in zip(changed, self.locate([keys[index] for index in changed], limit), strict=True):
            is_there[index] = tier is not None
        return Put(is_there, sum(is_new))

    def _put(
        self,
        keys: Sequence[Key],
        lacking: Sequence[Sequence[int]],
        record: Callable[[int], tuple[RecordKind, Source]],
        copy: RecordCopy,
        limit: TimeLimit,
    ) -> list[bool]:
        """Return for each record whether it was new to a tier.

        lacking: the numbers of the tiers to write each into.
        """
        indices = [index for index in range(len(keys)) if lacking[index]]
        num_threads = self.threads.each(len(indices))
        backs: list[_Back] = []
        put_one = functools.partial(self._put_one, keys, lacking, record, num_threads, backs, copy, limit)
        is_new = [False] * len(keys)
        try:
            for index, is_written in zip(indices, self.threads.map(put_one, indices), strict=True):
                is_new[index] = is_written
        finally:
            if backs:
                self.later(lambda: self._write_back(backs))
        return is_new

    def later(self, job: Callable[[], int]) -> "Future[int]":
        """Run the job in the background, after earlier jobs."""
        return self.threads.later(job)

    # --- reading ---

    def read(self, keys: Sequence[Key], read: Read) -> int:
        """Read records in order until one is missing; return the number that were read."""
        return self.read_located(keys, self.locate(keys), read)

    def read_located(self, keys: Sequence[Key], located: Sequence[int | None], read: Read) -> int:
        """Do as `read` for keys that are located already."""
        count = num_leading(tier is not None for tier in located)
        for begin in range(0, count, WINDOW):
            window = range(begin, min(begin + WINDOW, count))
            num_read = num_leading(self._read_window(keys, located, window, read, NO_LIMIT))
            if num_read < len(window):
                return begin + num_read
        return count

    def read_each(self, keys: Sequence[Key], read: Read, limit: TimeLimit = NO_LIMIT) -> list[bool]:
        """Read records, each whatever becomes of the others; return which were read.

        After the limit no more records are begun.
        """
        located, is_read = self.locate(keys, limit), [False] * len(keys)
        indices = [index for index, tier in enumerate(located) if tier is not None]
        for begin in range(0, len(indices), WINDOW):
            window = indices[begin : begin + WINDOW]
            for index, done in zip(window, self._read_window(keys, located, window, read, limit), strict=True):
                is_read[index] = done
        for at in range(len(self.tiers)):
            self.uses.miss(at, located.count(None))
        return is_read

    def _read_window(
        self, keys: Sequence[Key], located: Sequence[int | None], window: Sequence[int], read: Read, limit: TimeLimit
    ) -> list[bool]:
        """Return which of a few records were read. window: their indices; each has a tier."""
        window_keys, places = [keys[index] for index in window], [located[index] or 0 for index in window]
        num_threads = self.threads.each(len(window))
        with self.copies.under_way(window_keys) as copy:
            readers = self.open(window_keys, places, limit)

            def read_one(at: int) -> bool:
                def take(reader: Reader) -> None:
                    read(window[at], reader, num_threads)

                return self._read_one(window_keys[at], places[at], readers[at], copy, take, limit)

            return self.threads.map(read_one, range(len(window)))

    def first(self, key: Key, read: Callable[[Reader], T]) -> T | None:
        """Return the result of `read` for the first tier's record that is not corrupt; None if there is none."""
        return next(self.each(key, read), None)

    def each(self, key: Key, read: Callable[[Reader], T]) -> Iterator[T]:
        """Yield the result of `read` for each tier's record that is not corrupt, that of the fastest first."""
        for placed in self.tiers:
            for reader in self._open(placed, [key]):
                if reader is not None:
                    with reader:
                        result = self.verified(placed, key, lambda reader=reader: read(reader))  # type: ignore[misc]
                    if result is not None:
                        yield result

    def verified(self, placed: Placed, key: Key, read: Callable[[], T]) -> T | None:
        """Return the result of `read`; None for a corrupt record, which is dropped, and for trouble."""
        try:
            return self.ask(placed, read)
        except UnreadableRecord as error:
            logger.info("%s: %s", placed.tier.name, error)
            return None
        except CorruptRecord as error:
            logger.warning("%s: a record was dropped: %s", placed.tier.name, error)
            self.count(corrupt_records=1)
            if not placed.tier.is_read_only:
                self.ask(placed, placed.tier.remove, [key], placed.deadline)
            return None

    def open_leading(self, keys: Sequence[Key], in_memory: bool = False) -> list[tuple[Placed, Reader]]:
        """Return the tiers and readers of the leading records that are there; with `in_memory`, in memory tiers."""
        located = self.locate(keys)
        if in_memory:
            num_near = num_leading(at is not None and self.tiers[at].tier.is_in_memory for at in located)
            keys, located = keys[:num_near], located[:num_near]
        readers = self.open(keys, located)
        count = num_leading(reader is not None for reader in readers)
        for reader in readers[count:]:
            if reader is not None:
                reader.close()
        pairs = zip(located[:count], readers[:count], strict=True)
        return [(self.tiers[at], reader) for at, reader in pairs if at is not None and reader is not None]

    def promote(self, keys: Sequence[Key]) -> list[bool]:
        """Copy records into the faster tiers, as reads do; return which are in the fastest tier that can have them."""
        return [at is not None and self._is_near(at, key) for key, at in zip(keys, self.locate(keys), strict=True)]

    # --- all of them ---

    def remove(self, keys: Sequence[Key]) -> int:
        """Remove records; return the number that the tier with most of them had."""
        with self.copies.change(keys):
            return max((self._remove(at, keys) or 0 for at in self._written), default=0)

    def remove_each(self, keys: Sequence[Key], limit: TimeLimit) -> list[bool]:
        """Remove records; return for each whether a tier had it and took the call."""
        is_removed = [False] * len(keys)
        with self.copies.change(keys):
            for at in self._written:
                self.copies.settle(at)
                there = self.contains(self.tiers[at], keys, limit)
                if self._remove(at, keys, limit) is not None:
                    is_removed = [removed or had for removed, had in zip(is_removed, there, strict=True)]
        return is_removed

    def clear(self) -> list[str]:
        """Remove all records from all tiers; return the names of the tiers that keep theirs."""
        is_cleared = [False] * len(self.tiers)
        with self.copies.change(None):
            for at in self._written:
                self.copies.settle(at)
                clear = self.tiers[at].tier.clear
                is_cleared[at] = self.ask(self.tiers[at], lambda clear=clear: _true(clear())) is True
        return [placed.tier.name for placed, is_done in zip(self.tiers, is_cleared, strict=True) if not is_done]

    def drain(self) -> None:
        """Wait until nothing is written in the background."""
        self.threads.drain()

    def flush(self, sync: bool) -> None:
        self.drain()
        for placed in self.tiers:
            self.ask(placed, placed.tier.flush, sync)

    def close(self) -> None:
        self.flush(sync=False)
        self.threads.close()
        for placed in self.tiers:
            self.ask(placed, placed.tier.close)

    # --- inside ---

    def _remove(self, at: int, keys: Sequence[Key], limit: TimeLimit = NO_LIMIT) -> int | None:
        """Remove records from one tier, amid a change of these keys; return None if it did not take the call."""
        self.copies.settle(at)
        placed = self.tiers[at]
        return None if limit.is_over else self.ask(placed, placed.tier.remove, keys, limit.timeout(placed.deadline))

    def _put_one(
        self,
        keys: Sequence[Key],
        lacking: Sequence[Sequence[int]],
        record: Callable[[int], tuple[RecordKind, Source]],
        num_threads: int,
        backs: list[_Back],
        copy: RecordCopy,
        limit: TimeLimit,
        index: int,
    ) -> bool:
        """Return whether a tier has the record that had not, or will have it."""
        key, made, is_new = keys[index], None, False
        for at in lacking[index] if not limit.is_over else ():
            if self.tiers[at].is_written_back and at:
                if copy.change:
                    self._remove(at, [key])
                back = self._keep(at, key, copy.change)
                if back is not None:
                    backs.append(back)
                    continue
            made = made or encoded(*record(index))
            if copy.change:
                self.copies.settle(at)
            is_written = self._write(at, *made, num_threads, copy, limit)
            if copy.change and not is_written:
                self._remove(at, [key])
            is_new = is_written or is_new
        return is_new

    def _write(
        self, at: int, head: RecordHead, payload: Source, num_threads: int, under_way: RecordCopy, limit: TimeLimit
    ) -> bool:
        """Return whether the tier took the record."""
        placed = self.tiers[at]

        def write() -> bool:
            writer = (
                placed.tier.create(head.key, head.num_bytes) if self.copies.is_wanted(under_way, head.key) else None
            )
            if writer is None:
                return False
            with writer:
                write_record(writer, head, payload, num_threads)
                with self.copies.finish(at, under_way, head.key) as is_wanted:
                    return is_wanted and placed.tier.commit([writer], limit.timeout(placed.deadline))[0]

        began = time.perf_counter()
        is_written = self.ask(placed, write) or False
        self.uses.write(at, head.num_bytes, time.perf_counter() - began, is_written)
        return is_written

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
        placed = self.tiers[at]

        def copy() -> bool:
            writer = placed.tier.create(key, reader.num_bytes) if self.copies.is_wanted(under_way, key) else None
            if writer is None:
                return False
            with writer:
                copy_record(reader, writer, key)
                with self.copies.finish(at, under_way, key) as is_wanted:
                    return is_wanted and placed.tier.commit([writer], placed.deadline)[0]

        try:
            return self.ask(placed, copy) or False
        except CorruptRecord:  # its next reader reports it
            return False

    def _read_one(
        self,
        key: Key,
        located: int,
        reader: Reader | None,
        copy: RecordCopy,
        read: Callable[[Reader], None],
        limit: TimeLimit,
    ) -> bool:
        """Read a record from the tier where it was found, or from a slower one; return whether that succeeded."""
        for at in range(len(self.tiers)):
            opened = reader if at == located else self._open(self.tiers[at], [key], limit)[0] if at > located else None
            if opened is not None:
                with opened:
                    if not limit.is_over and self._read_verified(at, key, opened, read):
                        self._promote(at, key, opened, copy)
                        return True
            self.uses.miss(at)
        return False

    def _read_verified(self, at: int, key: Key, reader: Reader, read: Callable[[Reader], None]) -> bool:
        """Return whether the tier's record was read."""
        began = time.perf_counter()
        is_read = self.verified(self.tiers[at], key, lambda: _true(read(reader)))  # type: ignore[func-returns-value]
        if is_read:
            self.uses.hit(at, reader.num_bytes, time.perf_counter() - began)
        return is_read or False

    def _is_near(self, at: int, key: Key) -> bool:
        """Copy a record of a tier into the faster tiers; return whether the fastest that can have it has it."""
        nearest = next((faster for faster in self._written if faster < at and self.tiers[faster].promotes), None)
        if nearest is None:
            return True
        with self.copies.under_way([key]) as copy:
            for reader in self._open(self.tiers[at], [key]):
                if reader is not None:
                    with reader:
                        self._promote(at, key, reader, copy)
        return self.contains(self.tiers[nearest], [key])[0]

    def _promote(self, at: int, key: Key, reader: Reader, copy: RecordCopy) -> None:
        for faster in self._written:
            if faster < at and self.tiers[faster].promotes and self._copy_to(faster, key, reader, copy):
                self.count(promoted_chunks=1)


def _true(_: None) -> bool:
    return True
