"""RankedStore: the stores of all ranks as one, which holds what each of them holds. StoreFollower: the others' side.

    rank 0's connector ─► lookup ─┬────────────────► store of rank 0, heads 0 and 1 ─► 96 tokens ─┐
                                  └─► LOOKUP ─► ... ─► store of rank 1, heads 2 and 3 ─► 64 tokens ─┴─► 64: the least

Calls come to the others among rank 0's decisions, hence after all moves and steps that come before them.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvpage.cache.cache_engine import CacheEngine
from kvpage.cache.side_stream import side_stream
from kvpage.checks.started_pool import started_pool
from kvpage.serving.loop.ranks.answers import Answers
from kvpage.serving.loop.ranks.message import Kind, Message, Part
from kvpage.serving.loop.ranks.ranks import Ranks
from kvpage.store.block_store import BlockStore, TokenIds, is_count

NO_BLOCKS = np.zeros(0, np.int32)
STORE_CALLS = (Kind.LOOKUP, Kind.LOAD, Kind.SAVE)


class Tells(Protocol):
    """Rank 0's way to the others."""

    def tell(self, kind: Kind, *parts: Part) -> None:
        """Send the others a message, from any thread."""


class RankedStore(BlockStore):
    """Rank 0's store, and those of the others; a BlockStore. Its methods are called in any threads.

    Loads and saves go two ways, each a call at a time.
    """

    def __init__(self, store: BlockStore, ranks: Ranks, lead: Tells) -> None:
        self.config = store.config
        self._store, self._lead = store, lead
        self._finds, self._keeps = (ranks.finds, threading.Lock()), (ranks.keeps, threading.Lock())

    def check_engine(self, engine: CacheEngine) -> None:
        """Raise ValueError if rank 0's store takes other engines only."""
        self._store.check_engine(engine)

    def lookup(self, tokens: TokenIds, *, namespace: bytes = b"") -> int:
        """Return how many leading tokens all ranks hold."""
        parts = _parts(tokens, NO_BLOCKS, 0, namespace)
        return self._call(self._finds, Kind.LOOKUP, parts, partial(self._store.lookup, tokens, namespace=namespace))

    def load_blocks(
        self, tokens: TokenIds, engine: CacheEngine, block_table: npt.NDArray[np.int32], *, start: int, namespace: bytes
    ) -> int:
        """Load each rank's K and V; return how many leading tokens all have now."""
        call = partial(self._store.load_blocks, tokens, engine, block_table, start=start, namespace=namespace)
        return self._call(self._finds, Kind.LOAD, _parts(tokens, block_table, start, namespace), call)

    def store_blocks(
        self, tokens: TokenIds, engine: CacheEngine, block_table: npt.NDArray[np.int32], *, namespace: bytes
    ) -> int:
        """Keep each rank's K and V; return how many leading tokens all hold now."""
        call = partial(self._store.store_blocks, tokens, engine, block_table, namespace=namespace)
        return self._call(self._keeps, Kind.SAVE, _parts(tokens, block_table, 0, namespace), call)

    def _call(
        self, way: tuple[Answers, threading.Lock], kind: Kind, parts: Sequence[Part], call: Callable[[], int]
    ) -> int:
        """Call the stores of the other ranks, and this one's. An answer of this one's that is no count is returned."""
        answers, lock = way
        with lock, started_pool(1, "kvpage-answers") as pool:
            self._lead.tell(kind, *parts)
            answer: Future[int] = Future()
            agreed, count = pool.submit(answers.least, answer), 0
            try:
                count = call()
            finally:
                answer.set_result(count)
                least = agreed.result()
        return least if is_count(count) else count


class StoreFollower:
    """The store of a rank that follows, in two threads. Whatever it raises is a miss on all ranks."""

    def __init__(self, store: BlockStore, cache: CacheEngine, ranks: Ranks) -> None:
        self._store, self._cache = store, cache
        self._callers = started_pool(2, "kvpage-store")
        self._finds = ranks.finds, started_pool(1, "kvpage-finds")
        self._keeps = ranks.keeps, started_pool(1, "kvpage-keeps")

    def begin(self, message: Message) -> None:
        """Begin a call: after all that this thread has begun before."""
        answers, pool = self._keeps if message.kind is Kind.SAVE else self._finds
        pool.submit(self._answer, answers, message, side_stream(self._cache.device))

    def close(self) -> None:
        """Wait for the calls, and end the threads. The store stays open."""
        for pool in (self._finds[1], self._keeps[1], self._callers):
            pool.shutdown()

    def _answer(self, answers: Answers, message: Message, stream: Callable[[], AbstractContextManager[Any]]) -> None:
        answers.least(self._callers.submit(self._call, message, stream))

    def _call(self, message: Message, stream: Callable[[], AbstractContextManager[Any]]) -> int:
        (start,), tokens, block_table, name = message.parts
        namespace = name.tobytes()
        with stream():
            if message.kind is Kind.LOOKUP:
                return self._store.lookup(tokens, namespace=namespace)
            if message.kind is Kind.SAVE:
                return self._store.store_blocks(tokens, self._cache, block_table, namespace=namespace)
            return self._store.load_blocks(tokens, self._cache, block_table, start=int(start), namespace=namespace)


def _parts(tokens: TokenIds, block_table: npt.NDArray[np.int32], start: int, namespace: bytes) -> list[Part]:
    return [np.array([start], np.int64), tokens, block_table, np.frombuffer(namespace, np.uint8)]
