"""Runner: jobs to outputs, by an AsyncEngine.

    whole:   Job ─► AsyncEngine.generate, one a prompt ─► outputs
    stream:  Job ─► AsyncEngine.submit, one a prompt ─► (prompt, outputs), as they come

A job that is left, by an error or a cancellation, leaves nothing in the engine.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from kvpage.server.metrics.latencies import Latencies
from kvpage.server.page.ended import EndedRequests
from kvpage.server.protocol.errors import REFUSED, as_api_error
from kvpage.server.running.cache_work import CacheWishes, CacheWork
from kvpage.serving import AsyncEngine, LiveRequest, SamplingParams
from kvpage.serving.loop.outputs import RequestOutput, StepOutput

MAX_AHEAD = 4  # lists of outputs of a batch that wait for a slow client; the engine's limits hold behind them
Turn = tuple[int, list[StepOutput]]
NO_WISHES = CacheWishes()
ANSWERED = "stop", "length"
"""The finish reasons of an answer that is whole."""


@dataclass(frozen=True, slots=True)
class Job:
    """Prompts with their parameters, and the fields that they share.

    Attributes:
        prompts: Token ids of each prompt.
        params: One for each prompt.
        namespace: Where cached blocks are searched and kept.
        priority: Requests with a lower one are scheduled first.
        timeout: Seconds; None for no deadline.
        wishes: What it asks of the cache.
        cache_at: Positions of each prompt at which other prompts may go on.
        compiled: The CompiledGuide of the answers, which is held until they are queued; None for any form.
    """

    prompts: list[list[int]]
    params: list[SamplingParams]
    namespace: bytes = b""
    priority: int = 0
    timeout: float | None = None
    wishes: CacheWishes = NO_WISHES
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
        work: Does what jobs ask of the cache.
    """

    def __init__(
        self, engine: AsyncEngine, latencies: Latencies, ended: EndedRequests, tenant_pin_quota: int | None = None
    ) -> None:
        self._engine, self._latencies, self._page = engine, latencies, ended
        self.work = CacheWork(engine, tenant_pin_quota)

    @property
    def has_blocks(self) -> bool:
        """Whether the cached blocks are in this process."""
        return self.work.has_blocks

    def check_room(self, num_prompts: int) -> None:
        """Raise ApiError 503 unless the engine takes num_prompts prompts now: a full queue costs no more than this."""
        try:
            self._engine.check_room(num_prompts)
        except REFUSED as error:
            raise as_api_error(error) from error

    async def whole(self, job: Job) -> list[RequestOutput]:
        """Run a job to its end. ApiError if the engine takes it not."""
        arguments = job.arguments()
        if job.wishes is not NO_WISHES:
            self.work.begin(job.wishes, job.namespace)
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
        if job.wishes is not NO_WISHES:
            self._end(job, outputs)
        return outputs

    def submit(self, job: Job) -> list[LiveRequest]:
        """Queue all prompts of a job, or none. ApiError if the engine takes one not."""
        requests: list[LiveRequest] = []
        if job.wishes is not NO_WISHES:
            self.work.begin(job.wishes, job.namespace)
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
        if job.wishes is not NO_WISHES:
            self._end(job, [request.output for request in requests])

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

    def _end(self, job: Job, outputs: Sequence[RequestOutput | None]) -> None:
        """Do what the job asks of the cache, now that it has ended."""
        first = outputs[0]
        is_answered = first is not None and first.samples and first.finish_reason in ANSWERED
        answer = first.token_ids if first is not None and is_answered else None
        self.work.end(job.wishes, job.prompts, job.namespace, answer)


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
