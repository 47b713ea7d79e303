"""Runner: jobs to outputs, by an AsyncEngine.

    whole:   Job ─► AsyncEngine.generate, one a prompt ─► outputs
    stream:  Job ─► AsyncEngine.submit, one a prompt ─► (prompt, outputs), as they come

A job that is left, by an error or a cancellation, leaves nothing in the engine.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvpage.cache.cache_engine import CacheEngine
from kvpage.server.metrics.latencies import Latencies
from kvpage.server.page.ended import EndedRequests
from kvpage.server.protocol.errors import REFUSED, as_api_error
from kvpage.serving import AsyncEngine, EngineClosed, LiveRequest, SamplingParams
from kvpage.serving.engine import Engine
from kvpage.serving.loop.outputs import RequestOutput, StepOutput

logger = logging.getLogger(__name__)
MAX_AHEAD = 4  # lists of outputs of a batch that wait for a slow client; the engine's limits hold behind them
Turn = tuple[int, list[StepOutput]]


class TenantPins:
    """Pins by the tenants that asked for them. All calls are for the engine's thread.

    quota: Blocks that the pins of one tenant hold at most. None means all that the engine's own quota allows.
    """

    def __init__(self, quota: int | None) -> None:
        self._quota = quota
        self._pins: list[tuple[str, int]] = []  # tenant and handle; each holds a block or more

    def pin(
        self,
        engine: Any,
        tokens: Sequence[int],
        namespace: bytes,
        ttl: float,
        tenant: str,
        adapter: str | None = None,
    ) -> None:
        """Pin a prompt for `ttl` seconds. ValueError beyond a quota: nothing of it is pinned then."""
        space = engine.manager.space
        handle = space.pin(tokens, engine.kv_namespace(namespace, adapter), ttl)
        num_blocks = space.pins.num_blocks_of(handle)
        live_pins, num_pinned = list[tuple[str, int]](), 0
        for owner, pin in self._pins:
            if num_held := space.pins.num_blocks_of(pin):
                live_pins.append((owner, pin))
                num_pinned += num_held if owner == tenant else 0
        self._pins = live_pins
        if self._quota is not None and num_pinned + num_blocks > self._quota:
            space.unpin(handle)
            raise ValueError(
                f"pins of a tenant must hold at most {self._quota} blocks, got {num_pinned} + {num_blocks}"
            )
        if num_blocks:
            self._pins.append((tenant, handle))
        else:
            space.unpin(handle)  # nothing of it is cached


@dataclass(frozen=True, slots=True)
class Job:
    """Prompts with their parameters, and the fields that they share.

    Attributes:
        prompts: Token ids of each prompt.
        params: One for each prompt.
        namespace: Where cached blocks are searched and kept.
        priority: Requests with a lower one are scheduled first.
        timeout: Seconds; None for no deadline.
        pin_ttl: Seconds for which the prompts stay pinned afterwards; None for not at all.
        tenant: Who asks, to whom the pins are counted.
        cache_at: Positions of each prompt at which other prompts may go on.
        compiled: The CompiledGuide of the answers, which is held until they are queued; None for any form.
    """

    prompts: list[list[int]]
    params: list[SamplingParams]
    namespace: bytes = b""
    priority: int = 0
    timeout: float | None = None
    pin_ttl: float | None = None
    tenant: str = ""
    cache_at: Sequence[int] = ()
    compiled: object = None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of AsyncEngine.submit that all prompts share."""
        return {
            "namespace": self.namespace,
            "priority": self.priority,
            "timeout": self.timeout,
            "cache_at": self.cache_at,
        }


class Runner:
    """Runs jobs.

    Args:
        engine: The engine.
        latencies: Where times are counted.
        ended: Where requests that end are noted, for the page.
        tenant_pin_quota: See ServerConfig.

    Attributes:
        has_blocks: Whether the cached blocks are in this process; a gateway's workers have theirs elsewhere.
    """

    def __init__(
        self, engine: AsyncEngine, latencies: Latencies, ended: EndedRequests, tenant_pin_quota: int | None = None
    ) -> None:
        self._engine, self._latencies, self._page = engine, latencies, ended
        self._pins = TenantPins(tenant_pin_quota)
        self.has_blocks = isinstance(engine.engine.cache, CacheEngine)

    def check_room(self, num_prompts: int) -> None:
        """Raise ApiError 503 unless the engine takes num_prompts prompts now: a full queue costs no more than this."""
        try:
            self._engine.check_room(num_prompts)
        except REFUSED as error:
            raise as_api_error(error) from error

    async def whole(self, job: Job) -> list[RequestOutput]:
        """Run a job to its end. ApiError if the engine takes it not."""
        arguments = job.arguments()
        works = [
            self._engine.generate(prompt, params, **arguments)
            for prompt, params in zip(job.prompts, job.params, strict=True)
        ]
        try:
            outputs = (
                [await works[0]] if len(works) == 1 else await all_or_none([asyncio.ensure_future(w) for w in works])
            )
        except REFUSED as error:
            raise as_api_error(error) from error
        for output in outputs:
            self._latencies.ended(output)
            self._page.note(output, job.namespace)
        self._pin(job)
        return outputs

    def submit(self, job: Job) -> list[LiveRequest]:
        """Queue all prompts of a job, or none. ApiError if the engine takes one not."""
        requests: list[LiveRequest] = []
        try:
            for prompt, params in zip(job.prompts, job.params, strict=True):
                requests.append(self._engine.submit(prompt, params, **job.arguments()))
        except REFUSED as error:
            abort_all(requests)
            raise as_api_error(error) from error
        return requests

    async def stream(self, job: Job, requests: Sequence[LiveRequest]) -> AsyncGenerator[Turn, None]:
        """Yield the outputs of the prompts as they come."""
        try:
            if len(requests) == 1:
                async for outputs in self._timed(requests[0]):
                    yield 0, outputs
            else:
                async for turn in self._merged(requests):
                    yield turn
        finally:
            abort_all(requests)
            self._page.follow(requests, job.namespace)
        self._pin(job)

    async def _timed(self, request: LiveRequest) -> AsyncGenerator[list[StepOutput], None]:
        before: float | None = None
        async for outputs in request:
            now = time.monotonic()
            if before is not None:
                self._latencies.next_tokens(now - before)
            before = now
            yield outputs
        if request.output is not None:
            self._latencies.ended(request.output)

    async def _merged(self, requests: Sequence[LiveRequest]) -> AsyncGenerator[Turn, None]:
        queue: asyncio.Queue[Turn | None] = asyncio.Queue(MAX_AHEAD)

        async def read(index: int, request: LiveRequest) -> None:
            async for outputs in self._timed(request):
                await queue.put((index, outputs))
            await queue.put(None)

        readers = [asyncio.ensure_future(read(index, request)) for index, request in enumerate(requests)]
        try:
            num_left = len(readers)
            while num_left:
                turn = await queue.get()
                if turn is None:
                    num_left -= 1
                else:
                    yield turn
        finally:
            await cancel_all(readers)

    def _pin(self, job: Job) -> None:
        """Pin the prompts, if the job asks for it and the quota allows it. A hint never fails a request."""
        if job.pin_ttl is None:
            return
        if not self.has_blocks:
            logger.info("a hint to pin was not followed: the blocks are those of workers elsewhere")
            return
        prompts, namespace, ttl, adapter = job.prompts, job.namespace, job.pin_ttl, job.params[0].adapter

        def pin(engine: Engine) -> None:
            for prompt in prompts:
                try:
                    self._pins.pin(engine, prompt, namespace, ttl, job.tenant, adapter)
                except ValueError as error:
                    logger.info("a hint to pin %d tokens was not followed: %s", len(prompt), error)

        with suppress(EngineClosed):
            self._engine.call(pin)


def abort_all(requests: Sequence[LiveRequest]) -> None:
    """Abort the requests that have not ended."""
    for request in requests:
        if request.output is None:
            request.abort()


async def all_or_none(tasks: "list[asyncio.Task[RequestOutput]]") -> list[RequestOutput]:
    """Return the results of all tasks. The first error cancels the others."""
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: "list[asyncio.Task[RequestOutput]] | list[asyncio.Task[None]]") -> None:
    """Cancel the tasks that have not ended, and wait for them."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
