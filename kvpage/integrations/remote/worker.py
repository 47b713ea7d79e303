"""Worker: the far side of a GenerateCall: an AsyncEngine, and the store whose chunks may be arriving."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import nullcontext

from kvpage.integrations.remote.calls import GenerateCall, WorkerLost
from kvpage.serving import AsyncEngine, EngineClosed, LiveRequest, QueueFull
from kvpage.serving.loop.outputs import StepOutput
from kvpage.store import ArrivingStore


class Worker:
    """Runs calls; any number at once.

    Args:
        engine: The engine. It stays its owner's to close.
        arriving: The engine's store, where prompts are computed elsewhere. None for a worker that computes all.
    """

    def __init__(self, engine: AsyncEngine, arriving: ArrivingStore | None = None) -> None:
        self.engine, self._arriving = engine, arriving

    async def stream(self, call: GenerateCall) -> AsyncGenerator[list[StepOutput], None]:
        """Run a call. Closing the generator aborts it.

        Args:
            call: The request.

        Yields:
            All outputs that have come since the last ones.

        Raises:
            WorkerLost: The queue is full, or the engine takes no more.
            ValueError, TypeError: As AsyncEngine.submit.
        """
        arriving = self._arriving if call.is_arriving else None
        with nullcontext() if arriving is None else arriving.expect(call.tokens, call.namespace):
            if call.params.guide is None:
                request = self._submit(call)
            else:  # a form may take long to compile
                request = await asyncio.to_thread(self._submit, call)
            try:
                async for outputs in request:
                    yield outputs
            finally:
                request.abort()

    def _submit(self, call: GenerateCall) -> LiveRequest:
        try:
            return self.engine.submit(
                call.tokens,
                call.params,
                request_id=call.request_id,
                namespace=call.namespace,
                priority=call.priority,
                cache_at=call.cache_at,
            )
        except (QueueFull, EngineClosed) as error:
            raise WorkerLost(str(error)) from error
