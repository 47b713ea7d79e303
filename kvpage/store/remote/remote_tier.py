"""RemoteTier: records in a store across a network.

    open([key, ..])    ─► one get of all  ─► value ─► length, key, MAC right? ─► Reader, a view of the value
    create, piece, ..  ─► one buffer      ─► commit ─► one put of all

                 value = record, and with a mac_key 32 bytes after it: BLAKE3(mac_key, key and record)

A server is trusted with nothing. A value is a record only if it has the length in its header and the right key.
Anything else is a miss, counted and removed. Every call ends at its deadline (`deadline_pool`), and a server that fails
several times in a row is left alone for a while (`breaker`).

A key's fault is that key's miss (`fault`). A call fails if it has an answer for no key. Then the breaker counts
it, unless the server answers: it refuses, or is busy for keys that it was busy for before.
"""

import functools
import hmac
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from kvpage.checks.fork_guard import ForkGuard
from kvpage.store.records.record import CorruptRecord, RecordHead
from kvpage.store.remote.backend import Backend
from kvpage.store.remote.breaker import Breaker
from kvpage.store.remote.deadline_pool import DeadlinePool
from kvpage.store.remote.fault import Fault, raise_if_none
from kvpage.store.remote.options import MAC_BYTES, MIN_RECORD_BYTES, RemoteOptions
from kvpage.store.tiers.tier import Key, Reader, RecordInfo, Tier, TierError, TierRests, TierStats, Writer

T = TypeVar("T")
CLOSE_SECONDS = 5.0
logger = logging.getLogger(__name__)


class RemoteTier(Tier):
    """A Tier over a Backend, which it owns.

    A late call may still take effect: records that it stores are whole, and records that it removes are misses. A
    forked process needs a tier of its own: this one raises RuntimeError there.
    """

    def __init__(
        self,
        backend: Backend,
        name: str = "remote",
        options: RemoteOptions | None = None,
        breaker: Breaker | None = None,
    ) -> None:
        options = options or RemoteOptions()
        self.name = name
        self._backend, self._options = backend, options
        self._mac = None if options.mac_key is None else _Mac(options.mac_key)
        self._breaker = breaker or Breaker(options.max_failures, options.cooldown)
        self._pool = DeadlinePool(options.max_calls, backend.give_up)
        self._lock = threading.Lock()
        self._num_corrupted, self._num_errors = 0, 0
        self._busy_keys: set[Key] = set()  # since the last answer
        self._refused: set[str] = set()  # kinds of calls that the server refused, and that were told
        self._is_closed = False
        self._process = ForkGuard(name)

    def contains(self, keys: Sequence[Key], timeout: float | None = None) -> list[bool]:
        if not keys:
            return []
        return self._flags("contains", keys, lambda left: self._backend.contains(keys, left), timeout)

    def open(self, keys: Sequence[Key], timeout: float | None = None) -> list[Reader | None]:
        if not keys:
            return []
        deadline = _Deadline(self._options.timeout if timeout is None else timeout)
        records, wrong = self._call("open", keys, lambda _: self._fetch(keys, deadline), deadline.left())
        if wrong:
            self._drop(wrong, deadline)
        return [None if record is None else _RemoteReader(record) for record in records]

    def create(self, key: Key, num_bytes: int) -> Writer | None:
        if num_bytes < 1:
            raise ValueError(f"num_bytes must be positive, got {num_bytes}")
        if self._is_closed:
            raise TierError(f"{self.name} is closed")
        if num_bytes > self._options.max_record_bytes:
            return None
        return _RemoteWriter(self, key, num_bytes, self._options.mac_bytes)

    def commit(self, writers: Sequence[Writer], timeout: float | None = None) -> list[bool]:
        """Store the records. A writer has one try.

        Raises ValueError for a writer of another tier, or one that is closed, committed or not filled to its end:
        nothing is written then.
        """
        if not writers:
            return []
        items = [(writer.key, writer.value) for writer in map(self._own, writers)]
        try:
            keys = [key for key, _ in items]
            return self._flags("commit", keys, lambda left: self._backend.put(self._sealed(items), left), timeout)
        finally:
            for writer in writers:
                writer.close()  # one try each: a late one may still be on its way

    def remove(self, keys: Sequence[Key], timeout: float | None = None) -> int:
        if not keys:
            return 0
        answer = self._call("remove", keys, lambda left: self._backend.remove(keys, left), timeout)
        return answer if isinstance(answer, int) else 0

    def infos(self) -> Iterator[RecordInfo]:
        infos = self._call("infos", (), lambda _: list(self._backend.infos()), None)
        return (info._replace(num_bytes=max(info.num_bytes - self._options.mac_bytes, 0)) for info in infos)

    def clear(self) -> None:
        self._call("clear", (), lambda _: self._backend.clear(), None)

    def flush(self, sync: bool = False) -> None:
        """Do nothing: committed records are there. The server decides whether they survive a loss of power."""

    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(self.name, None, None, None, corrupted=self._num_corrupted, errors=self._num_errors)

    def close(self) -> None:
        """Close the backend, within CLOSE_SECONDS. Raises TierError if it takes longer."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if was_closed:
            return
        self._pool.close()
        closer = DeadlinePool(1)
        try:
            closer.call(self._backend.close, CLOSE_SECONDS)
        except Exception as error:  # as in _call
            raise TierError(f"{self.name}: {type(error).__name__}: {error}") from error
        finally:
            closer.close()  # its thread would wait for more calls

    def _call(self, name: str, keys: Sequence[Key], function: Callable[[float | None], T], timeout: float | None) -> T:
        """Call the backend; every call passes here. function: takes the seconds that are left."""
        self._process.check()
        deadline = _Deadline(self._options.timeout if timeout is None else timeout)
        self._admit(deadline)
        try:
            result = self._pool.call(lambda: function(deadline.left()), deadline.left())
        except NotImplementedError as error:  # not a failure: the server was not even asked
            self._succeeded()
            raise TierError(f"{self.name}: {error}") from error
        except Fault as fault:
            self._count(errors=1)
            raise self._faulted(name, keys, fault) from fault
        except Exception as error:  # every error of a client library is the tier's trouble
            self._count(errors=1)
            raise self._failed(f"{self.name}: {type(error).__name__}: {error}") from error
        except BaseException as error:
            self._failed(f"{self.name}: {type(error).__name__}")
            raise
        self._succeeded(name)
        return result

    def _succeeded(self, name: str | None = None) -> None:
        """Note an answer. name: of a kind of call that the server does not refuse."""
        with self._lock:
            self._busy_keys.clear()
            self._refused.discard(name or "")
        if self._breaker.succeeded():
            logger.warning("%s answers again and is asked as before", self.name)

    def _faulted(self, name: str, keys: Sequence[Key], fault: Fault) -> TierError:
        """Return the error of a call that has an answer for no key. A refusal is told once, until it ends."""
        message = f"{self.name}: {fault}"
        if fault.is_of_server:
            return self._failed(message, fault.kind == "broken" or self._is_newly_busy(keys))
        self._succeeded()
        with self._lock:
            is_told = name in self._refused
            self._refused.add(name)
        return TierRests(message) if is_told else TierError(message)

    def _is_newly_busy(self, keys: Sequence[Key]) -> bool:
        """Return whether the server was not busy for one of the keys before: one key alone opens no breaker."""
        with self._lock:
            is_new = not keys or not self._busy_keys.issuperset(keys)
            self._busy_keys.update(keys)
            return is_new

    def _failed(self, message: str, is_new: bool = True) -> TierError:
        """Count a failure and return its error, which is not logged once the breaker is open."""
        if self._breaker.failed(is_new):
            logger.warning("%s: it is left alone until it answers again", message)
        if not self._breaker.is_open:
            return TierError(message)
        with self._lock:
            self._busy_keys.clear()
        return TierRests(message)

    def _admit(self, deadline: "_Deadline") -> None:
        if self._is_closed:
            raise TierError(f"{self.name} is closed")
        if deadline.left() == 0:
            raise TierError(f"{self.name} has no time left")
        if not self._breaker.admit():
            self._count(errors=1)
            raise TierRests(f"{self.name} failed repeatedly and rests for a while")

    def _fetch(self, keys: Sequence[Key], deadline: "_Deadline") -> tuple[list[memoryview | None], list[Key]]:
        """Return the records, and the keys of values that are not records; as many at a time as are sure to fit."""
        records: list[memoryview | None] = []
        wrong: list[Key] = []
        answers: list[object] = []
        left = self._options.max_batch_bytes
        while len(records) < len(keys) and left >= self._options.max_record_bytes:
            batch = keys[len(records) :][: left // self._options.max_record_bytes]
            values = self._listed(self._backend.get(batch, deadline.left()), len(batch))
            answers += values
            for key, value in zip(batch, values, strict=True):
                is_value = value is not None and not isinstance(value, Fault)
                record = self._record(key, value) if is_value else None
                if is_value and record is None:
                    wrong.append(key)
                left -= 0 if record is None else record.nbytes
                records.append(record)
        self._judge(answers)
        return records + [None] * (len(keys) - len(records)), wrong

    def _record(self, key: Key, value: object) -> memoryview | None:
        """Return the record in a value, if it is one and that of the key."""
        try:
            data = memoryview(value).cast("B").toreadonly()  # type: ignore[arg-type]
        except TypeError:
            return None
        num_bytes = data.nbytes - self._options.mac_bytes
        if not MIN_RECORD_BYTES <= num_bytes <= self._options.max_record_bytes:
            return None
        record = data[:num_bytes]
        try:
            is_right = RecordHead.unpack(record, num_bytes).key == key
        except CorruptRecord:
            return None
        if is_right and self._mac:
            is_right = hmac.compare_digest(self._mac.of(key, record), data[num_bytes:])
        return record if is_right else None

    def _own(self, writer: Writer) -> "_RemoteWriter":
        if not isinstance(writer, _RemoteWriter) or writer.tier is not self or writer.is_closed:
            raise ValueError(f"a writer must be one of this tier and open, got {writer!r}")
        if writer.num_filled != writer.num_bytes:
            raise ValueError(f"a writer must be filled to {writer.num_bytes} bytes, got {writer.num_filled}")
        return writer

    def _sealed(self, items: Sequence[tuple[Key, memoryview]]) -> Sequence[tuple[Key, memoryview]]:
        if self._mac:
            for key, value in items:
                value[-MAC_BYTES:] = self._mac.of(key, value[:-MAC_BYTES])
        return items

    def _drop(self, keys: Sequence[Key], deadline: "_Deadline") -> None:
        """Remove wrong values, which would keep right ones from being stored."""
        self._count(corrupted=len(keys))
        try:
            self._call("remove", keys, lambda left: self._backend.remove(keys, left), deadline.left())
        except TierError:
            return  # counted; the next reader tries again

    def _listed(self, answers: object, num_keys: int) -> Sequence[object]:
        """Return the answers; None for each key if there are more or fewer answers than keys."""
        if isinstance(answers, list | tuple) and len(answers) == num_keys:
            return answers
        self._count(errors=1)
        return [None] * num_keys

    def _flags(
        self, name: str, keys: Sequence[Key], function: Callable[[float | None], object], timeout: float | None
    ) -> list[bool]:
        """Call the backend for a flag a key. False for a key's fault."""

        def answers(left: float | None) -> Sequence[object]:
            listed = self._listed(function(left), len(keys))
            self._judge(listed)
            return listed

        return [answer is True for answer in self._call(name, keys, answers, timeout)]

    def _judge(self, answers: Sequence[object]) -> None:
        """Count faults; raise one if there is nothing else."""
        raise_if_none(answers)
        faults = [answer for answer in answers if isinstance(answer, Fault) and answer.is_error]
        if faults:
            self._count(errors=len(faults))
            logger.info("%s: no answer for %d of %d keys: %s", self.name, len(faults), len(answers), faults[0])

    def _count(self, corrupted: int = 0, errors: int = 0) -> None:
        with self._lock:
            self._num_corrupted += corrupted
            self._num_errors += errors


class _Deadline:
    def __init__(self, timeout: float | None) -> None:
        self._end = None if timeout is None else time.monotonic() + timeout

    def left(self) -> float | None:
        """Return the seconds that are left, at least 0; None without a deadline."""
        return None if self._end is None else max(self._end - time.monotonic(), 0.0)


class _Mac:
    """BLAKE3 with a key: five times as fast as BLAKE2b of the standard library."""

    def __init__(self, mac_key: bytes) -> None:
        try:
            from blake3 import blake3
        except ImportError as error:
            raise ImportError("mac_key needs the package blake3: pip install 'kvpage[mac]'") from error
        new: Callable[..., Any] = blake3  # the package has no types
        self._new = functools.partial(new, key=mac_key)

    def of(self, key: Key, record: memoryview) -> bytes:
        digest: bytes = self._new().update(key).update(record).digest()
        return digest


class _RemoteReader(Reader):
    def __init__(self, record: memoryview) -> None:
        self.num_bytes = record.nbytes
        self._record: memoryview | None = record

    def piece(self, begin: int, end: int) -> memoryview:
        if self._record is None:
            raise ValueError("the reader must be open, got a closed one")
        if not 0 <= begin <= end <= self.num_bytes:
            raise ValueError(f"begin and end must be in order within [0, {self.num_bytes}], got {begin}, {end}")
        return self._record[begin:end]

    def close(self) -> None:
        self._record = None


class _RemoteWriter(Writer):
    """A record to be stored. value: memory for it and its MAC, not initialised, so that no page is touched twice."""

    def __init__(self, tier: RemoteTier, key: Key, num_bytes: int, mac_bytes: int) -> None:
        self.tier, self.key, self.num_bytes = tier, key, num_bytes
        self.value = np.empty(num_bytes + mac_bytes, np.uint8).data
        self.num_filled = 0
        self.is_closed = False

    def piece(self, begin: int, end: int) -> memoryview:
        if self.is_closed:
            raise ValueError("the writer must be open, got a closed one")
        if begin != self.num_filled or not begin <= end <= self.num_bytes:
            raise ValueError(f"begin must be {self.num_filled} and end at most {self.num_bytes}, got {begin}, {end}")
        self.num_filled = end
        return self.value[begin:end]

    def close(self) -> None:
        self.is_closed = True
        self.value = memoryview(b"")
