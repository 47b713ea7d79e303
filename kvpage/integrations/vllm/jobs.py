"""Jobs: vLLM's loads and stores under way at the store.

submit ─► store.later ─► done, in a thread of the store's ─► finished(), in the scheduler's

A store beyond the limit of bytes that wait is over at once, and has stored nothing.
"""

import logging
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kvpage.integrations.vllm.chunk_rows import ChunkRows
from kvpage.store import ByteStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """A job that is over.

    Attributes:
        job_id: As vLLM named it.
        is_load: Whether it was a load.
        keys: Of its chunks.
        flags: For each key, whether its bytes were loaded, or are stored.
        seconds: From submission to the end.
        num_bytes: Of the chunks with a flag.
        is_dropped: Whether it never began, since too many bytes were waiting to be stored.
    """

    job_id: int
    is_load: bool
    keys: tuple[bytes, ...]
    flags: tuple[bool, ...]
    seconds: float
    num_bytes: int
    is_dropped: bool = False

    @property
    def done(self) -> tuple[bytes, ...]:
        """Return the keys that were loaded, or are stored."""
        return tuple(key for key, flag in zip(self.keys, self.flags, strict=True) if flag)

    @property
    def failed(self) -> tuple[bytes, ...]:
        """Return the other keys."""
        return tuple(key for key, flag in zip(self.keys, self.flags, strict=True) if not flag)


class Jobs:
    """Loads and stores. For the scheduler's thread."""

    def __init__(
        self, store: ByteStore, rows: ChunkRows, load_patience: float, store_patience: float, max_pending: int
    ) -> None:
        """Make it.

        Args:
            store: Has the records. It stays the caller's.
            rows: vLLM's host memory.
            load_patience: Seconds after which the rest of a load is a miss.
            store_patience: Seconds after which the rest of a store is given up.
            max_pending: Bytes that wait to be stored at most.
        """
        self._store, self._rows = store, rows
        self._load_patience, self._store_patience, self._max_pending = load_patience, store_patience, max_pending
        self._done: queue.SimpleQueue[FinishedJob] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._futures: set[Future[list[bool]]] = set()
        self._pending_bytes = 0

    def submit_load(self, job_id: int, keys: Sequence[bytes], chunk_ids: Sequence[int]) -> None:
        """Begin to read chunks into their rows.

        Args:
            job_id: vLLM's name of the job.
            keys: Of the chunks.
            chunk_ids: The row of each. Nobody else may use them until the job is finished.
        """
        rows = [self._rows[int(chunk_id)] for chunk_id in chunk_ids]
        future = self._store.later.get_into(list(keys), rows, deadline=self._load_patience)
        self._follow(future, job_id, True, tuple(keys), 0)

    def submit_store(self, job_id: int, keys: Sequence[bytes], chunk_ids: Sequence[int]) -> None:
        """Begin to store chunks.

        Args:
            job_id: vLLM's name of the job.
            keys: Of the chunks.
            chunk_ids: The row of each. They may not change until the job is finished.
        """
        num_bytes = len(keys) * self._rows.num_bytes
        with self._changed:
            is_dropped = self._pending_bytes > 0 and self._pending_bytes + num_bytes > self._max_pending
        if is_dropped:
            self._done.put(FinishedJob(job_id, False, tuple(keys), (False,) * len(keys), 0.0, 0, is_dropped=True))
            return
        rows = {key: self._rows[int(chunk_id)] for key, chunk_id in zip(keys, chunk_ids, strict=True)}
        future = self._store.later.put(list(rows), list(rows.values()), deadline=self._store_patience)
        self._follow(future, job_id, False, tuple(rows), num_bytes)

    def finished(self) -> list[FinishedJob]:
        """Return the jobs that are over, each once."""
        found = []
        while not self._done.empty():
            found.append(self._done.get())
        return found

    def drain(self) -> None:
        """Wait until no job is under way. Their patience bounds the time."""
        with self._changed:
            self._changed.wait_for(lambda: not self._futures)

    def _follow(
        self, future: "Future[list[bool]]", job_id: int, is_load: bool, keys: tuple[bytes, ...], num_bytes: int
    ) -> None:
        """Note a job, and what is to be done at its end. num_bytes: those that wait to be stored."""
        began = time.monotonic()
        with self._changed:
            self._futures.add(future)
            self._pending_bytes += num_bytes

        def end(ended: "Future[list[bool]]") -> None:
            flags = _flags(ended, len(keys))
            moved = sum(flags) * self._rows.num_bytes
            self._done.put(FinishedJob(job_id, is_load, keys, flags, time.monotonic() - began, moved))
            with self._changed:
                self._futures.discard(ended)
                self._pending_bytes -= num_bytes
                self._changed.notify_all()

        future.add_done_callback(end)


def _flags(future: "Future[list[bool]]", num_keys: int) -> tuple[bool, ...]:
    """Return the result of a call; no flag of one that failed."""
    if future.cancelled():
        return (False,) * num_keys
    error = future.exception()
    if error is not None:
        logger.error("a job of the store failed; its chunks count as missing", exc_info=error)
        return (False,) * num_keys
    return tuple(future.result())
