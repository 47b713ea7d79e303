"""RemoteRequest: one request on its way over one worker after the other, and over two at once.

together   decode worker: computes the prompt, and all tokens
apart      prefill worker: computes the prompt, stores its chunks as they are done, gives the first token ─► reader
           decode worker:  loads the chunks as they come, gives the first token again (left out), and all others
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from kvpage.integrations.remote.calls import GenerateCall, WorkerLost, Workers
from kvpage.integrations.remote.delivered import Delivered, Diverged
from kvpage.serving.loop.outputs import RequestOutput, StepOutput
from kvpage.serving.loop.request import Request
from kvpage.serving.params.sampling import SamplingParams
from kvpage.serving.stats.request_state import RequestState

Put = Callable[["RemoteRequest", Sequence[StepOutput]], object]
BACKOFF = 0.05  # seconds before the second try; doubled with each one


class RemoteRequest:
    """A request of a RemoteLoop.

    put: takes its outputs, on the event loop's thread. future: of `run`. is_started: whether its reader has anything.
    """

    def __init__(self, request: Request, put: Put) -> None:
        self.request, self._put = request, put
        self.delivered = Delivered(request.request_id, request.params.n)
        self.future: Future[Any] | None = None
        self.num_tries, self.is_started = 0, False
        self.first_token_time: float | None = None

    def start(self) -> bool:
        """Note that its reader has something. Returns whether it had nothing before."""
        is_first, self.is_started = not self.is_started, True
        return is_first

    def state(self) -> RequestState:
        """Return how far it is, as its reader knows it."""
        request, num_prompt = self.request, self.request.num_prompt_tokens
        return RequestState(
            request_id=request.request_id,
            sample_index=0,
            namespace=request.namespace,
            stage="decode" if self.is_started else "waiting",
            num_prompt_tokens=num_prompt,
            num_cached_tokens=0,
            num_loaded_tokens=0,
            num_computed_tokens=num_prompt if self.is_started else 0,
            num_generated_tokens=self.delivered.num_tokens,
            arrival_time=request.group.arrival_time,
            first_token_time=self.first_token_time,
        )

    async def run(self, decode: Workers, prefill: Workers | None, max_tries: int) -> None:
        """Get its outputs, from other workers where some are lost. prefill: None computes all at one worker."""
        while True:
            self.num_tries += 1
            self.delivered.restart()
            try:
                if prefill is None or self.num_tries > 1:
                    await self._decode(decode, False)
                else:
                    await self._apart(decode, prefill)
                return
            except Diverged as error:
                return self._fail(str(error))
            except WorkerLost as error:
                if self.num_tries >= max_tries:
                    return self._fail(f"{self.num_tries} workers were lost, the last one by: {error}")
            except Exception as error:  # the worker's answer is the reader's
                return self._fail(f"{type(error).__name__}: {error}")
            await asyncio.sleep(BACKOFF * 2 ** (self.num_tries - 1))

    def outcome(self, output: RequestOutput | None = None) -> RequestOutput:
        """Return its outcome, with times of this machine. None: of the tokens that have come by now."""
        request = self.request
        times = request.group.arrival_time, self.first_token_time, time.monotonic()
        if output is None:
            prompt = request.prompt.tolist()
            return RequestOutput(request.request_id, prompt, self.delivered.partial(), 0, *times)
        arrival, first, finish = times
        return replace(
            output, request_id=request.request_id, arrival_time=arrival, first_token_time=first, finish_time=finish
        )

    # --- on the event loop -------------------------------------------------------------------------------------------

    async def _decode(self, workers: Workers, is_arriving: bool) -> None:
        async with aclosing(workers.stream(self._call("", self.request.params, is_arriving))) as stream:
            async for items in stream:
                self._take(self.delivered.fresh(items))
        if self.delivered.output is None:
            raise WorkerLost("a worker ended its answer early")

    async def _prefill(self, workers: Workers) -> None:
        params = self.request.params
        prefill_params = replace(params, max_tokens=1, min_tokens=min(params.min_tokens or 0, 1))
        async with aclosing(workers.stream(self._call("-prefill", prefill_params, False))) as stream:
            async for items in stream:
                self._take(self.delivered.early(items))

    async def _apart(self, decode: Workers, prefill: Workers) -> None:
        """Have the prompt computed elsewhere. If that worker is lost, one worker computes all."""
        begun = asyncio.ensure_future(self._prefill(prefill))
        going = asyncio.ensure_future(self._decode(decode, True))
        try:
            await asyncio.wait((begun, going), return_when=asyncio.FIRST_COMPLETED)
            if not going.done() and begun.exception() is not None:
                raise WorkerLost(f"a prefill worker was lost: {begun.exception()}")
            await going
        finally:
            for task in (begun, going):
                task.cancel()
            await asyncio.gather(begun, going, return_exceptions=True)

    def _call(self, suffix: str, params: SamplingParams, is_arriving: bool) -> GenerateCall:
        request = self.request
        call_id = f"{request.request_id}-{self.num_tries}{suffix}"
        if not params.is_greedy:
            params = replace(params, seed=request.seed)
        return GenerateCall(
            call_id,
            request.prompt,
            params,
            namespace=request.namespace,
            priority=request.group.priority,
            is_arriving=is_arriving,
            cache_at=tuple(request.cache_at),
        )

    def _take(self, items: list[StepOutput]) -> None:
        if items and self.first_token_time is None:
            self.first_token_time = time.monotonic()
        if items:
            self._put(self, [self._finished(item) for item in items])

    def _finished(self, item: StepOutput) -> StepOutput:
        return item if item.output is None else item._replace(output=self.outcome(item.output))

    def _fail(self, reason: str) -> None:
        output = self.outcome()
        samples = tuple(replace(sample, finish_reason="error", error=reason) for sample in output.samples)
        failed = replace(output, samples=samples)
        self._put(self, [StepOutput(self.request.request_id, None, 0, "error", failed, reason)])
