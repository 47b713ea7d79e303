"""Prefetches: what a store brings nearer for requests that wait, within itself, in a thread. No block is touched.

looked up, not its turn yet ─► store.prefetch: from the disk or another machine into the host's memory
its turn comes              ─► the load, from the host's memory; it waits for no prefetch
"""

from collections.abc import Callable
from concurrent.futures import Future

from kvpage.checks.started_pool import started_pool
from kvpage.store.block_store import TokenIds

Prefetch = Callable[[TokenIds, bytes], object]
"""Brings what a store has of a prompt nearer: its tokens, and their namespace. Called in a thread."""


class Prefetches:
    """Prefetches under way, in the order in which they began. All methods are for the engine's thread.

    call: brings a prompt nearer. max_prefetches: under way at once; more are left out, so that a small memory is not
        filled with the records of late turns.
    """

    def __init__(self, call: Prefetch, max_prefetches: int) -> None:
        self._call, self._max_prefetches = call, max_prefetches
        self.futures: list[Future[object]] = []
        self._threads = started_pool(1, "kvpage-prefetch")

    def begin(self, tokens: TokenIds, namespace: bytes) -> None:
        """Bring a prompt nearer, if not too many are on their way."""
        if len(self.futures) < self._max_prefetches:
            self.futures.append(self._threads.submit(lambda: self._call(tokens, namespace)))

    def take_failures(self) -> int:
        """Forget those that are done; return how many have raised. That is a miss for nobody: the load still comes."""
        done = [future for future in self.futures if future.done()]
        self.futures = [future for future in self.futures if not future.done()]
        return sum(future.exception() is not None for future in done)

    def close(self) -> None:
        """End the thread."""
        self._threads.shutdown()
