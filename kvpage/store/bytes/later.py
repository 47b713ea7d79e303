"""Later: the calls of a ByteStore as futures, in threads of its own.

contains, touch ─► two threads, in any order
get_into        ─► several threads, in any order
put, remove     ─► one thread, in the order of the calls
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from kvpage.checks.interrupts import HeldInterrupts
from kvpage.checks.started_pool import started_pool
from kvpage.store.bytes.byte_jobs import Buffer, ByteJobs, Job
from kvpage.store.stack.call_gate import CallGate

NUM_LOOKERS = 2


class Later:
    """The calls of a `ByteStore`, each of which returns a future at once. Thread-safe; made by the store.

    Arguments are checked before the return. A put or removal begins when earlier puts and removals are over.
    Reads wait for reads alone, and look-ups and touches for each other alone. A deadline counts from the call. `close`
    of the store waits for all of them.

    Args:
        jobs: makes the calls.
        gate: counts them as under way.
        num_readers: threads for reads.
    """

    def __init__(self, jobs: ByteJobs, gate: CallGate, num_readers: int) -> None:
        self._jobs, self._gate = jobs, gate
        self._num_threads = {"looks": NUM_LOOKERS, "reads": num_readers, "writes": 1}
        self._lock = threading.Lock()
        self._pools: dict[str, ThreadPoolExecutor] = {}

    def contains(self, keys: Sequence[bytes], deadline: float | None = None) -> "Future[list[bool]]":
        """Return a future of `ByteStore.contains(keys, deadline)`."""
        return self._start("looks", self._jobs.contains(keys, deadline))

    def put(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[Buffer],
        skip_existing: bool = True,
        deadline: float | None = None,
    ) -> "Future[list[bool]]":
        """Return a future of `ByteStore.put(keys, buffers, skip_existing, deadline)`.

        The buffers must not change until it is done.
        """
        return self._start("writes", self._jobs.put(keys, buffers, skip_existing, deadline))

    def get_into(
        self, keys: Sequence[bytes], buffers: Sequence[Buffer], deadline: float | None = None
    ) -> "Future[list[bool]]":
        """Return a future of `ByteStore.get_into(keys, buffers, deadline)`.

        The buffers are written until it is done.
        """
        return self._start("reads", self._jobs.get_into(keys, buffers, deadline))

    def remove(self, keys: Sequence[bytes], deadline: float | None = None) -> "Future[list[bool]]":
        """Return a future of `ByteStore.remove(keys, deadline)`."""
        return self._start("writes", self._jobs.remove(keys, deadline))

    def close(self) -> None:
        """End the threads. The store calls it when no call is under way."""
        for pool in self._pools.values():
            pool.shutdown(wait=False)  # it may be a thread of theirs that closes the store

    def touch(self, keys: Sequence[bytes], deadline: float | None = None) -> "Future[list[bool]]":
        """Return a future of `ByteStore.touch(keys, deadline)`. It waits for no put or read."""
        return self._start("looks", self._jobs.touch(keys, deadline))

    def _start(self, lane: str, job: Job) -> "Future[list[bool]]":
        with HeldInterrupts():
            self._gate.enter()
            try:
                future = self._pool(lane).submit(job)
            except BaseException:
                self._gate.leave()
                raise
            future.add_done_callback(lambda _: self._gate.leave())
        return future

    def _pool(self, lane: str) -> ThreadPoolExecutor:
        """Return the lane's threads. They are started when they are needed: many stores need none."""
        with self._lock:
            if lane not in self._pools:
                self._pools[lane] = started_pool(self._num_threads[lane], f"kvpage-{lane}")
            return self._pools[lane]
