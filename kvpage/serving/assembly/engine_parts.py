"""EngineParts: the parts of an engine, made and joined for one model and one EngineConfig.

model, EngineConfig ─► ServableModel ─► blocks: a number, caches, a manager ─► EngineParts ─► Engine

    Intake          prompts are checked, and become requests
    ServingLoop ──► BatchRunner ─► the model, over the blocks of the caches
         ├────────► Scheduler ───► BlockManager: which request has which block
         └────────► Connectors ──► a store, kept segments
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeGuard

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvpage.blend.segments import MemorySegments, SegmentCache
from kvpage.blend.stored_segments import StoredSegments
from kvpage.blocks.load_or_compute import LoadOrCompute
from kvpage.blocks.manager import BlockManager
from kvpage.cache.cache_engine import CacheEngine
from kvpage.checks.interrupts import HeldInterrupts
from kvpage.layout.config import CacheConfig, ModelConfig
from kvpage.observe.events.config import SpecKind
from kvpage.observe.telemetry import Telemetry
from kvpage.ops import attends_in_place
from kvpage.ops.args.tokens import COMPUTE_DTYPES
from kvpage.serving.assembly.block_count import with_blocks
from kvpage.serving.assembly.parts import (
    RankParts,
    ServableModel,
    assemble_rank,
    check_arguments,
    check_servable,
    without_autocast,
)
from kvpage.serving.assembly.session_parts import make_sessions
from kvpage.serving.assembly.store_parts import make_store_connector
from kvpage.serving.assembly.weight_updates import WeightUpdates
from kvpage.serving.blending.blender import Blender
from kvpage.serving.blending.blender_check import checked_blender
from kvpage.serving.blending.connector import BlendConnector
from kvpage.serving.config import EngineConfig
from kvpage.serving.loop.batch.batch_runner import BatchRunner
from kvpage.serving.loop.batch.device_decoder import DeviceDecoder
from kvpage.serving.loop.batch.step_groups import StepGroups
from kvpage.serving.loop.connectors import Connectors
from kvpage.serving.loop.graphs.capture import Capturer, CudaCapturer
from kvpage.serving.loop.graphs.decode_graphs import captures_decodes, graphs_of
from kvpage.serving.loop.graphs.padding import PaddedSteps, StepLimits
from kvpage.serving.loop.graphs.warmup import rehearse_blending, warm_up
from kvpage.serving.loop.intake import Intake
from kvpage.serving.loop.moves.block_transfers import BlockTransfers
from kvpage.serving.loop.ranks.follower import Follower
from kvpage.serving.loop.ranks.lead import Lead
from kvpage.serving.loop.ranks.rank_caches import RankCaches
from kvpage.serving.loop.ranks.ranked_store import RankedStore, StoreFollower
from kvpage.serving.loop.ranks.ranks import Ranks, Role
from kvpage.serving.loop.scheduler import Scheduler
from kvpage.serving.loop.serving_loop import ServingLoop
from kvpage.serving.loop.store_connector import BlockStore
from kvpage.serving.model.runner import ModelRunner
from kvpage.serving.params.defaults import ParamDefaults
from kvpage.serving.sessions.sessions import Sessions
from kvpage.serving.stats.debug import EngineDebug
from kvpage.serving.stats.engine_stats import EngineStats
from kvpage.serving.weights.engine_weights import EngineWeights
from kvpage.serving.weights.watch import WeightWatch
from kvpage.store import KVStore


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of one engine.

    config: with the number of blocks. lead: the side of the other ranks; None where there are none.
    """

    config: EngineConfig
    runner: ModelRunner
    caches: RankCaches
    manager: BlockManager
    telemetry: Telemetry
    defaults: ParamDefaults
    intake: Intake
    connectors: Connectors
    transfers: BlockTransfers
    scheduler: Scheduler
    batch_runner: BatchRunner
    loop: ServingLoop
    sessions: Sessions
    lead: Lead | None
    weights: EngineWeights
    updates: WeightUpdates

    @property
    def longest(self) -> int:
        """Tokens of a sequence at most, by the model and the blocks."""
        return min(self.intake.max_model_len, self.manager.num_blocks * self.manager.block_size)

    def connect_store(self, store: BlockStore, rule: LoadOrCompute | None) -> None:
        """Ask a store from now on. ValueError without prefix caching, and for a second store."""
        if not self.manager.enable_prefix_caching:
            raise ValueError("store needs enable_prefix_caching, by which requests find what comes out of it")
        if self.connectors.store:
            raise ValueError("store must be given once, the engine has one")
        connector = make_store_connector(self.config, store, self.caches, self.manager, self.transfers, rule)
        self.connectors.connect_store(connector)

    def warm_up(self, progress: Callable[[int], object] | None) -> None:
        """Compile and capture, in a step of its own; see Engine.warmup."""
        config, blend, connector = self.config, self.connectors.blend, self.connectors.store
        num_seqs = config.max_num_seqs if self.caches.states is None else 1  # each has a state beside the slots
        limits = StepLimits(num_seqs, config.max_num_batched_tokens, self.longest)
        steps = PaddedSteps(self.runner, self.caches, self.lead)
        beside: list[Callable[[], object]] = [] if connector is None else [connector.rehearse]
        if blend is not None:
            beside.append(partial(rehearse_blending, steps, limits, blend))
        graphs = self.batch_runner.graphs
        self.loop.between_requests(lambda: warm_up(steps, graphs, limits, progress, beside))

    def stats(self) -> EngineStats:
        """Return the numbers of an engine. Another thread than its own may call it."""
        scheduler, connectors, runner = self.scheduler, self.connectors, self.batch_runner
        manager, preemptions = self.manager, scheduler.preemptions
        return EngineStats(
            num_steps=runner.num_passes,
            num_computed_tokens=runner.num_computed_tokens,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_generated_tokens=self.loop.num_generated_tokens,
            num_preemptions=preemptions.num,
            num_swaps=preemptions.num_swaps,
            num_finished=self.loop.num_finished,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_used_blocks=manager.num_blocks - manager.num_free_blocks,
            num_blocks=manager.num_blocks,
            blocks=manager.stats(),
            transfers=self.transfers.stats(),
            residency=self.telemetry.residency(),
            num_lost_events=self.telemetry.num_lost_events,
            store=replace(connectors.store.stats) if connectors.store else None,
            blend=replace(connectors.blend.stats) if connectors.blend else None,
            graphs=runner.graphs.stats() if runner.graphs else None,
            windows=tuple(window.blocks.stats() for window in manager.windows),
            slot_bytes=_slot_bytes(self.caches),
            numerics=self.caches.full.numerics or None,
            sessions=self.sessions.stats(),
            weights=self.weights.stats(),
        )

    def debug(self) -> EngineDebug:
        """Return the parts by the names of their roles, for tests."""
        return EngineDebug(
            runner=self.runner,
            connectors=self.connectors,
            transfers=self.transfers,
            batch_runner=self.batch_runner,
            decoder=self.loop.decoder,
            use_graphs=self.use_graphs,
            accept_weights=self.updates.accept,
        )

    def use_graphs(self, capturer: Capturer) -> None:
        """Let `warmup` capture decode steps."""
        self.batch_runner.use_graphs(graphs_of(self.runner, self.caches, capturer, self.config, self.longest))


def assemble(
    model: PreTrainedModel,
    config: EngineConfig,
    store: BlockStore | None,
    segments: SegmentCache | None,
    tokenizer: PreTrainedTokenizerBase | None,
    refusals: Callable[[PreTrainedModel, CacheConfig], AbstractContextManager[None]],
) -> EngineParts:
    """Make the parts of an engine, or of rank 0 of several. Arguments and errors are those of Engine.from_model.

    refusals: names another way to compute the model, where a ValueError refuses it for one rank.
    """
    check_arguments(model, config, tokenizer)
    if config.num_window_blocks == "auto" and isinstance(store, BlockStore) and not store.has_layers:
        config = replace(config, num_window_blocks=None)
    if config.tensor_parallel_size == 1:
        with refusals(model, config.cache_config):
            servable = check_servable(model, config)
        return _joined(servable, with_blocks(servable, config), store, segments, tokenizer)
    lead = Lead(Ranks.join(model, config, Role.LEADS, store))
    with lead.assembling():
        servable = check_servable(model, config)
        ranked = None if store is None else RankedStore(store, lead.ranks, lead)
        return _joined(servable, with_blocks(servable, config, lead.ranks.least), ranked, segments, tokenizer, lead)


def follow(model: PreTrainedModel, config: EngineConfig, store: BlockStore | None) -> None:
    """Make the parts of a rank that follows, and compute with rank 0 until it closes its engine; see Engine.follow."""
    check_arguments(model, config)
    ranks = Ranks.join(model, config, Role.FOLLOWS, store)
    with HeldInterrupts():
        with ranks.together(), ranks.watch.waiting():
            servable = check_servable(model, config)
            caches = assemble_rank(servable, with_blocks(servable, config, ranks.least)).caches
            follower_store = None if store is None else StoreFollower(store, caches.full, ranks)
            ranks.meet()
        Follower(ranks, servable.runner, caches, follower_store).run()


def _joined(
    servable: ServableModel,
    config: EngineConfig,
    store: BlockStore | None,
    segments: SegmentCache | None,
    tokenizer: PreTrainedTokenizerBase | None,
    lead: Lead | None = None,
) -> EngineParts:
    """Make the parts, and connect a store and segments. lead: the side of the other ranks; None without any."""
    rank_parts = assemble_rank(servable, config)
    rule, store_rule = (_make_rule(config, servable.config) for _ in range(2))  # the two differ in speed
    manager = BlockManager.of(config.block_config(), rule, rank_parts.groups)
    blender = _blender(servable, config)
    if segments is not None and blender is None:
        raise ValueError("segments must be None without blend")
    spec_kind: SpecKind = "mla_attention" if servable.config.use_mla else "full_attention"
    telemetry = Telemetry(manager.tree, config.events, config.residency_sample_rate, spec_kind)
    parts = _looped(servable, config, rank_parts, manager, telemetry, rule, tokenizer, lead)
    if store is not None:
        parts.connect_store(store, store_rule)
    if config.blend is not None and blender is not None:
        cache = parts.caches.full
        kept_segments = _default_segments(store, cache, config.blend.max_bytes) if segments is None else segments
        connector = BlendConnector(blender, kept_segments, cache, manager, parts.runner.model.dtype)
        parts.connectors.connect_blend(connector)
    return parts


def _looped(
    servable: ServableModel,
    config: EngineConfig,
    rank_parts: RankParts,
    manager: BlockManager,
    telemetry: Telemetry,
    rule: LoadOrCompute | None,
    tokenizer: PreTrainedTokenizerBase | None,
    lead: Lead | None,
) -> EngineParts:
    """Make the loop, and all that it asks. rule: whether blocks of the host are loaded; None for always."""
    runner, caches, connectors = servable.runner, rank_parts.caches, Connectors()
    tell = None if lead is None else lead.move
    transfers = BlockTransfers(caches.full, manager, rule, tell=tell and partial(tell, 0))
    scheduler = Scheduler(
        manager,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        servable.attention.window if rank_parts.shares_blocks else None,
        turns=connectors,
        reclaimers=[connectors.reclaim],
        explains=config.explains_requests,
    )
    groups = StepGroups(manager, caches, tell)
    batch_runner = BatchRunner(runner, caches, manager, transfers, lead, groups)
    weights, watch = EngineWeights(), WeightWatch(runner.model)
    loop = ServingLoop(batch_runner, scheduler, connectors, telemetry, weights, rule)
    parts = EngineParts(
        config=config,
        runner=runner,
        caches=caches,
        manager=manager,
        telemetry=telemetry,
        defaults=rank_parts.defaults,
        intake=Intake(
            runner.model,
            manager,
            rank_parts.defaults,
            rank_parts.max_model_len,
            tokenizer,
            connectors.blend_config,
            config.same_bits,
            weights,
        ),
        connectors=connectors,
        transfers=transfers,
        scheduler=scheduler,
        batch_runner=batch_runner,
        loop=loop,
        sessions=make_sessions(manager, transfers, connectors, config.sessions, weights, loop.check_between_steps),
        lead=lead,
        weights=weights,
        updates=WeightUpdates(loop, scheduler, connectors, telemetry, weights, watch, config.changed_weights),
    )
    parts.loop.keep(parts.sessions)
    _connect_device(parts)
    return parts


def _connect_device(parts: EngineParts) -> None:
    """On a GPU, let decode steps leave their tokens on the device, and capture them at `warmup`.

    Other ranks get the tokens of each step from the host, and begin it as it is.
    """
    config, device = parts.config, parts.caches.full.device
    if device.type != "cuda" or parts.lead is not None:
        return
    runs_ahead = config.async_scheduling is not False
    draws = attends_in_place(device) and parts.runner.model.dtype in COMPUTE_DTYPES  # by kernels of kvpage's
    parts.loop.use_decoder(DeviceDecoder(parts.batch_runner, parts.scheduler, runs_ahead, draws))
    if captures_decodes(config):
        parts.use_graphs(CudaCapturer(device))


def _blender(servable: ServableModel, config: EngineConfig) -> Blender | None:
    if config.blend is None:
        return None
    with without_autocast(servable.runner.model.device):
        return checked_blender(config.blend, servable.runner, config.cache_config, servable.config)


def _slot_bytes(caches: RankCaches) -> int:
    """Return the bytes of a state slot and its tail block; 0 without states."""
    if caches.states is None:
        return 0
    layers = caches.full.gpu_cache
    return caches.states.layout.slot_bytes + sum(layer.nbytes // caches.full.num_gpu_blocks for layer in layers)


def _make_rule(config: EngineConfig, model_config: ModelConfig) -> LoadOrCompute | None:
    """Return the rule by which blocks of one tier are loaded or computed; None if they are always loaded."""
    if not config.load_or_compute or model_config.is_attention_free:
        return None
    block_bytes = CacheEngine.get_cache_block_size(config.cache_config, model_config)
    return LoadOrCompute(block_bytes, config.cache_config.block_size)


def _default_segments(store: BlockStore | None, cache: CacheEngine, max_bytes: int) -> SegmentCache:
    """Return segments in the store, where that can hold rows of the cache as they are, or in host memory."""
    return StoredSegments(store) if _keeps_rows(store, cache) else MemorySegments(max_bytes)


def _keeps_rows(store: BlockStore | None, cache: CacheEngine) -> TypeGuard[KVStore]:
    if not isinstance(store, KVStore) or cache.layout.is_quantized:
        return False
    return store.metadata.kv_dtype in (None, cache.layout.dtype)
