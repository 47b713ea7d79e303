"""RemoteLoop: the loop of a RemoteEngine. A step waits for messages of workers.

stepping thread                         event loop, in a thread of its own
add ─────► RemoteRequest.run ─────────► Workers.stream ─► outputs ─┐
try_step ◄──────────────────────────────────────────────── news ◄──┘
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice

from kvpage.checks.thread_guard import ThreadGuard
from kvpage.checks.values import check_at_least
from kvpage.checks.wait_limit import WaitLimit, wait_for_one
from kvpage.integrations.remote.calls import Workers
from kvpage.integrations.remote.remote_request import RemoteRequest
from kvpage.serving.loop.outputs import RequestOutput, StepOutput
from kvpage.serving.loop.request import Request
from kvpage.serving.stats.request_state import RequestState

MAX_WAIT = 60.0  # seconds of a step without news


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """The rules by which requests go to workers.

    Attributes:
        max_tries: Workers that one request is given to, one after the other, where they are lost.
        min_prefill_tokens: Prompts of fewer tokens are computed by the decode worker itself.

    Raises:
        ValueError: A number is too small.
    """

    max_tries: int = 4
    min_prefill_tokens: int = 1

    def __post_init__(self) -> None:
        check_at_least("max_tries", self.max_tries, 1)
        check_at_least("min_prefill_tokens", self.min_prefill_tokens, 1)


class RemoteLoop:
    """The unfinished requests, by id, and their streams. It has a thread with an event loop until `close`.

    Args:
        decode: Workers that give all tokens of a request.
        prefill: Workers that compute prompts for them. None lets the decode workers do that.
        settings: Which way requests go.
    """

    def __init__(self, decode: Workers, prefill: Workers | None, settings: RemoteSettings) -> None:
        self.requests: dict[str, Request] = {}
        self.thread = ThreadGuard("the engine")
        self.num_finished = self.num_retries = 0
        self._decode, self._prefill, self._settings = decode, prefill, settings
        self._remote: dict[str, RemoteRequest] = {}
        self._num_started = 0
        self._news: deque[tuple[RemoteRequest, Sequence[StepOutput]]] = deque()
        self._lock = threading.Lock()
        self._has_news: Future[None] = Future()
        self._limit: Callable[[], WaitLimit] | None = None
        self._events = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(target=self._events.run_forever, name="kvpage-remote", daemon=True)
        self._loop_thread.start()

    def add(self, request: Request) -> None:
        """Send it to a worker. ValueError if its id is in use."""
        if request.request_id in self.requests:
            raise ValueError(f"request_id must not be in use, {request.request_id!r} is")
        remote = RemoteRequest(request, self._put)
        self.requests[request.request_id], self._remote[request.request_id] = request, remote
        prefill = self._prefill if self._goes_apart(request) else None
        running = remote.run(self._decode, prefill, self._settings.max_tries)
        remote.future = asyncio.run_coroutine_threadsafe(running, self._events)

    def abort(self, request: Request) -> RequestOutput:
        """End it now, and its stream soon; return its outcome."""
        remote = self._forget(request)
        if remote.future is not None:
            remote.future.cancel()
        return remote.outcome()

    def try_step(self) -> None:
        """Wait for outputs, no longer than the limit, and hand them to their requests' sinks."""
        limit = None if self._limit is None else self._limit()
        wait_for_one([self._has_news], time.monotonic() + MAX_WAIT, limit)
        with self._lock:
            news, self._news = self._news, deque()
            if news:
                self._has_news = Future()
        for remote, items in news:
            if self._remote.get(remote.request.request_id) is remote:
                self._hand_out(remote, items)

    def limit_waits(self, limit: Callable[[], WaitLimit] | None) -> None:
        """Have steps that only wait end early."""
        self._limit = limit

    @property
    def next_due(self) -> float:
        """Return infinity: nothing is due between requests."""
        return float("inf")

    def tend(self) -> None:
        """Do nothing."""

    @property
    def num_waiting(self) -> int:
        """Return how many requests have no token yet."""
        return len(self.requests) - self._num_started

    def states(self, limit: int) -> list[RequestState]:
        """Return how far requests are, `limit` at most: requests with tokens first."""
        begun = islice((request for request in self._remote.values() if request.is_started), limit)
        states = [request.state() for request in begun]
        waiting = islice((request for request in self._remote.values() if not request.is_started), limit - len(states))
        return states + [request.state() for request in waiting]

    def close(self) -> None:
        """End all streams, and the thread. A second call does nothing."""
        if self._events.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._events).result(MAX_WAIT)
        self._events.call_soon_threadsafe(self._events.stop)
        self._loop_thread.join()
        self._events.close()

    def _goes_apart(self, request: Request) -> bool:
        params, long = request.params, self._settings.min_prefill_tokens
        is_long = self._prefill is not None and request.num_prompt_tokens >= long
        return is_long and params.max_tokens != 1 and getattr(params, "prompt_logprobs", None) is None

    def _put(self, remote: RemoteRequest, items: Sequence[StepOutput]) -> None:
        """Keep outputs for the next step, and wake it. On the event loop's thread."""
        with self._lock:
            self._news.append((remote, items))
            if not self._has_news.done():
                self._has_news.set_result(None)

    def _hand_out(self, remote: RemoteRequest, items: Sequence[StepOutput]) -> None:
        sink = remote.request.group.sink
        assert sink is not None, "AsyncEngine gives each request one"
        self._num_started += remote.start()
        for item in items:
            sink.append(item)
            if item.output is not None:
                self._forget(remote.request)

    def _forget(self, request: Request) -> RemoteRequest:
        del self.requests[request.request_id]
        remote = self._remote.pop(request.request_id)
        self._num_started -= remote.is_started
        self.num_finished += 1
        self.num_retries += remote.num_tries - 1 if remote.num_tries else 0
        return remote


async def _cancel_all() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
