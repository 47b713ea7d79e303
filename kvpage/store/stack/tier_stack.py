"""TierStack: several tiers as one, the fastest first. A tier in trouble is counted and logged, and is a miss.

put       ─► every tier that lacks it; tiers written back get it later, from the first that has it and keeps it
read      ─► the first tier that has it ─► verified ─► copied into the faster ones; the first miss ends it
read_each ─► likewise, but each record by itself
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from kvpage.store.records.kinds import RecordKind
from kvpage.store.records.record import CorruptRecord, RecordHead, UnreadableRecord
from kvpage.store.records.record_io import Source, copy_record, encoded, recoded, write_record
from kvpage.store.stack.chunk_threads import ChunkThreads, num_leading
from kvpage.store.stack.placed import NO_LIMIT, Placed, TimeLimit
from kvpage.store.stack.record_copies import Change, RecordCopies, RecordCopy
from kvpage.store.stats import TierUse
from kvpage.store.tiers.tier import Key, Reader, RecordGone, RecordInfo, TierError, TierRests, TierStats, Writer

WINDOW = 8  # records that are open at once
logger = logging.getLogger(__name__)
T = TypeVar("T")

Read = Callable[[int, Reader, int], bool]
"""read(index, reader, num_threads) returns True, or raises CorruptRecord for a wrong record, which is dropped."""
Record = Callable[[int], tuple[RecordKind, Source]]
"""record(index) returns the record to write."""


class Put(NamedTuple):
    """The result of a put. is_there: for each key whether some tier has its record now. num_new: new to a tier."""

    is_there: list[bool]
    num_new: int


class _Write(NamedTuple):
    """Records to write. lacking: the numbers of the tiers that each goes into. backs: records to be written back."""

    keys: Sequence[Key]
    lacking: Sequence[Sequence[int]]
    record: Record
    copy: RecordCopy
    limit: TimeLimit
    num_threads: int
    backs: "list[_Back]"


class _Back(NamedTuple):
    """A record on its way into a tier that is written back. at: the tier's number. reader: keeps it where it is.
    kind: of the record.
    """

    at: int
    key: Key
    reader: Reader
    copy: RecordCopy
    kind: RecordKind


class _Reads(NamedTuple):
    """A window of records to read, and their readers. indices: of the records, among keys and located."""

    keys: Sequence[Key]
    located: Sequence[int | None]
    indices: Sequence[int]
    readers: Sequence[Reader | None]
    read: Read
    copy: RecordCopy
    limit: TimeLimit
    num_threads: int


class TierStack:
    """Thread-safe. tiers: the fastest first. counts: events by name. refused: records that were misses, by reason.
    threads: `num_threads`, for one call's records.
    """

    def __init__(self, tiers: Sequence[Placed], num_threads: int) -> None:
        self.tiers = list(tiers)
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.threads = ChunkThreads(num_threads)
        self.copies = RecordCopies()
        self._uses = [TierUse() for _ in self.tiers]
        self._lock, self._replacing = threading.Lock(), threading.Lock()
        self._written = [at for at, placed in enumerate(self.tiers) if not placed.tier.is_read_only]

    # --- looking up ---

    def locate(self, keys: Sequence[Key], limit: TimeLimit = NO_LIMIT) -> list[int | None]:
        """Return for each key the number of the first tier that has it; None if none has it."""
        located: list[int | None] = [None] * len(keys)
        for at, placed in enumerate(self.tiers):
            left = [index for index, tier in enumerate(located) if tier is None]
            if not left:
                break
            for index, is_there in zip(
                left, self.contains(placed, [keys[index] for index in left], limit), strict=True
            ):
                if is_there:
                    located[index] = at
        return located

    def contains(self, placed: Placed, keys: Sequence[Key], limit: TimeLimit = NO_LIMIT) -> list[bool]:
        """Return for each key whether the tier has it."""
        there = self._in_time(placed, placed.tier.contains, keys, limit) or []
        return there if len(there) == len(keys) else [False] * len(keys)

    def touch(self, keys: Sequence[Key], limit: TimeLimit = NO_LIMIT) -> list[bool]:
        """Return for each key whether some tier noted a use of it."""
        is_noted = [False] * len(keys)
        for placed in self.tiers:
            noted = self._in_time(placed, placed.tier.touch, keys, limit) or is_noted
            is_noted = [before or now for before, now in zip(is_noted, noted, strict=True)]
        return is_noted

    def infos(self) -> list[list[RecordInfo]]:
        """Return the records of each tier; none of a tier that cannot list them."""
        return [self.ask(placed, lambda tier=placed.tier: list(tier.infos())) or [] for placed in self.tiers]

    # --- writing ---

    def put(self, keys: Sequence[Key], record: Record, skip_existing: bool, limit: TimeLimit = NO_LIMIT) -> Put:
        """Write records into the tiers that lack them, or into all.

        For a tier that is written back, a faster one keeps the record until it is written; a record that none can keep
        is written at once. With `skip_existing` False a tier that did not take a record forgets its old one, unless it
        is out of reach. After the limit no more records are begun.
        """
        if skip_existing:
            return self._put_missing(keys, record, limit)
        with self._replacing, self.copies.change(keys) as change, self.copies.under_way(keys, change) as copy:
            is_new = self._put(keys, [self._written] * len(keys), record, copy, limit)
        return Put(is_new, sum(is_new))

    def _put_missing(self, keys: Sequence[Key], record: Record, limit: TimeLimit) -> Put:
        """Write records into the tiers that lack them. One that is changed meanwhile is left to the change."""
        with self.copies.under_way(keys) as copy:
            there = [self.contains(placed, keys, limit) for placed in self.tiers]
            lacking = [[at for at in self._written if not there[at][index]] for index in range(len(keys))]
            is_new = self._put(keys, lacking, record, copy, limit)
        is_there = [new or any(has) for new, *has in zip(is_new, *there, strict=True)]
        changed = [index for index, key in enumerate(keys) if key in copy.unwanted]
        located = self.locate([keys[index] for index in changed], limit) if changed else ()
        for index, tier in zip(changed, located, strict=True):
            is_there[index] = tier is not None
        return Put(is_there, sum(is_new))

    def _put(
        self,
        keys: Sequence[Key],
        lacking: Sequence[Sequence[int]],
        record: Record,
        copy: RecordCopy,
        limit: TimeLimit,
    ) -> list[bool]:
        """Return for each record whether it was new to a tier."""
        indices = [index for index, tiers in enumerate(lacking) if tiers]
        write = _Write(keys, lacking, record, copy, limit, self.threads.each(len(indices)), [])
        is_new = [False] * len(keys)
        try:
            for index, is_written in zip(
                indices, self.threads.map(partial(self._put_one, write), indices), strict=True
            ):
                is_new[index] = is_written
        finally:
            if write.backs:
                self.threads.later(lambda: sum(map(self._write_back, write.backs)))
        return is_new

    def _put_one(self, write: _Write, index: int) -> bool:
        """Return whether a tier has the record that had not, or will have it."""
        if write.limit.is_over:
            return False
        key, change, is_new = write.keys[index], write.copy.change, False
        kind, source = write.record(index)
        made: dict[str, tuple[RecordHead, Source]] = {}  # by the names of codecs
        for at in write.lacking[index]:
            if self.tiers[at].is_written_back and at:
                if change:
                    self._remove(at, [key])
                back = self._keep(at, key, change, kind)
                if back is not None:
                    write.backs.append(back)
                    continue
            way = self._way(at, kind)
            name = kind.written_by(way)
            if name not in made:
                made[name] = encoded(kind, source, way)
            if change:
                self.copies.settle(at)
            is_written = self._write(at, *made[name], write)
            if change and not is_written:
                self._remove(at, [key])
            is_new = is_written or is_new
        return is_new

    def _way(self, at: int, kind: RecordKind) -> str | None:
        """Return the codec that the tier wants; None for the kind's own."""
        way, codec = self.tiers[at].codec, kind.codecs[kind.written_by("split")]
        if way != "auto" or next(iter(kind.codecs.values())) is not None:
            return None if way == "auto" else way
        with self._lock:
            speed = self._uses[at].bytes_per_second
        return None if codec is None or speed is None or speed >= codec.gains_below else "split"

    def _write(self, at: int, head: RecordHead, payload: Source, write: _Write) -> bool:
        """Return whether the tier took the record."""
        began = time.perf_counter()
        is_written = self.ask(
            self.tiers[at],
            self._fill,
            at,
            head.key,
            head.num_bytes,
            lambda writer: write_record(writer, head, payload, write.num_threads),
            write.copy,
            write.limit,
        )
        seconds = time.perf_counter() - began
        with self._lock:
            self._uses[at].note_write(head.num_bytes if is_written else None, seconds)
        return is_written or False

    def _fill(
        self,
        at: int,
        key: Key,
        num_bytes: int,
        fill: Callable[[Writer], None],
        copy: RecordCopy,
        limit: TimeLimit = NO_LIMIT,
    ) -> bool:
        """Return whether a tier took a record that `fill` writes and that no other call has changed since."""
        placed = self.tiers[at]
        writer = placed.tier.create(key, num_bytes) if self.copies.is_wanted(copy, key) else None
        if writer is None:
            return False
        with writer:
            fill(writer)
            with self.copies.finish(at, copy, key) as is_wanted:
                return is_wanted and placed.tier.commit([writer], limit.timeout(placed.deadline))[0]

    def _keep(self, at: int, key: Key, change: Change | None, kind: RecordKind) -> _Back | None:
        """Keep the record in a faster tier until it is written back; return None if none has it."""
        copy = self.copies.begin([key], change)
        for source in self.tiers[:at]:
            for reader in self._open(source, [key]):
                if reader is not None:
                    return _Back(at, key, reader, copy, kind)
        self.copies.end(copy)
        return None

    def _write_back(self, back: _Back) -> bool:
        """Write the record back, unless it was removed meanwhile; return whether it was written."""
        try:
            with back.reader:
                return self._copy_to(back.at, back.key, back.reader, back.copy, back.kind)
        finally:
            self.copies.end(back.copy)

    def _copy_to(self, at: int, key: Key, reader: Reader, copy: RecordCopy, kind: RecordKind | None = None) -> bool:
        """Copy a record as it is; one of a known kind with the codec that the tier wants."""
        try:
            made = recoded(reader, kind, self._way(at, kind)) if kind is not None else None
            num_bytes = reader.num_bytes if made is None else made[0].num_bytes

            def fill(writer: Writer) -> None:
                if made is None:
                    copy_record(reader, writer, key)
                else:
                    write_record(writer, *made)

            return self.ask(self.tiers[at], self._fill, at, key, num_bytes, fill, copy) or False
        except (CorruptRecord, UnreadableRecord):  # its next reader reports it
            return False

    # --- reading ---

    def read(self, keys: Sequence[Key], read: Read, located: Sequence[int | None] | None = None) -> int:
        """Read records in order until one is missing; return the number that were read.

        located: the result of `locate`; None to ask.
        """
        located = self.locate(keys) if located is None else located
        count = located.index(None) if None in located else len(located)
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
            self._count_misses(at, located.count(None))
        return is_read

    def _read_window(
        self, keys: Sequence[Key], located: Sequence[int | None], indices: Sequence[int], read: Read, limit: TimeLimit
    ) -> list[bool]:
        """Return which of a few records were read. indices: of these records; each has a tier."""
        window_keys, window_tiers = [keys[index] for index in indices], [located[index] for index in indices]
        with self.copies.under_way(window_keys) as copy:
            readers = self._open_located(window_keys, window_tiers, limit)
            reads = _Reads(keys, located, indices, readers, read, copy, limit, self.threads.each(len(indices)))
            return self.threads.map(partial(self._read_one, reads), range(len(indices)))

    def _read_one(self, reads: _Reads, number: int) -> bool:
        """Read a record from the tier where it was found, or from a slower one; return whether that succeeded."""
        index, limit = reads.indices[number], reads.limit
        key, located = reads.keys[index], reads.located[index] or 0
        for at, placed in enumerate(self.tiers):
            reader = reads.readers[number] if at == located else None
            reader = self._open(placed, [key], limit)[0] if at > located else reader
            if reader is not None:
                with reader:
                    began = time.perf_counter()
                    is_read = (
                        None
                        if limit.is_over
                        else self.verified(placed, key, reads.read, index, reader, reads.num_threads)
                    )
                    if is_read:
                        self._count_hit(at, reader.num_bytes, time.perf_counter() - began)
                        self._promote(at, key, reader, reads.copy)
                        return True
            self._count_misses(at, 1)
        return False

    def first(self, key: Key, read: Callable[[Reader], T]) -> T | None:
        """Return the result of `read` for the first tier's record that is not corrupt; None if there is none."""
        return next(self.each(key, read), None)

    def each(self, key: Key, read: Callable[[Reader], T]) -> Iterator[T]:
        """Yield the result of `read` for each tier's record that is not corrupt, that of the fastest first."""
        for placed in self.tiers:
            for reader in self._open(placed, [key]):
                if reader is not None:
                    with reader:
                        result = self.verified(placed, key, read, reader)
                    if result is not None:
                        yield result

    def open_leading(self, keys: Sequence[Key], in_memory: bool = False) -> list[tuple[Placed, Reader]]:
        """Return the tiers and readers of the leading records that are there; with `in_memory`, in memory tiers."""
        located = self.locate(keys)
        if in_memory:
            num_near = num_leading(at is not None and self.tiers[at].tier.is_in_memory for at in located)
            keys, located = keys[:num_near], located[:num_near]
        readers = self._open_located(keys, located, NO_LIMIT)
        count = num_leading(reader is not None for reader in readers)
        for reader in readers[count:]:
            if reader is not None:
                reader.close()
        pairs = zip(located[:count], readers[:count], strict=True)
        return [(self.tiers[at], reader) for at, reader in pairs if at is not None and reader is not None]

    def _open_located(
        self, keys: Sequence[Key], located: Sequence[int | None], limit: TimeLimit
    ) -> list[Reader | None]:
        """Return a reader of each key in its tier; None if it is gone."""
        readers: list[Reader | None] = [None] * len(keys)
        for at, placed in enumerate(self.tiers):
            indices = [index for index, tier in enumerate(located) if tier == at]
            opened = self._open(placed, [keys[index] for index in indices], limit) if indices else []
            for index, reader in zip(indices, opened, strict=True):
                readers[index] = reader
        return readers

    # --- promotion ---

    def promote(self, keys: Sequence[Key]) -> list[bool]:
        """Copy records into the faster tiers, as reads do; return which are in the fastest tier that can have them."""
        return [at is not None and self._is_near(at, key) for key, at in zip(keys, self.locate(keys), strict=True)]

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
        for faster in self._written if at else ():
            if faster < at and self.tiers[faster].promotes and self._copy_to(faster, key, reader, copy):
                self.count(promoted_chunks=1)

    # --- removal, and the end ---

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

    def _remove(self, at: int, keys: Sequence[Key], limit: TimeLimit = NO_LIMIT) -> int | None:
        """Remove records from one tier, amid a change of these keys; return None if it did not take the call."""
        self.copies.settle(at)
        return self._in_time(self.tiers[at], self.tiers[at].tier.remove, keys, limit)

    def clear(self) -> list[str]:
        """Remove all records from all tiers; return the names of the tiers that keep theirs."""
        keepers = {at: placed.tier.name for at, placed in enumerate(self.tiers)}
        with self.copies.change(None):
            for at in self._written:
                self.copies.settle(at)
                if self.ask(self.tiers[at], lambda tier=self.tiers[at].tier: (tier.clear(),)) is not None:
                    del keepers[at]
        return list(keepers.values())

    def flush(self, sync: bool) -> None:
        self.threads.drain()
        for placed in self.tiers:
            self.ask(placed, placed.tier.flush, sync)

    def close(self) -> None:
        self.flush(sync=False)
        self.threads.close()
        for placed in self.tiers:
            self.ask(placed, placed.tier.close)

    # --- counters ---

    def count(self, **counts: int) -> None:
        with self._lock:
            self.counts.update(counts)

    def refuse(self, reason: str) -> None:
        """Count a record that was there, and could not be given."""
        with self._lock:
            self.refused[reason] += 1

    def count_reads(self, placed_tiers: Sequence[Placed]) -> None:
        """Count a chunk that each of these tiers has given; a tier may be there several times."""
        for placed in placed_tiers:
            self._count_hit(self.tiers.index(placed))

    def uses(self) -> tuple[TierUse, ...]:
        """Return copies of the use of each tier until now."""
        with self._lock:
            return tuple(map(replace, self._uses))

    def stats(self) -> tuple[TierStats | None, ...]:
        """Return the statistics of each tier; None for a tier in trouble."""
        return tuple(self.ask(placed, placed.tier.stats) for placed in self.tiers)

    def _count_hit(self, at: int, num_bytes: int = 0, seconds: float = 0.0) -> None:
        with self._lock:
            self._uses[at].note_hit(num_bytes, seconds)

    def _count_misses(self, at: int, count: int) -> None:
        with self._lock:
            self._uses[at].note_misses(count)

    # --- calls of one tier ---

    def ask(self, placed: Placed, call: Callable[..., T], *args: object) -> T | None:
        """Return the result of a call of the tier; None when it is in trouble."""
        try:
            return call(*args)
        except RecordGone:
            return None
        except TierError as error:
            if not isinstance(error, TierRests):
                logger.warning("%s: %s", placed.tier.name, error)
            self.count(tier_errors=1)
            return None

    def verified(self, placed: Placed, key: Key, read: Callable[..., T], *args: object) -> T | None:
        """Return the result of `read`; None for a corrupt record, which is dropped, and for trouble."""
        try:
            return self.ask(placed, read, *args)
        except UnreadableRecord as error:
            logger.info("%s: %s", placed.tier.name, error)
            self.refuse(error.reason)
            return None
        except CorruptRecord as error:
            logger.warning("%s: a record was dropped: %s", placed.tier.name, error)
            self.count(corrupt_records=1)
            self.refuse(error.reason)
            if not placed.tier.is_read_only:
                self.ask(placed, placed.tier.remove, [key], placed.deadline)
            return None

    def _in_time(self, placed: Placed, call: Callable[..., T], keys: Sequence[Key], limit: TimeLimit) -> T | None:
        """Return the result of a tier's call for keys; None when it is in trouble, or the limit is over."""
        timeout = limit.timeout(placed.deadline)
        return None if timeout == 0 else self.ask(placed, call, keys, timeout)

    def _open(self, placed: Placed, keys: Sequence[Key], limit: TimeLimit = NO_LIMIT) -> list[Reader | None]:
        opened = self._in_time(placed, placed.tier.open, keys, limit) or []
        return opened if len(opened) == len(keys) else [None] * len(keys)
