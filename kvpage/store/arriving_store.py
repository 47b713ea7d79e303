"""ArrivingStore: a store that waits for chunks while another worker computes and stores them.

    prefill worker   compute ─► store chunk 0 ─► compute ─► store chunk 1 ─► ...     EngineConfig(save_portions=True)
                                      │                           │
    decode worker    expect ─► load chunk 0 ─────────────► load chunk 1 ─► ... ─► commit, decode

A chunk that does not come is a miss: the decode worker computes from there on. Over a LayerwiseStore each chunk comes a
few layers at a time.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kvpage.checks.tokens import Tokens
from kvpage.store.block_store import BlockStore, Table, check_store
from kvpage.store.records.keys import KVStoreMetadata, checked_tokens

if TYPE_CHECKING:
    from kvpage.cache.cache_engine import CacheEngine

MIN_POLL_SECONDS, MAX_POLL_SECONDS = 0.002, 0.02
POLL_SHARE = 1 / 16  # of the time since the last chunk: a look takes half a millisecond, of a core that others need
_Name = tuple[bytes, bytes]
_Load = Callable[[Tokens, Table, int, bytes], int]


class Expectation:
    """A prompt that another worker is storing, until `close`. Use it in `with`, or close it.

    Args:
        end: Called once, by the first `close`.
    """

    def __init__(self, end: Callable[[], object]) -> None:
        self._end, self._is_open = end, True

    def close(self) -> None:
        """End the wait: loads of the prompt take the chunks that have come. A second call does nothing."""
        if self._is_open:
            self._is_open = False
            self._end()

    def __enter__(self) -> "Expectation":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class ArrivingStore(BlockStore):
    """A KVStore for an engine that decodes what other workers prefill. Thread-safe.

    Give it to `Engine.from_model(store=...)` or `use_store`. Set `EngineConfig(load_or_compute=False)`: its loads wait,
    so their speed says nothing. `EngineConfig.store_deadline` bounds how long a request waits for all of its chunks.

    Args:
        store: The store that the other workers write, too: a KVStore, for example, or a LayerwiseStore of the decode
            worker's engine. It stays its owner's to close.
        patience: Seconds without a new chunk after which the rest is a miss.

    Raises:
        TypeError: `store` is no BlockStore, or `patience` no number.
        ValueError: `patience` is negative or not finite.
    """

    waits_for_others = True

    def __init__(self, store: BlockStore, patience: float = 2.0) -> None:
        check_store(store)
        if isinstance(patience, bool) or not isinstance(patience, int | float):
            raise TypeError(f"patience must be a number of seconds, got {type(patience).__name__}")
        if not 0 <= patience < float("inf"):
            raise ValueError(f"patience must be finite and not negative, got {patience!r}")
        self.store, self.patience, self.config = store, patience, store.config
        self._expected: Counter[_Name] = Counter()
        self._changed = threading.Condition()

    @property
    def metadata(self) -> KVStoreMetadata | None:
        return self.store.metadata

    def expect(self, tokens: Tokens, namespace: bytes = b"") -> Expectation:
        """Expect the chunks of a prompt, `tokens` of a `namespace`, before the request for it is added.

        Returns:
            The expectation. Close it when the other worker has ended, or is lost.
        """
        name = _name(tokens, namespace)
        with self._changed:
            self._expected[name] += 1
        return Expectation(partial(self._forget, name))

    def lookup(self, tokens: Tokens, *, namespace: bytes = b"") -> int:
        """Return how many leading tokens of a namespace are there, or are expected."""
        array = checked_tokens(tokens, namespace)
        return (
            len(array) if self._is_expected(_name(array, namespace)) else self.store.lookup(array, namespace=namespace)
        )

    def load_blocks(
        self, tokens: Tokens, engine: "CacheEngine", block_table: Table, *, start: int = 0, namespace: bytes = b""
    ) -> int:
        name, size = _name(tokens, namespace), engine.layout.block_size
        whole = tokens[: len(tokens) // size * size]  # as the other worker stores them: whole blocks
        reach, loads = min(len(whole), len(block_table) * size), self._loads(engine)
        ends, last = [start] * len(loads), time.monotonic()
        while min(ends) < reach:
            is_last = not self._is_expected(name)
            before = sum(ends)
            for index, load in enumerate(loads):
                if ends[index] < (ends[index - 1] if index else reach):  # the first layers come first
                    ends[index] = load(whole, block_table, ends[index], namespace)
            now = time.monotonic()
            if sum(ends) > before:
                last = now
            elif is_last or now - last >= self.patience:
                break
            else:
                self._wait(name, min(max((now - last) * POLL_SHARE, MIN_POLL_SECONDS), MAX_POLL_SECONDS))
        return min(ends)

    def store_blocks(self, tokens: Tokens, engine: "CacheEngine", block_table: Table, *, namespace: bytes = b"") -> int:
        array = checked_tokens(tokens, namespace)
        return self.store.store_blocks(array, engine, block_table, namespace=namespace)

    def check_engine(self, engine: "CacheEngine") -> None:
        self.store.check_engine(engine)

    def _loads(self, engine: "CacheEngine") -> list[_Load]:
        """Return the loads of all layers, or of each few."""
        if self.store.groups:
            self.store.check_engine(engine)
            return [group.load for group in self.store.groups]
        load = self.store.load_blocks
        return [lambda tokens, table, start, space: load(tokens, engine, table, start=start, namespace=space)]

    def _is_expected(self, name: _Name) -> bool:
        with self._changed:
            return name in self._expected

    def _wait(self, name: _Name, seconds: float) -> None:
        """Wait so long, or until nothing more is expected."""
        with self._changed:
            self._changed.wait_for(lambda: name not in self._expected, seconds)

    def _forget(self, name: _Name) -> None:
        with self._changed:
            self._expected[name] -= 1
            if not self._expected[name]:
                del self._expected[name]
            self._changed.notify_all()


def _name(tokens: Tokens, namespace: bytes) -> _Name:
    return checked_tokens(tokens, namespace).tobytes(), namespace
