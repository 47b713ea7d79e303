"""StepGate: lets the steps of an AsyncEngine through one by one, so that requests are under way while it asks."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from kvpage.serving import AsyncEngine

MANY = 10**6


class StepGate:
    """A gate before each step; num_steps of them pass at once."""

    def __init__(self, live: AsyncEngine, num_steps: int) -> None:
        self._live, self._gate = live, threading.Semaphore(num_steps)
        loop = live.engine.loop
        step = loop.try_step

        def try_step() -> Exception | None:
            self._gate.acquire()
            return step()

        loop.try_step = try_step

    async def ask(self, question: Callable[[Any], Any]) -> Any:
        """Return what a function says of the engine after at most one more step."""
        answer = self._live.call(question)
        self._gate.release()
        return await asyncio.wrap_future(answer)

    def open(self) -> None:
        """Let all steps through from now on."""
        self._gate.release(MANY)
