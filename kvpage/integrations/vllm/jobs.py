"""Jobs: vLLM's loads and stores under way at the store.

submit ─► store.later ─► done, in a thread of the store's ─► finished(), in the scheduler's

A store beyond the limit of bytes that wait is over at once, and has stored nothing. A job that has not begun when its
patience ends never begins. One that has begun holds its rows until it ends: a read cannot be stopped.
"""

import logging
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kvpage.checks.started_pool import begun
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


@dataclass(frozen=True, slots=True)
class _Begun:
    """A job under way. end: the second after which it is late."""

    is_load: bool
    end: float


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
        self._under_way: dict[Future[list[bool]], _Begun] = {}
        self._pending_bytes = 0
        self.is_stuck = False
        """Whether a load was late when `finished` was called last: other loads would wait, too."""

    def submit_load(self, job_id: int, keys: Sequence[bytes], chunk_ids: Sequence[int]) -> None:
        """Begin to read chunks into their rows.

        Args:
            job_id: vLLM's name of the job.
            keys: Of the chunks.
            chunk_ids: The row of each. No other code may use them until the job is finished.
        """
        rows = [self._rows[int(chunk_id)] for chunk_id in chunk_ids]
        future = begun(lambda: self._store.later.get_into(list(keys), rows, deadline=self._load_patience))
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
        memory = list(rows.values())
        future = begun(lambda: self._store.later.put(list(rows), memory, deadline=self._store_patience))
        self._follow(future, job_id, False, tuple(rows), num_bytes)

    def finished(self) -> list[FinishedJob]:
        """Return the jobs that are over, each once."""
        self._cancel_late()
        jobs = []
        while not self._done.empty():
            jobs.append(self._done.get())
        return jobs

    def drain(self, seconds: float) -> None:
        """Wait until no job is under way. Jobs that have not begun by then never begin.

        Args:
            seconds: To wait at most.

        Raises:
            TimeoutError: Some are still under way, and use their rows.
        """
        with self._changed:
            if self._changed.wait_for(lambda: not self._under_way, seconds):
                return
            left = list(self._under_way)
        num_left = sum(not (future.cancel() or future.done()) for future in left)
        if num_left:
            raise TimeoutError(
                f"jobs of the store must end within {seconds:g} s, {num_left} are under way: a place hangs"
            )

    def _cancel_late(self) -> None:
        """End jobs that have not begun in their time, and note whether a load that has begun is late."""
        now = time.monotonic()
        with self._changed:
            late = [(future, job) for future, job in self._under_way.items() if now > job.end]
        self.is_stuck = any([not (future.cancel() or future.done()) and job.is_load for future, job in late])

    def _follow(
        self, future: "Future[list[bool]]", job_id: int, is_load: bool, keys: tuple[bytes, ...], num_bytes: int
    ) -> None:
        """Note a job, and the work at its end. num_bytes: bytes that wait to be stored."""
        began = time.monotonic()
        patience = self._load_patience if is_load else self._store_patience
        with self._changed:
            self._under_way[future] = _Begun(is_load, began + patience)
            self._pending_bytes += num_bytes

        def end(ended: "Future[list[bool]]") -> None:
            flags = _flags(ended, len(keys))
            moved = sum(flags) * self._rows.num_bytes
            self._done.put(FinishedJob(job_id, is_load, keys, flags, time.monotonic() - began, moved))
            with self._changed:
                del self._under_way[ended]
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
