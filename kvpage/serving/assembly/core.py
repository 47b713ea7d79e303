"""EngineCore: the parts of an engine put together: its loop, its blocks, and all that is beside requests and tokens.

EngineCore ─► Intake: prompts are checked, and become requests
   └────────► ServingLoop ─► BatchRunner ─► the model, over the blocks of CacheEngine
                  ├────────► Scheduler ───► BlockManager: which request has which block
                  └────────► Connectors ──► a store, kept segments
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import torch
from transformers import PreTrainedTokenizerBase

from kvpage.blend.config import BlendConfig
from kvpage.blend.segments import SegmentCache
from kvpage.blocks.load_or_compute import LoadOrCompute
from kvpage.checks.interrupts import HeldInterrupts, uninterrupted
from kvpage.checks.values import check_at_least
from kvpage.ops import attends_in_place
from kvpage.ops.args.tokens import COMPUTE_DTYPES
from kvpage.ops.cuda.libraries.rules import OURS
from kvpage.serving.assembly.parts import EngineParts
from kvpage.serving.assembly.prompts import EnginePrompts
from kvpage.serving.assembly.store_parts import make_store_connector
from kvpage.serving.blending.blender import Blender
from kvpage.serving.blending.connector import BlendConnector
from kvpage.serving.config import EngineConfig
from kvpage.serving.debug import EngineDebug
from kvpage.serving.loop.batch.batch_runner import BatchRunner
from kvpage.serving.loop.batch.device_decoder import DeviceDecoder
from kvpage.serving.loop.batch.step_groups import StepGroups
from kvpage.serving.loop.connectors import Connectors
from kvpage.serving.loop.graphs.capture import Capturer, CudaCapturer
from kvpage.serving.loop.graphs.decode_graphs import captures_decodes, graphs_of
from kvpage.serving.loop.graphs.padding import PaddedSteps, StepLimits
from kvpage.serving.loop.graphs.warmup import rehearse_blending, warm_up
from kvpage.serving.loop.intake import Intake, Prompt
from kvpage.serving.loop.moves.block_transfers import BlockTransfers
from kvpage.serving.loop.ranks.lead import Lead
from kvpage.serving.loop.request import Request
from kvpage.serving.loop.scheduler import Scheduler
from kvpage.serving.loop.serving_loop import ServingLoop
from kvpage.serving.loop.store_connector import BlockStore
from kvpage.serving.model.step import BatchItem
from kvpage.serving.stats import EngineStats
from kvpage.serving.stats.request_state import RequestState, request_states


class EngineCore(EnginePrompts):
    """The parts of an engine, and the calls that concern the engine as a whole. See Engine."""

    def __init__(
        self,
        config: EngineConfig,
        parts: EngineParts,
        lead: Lead | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """Put the parts together. lead: the side of other ranks; None where there are none."""
        runner, manager, caches = parts.runner, parts.manager, parts.caches
        self.states, self.defaults, self.max_model_len = caches.states, parts.defaults, parts.max_model_len
        self._lead = lead
        self.config, self.tokenizer = config, tokenizer
        self.cache, self.manager, self.telemetry = caches.full, manager, parts.telemetry
        self.window_caches, self._caches = tuple(caches.windows), caches
        self._runner, self._connectors = runner, Connectors()
        tell = None if lead is None else lead.move
        self._transfers = BlockTransfers(self.cache, manager, parts.rule, tell=tell and partial(tell, 0))
        self.scheduler = Scheduler(
            self.manager,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            parts.window,
            turns=self._connectors,
            reclaimers=[self._connectors.reclaim],
        )
        groups = StepGroups(manager, caches, tell)
        self._batch_runner = BatchRunner(runner, caches, self.manager, self._transfers, lead, groups)
        self._loop = ServingLoop(self._batch_runner, self.scheduler, self._connectors, self.telemetry, parts.rule)
        self._connect_device()
        self._intake = Intake(runner.model, manager, parts.defaults, parts.max_model_len, tokenizer)
        self.vocab_size, self.eos_token_ids = self._intake.vocab_size, self._intake.eos_token_ids

    def _connect_device(self) -> None:
        """On a GPU, let decode steps leave their tokens on the device, and capture them at `warmup`.

        Other ranks get the tokens of each step from the host, and begin it as it is.
        """
        config, device = self.config, self.cache.device
        if device.type != "cuda" or self._lead is not None:
            return
        runs_ahead = config.async_scheduling is not False
        draws = attends_in_place(device) and self._runner.model.dtype in COMPUTE_DTYPES  # by kernels of kvpage's
        self._loop.use_decoder(DeviceDecoder(self._batch_runner, self.scheduler, runs_ahead, draws))
        if captures_decodes(config):
            self._use_graphs(CudaCapturer(device))

    def _use_graphs(self, capturer: Capturer) -> None:
        graphs = graphs_of(self._runner, self._caches, capturer, self.config, self._longest)
        self._batch_runner.use_graphs(graphs)

    @property
    def _longest(self) -> int:
        """Tokens of a sequence at most, by the model and the blocks."""
        return min(self.max_model_len, self.manager.num_blocks * self.manager.block_size)

    def use_store(self, store: BlockStore, rule: LoadOrCompute | None = None) -> None:
        """Ask a store for all that the blocks do not hold, and store finished prefills, from now on.

        Both happen in the background, while other requests compute. Close the engine before the store.

        Args:
            store: A `kvpage.store.KVStore` or another BlockStore. It stays its owner's to close.
            rule: Whether loading is worth it. None means always.

        Raises:
            ValueError: The engine has no prefix caching, or has a store already. It is one of several ranks: each
                gives its store to `from_model` or `follow`.
        """
        if self._lead is not None:
            raise ValueError("use_store needs tensor_parallel_size=1: with more, give stores to from_model and follow")
        self._connect_store(store, rule)

    def _connect_store(self, store: BlockStore, rule: LoadOrCompute | None) -> None:
        if not self.manager.enable_prefix_caching:
            raise ValueError("store needs enable_prefix_caching, by which requests find what comes out of it")
        if self._connectors.store:
            raise ValueError("store must be given once, the engine has one")
        cache, manager, transfers = self.cache, self.manager, self._transfers
        self._connectors.connect_store(
            make_store_connector(self.config, store, cache, manager, transfers, rule, self.states, self.window_caches)
        )

    def use_segments(self, blender: Blender, segments: SegmentCache) -> None:
        """Reuse and keep segments from now on, for prompts that ask for it; `from_model` calls it.

        Args:
            blender: Blends prompts of this engine's model.
            segments: Keeps the segments.
        """
        dtype = self._runner.model.dtype
        self._connectors.connect_blend(BlendConnector(blender, segments, self.cache, self.manager, dtype))

    def warmup(self, progress: Callable[[int], object] | None = None) -> None:
        """Compile all kernels that steps ask for, and compute some of padding; capture decode steps as CUDA graphs.

        Kernels are compiled side by side, in threads, those of a KVStore's chunks and of blending among them. Call it
        once, before the first request. A call between two steps is allowed, and captures anew: after weights or modules
        of the model were replaced, for example. A size that the memory does not suffice for is left out. Where nothing
        can be captured, the log says why, and decode steps run as without it. On a CPU nothing is compiled or captured.

        Args:
            progress: Called with the number of finished parts, like the `update` of a progress bar. None shows a bar on
                a terminal.

        Raises:
            RuntimeError: A step is under way.
            ValueError: The model is in training mode.
        """
        config, graphs = self.config, self._batch_runner.graphs
        num_seqs = config.max_num_seqs if self.states is None else 1  # each has a state of its own, beside the slots
        limits = StepLimits(num_seqs, config.max_num_batched_tokens, self._longest)
        steps = PaddedSteps(self._runner, self._caches, self._lead)
        beside: list[Callable[[], object]] = [self._connectors.store.rehearse] if self._connectors.store else []
        if self._connectors.blend is not None:
            beside.append(partial(rehearse_blending, steps, limits, self._connectors.blend))
        self._loop.between_requests(lambda: warm_up(steps, graphs, limits, progress, beside))

    def close(self) -> None:
        """Wait for all that is on its way to a store and to kept segments, and publish the last events.

        The engine goes on without them. Without a store, blending and events there is nothing to close. Other ranks
        end: an engine with these computes no more.
        """
        try:
            self._connectors.drain()
            self._close()
        finally:
            if self._lead is not None:
                self._lead.close()

    @uninterrupted
    def _close(self) -> None:
        self._loop.disconnect()
        self.telemetry.close()

    def reset_prefix_cache(self) -> None:
        """Forget all K and V. Call it after a change of the model's weights, before the next step.

        No request, new or under way, finds anything that was computed before. Forgotten is all that is cached in both
        tiers, in all namespaces, pinned or not, and the segments for blending in host memory. Unfinished requests keep
        their tokens, and compute the K and V of all of them again. The call waits for transfers of a store.

        A store is left as it is, with the segments in it, and is asked as before: its keys name the model. For other
        weights make a store whose metadata name another model, or another revision of it, and give it to another
        engine. A `segments` object of the caller's is emptied if it has a method `clear`. KVScales stay.

        Raises:
            RuntimeError: A step is under way, or there are live Branches; nothing is forgotten. Close these, and
                `clear` each PagedTokenTrie.
        """
        self._loop.check_between_steps("reset_prefix_cache")
        self._connectors.drain()
        with HeldInterrupts():
            num_branches = self.manager.stats().num_sequences - len(self.scheduler.running)
            if num_branches:
                raise RuntimeError(f"reset_prefix_cache needs all Branches to be closed, {num_branches} are live")
            self._loop.restart()
            self._connectors.forget_kept()
            self.manager.reset_prefix_cache()
            self.telemetry.tell()

    def saves_under_way(self) -> "list[Future[int]]":
        """Return what the store is being given now. A prompt is among it once its first token has come.

        Returns:
            A future of each prompt: of the number of its tokens that the store holds. None without a store. Do not wait
            for them on the engine's thread: other requests would wait, too.
        """
        return self._connectors.store.saves.futures if self._connectors.store else []

    # --- numbers -----------------------------------------------------------------------------------------------------

    @property
    def store(self) -> BlockStore | None:
        """The store that is asked; None without one."""
        return None if self._connectors.store is None else self._connectors.store.store

    @property
    def attention_backend(self) -> str:
        """What attends over the blocks: the library that the engine has chosen, or "kvpage"."""
        layer = next(iter(self.cache.bound_layers.values()), None)
        return OURS if layer is None or layer.library is None else layer.library.name

    def stats(self) -> EngineStats:
        """Return counters and the state now.

        Returns:
            The numbers. Another thread may ask while the engine works; then they are not all of one moment.
        """
        loop, scheduler, connectors = self._loop, self.scheduler, self._connectors
        preemptions = scheduler.preemptions
        return EngineStats(
            num_steps=self._batch_runner.num_passes,
            num_computed_tokens=self._batch_runner.num_computed_tokens,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_generated_tokens=loop.num_generated_tokens,
            num_preemptions=preemptions.num,
            num_swaps=preemptions.num_swaps,
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
            windows=tuple(window.blocks.stats() for window in self.manager.windows),
            slot_bytes=self._slot_bytes,
        )

    @property
    def _slot_bytes(self) -> int:
        """Bytes of a state slot and its tail block; 0 without states."""
        if self.states is None:
            return 0
        layers = self.cache.gpu_cache
        return self.states.layout.slot_bytes + sum(layer.nbytes // self.cache.num_gpu_blocks for layer in layers)

    @property
    def debug(self) -> EngineDebug:
        """The parts inside, by the names of their roles: for tests."""
        return EngineDebug(
            runner=self._runner,
            connectors=self._connectors,
            transfers=self._transfers,
            batch_runner=self._batch_runner,
            decoder=self._loop.decoder,
            use_graphs=self._use_graphs,
        )

    # --- for an AsyncEngine ------------------------------------------------------------------------------------------

    def prepare(self, prompt: Prompt, request_id: str) -> Request:
        """Check a prompt, and make a request of it that is not queued yet. Any thread may call it at any time.

        Args:
            prompt: The arguments of `add_request`.
            request_id: The id.

        Returns:
            The request.

        Raises:
            ValueError, TypeError: As `add_request`, but for an id that is in use.
        """
        request = self._intake.request(prompt, request_id, self._blend_config)
        self.scheduler.check(request)
        return request

    @property
    def loop(self) -> ServingLoop:
        """The loop: it queues requests that are prepared, and computes them."""
        return self._loop

    @property
    def _blend_config(self) -> BlendConfig | None:
        blender = self._connectors.blender
        return None if blender is None else blender.config

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

    # --- for Branches, and other owners of sequences -----------------------------------------------------------------

    def compute(self, items: Sequence[BatchItem]) -> torch.Tensor:
        """Compute tokens of sequences that belong to no request, in one forward pass.

        Args:
            items: The tokens. The manager has given room for them, and the caller commits them.

        Returns:
            The logits of the wanted tokens: [their number, vocab_size].

        Raises:
            RuntimeError: A step is under way.
            ValueError: The model is in training mode.
        """
        return self._loop.compute(items)

    @uninterrupted
    def make_room(self) -> bool:
        """Preempt the request that runs and is last in order. Where none runs, wait for blocks that a store is given.

        Returns:
            False if none runs, and no store holds blocks.
        """
        if not self.scheduler.running:
            return self._connectors.reclaim()
        self.scheduler.preempt_last()
        return True

    def add_reclaimer(self, reclaimer: Callable[[], bool]) -> None:
        """Ask one more for blocks, where running requests cannot give any.

        Args:
            reclaimer: Gives back some blocks; returns False if it cannot.
        """
        self.scheduler.reclaimers.append(reclaimer)

    def remove_reclaimer(self, reclaimer: Callable[[], bool]) -> None:
        """Ask a reclaimer no more. Removing one that is not there does nothing.

        Args:
            reclaimer: As it was added.
        """
        reclaimers = self.scheduler.reclaimers
        reclaimers[:] = [one for one in reclaimers if one != reclaimer]
