"""StoredRecords: records of sessions in the tiers of a KVStore, beside its chunks.

write ─► the newest record of each session waits ─► a thread ─► body, then head     a reader sees the old one or
read  ─► head: length and digest of the body ─► body                                the new one, or none
"""

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kvpage.checks.started_pool import started_pool
from kvpage.serving.sessions.record import SessionRecord
from kvpage.store import KVStore
from kvpage.store.bytes.header import Header
from kvpage.store.stack.call_gate import ClosedStore

LENGTH_BYTES, DIGEST_BYTES = 8, 32
MAX_BYTES = 2**30
MAX_UNKNOWN = 4096
UNKNOWN_SECONDS = 10.0
"""So long an id that has no record is not looked up again."""
REST = 10
"""Reads rest for so many times as long as a slow one took."""


class StoredRecords:
    """Records of one model in a store, which stays its owner's. One thread writes and removes.

    A read takes place on the caller's thread, so reads are few: an id without a record is not looked up again for ten
    seconds, and after a read of more than half of the deadline there is none for ten times as long.

    Args:
        store: The store.
        deadline: Seconds that a read may take at most.
        clock: Returns seconds.
    """

    def __init__(self, store: KVStore, deadline: float, clock: Callable[[], float] = time.monotonic) -> None:
        header: Header = {"what": "sessions of kvpage", "version": 1, "model": store.given_metadata.model_name}
        self._records, self._deadline, self._clock = store.byte_records(header), deadline, clock
        self._unknown: OrderedDict[bytes, float] = OrderedDict()  # by key: until when it is not looked up
        self._rests_until = float("-inf")
        self._lock = threading.Lock()
        self._waiting: dict[bytes, bytes | None] = {}  # by key: what to write; None to remove
        self._thread: ThreadPoolExecutor | None = None

    def read(self, namespace: bytes, session_id: str) -> SessionRecord | None:
        """Return a session's record; None where there is none, it is damaged, or it is not looked up now."""
        key = _key(namespace, session_id)
        with self._lock:
            if key in self._waiting:
                data = self._waiting[key]
                return None if data is None else SessionRecord.decoded(data)
        data = self._looked_up(key)
        return None if data is None else SessionRecord.decoded(data)

    def write(self, namespace: bytes, session_id: str, record: SessionRecord) -> None:
        """Keep a record soon."""
        self._begin(_key(namespace, session_id), record.encoded())

    def remove(self, namespace: bytes, session_id: str) -> None:
        """Forget a record soon."""
        self._begin(_key(namespace, session_id), None)

    def close(self) -> None:
        """Wait for all that is to be written."""
        if self._thread is not None:
            self._thread.shutdown()

    def _looked_up(self, key: bytes) -> bytes | None:
        begin = self._clock()
        if begin < max(self._rests_until, self._unknown.get(key, begin)):
            return None
        try:
            data = self._read(key)
        except ClosedStore:
            return None
        end = self._clock()
        if data is None:
            self._unknown[key] = end + UNKNOWN_SECONDS
            self._unknown.move_to_end(key)
            if len(self._unknown) > MAX_UNKNOWN:
                self._unknown.popitem(last=False)
        if end - begin > self._deadline / 2:
            self._rests_until = end + REST * (end - begin)
        return data

    def _begin(self, key: bytes, data: bytes | None) -> None:
        self._unknown.pop(key, None)
        if self._thread is None:
            self._thread = started_pool(1, "kvpage-session")
        with self._lock:
            self._waiting[key] = data
        self._thread.submit(self._settle, key)

    def _settle(self, key: bytes) -> None:
        """Write the newest record of a session, or remove it; in the thread. Trouble of the store loses a record."""
        with self._lock:
            if key not in self._waiting:
                return
            data = self._waiting[key]
        try:
            self._put(key, data)
        finally:
            with self._lock:
                if self._waiting.get(key, b"") is data:
                    del self._waiting[key]

    def _put(self, key: bytes, data: bytes | None) -> None:
        before, head = self._head(key), None if data is None else _head_of(data)
        if data is None or head is None:
            self._records.remove([b"head" + key])
        else:
            self._records.put([_body(key, head)], [data])
            self._records.put([b"head" + key], [head], skip_existing=False)
        if before not in (None, head):
            self._records.remove([_body(key, before or b"")])

    def _head(self, key: bytes) -> bytes | None:
        head = bytearray(LENGTH_BYTES + DIGEST_BYTES)
        return bytes(head) if self._records.get_into([b"head" + key], [head], self._deadline)[0] else None

    def _read(self, key: bytes) -> bytes | None:
        head = self._head(key)
        if head is None:
            return None
        num_bytes = int.from_bytes(head[:LENGTH_BYTES], "little")
        if not 0 < num_bytes <= MAX_BYTES:
            return None
        data = bytearray(num_bytes)
        is_there = self._records.get_into([_body(key, head)], [data], self._deadline)[0]
        return bytes(data) if is_there and _head_of(data) == head else None


def _key(namespace: bytes, session_id: str) -> bytes:
    name = session_id.encode("utf-8", "surrogatepass")
    return hashlib.sha256(len(namespace).to_bytes(8, "little") + namespace + name).digest()


def _head_of(data: bytes | bytearray) -> bytes:
    return len(data).to_bytes(LENGTH_BYTES, "little") + hashlib.sha256(data).digest()


def _body(key: bytes, head: bytes) -> bytes:
    return b"body" + key + head
