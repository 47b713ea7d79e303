"""Snapshots: how full a worker's cache is, told to Dynamo's router and metrics a few times a second."""

import asyncio
import contextlib
from typing import Any

from kvpage.serving import AsyncEngine

INTERVAL = 0.1
"""Seconds between two looks. Nothing is told where nothing has changed."""


class Snapshots:
    """Tells from `begin` to `end`, once there is a publisher."""

    def __init__(self) -> None:
        """Make it; it does nothing yet."""
        self._publisher: Any = None
        self._task: asyncio.Task[None] | None = None
        self._last: Any = None

    def attach(self, publisher: Any) -> None:
        """Take the publisher.

        Args:
            publisher: Dynamo's SnapshotPublisher.
        """
        self._publisher = publisher

    def begin(self, engine: AsyncEngine) -> None:
        """Begin to tell, in a task of this event loop.

        Args:
            engine: Whose cache it is.
        """
        self._task = asyncio.get_running_loop().create_task(self._run(engine))

    async def end(self) -> None:
        """Tell no more. A second call, or one without `begin`, does nothing."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def tell(self, engine: AsyncEngine) -> None:
        """Tell now, if anything has changed.

        Args:
            engine: Whose cache it is.
        """
        from dynamo.common.backend.publisher import ComponentSnapshot

        stats = engine.engine.stats()
        snapshot = ComponentSnapshot(
            kv_used_blocks=stats.num_used_blocks,
            kv_total_blocks=stats.num_blocks,
            gpu_cache_usage=stats.num_used_blocks / stats.num_blocks,
            dp_rank=0,
            kv_cache_hit_rate=stats.hit_rate if stats.num_prompt_tokens else None,
        )
        if snapshot != self._last:
            self._publisher.publish(0, snapshot)
            self._last = snapshot

    async def _run(self, engine: AsyncEngine) -> None:
        while True:
            if self._publisher is not None:
                self.tell(engine)
            await asyncio.sleep(INTERVAL)
