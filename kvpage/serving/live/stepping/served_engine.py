"""ServedEngine: the side of an engine that a Stepper, and the callers of an AsyncEngine, use."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from kvpage.blocks.manager import BlockManager
from kvpage.cache.cache_engine import CacheEngine
from kvpage.checks.thread_guard import ThreadGuard
from kvpage.checks.wait_limit import WaitLimit
from kvpage.observe.telemetry import Telemetry
from kvpage.serving.config import EngineConfig
from kvpage.serving.loop.intake import Prompt
from kvpage.serving.loop.outputs import RequestOutput
from kvpage.serving.loop.request import Request
from kvpage.serving.params.defaults import ParamDefaults
from kvpage.serving.stats.engine_stats import EngineStats


class ServedLoop(Protocol):
    """The loop of such an engine; ServingLoop is one."""

    requests: dict[str, Request]
    thread: ThreadGuard

    def add(self, request: Request) -> None:
        """Queue it. ValueError if its id is in use."""

    def abort(self, request: Request) -> RequestOutput:
        """End it now; return its outcome."""

    def try_step(self) -> Exception | None:
        """Compute one batch; return its exception if that is worth a second try."""

    def limit_waits(self, limit: Callable[[], WaitLimit] | None) -> None:
        """Have steps that only wait end early."""

    @property
    def next_due(self) -> float:
        """Return when `tend` has something to do, in seconds of time.monotonic()."""

    def tend(self) -> None:
        """Do what is due between requests."""

    @property
    def num_waiting(self) -> int:
        """Return how many requests wait."""


class ServedEngine(Protocol):
    """An engine that an AsyncEngine has; `kvpage.serving.Engine` is one."""

    config: EngineConfig
    cache: CacheEngine
    manager: BlockManager
    telemetry: Telemetry
    defaults: ParamDefaults
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]

    @property
    def loop(self) -> ServedLoop:
        """The loop."""

    @property
    def has_unfinished(self) -> bool:
        """Whether there are requests to compute, or outputs that nobody has taken."""

    def prepare(self, prompt: Prompt, request_id: str) -> Request:
        """Check a prompt, and make a request of it. Any thread may call it."""

    def stats(self) -> EngineStats:
        """Return counters and the state now. Any thread may call it."""

    def saves_under_way(self) -> "list[Future[int]]":
        """Return a future of each prompt that a store is being given."""

    def close(self) -> None:
        """Wait for all that is on its way to a store, and let go of it."""
