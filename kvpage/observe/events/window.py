"""EventWindow: the last batches of a stream, and the sum of all earlier batches.

    seq    0 ......... 41 | 42 43 44 45 46
           one batch:       the window, as sent
           cleared, then
           all cached blocks

So a subscriber that comes late, or has missed more than the window, still learns everything. The window and the size
of the cache bound the memory.
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
    """Batches by ascending sequence number. size: How many are kept as sent; 0 keeps none."""

    def __init__(self, size: int, encoding: Encoding) -> None:
        self._size = size
        self._encoding = encoding
        self._batches: deque[tuple[int, bytes]] = deque()
        self._last_folded: tuple[int, EventBatch] | None = None  # without its events
        self._stored: dict[tuple[str | None, int], BlockStored] = {}  # by medium and hash, after the folded batches

    def add(self, seq: int, payload: bytes) -> None:
        """Add the batch of the next sequence number."""
        self._batches.append((seq, payload))
        if len(self._batches) > self._size:
            self._fold(*self._batches.popleft())

    def since(self, seq: int) -> Iterator[tuple[int, bytes]]:
        """Yield the batches from a number on.

        If it is older than the window, the first one is the sum of all earlier batches, under the last number before
        the window.
        """
        if self._last_folded and seq <= self._last_folded[0]:
            folded, batch = self._last_folded
            yield folded, pack(batch._replace(events=self._folded_events()), self._encoding)
        yield from (batch for batch in self._batches if batch[0] >= seq)

    def _fold(self, seq: int, payload: bytes) -> None:
        batch = unpack(payload)
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._stored.update({(event.medium, stored.block_hashes[0]): stored for stored in split(event)})
            elif isinstance(event, AllBlocksCleared):
                self._stored.clear()
            else:
                for block_hash in event.block_hashes:
                    del self._stored[event.medium, block_hash]
        self._last_folded = seq, batch._replace(events=[])

    def _folded_events(self) -> list[Event]:
        """Return the sum of the folded batches, the device first: a block on the host may come after one only there."""
        on_device = [event for event in self._stored.values() if event.medium == DEVICE]
        elsewhere = [event for event in self._stored.values() if event.medium != DEVICE]
        return [AllBlocksCleared(), *merge(on_device), *merge(elsewhere)]
