"""StoreLoad: a prompt on its way out of a store."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from kvpage.blocks.sequence_state import Allocation, Ids
from kvpage.cache.cache_engine import CacheEngine
from kvpage.cache.layered_moves import Arrival
from kvpage.store.block_store import BlockStore, is_count

__all__ = ["StoreLoad", "count_of", "num_shared"]


class Prompted(Protocol):
    """A request, as far as its load knows it."""

    tokens: Ids
    num_tokens: int
    namespace: bytes


RequestT = TypeVar("RequestT", bound=Prompted)


class StoreLoad(Generic[RequestT]):
    """A lookup, then a load. It is its own seq_id in the block manager while it has blocks.

    future: what is under way; its result is a number of tokens. verified: how many tokens are verified, and when their
        layers will be there, told before `future` is done; None where it is taken, or never told.
    num_found: leading tokens that the store had when it was asked. is_outdated: whether it may have more now.
    deadline: when its request, whose turn has come, stops waiting for the store; None while it does not wait.
    is_ready: whether all is there that is to come, in blocks that are kept for the request.
    num_cached: tokens that its blocks had at once. num_wanted: tokens that are to be there at its end.
    num_early: tokens that were committed before its end. arrival: theirs.
    """

    def __init__(self, request: RequestT) -> None:
        self.request = request
        self.tokens = request.tokens[: request.num_tokens].copy()
        self.namespace = request.namespace
        self.num_found: int | None = None
        self.is_outdated = self.is_ready = False
        self.deadline: float | None = None
        self._seconds_left: float | None = None  # that its request waits for the store; None for all of them
        self.future: Future[int] | None = None
        self.verified: Future[tuple[int, Arrival]] | None = None
        self.block_ids: Ids = np.empty(0, np.int32)
        self.num_cached = self.num_wanted = self.num_early = 0
        self.arrival: Arrival | None = None
        self.has_blocks = False

    @property
    def futures(self) -> list[Future[Any]]:
        """The lookup or load under way, which is done when there is something new."""
        return [future for future in (self.future, self.verified) if future is not None]

    @property
    def is_under_way(self) -> bool:
        """Whether something comes that is not there yet."""
        return self.future is not None and not self.is_ready

    def set_waiting(self, waits: bool, seconds: float) -> None:
        """Note whether its request waits for the store. Its time for that stands still while it does not.

        seconds: that it waits in all.
        """
        if waits and self.deadline is None:
            left = seconds if self._seconds_left is None else self._seconds_left
            self.deadline = time.monotonic() + left
        elif not waits and self.deadline is not None:
            self._seconds_left, self.deadline = self.deadline - time.monotonic(), None

    def begin(self, future: "Future[int]") -> None:
        """Wait for the answer of a lookup from now on."""
        self.future, self.is_outdated = future, False

    def take_answer(self, num_found: int, is_outdated: bool = False) -> None:
        """Note how many leading tokens the store has, or had when it was asked."""
        self.num_found, self.is_outdated = num_found, self.is_outdated or is_outdated

    def note_saved(self, tokens: Ids, namespace: bytes, block_size: int) -> None:
        """Note that tokens are stored now. An answer, also one on its way, is outdated if the prompt shares more."""
        if not self.has_blocks and namespace == self.namespace:
            num_same = _num_same(self.tokens[:-1], tokens, block_size)
            self.is_outdated = self.is_outdated or num_same >= (self.num_found or 0) + block_size

    def leave_blocks(self) -> None:
        """Note that its blocks are given back."""
        self.has_blocks = False

    def set_ready(self) -> None:
        """Note that all is there that is to come."""
        self.is_ready, self.deadline = True, None

    def begin_in(self, allocation: Allocation, num_wanted: int, block_size: int, future: "Future[int]") -> None:
        """Wait for the load into the first blocks of an allocation. The others are for the rest of the prompt."""
        self.block_ids = allocation.block_ids[: -(-num_wanted // block_size)]
        self.num_cached, self.num_wanted = allocation.num_cached_tokens, num_wanted
        self.future, self.has_blocks = future, True

    def take(self) -> "Future[int]":
        """Return what was under way, and is done."""
        assert self.future is not None
        done, self.future = self.future, None
        return done

    def call(self, store: BlockStore, cache: CacheEngine, block_ids: Ids, is_beside: bool) -> Callable[..., int]:
        """Return the call that loads into the blocks: where it runs beside the computation, the one by layers."""
        to_blocks = self.tokens, cache, block_ids
        if is_beside:
            return partial(store.load_early, *to_blocks, self._teller())
        return partial(store.load_blocks, *to_blocks)

    @property
    def is_verified(self) -> bool:
        """Whether there is something new to take."""
        return self.verified is not None and self.verified.done()

    def take_verified(self) -> tuple[int, Arrival]:
        """Return, once, what is verified."""
        assert self.verified is not None
        done, self.verified = self.verified, None
        return done.result()

    def note_early(self, num_tokens: int, arrival: Arrival) -> None:
        """Note that num_tokens tokens are committed before they have come."""
        self.num_early, self.arrival = num_tokens, arrival

    def _teller(self) -> Callable[[int, Arrival], None]:
        """Return what a store's thread calls once all is verified. It raises ValueError for what is no count."""
        verified: Future[tuple[int, Arrival]] = Future()
        self.verified = verified

        def tell(num_tokens: int, arrival: Arrival) -> None:
            if not is_count(num_tokens):
                raise ValueError(f"verified must be told a number of tokens, got {num_tokens!r}")
            verified.set_result((int(num_tokens), arrival))

        return tell


def num_shared(load: StoreLoad[Any], other: StoreLoad[Any], block_size: int) -> int:
    """Return how many leading tokens of a load's prompt another one's load brings."""
    if load.namespace != other.namespace:
        return 0
    coming = other.tokens[: other.num_wanted] if other.has_blocks else other.tokens
    return _num_same(load.tokens[:-1], coming, block_size)


def _num_same(tokens: Ids, other: Ids, block_size: int) -> int:
    """Return how many leading tokens are the same; 0 for less than a block."""
    length = min(len(tokens), len(other))
    if length < block_size or not np.array_equal(tokens[:block_size], other[:block_size]):
        return 0
    differ = tokens[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length


def count_of(future: "Future[int]") -> int | None:
    """Return the count that a store has returned; None for an exception, and for an answer that is no count."""
    count = None if future.exception() else future.result()
    return None if count is None or not is_count(count) else int(count)
