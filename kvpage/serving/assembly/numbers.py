"""EngineNumbers: what an engine tells of itself: counters, its requests, and what is cached of a prompt."""

from dataclasses import replace

from kvpage.blocks.explain import Explanation
from kvpage.blocks.manager import BlockManager
from kvpage.cache.cache_engine import CacheEngine
from kvpage.checks.tokens import Tokens
from kvpage.checks.values import check_at_least
from kvpage.observe.telemetry import Telemetry
from kvpage.ops.cuda.libraries.rules import OURS
from kvpage.serving.loop.batch.batch_runner import BatchRunner
from kvpage.serving.loop.connectors import Connectors
from kvpage.serving.loop.intake import Intake
from kvpage.serving.loop.moves.block_transfers import BlockTransfers
from kvpage.serving.loop.scheduler import Scheduler
from kvpage.serving.loop.serving_loop import ServingLoop
from kvpage.serving.loop.store_connector import BlockStore
from kvpage.serving.stats import EngineStats
from kvpage.serving.stats.request_state import RequestState, request_states


class EngineNumbers:
    """The part of an engine that only reads. EngineCore makes the parts that it asks."""

    cache: CacheEngine
    manager: BlockManager
    scheduler: Scheduler
    telemetry: Telemetry
    _batch_runner: BatchRunner
    _connectors: Connectors
    _intake: Intake
    _loop: ServingLoop
    _transfers: BlockTransfers

    @property
    def store(self) -> BlockStore | None:
        """The store that is asked; None without one."""
        return None if self._connectors.store is None else self._connectors.store.store

    @property
    def attention_backend(self) -> str:
        """What attends over the blocks: the library that the engine has chosen, or "kvpage"."""
        library = next(iter(self.cache.bound_layers.values())).library
        return OURS if library is None else library.name

    def stats(self) -> EngineStats:
        """Return counters and the state now.

        Returns:
            The numbers. Another thread may ask while the engine works; then they are not all of one moment.
        """
        loop, scheduler, connectors = self._loop, self.scheduler, self._connectors
        return EngineStats(
            num_steps=self._batch_runner.num_passes,
            num_computed_tokens=self._batch_runner.num_computed_tokens,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_generated_tokens=loop.num_generated_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_swaps=scheduler.num_swaps,
            num_finished=loop.num_finished,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_used_blocks=self.manager.num_blocks - self.manager.num_free_blocks,
            num_blocks=self.manager.num_blocks,
            blocks=self.manager.stats(),
            transfers=self._transfers.stats(),
            residency=self.telemetry.residency(),
            num_lost_events=self.telemetry.num_lost_events,
            store=replace(connectors.store.stats) if connectors.store else None,
            blend=replace(connectors.blend.stats) if connectors.blend else None,
            graphs=self._batch_runner.graphs.stats() if self._batch_runner.graphs else None,
        )

    def explain(self, tokens: Tokens, namespace: bytes = b"") -> Explanation:
        """Return how far what is cached reaches into a prompt, and why it ends there, for each group of layers.

        Args:
            tokens: Token ids of a prompt.
            namespace: Where to search.

        Returns:
            The explanation. Nothing changes by it, not even what counts as used.

        Raises:
            ValueError, TypeError: As `add_request` for tokens and namespace.
        """
        return self.manager.explain(self._intake.check_tokens(tokens), namespace)

    def request_states(self, limit: int) -> list[RequestState]:
        """Return how far the unfinished requests are: those that run first, then those that wait.

        Args:
            limit: The largest number of states. A long queue is not read to its end.

        Returns:
            The states. Ask between two steps, as by `AsyncEngine.call`.

        Raises:
            ValueError: `limit` is negative.
        """
        check_at_least("limit", limit, 0)
        return request_states(self.scheduler, self._connectors, limit)
