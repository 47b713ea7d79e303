"""ChunkThreads: the threads that store and load the chunks of one call, and one thread in the background."""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

from kvpage.checks.interrupts import interruptible
from kvpage.checks.started_pool import started_pool

T = TypeVar("T")


class ChunkThreads:
    """Thread-safe. num_threads: shared by all calls."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._pool = started_pool(num_threads, "kvpage-chunk")
        try:
            self._worker = started_pool(1, "kvpage-store")
        except BaseException:
            self._pool.shutdown()
            raise
        self._lock = threading.Lock()
        self._pending: set[Future[int]] = set()

    def each(self, num_items: int) -> int:
        """Return the number of threads for each of `num_items` chunks at once."""
        return max(self.num_threads // max(num_items, 1), 1)

    def map(self, call: Callable[[int], T], items: Sequence[int]) -> list[T]:
        """Call for each item on the threads; a single item needs none. An error is raised when all are done."""
        if len(items) < 2:
            return [call(item) for item in items]
        futures = [self._pool.submit(call, item) for item in items]
        wait(futures)
        return [future.result() for future in futures]

    def num_leading(self, call: Callable[[int], bool], num_items: int) -> int:
        """Call for items in order, each thread until one fails; return the number of leading ones that did not."""
        num_shares = min(self.num_threads, num_items)
        bounds = [num_items * share // max(num_shares, 1) for share in range(num_shares + 1)]

        def run(share: int) -> int:
            return num_leading(map(call, range(bounds[share], bounds[share + 1])))

        counts = self.map(run, range(num_shares))
        for share, count in enumerate(counts):
            if count < bounds[share + 1] - bounds[share]:
                return bounds[share] + count
        return num_items

    def later(self, job: Callable[[], int]) -> "Future[int]":
        """Run the job in the background, after earlier jobs."""
        future = self._worker.submit(job)
        with self._lock:
            self._pending.add(future)
        future.add_done_callback(self._over)
        return future

    def drain(self) -> None:
        """Wait until nothing is left in the background."""
        while pending := self._left():
            with interruptible():
                for future in pending:
                    future.exception()

    def close(self) -> None:
        self._worker.shutdown()
        self._pool.shutdown()

    def _left(self) -> list[Future[int]]:
        with self._lock:
            return list(self._pending)

    def _over(self, future: "Future[int]") -> None:
        with self._lock:
            self._pending.discard(future)


def num_leading(flags: Iterable[object]) -> int:
    """Return the number of true flags before the first that is not."""
    count = 0
    for flag in flags:
        if not flag:
            break
        count += 1
    return count


def done(result: int) -> "Future[int]":
    """Return a future that has its result."""
    future: Future[int] = Future()
    future.set_result(result)
    return future
