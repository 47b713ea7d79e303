"""DrainingServer: uvicorn, which finishes its requests before it ends.

before it serves:         a SIGTERM, SIGINT or SIGHUP ends the process ─► exit code 0
first of them:            /health is 503, no new requests, requests under way go on ─► exit code 0
second one:               the process ends at once
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from kvpage.server.service import Service
from kvpage.serving import EngineClosed

logger = logging.getLogger(__name__)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def taken_signals() -> list[signal.Signals]:
    """Return the signals that end a server: all but the signals that its parent ignores, as nohup does."""
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Have a signal end the process within the block, until a DrainingServer takes the signals."""

    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one ends it at once
        logger.info("ended before it served")
        raise SystemExit(0)

    before = {number: signal.signal(number, end) for number in taken_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class DrainingServer(uvicorn.Server):
    """A server process's main loop.

    Args:
        config: uvicorn's settings.
        service: The server's parts.
        drain_timeout: Seconds that requests under way have; then they are aborted.
        ready: Called once connections are taken.
    """

    def __init__(
        self, config: uvicorn.Config, service: Service, drain_timeout: float, ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._service, self._drain_timeout, self._ready = service, drain_timeout, ready
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Have signals drain the server, within the block."""
        loop = asyncio.get_running_loop()
        numbers = taken_signals()
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._draining is not None:
            print("kvpage serve: ended before its requests", flush=True)
            os._exit(128 + number)
        num_left = self._service.engine.stats().num_unfinished
        logger.info("%s: %d requests have %g s to end", number.name, num_left, self._drain_timeout)
        self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        self._service.begin_drain()
        try:
            num_aborted = await self._service.engine.drain(self._drain_timeout)
        except EngineClosed as error:
            logger.warning("nothing is left to be finished: %s", error)
            num_aborted = 0
        if num_aborted:
            logger.warning("%d requests were aborted after %g s", num_aborted, self._drain_timeout)
        self.should_exit = True
