"""StoreConnector: between the blocks of an engine and a store of chunks, beside the serving loop, never in its way.

    a request waits ─► lookup ─► blocks for the tokens found ─► load ─► commit: the prefix tree has them, and the
                       thread    this thread                    thread  request, admitted now, finds them there

    its prefill is done ─► pin the cached blocks ─► store ─► unpin
                           this thread              thread

Whatever goes wrong, or takes longer than the deadline, is a request that computes. A load that comes late goes into
the tree all the same. Until then it writes to blocks of its own.
"""

import time
from collections.abc import Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvpage._C import Match
from kvpage.blocks.load_or_compute import LoadOrCompute
from kvpage.blocks.manager import BlockManager
from kvpage.blocks.states import Allocation
from kvpage.cache.cache_engine import CacheEngine
from kvpage.cache.side_stream import side_stream
from kvpage.checks.errors import OutOfBlocks
from kvpage.checks.interrupts import interruptible, uninterrupted
from kvpage.checks.started_pool import started_pool
from kvpage.serving.loop.block_transfers import BlockTransfers
from kvpage.serving.loop.request import Request

__all__ = ["BlockStore", "StoreConnectorStats"]

TokenIds = npt.NDArray[np.int32]


class BlockStore(Protocol):
    """A store that an engine can ask; `kvpage.store.KVStore` is one. Its methods are called in other threads.

    None of them raises for trouble of the store's own: that is a miss. An exception that comes nevertheless is counted,
    and so is an answer that is no count. Both are misses, too.
    """

    def lookup(self, tokens: TokenIds, *, namespace: bytes = b"") -> int:
        """Look a prompt up.

        Args:
            tokens: int32 [num_tokens].
            namespace: Only sequences of the same namespace are found.

        Returns:
            How many leading tokens it holds.
        """

    def load_blocks(
        self, tokens: TokenIds, engine: CacheEngine, block_table: npt.NDArray[np.int32], *, start: int, namespace: bytes
    ) -> int:
        """Load K and V of tokens[start:] into the blocks, as far as they are held and the blocks reach.

        Args:
            tokens: int32 [num_tokens].
            engine: The cache of the blocks.
            block_table: int32, the blocks of the sequence from its first token on.
            start: The first token that is loaded.
            namespace: As for `lookup`.

        Returns:
            The number of leading tokens whose K and V are there now.
        """

    def store_blocks(
        self, tokens: TokenIds, engine: CacheEngine, block_table: npt.NDArray[np.int32], *, namespace: bytes
    ) -> int:
        """Keep K and V of the tokens.

        Args:
            tokens: int32 [num_tokens].
            engine: The cache of the blocks.
            block_table: int32, the blocks of the sequence from its first token on.
            namespace: As for `lookup`.

        Returns:
            How many leading tokens it holds now.
        """


@dataclass(slots=True)
class StoreConnectorStats:
    """Counters since the engine was made.

    Attributes:
        num_lookups: Prompts that the store was asked for.
        num_lookup_tokens: Their tokens.
        num_found_tokens: Tokens that the store had beyond those that were cached.
        num_loads: Loads that have reached the prefix tree.
        num_loaded_tokens: Their tokens.
        num_refused_tokens: Tokens found and left there: computing was expected to be faster.
        num_late: Loads that their requests did not wait for.
        num_errors: Exceptions of the store, and answers that are no counts.
        num_stores: Prompts that were handed to the store.
        num_stored_tokens: Tokens that it held afterwards.
        num_skipped: Prompts that were not stored because too many were on their way.
        load_seconds: Time that the threads spent on loads.
        store_seconds: The same for storing.
    """

    num_lookups: int = 0
    num_lookup_tokens: int = 0
    num_found_tokens: int = 0
    num_loads: int = 0
    num_loaded_tokens: int = 0
    num_refused_tokens: int = 0
    num_late: int = 0
    num_errors: int = 0
    num_stores: int = 0
    num_stored_tokens: int = 0
    num_skipped: int = 0
    load_seconds: float = 0.0
    store_seconds: float = 0.0


class _Load:
    """A prompt on its way out of the store. It is its own seq_id in the block manager while it has blocks."""

    def __init__(self, request: Request, deadline: float) -> None:
        self.request = request
        self.tokens = request.tokens[: request.num_tokens].copy()
        self.namespace = request.namespace
        self.deadline = deadline
        self.future: Future[int] | None = None
        self.num_cached = 0  # tokens that its blocks had at once
        self.has_blocks = False


@dataclass(slots=True)
class _Save:
    match: Match
    future: "Future[int]"


class StoreConnector:
    """Loads and stores for one engine. All methods are for the engine's thread.

    transfers: the manager's moves; they come before a load writes to blocks that were evicted for it.
    rule: whether loading is worth it; None for always.
    deadline: seconds that a request waits for the store. max_loads, max_saves: under way at once.
    save_generated: store the generated tokens, too, once a request has finished.
    """

    def __init__(
        self,
        store: BlockStore,
        cache: CacheEngine,
        manager: BlockManager,
        transfers: BlockTransfers,
        rule: LoadOrCompute | None,
        *,
        deadline: float = 5.0,
        max_loads: int = 8,
        max_saves: int = 8,
        save_generated: bool = False,
    ) -> None:
        self.store = store
        self.stats = StoreConnectorStats()
        self.save_generated = save_generated
        self.rule = rule
        self._cache, self._manager, self._transfers = cache, manager, transfers
        self._deadline, self._max_loads, self._max_saves = deadline, max_loads, max_saves
        self._loads: dict[Request, _Load] = {}
        self._late: list[_Load] = []
        self._saves: list[_Save] = []
        self._asked: set[Request] = set()
        self._loaders = started_pool(2, "kvpage-load")
        self._savers = started_pool(1, "kvpage-save")

    def ask(self, waiting: Iterable[Request]) -> bool:
        """Go on with everything under way, and ask for the first of the waiting; return whether that was all."""
        self._poll()
        for request in waiting:
            if len(self._loads) + len(self._late) >= self._max_loads:
                return False
            if request not in self._asked:
                self._asked.add(request)
                self._start(request)
        return True

    def holds(self, request: Request) -> bool:
        """Whether K and V for the request are on their way."""
        return request in self._loads

    def wait(self) -> None:
        """Wait until something is done that a request waits for, or is late."""
        futures = [load.future for load in self._loads.values() if load.future]
        if futures:
            first = min(load.deadline for load in self._loads.values())
            wait(futures, timeout=max(first - time.monotonic(), 0.0), return_when="FIRST_COMPLETED")

    def reclaim(self) -> bool:
        """Wait for a load or a save that holds blocks, so that these can be evicted; False if there is none."""
        for load in [*self._loads.values(), *self._late]:
            if load.has_blocks and load.future:
                with interruptible():
                    wait([load.future])
                self._poll()
                return True
        if self._saves:
            with interruptible():
                wait([self._saves[0].future])
            self._poll()
            return True
        return False

    def save(self, tokens: TokenIds, namespace: bytes) -> None:
        """Store tokens that are committed, as far as they are cached in whole blocks on the device."""
        if len(self._saves) >= self._max_saves:
            self.stats.num_skipped += 1
            return
        match = self._manager.tree.match(tokens, namespace, num_left_over=0)
        if match.num_device_blocks < match.num_blocks:
            self._manager.tree.trim(match)
        if match.num_blocks == 0:
            self._manager.tree.release(match)
            return
        try:
            self._saves.append(_Save(match, self._start_save(tokens[: match.num_tokens].copy(), match, namespace)))
        except BaseException:
            self._manager.tree.release(match)
            raise

    def _start_save(self, tokens: TokenIds, match: Match, namespace: bytes) -> "Future[int]":
        block_ids, stream = match.block_ids.copy(), side_stream(self._cache.device)

        def store() -> int:
            begin = time.perf_counter()
            with stream():
                num_stored = self.store.store_blocks(tokens, self._cache, block_ids, namespace=namespace)
            self.stats.store_seconds += time.perf_counter() - begin
            return num_stored

        return self._savers.submit(store)

    def forget(self, request: Request) -> None:
        """Forget a request that has ended; a load that is under way for it goes on for others."""
        self._asked.discard(request)
        if load := self._loads.pop(request, None):
            self._late.append(load)

    def drain(self) -> None:
        """Wait until everything that is under way is done."""
        while self._loads or self._late or self._saves:
            futures = [load.future for load in (*self._loads.values(), *self._late) if load.future]
            wait([*futures, *(save.future for save in self._saves)], return_when="FIRST_COMPLETED")
            self._poll()

    def close(self) -> None:
        """Drain, and end the threads. The store stays open: it is its owner's."""
        self.drain()
        self._loaders.shutdown()
        self._savers.shutdown()

    # --- loads -------------------------------------------------------------------------------------------------------

    def _start(self, request: Request) -> None:
        load = _Load(request, time.monotonic() + self._deadline)
        if self._num_missing(load) < self._manager.block_size:
            return
        tokens, namespace = load.tokens, load.namespace
        load.future = self._loaders.submit(lambda: self.store.lookup(tokens, namespace=namespace))
        self.stats.num_lookups += 1
        self.stats.num_lookup_tokens += len(load.tokens)
        self._loads[request] = load

    def _num_missing(self, load: _Load) -> int:
        match = self._manager.tree.match(load.tokens, load.namespace)
        self._manager.tree.release(match)
        return len(load.tokens) - 1 - match.num_tokens

    @uninterrupted
    def _poll(self) -> None:
        now = time.monotonic()
        for load in [*self._loads.values(), *self._late]:
            if load.future and load.future.done():
                self._take(load)
            elif load.request in self._loads and now >= load.deadline:
                self.stats.num_late += 1
                self._late.append(self._loads.pop(load.request))
        for save in [save for save in self._saves if save.future.done()]:
            self._saves.remove(save)
            self._manager.tree.release(save.match)
            self.stats.num_stores += 1
            self.stats.num_stored_tokens += self._result(save.future)

    def _take(self, load: _Load) -> None:
        """Take the result of a lookup, or of a load."""
        assert load.future is not None
        result = self._result(load.future)
        load.future = None
        has_begun = False
        try:
            if load.has_blocks:
                self._finish(load, result)
            elif load.request in self._loads:
                has_begun = self._begin(load, result)
        finally:
            if not has_begun:
                self._over(load)

    def _over(self, load: _Load) -> None:
        if self._loads.get(load.request) is load:
            del self._loads[load.request]
        else:
            self._late.remove(load)

    def _begin(self, load: _Load, num_found: int) -> bool:
        """Begin a load into blocks of its own; False if it is not worth it, or blocks are short."""
        size = self._manager.block_size
        num_tokens = min(num_found, len(load.tokens) - 1) // size * size
        num_missing = num_tokens - (len(load.tokens) - 1 - self._num_missing(load))
        if num_missing < size:
            return False
        self.stats.num_found_tokens += num_missing
        if self.rule and not self.rule.should_load(num_missing // size):
            self.stats.num_refused_tokens += num_missing
            return False
        try:
            given = self._manager.allocate(load, load.tokens[:num_tokens], load.namespace)
        except OutOfBlocks:
            return False
        try:
            load.future = self._into_blocks(load, num_tokens, given)
        except BaseException:
            self._manager.release(load)
            raise
        load.has_blocks, load.num_cached = True, given.num_cached_tokens
        return True

    def _into_blocks(self, load: _Load, num_tokens: int, given: Allocation) -> "Future[int]":
        self._transfers.run()
        size = self._manager.block_size
        start, block_ids, stream = (
            given.num_cached_tokens // size * size,
            given.block_ids,
            side_stream(self._cache.device),
        )

        def load_blocks() -> int:
            begin = time.perf_counter()
            with stream():
                end = self.store.load_blocks(load.tokens, self._cache, block_ids, start=start, namespace=load.namespace)
            seconds = time.perf_counter() - begin
            self.stats.load_seconds += seconds
            end = min(end, num_tokens)
            if self.rule and end > start:
                self.rule.saw_transfer((end - start) // size * self.rule.block_bytes, seconds)
            return end

        return self._loaders.submit(load_blocks)

    def _finish(self, load: _Load, num_loaded: int) -> None:
        """Commit the tokens that have come, and free the other blocks."""
        end = num_loaded // self._manager.block_size * self._manager.block_size
        try:
            if end > load.num_cached:
                self._manager.commit(load, load.tokens[load.num_cached : end])
                self.stats.num_loads += 1
                self.stats.num_loaded_tokens += end - load.num_cached
        finally:
            self._manager.release(load)

    def _result(self, future: "Future[int]") -> int:
        """Return the count that the store has returned; 0 for an exception, and for an answer that is no count."""
        count = None if future.exception() else future.result()
        if isinstance(count, (int, np.integer)) and not isinstance(count, bool) and count >= 0:
            return int(count)
        self.stats.num_errors += 1
        return 0
