"""Feed: pictures of an engine for all who watch, at a bounded cost to its steps.

    a watcher ─► turn ─► AsyncEngine.call ─► Snapshot ─► the next turn comes after 200 times its seconds, or later
                           stepping thread

No reader: the engine is not asked. Many readers: they take turns, and each sees fewer pictures.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from kvpage.server.page.ended import EndedRequests
from kvpage.server.page.picture import picture
from kvpage.server.page.snapshot import Snapshot, take_snapshot
from kvpage.server.page.texts import TokenTexts
from kvpage.serving import AsyncEngine, EngineClosed
from kvpage.store import KVStoreStats

INTERVAL = 0.5  # seconds between two pictures of a watcher
SHARE = 200  # of the stepping thread's time, one part goes to pictures
MAX_WATCHERS = 16


class Feed:
    """Pictures of an engine. All methods are for the thread of the event loop.

    Args:
        engine: The engine.
        tokenizer: A tokenizer of transformers, for decoding.

    Attributes:
        ended: Where requests that end are noted.
        num_watchers: How many watch now.
    """

    def __init__(self, engine: AsyncEngine, tokenizer: Any) -> None:
        self.ended, self.num_watchers = EndedRequests(), 0
        self._engine, self._texts = engine, TokenTexts(tokenizer)
        self._turn, self._next_turn = asyncio.Lock(), 0.0

    async def watch(self, namespaces: tuple[bytes, ...]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield pictures, until the engine takes no more requests; none where MAX_WATCHERS watch already.

        Args:
            namespaces: Whose requests and prefixes are shown.
        """
        if self.num_watchers >= MAX_WATCHERS:
            return
        self.num_watchers += 1
        try:
            while self._engine.takes_requests:
                begin = time.monotonic()
                try:
                    snapshot = await self._snapshot(namespaces)
                except EngineClosed:
                    return
                yield picture(snapshot, await self._store_stats(), self.ended.of(namespaces), self._texts)
                await asyncio.sleep(max(begin + INTERVAL - time.monotonic(), 0.0))
        finally:
            self.num_watchers -= 1

    async def _snapshot(self, namespaces: tuple[bytes, ...]) -> Snapshot:
        async with self._turn:
            await asyncio.sleep(max(self._next_turn - time.monotonic(), 0.0))
            call = self._engine.call(lambda engine: take_snapshot(engine, namespaces))
            snapshot = await asyncio.wrap_future(call)
            self._next_turn = time.monotonic() + SHARE * snapshot.seconds
            return snapshot

    async def _store_stats(self) -> KVStoreStats | None:
        """Return the store's numbers, read beside the loop: a tier may wait for its locks."""
        store = getattr(self._engine.engine, "store", None)
        stats = getattr(store, "stats", None)
        return None if stats is None else await asyncio.to_thread(stats)
