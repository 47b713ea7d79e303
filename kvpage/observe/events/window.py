"""EventWindow: the last batches of a stream, and what all those before them came to.

    seq    0 ......... 41 | 42 43 44 45 46
           one batch:       the window, as sent
           cleared, then
           what was cached

So whoever comes late, or has missed more than the window, still learns everything, and the memory is bounded by the
window and by the size of the cache.
"""

from collections import deque
from collections.abc import Iterator

from kvpage.observe.events.config import Encoding
from kvpage.observe.events.schema import (
    DEVICE,
    AllBlocksCleared,
    BlockStored,
    Event,
    EventBatch,
    merge,
    pack,
    split,
    unpack,
)


class EventWindow:
    """Batches in the order of their sequence numbers, each one more than the one before. size: 0 keeps none as sent."""

    def __init__(self, size: int, encoding: Encoding) -> None:
        self._size = size
        self._encoding = encoding
        self._batches: deque[tuple[int, bytes]] = deque()
        self._last_folded: tuple[int, EventBatch] | None = None  # without its events
        self._stored: dict[tuple[str | None, int], BlockStored] = {}  # by medium and hash, after what was folded

    def add(self, seq: int, payload: bytes) -> None:
        self._batches.append((seq, payload))
        if len(self._batches) > self._size:
            self._fold(*self._batches.popleft())

    def since(self, seq: int) -> Iterator[tuple[int, bytes]]:
        """The batches from that number on. If it is older than the window, first one under the last number before the
        window that puts together all up to there.
        """
        if self._last_folded and seq <= self._last_folded[0]:
            folded, batch = self._last_folded
            yield folded, pack(batch._replace(events=self._folded_events()), self._encoding)
        yield from (batch for batch in self._batches if batch[0] >= seq)

    def _fold(self, seq: int, payload: bytes) -> None:
        batch = unpack(payload)
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._stored.update({(event.medium, one.block_hashes[0]): one for one in split(event)})
            elif isinstance(event, AllBlocksCleared):
                self._stored.clear()
            else:
                for block_hash in event.block_hashes:
                    del self._stored[event.medium, block_hash]
        self._last_folded = seq, batch._replace(events=[])

    def _folded_events(self) -> list[Event]:
        """The device first: a block on the host may follow one that is there only, but never the other way round."""
        on_device = [event for event in self._stored.values() if event.medium == DEVICE]
        elsewhere = [event for event in self._stored.values() if event.medium != DEVICE]
        return [AllBlocksCleared(), *merge(on_device), *merge(elsewhere)]
