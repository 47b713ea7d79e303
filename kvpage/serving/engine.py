"""Engine: requests in, tokens out, through a Hugging Face decoder whose K and V lie in paged blocks.

    add_request ─► Scheduler.schedule ─► ModelRunner.forward ─► sample ─► Scheduler.complete ─► StepOutput
                        blocks              K, V, logits         tokens      blocks findable

Everything happens inside `step()`: between two steps the caller's model is its own.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal, TypeGuard

import numpy as np
import torch
from transformers import PreTrainedModel

from kvpage.blend.config import BlendConfig
from kvpage.blend.segments import MemorySegments, SegmentCache
from kvpage.blend.spans import Span, spans_of_lengths
from kvpage.blend.stored_segments import StoredSegments
from kvpage.block_manager import BlockManager
from kvpage.block_space import HostPolicy
from kvpage.cache_engine import CacheEngine
from kvpage.config import CacheConfig, DeviceConfig, ModelConfig
from kvpage.events import EventConfig
from kvpage.kv_scales import KVScales
from kvpage.load_or_compute import LoadOrCompute
from kvpage.own_process import OwnProcess
from kvpage.sequence_args import as_integer, as_list, check_namespace
from kvpage.serving.beam_search import BeamSearchOutput, BeamSearchParams, search_beams
from kvpage.serving.blend_link import BlendLink
from kvpage.serving.blend_pass import BlendPass
from kvpage.serving.blender import Blender
from kvpage.serving.kv_calibration import choose_scales
from kvpage.serving.model_check import check_config, verify_model, verify_quantized
from kvpage.serving.model_limits import eos_token_ids, limited_model_len, vocab_size
from kvpage.serving.model_runner import ModelRunner, PackedTokens
from kvpage.serving.requests import Request, RequestOutput, StepOutput
from kvpage.serving.sampler import sample
from kvpage.serving.sampling_params import SamplingParams, check_params, params_of_each
from kvpage.serving.scheduler import Batch, Scheduler
from kvpage.serving.stats import EngineStats
from kvpage.serving.step import Piece, Step
from kvpage.serving.store_link import BlockStore, StoreLink
from kvpage.serving.token_stream import TokenStream
from kvpage.serving.transfer_meter import TransferMeter
from kvpage.store import KVStore
from kvpage.telemetry import Telemetry
from kvpage.tokens import Tokens, as_tokens


class Engine:
    """A serving loop over one model. Make it by `from_model`. Not thread-safe: one engine, one thread. A forked process
    needs one of its own: there, whatever computes raises RuntimeError.

    It owns the cache tensors and the block manager; the model stays the caller's.
    """

    def __init__(
        self,
        runner: ModelRunner,
        cache: CacheEngine,
        scheduler: Scheduler,
        max_model_len: int,
        telemetry: Telemetry | None = None,
    ) -> None:
        self.cache = cache
        self.scheduler = scheduler
        self.manager = scheduler.manager
        self.max_model_len = max_model_len
        self._runner = runner
        self.vocab_size = vocab_size(runner.model)
        self.eos_token_ids = eos_token_ids(runner.model)
        self._requests: dict[str, Request] = {}
        self._undelivered: list[StepOutput] = []
        self._dropped: list[Request] = []  # by streams, during a step
        self._is_stepping = False
        self._num_arrivals = self._num_steps = self._num_finished = 0
        self._num_computed_tokens = self._num_generated_tokens = 0
        self._meter = TransferMeter(cache)
        self.telemetry = telemetry or Telemetry(self.manager.tree, None, 0.0)
        self._store_rule: LoadOrCompute | None = None
        self._link: StoreLink | None = None
        self._blender: Blender | None = None
        self._blend_link: BlendLink | None = None
        self.scheduler.is_held = self._is_held
        self._process = OwnProcess("the engine")

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        cache_config: CacheConfig,
        *,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        max_model_len: int | None = None,
        enable_prefix_caching: bool = True,
        share_parts: bool = True,
        host_policy: HostPolicy | None = None,
        load_or_compute: bool = True,
        pin_quota: int = 0,
        kv_scales: Sequence[KVScales] | Literal["calibrate"] | None = None,
        calibration_tokens: Tokens | None = None,
        events: EventConfig | None = None,
        residency_sample_rate: float = 0.0,
        store: BlockStore | None = None,
        store_deadline: float = 5.0,
        save_generated: bool | None = None,
        blend: BlendConfig | None = None,
        segments: SegmentCache | None = None,
    ) -> "Engine":
        """An engine on the model's device.

        max_num_seqs: requests that run at once.
        max_num_batched_tokens: of one step; longer prompts are computed in chunks.
        max_model_len: tokens of a request, generated ones included; by default what the model's config allows.
        enable_prefix_caching, share_parts, host_policy, pin_quota: see BlockManager. The host tier is as large as
            `cache_config.num_cpu_blocks`: what is evicted goes there, and what is preempted.
        load_or_compute: leave on the host what is expected to be computed faster than loaded, by the speeds measured.
        kv_scales: for a cache of 8-bit floats: one a layer, or "calibrate" to take them from what the model makes of
            calibration_tokens (by default a few of its vocabulary); None means 1. They are fixed before the first
            request, and `cache.kv_scales` tells them.
        events: publish what the cache holds, for routers; then `close` the engine. It needs the extra `events`.
        residency_sample_rate: the part of the cached blocks, 0 to 1, of which `stats` tells how long they stay.
        store: a `kvpage.store.KVStore`, asked for what the blocks do not hold, at most `store_deadline` seconds a
            request, while others compute. Finished prefills are stored in the background; with `save_generated` what
            was generated, too (None: as the store's save_decode_cache says). It stays its owner's to close, after the
            engine.
        blend: how requests that ask for it reuse segments of their prompts wherever these stand (CacheBlend), kept in
            `segments`: by default in `store`, where that is a KVStore of the cache's dtype, or in host memory.

        Raises ValueError, with the reason, for a model that cannot be served from blocks, or not be blended where that
        is asked for, for a cache without any, and for scales that the cache takes none of or that leave nothing of the
        model. ModuleNotFoundError and zmq.ZMQError where events cannot be published.
        """
        if not isinstance(cache_config, CacheConfig):
            raise TypeError(f"cache_config must be a CacheConfig, got {type(cache_config).__name__}")
        if cache_config.num_gpu_blocks == 0:
            raise ValueError(
                "num_gpu_blocks must be positive, got 0; CacheConfig.for_memory and CacheConfig.for_device choose it"
            )
        check_config(model)
        model_config = ModelConfig.from_hf(model.config, model.dtype)
        runner = ModelRunner(model)
        window = verify_model(runner, cache_config, model_config)
        cache = _make_cache(runner, cache_config, model_config, kv_scales, calibration_tokens)
        block_bytes = CacheEngine.get_cache_block_size(cache_config, model_config)
        manager = BlockManager(
            cache_config.num_gpu_blocks,
            cache_config.block_size,
            enable_prefix_caching,
            num_host_blocks=cache_config.num_cpu_blocks,
            share_parts=share_parts,
            host_policy=host_policy,
            rule=LoadOrCompute(block_bytes, cache_config.block_size) if load_or_compute else None,
            pin_quota=pin_quota,
        )
        scheduler = Scheduler(manager, max_num_seqs, max_num_batched_tokens, window)
        length = limited_model_len(model, max_model_len)
        engine = cls(runner, cache, scheduler, length, Telemetry(manager.tree, events, residency_sample_rate))
        if store is not None:
            rule = LoadOrCompute(block_bytes, cache_config.block_size) if load_or_compute else None
            engine.use_store(store, store_deadline, save_generated, rule)
        if blend is not None:
            blender = Blender.of_model(blend, runner, cache_config, model_config)
            if segments is None:
                segments = StoredSegments(store) if _keeps_rows(store, cache) else MemorySegments(blend.max_bytes)
            engine.use_blend(blender, segments)
        elif segments is not None:
            raise ValueError("segments must be None without blend")
        return engine

    def use_store(
        self,
        store: BlockStore,
        deadline: float = 5.0,
        save_generated: bool | None = None,
        rule: LoadOrCompute | None = None,
    ) -> None:
        """From now on, what the blocks lack is asked of `store`; see from_model. rule: whether loading is worth it.

        ValueError without prefix caching, or with a store already.
        """
        if not self.manager.enable_prefix_caching:
            raise ValueError("store needs enable_prefix_caching, by which requests find what comes out of it")
        if self._link:
            raise ValueError("store must be given once, the engine has one")
        if save_generated is None:
            save_generated = getattr(getattr(store, "config", None), "save_decode_cache", False)
        self._store_rule = rule
        self._link = StoreLink(
            store, self.cache, self.manager, self._move_blocks, rule, deadline=deadline, save_generated=save_generated
        )
        self.scheduler.reclaimers.append(self._link.reclaim)

    def use_blend(self, blender: Blender, segments: SegmentCache) -> None:
        """From now on, requests may reuse what `segments` has; see from_model.

        ValueError without prefix caching, or with segments already.
        """
        if not self.manager.enable_prefix_caching:
            raise ValueError(
                "blend needs enable_prefix_caching, which keeps K and V until they can be kept as segments"
            )
        if self._blend_link:
            raise ValueError("blend must be given once, the engine has it")
        self._blender = blender
        dtype, deadline = self._runner.model.dtype, blender.config.deadline
        self._blend_link = BlendLink(segments, self.cache, self.manager, dtype, deadline)

    def close(self) -> None:
        """Waits for what is on its way to the store and to the kept segments, publishes the last events, and closes
        what `events` has opened; the engine goes on without. Without any of these there is nothing to close.
        """
        if self._blend_link:
            self._blend_link.close()
            self._blend_link = None
            for request in self.scheduler.waiting:
                request.reusable = []
        if self._link:
            self._link.close()
            self.scheduler.reclaimers.remove(self._link.reclaim)
            self._link = None
        self.telemetry.close()

    # --- requests ----------------------------------------------------------------------------------------------------

    def add_request(
        self,
        tokens: Tokens,
        params: SamplingParams,
        request_id: str | None = None,
        namespace: bytes = b"",
        *,
        blend: bool = False,
        segments: Sequence[int] | None = None,
    ) -> str:
        """Queues a prompt; returns its id. Its tokens come out of `step()`.

        namespace: only requests of the same one (a tenant's salt, an adapter) share cached blocks, and segments.
        blend: reuse the segments of the prompt that are kept, and keep the others. What of the prompt is cached as a
            prefix is taken from there first.
        segments: the lengths of the prompt's segments, from its first token on; the rest is in none. By default they
            end where the BlendConfig says. Given without `blend`, the prompt is computed in full, and its
            segments are kept.

        Raises ValueError, and changes nothing, for an id in use, no tokens, tokens that are no ids of the vocabulary, a
        request that is longer than the model or than all blocks, blend and segments in an engine without a BlendConfig,
        and segments that are no lengths, longer than the prompt, or neither given nor found by the BlendConfig;
        TypeError for params, an id or a namespace of another type.
        """
        return self._add(tokens, params, request_id, namespace, None, blend, segments).request_id

    def warm_segments(self, segments: Sequence[Tokens], namespace: bytes = b"") -> None:
        """Computes each by itself, and keeps it: a segment that knows of no context serves in all of them.

        Other requests go on meanwhile. ValueError as of add_request, before anything is computed.
        """
        one = SamplingParams(max_tokens=1)
        self._generate([(tokens, one, namespace, False, [len(tokens)]) for tokens in segments], None)
        if self._blend_link:
            self._blend_link.drain()

    def abort(self, request_id: str) -> RequestOutput:
        """Ends a request now, and returns what came of it. KeyError if there is no such unfinished request."""
        if request_id not in self._requests:
            raise KeyError(f"request_id must be that of an unfinished request, got {request_id!r}")
        request = self._requests.pop(request_id)
        for one in request.samples:
            if one.finish_reason is None:
                self._end(one)
                one.finish_reason = "abort"
        self._num_finished += 1
        request.is_aborted = True
        return request.output()

    @property
    def has_unfinished(self) -> bool:
        """There are requests to compute, or outputs that `step()` has not returned yet."""
        return bool(self._requests or self._undelivered)

    def stats(self) -> EngineStats:
        """May be called in another thread while the engine works; its numbers then are not all of one moment."""
        scheduler = self.scheduler
        return EngineStats(
            num_steps=self._num_steps,
            num_computed_tokens=self._num_computed_tokens,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_swaps=scheduler.num_swaps,
            num_finished=self._num_finished,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_used_blocks=self.manager.num_blocks - self.manager.num_free_blocks,
            num_blocks=self.manager.num_blocks,
            blocks=self.manager.stats(),
            transfers=self._meter.stats(),
            residency=self.telemetry.residency(),
            num_lost_events=self.telemetry.num_lost_events,
            store=replace(self._link.stats) if self._link else None,
            blend=replace(self._blend_link.stats) if self._blend_link else None,
        )

    # --- tokens ------------------------------------------------------------------------------------------------------

    def step(self) -> list[StepOutput]:
        """Computes one batch; the tokens of the requests that `add_request` queued, those of steps inside `generate`
        and `stream` included. Empty if none is complete yet, or there is nothing to do.

        If the model raises, its exception comes through, and the batch's requests are back in the queue: nothing of it
        is cached, no token is lost, and the next step computes it again.
        """
        self._run_step()
        outputs, self._undelivered = self._undelivered, []
        return outputs

    def generate(
        self,
        prompts: Sequence[Tokens],
        params: SamplingParams | Sequence[SamplingParams],
        progress: Callable[[int], object] | None = None,
        *,
        blend: bool = False,
    ) -> list[RequestOutput]:
        """Runs the prompts to their ends; the outputs in their order. Other requests go on meanwhile.

        params: one for all, or one a prompt. progress: called with the number of prompts that a step has finished, like
        the `update` of a progress bar. blend: see add_request. If anything raises, the prompts are aborted; for a bad
        prompt, before a step.
        """
        prompts = as_list("prompts", prompts)
        each = params_of_each(params, len(prompts))
        arguments = [(tokens, one, b"", blend, None) for tokens, one in zip(prompts, each, strict=True)]
        return self._generate(arguments, progress)

    def _generate(
        self,
        arguments: Sequence[tuple[Tokens, SamplingParams, bytes, bool, Sequence[int] | None]],
        progress: Callable[[int], object] | None,
    ) -> list[RequestOutput]:
        if progress is not None and not callable(progress):
            raise TypeError(f"progress must be callable, got {type(progress).__name__}")
        sink: deque[StepOutput] = deque()
        outputs: dict[str, RequestOutput] = {}
        requests: list[Request] = []
        try:
            for tokens, params, namespace, blend, segments in arguments:
                requests.append(self._add(tokens, params, None, namespace, sink, blend, segments))
            while len(outputs) < len(requests):
                self._wait_for(sink, requests)
                finished = {output.request_id: output.output for output in sink if output.output}
                sink.clear()
                outputs.update(finished)
                if progress and finished:
                    progress(len(finished))
        finally:
            self._abort_unfinished(requests)
        return [outputs[request.request_id] for request in requests]

    def beam_search(
        self, prompts: Sequence[Tokens], params: BeamSearchParams, namespace: bytes = b""
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt, as `model.generate(num_beams=...)` finds them.

        Runs to its end before it returns; other requests wait, and are preempted where blocks lack. Beams share the
        blocks of what they have in common. Raises as `add_request` does, before anything is computed, and OutOfBlocks
        if the beams of one prompt do not fit into all blocks.
        """
        return search_beams(self, prompts, params, namespace)

    def stream(
        self, tokens: Tokens, params: SamplingParams, *, blend: bool = False, segments: Sequence[int] | None = None
    ) -> TokenStream:
        """The generated tokens of one prompt as they come. Other requests go on meanwhile.

        The request is queued at once; closing or dropping the iterator aborts it. ValueError for params.n > 1.
        blend, segments: see add_request.
        """
        if check_params(params).n != 1:
            raise ValueError(f"n must be 1 for a stream, got {params.n}")
        sink: deque[StepOutput] = deque()
        request = self._add(tokens, params, None, b"", sink, blend, segments)

        def take() -> StepOutput:
            self._wait_for(sink, [request])
            return sink.popleft()

        return TokenStream(take, lambda: self._abort_unfinished([request]), lambda: self._drop(request))

    # --- for those who steer sequences themselves: Branches ----------------------------------------------------------

    def check_tokens(self, tokens: Tokens) -> np.ndarray:
        """The same as an array. ValueError for none, and for what are no ids of the vocabulary."""
        array = as_tokens(tokens)
        if len(array) == 0:
            raise ValueError("tokens must hold at least one token, got none")
        if array.min() < 0 or array.max() >= self.vocab_size:
            raise ValueError(
                f"tokens must be ids in [0, {self.vocab_size}), got {int(array.min())} to {int(array.max())}"
            )
        return array

    def check_length(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """ValueError if so many would be more than the model takes."""
        num_prompt_tokens, max_tokens = (
            as_integer("num_prompt_tokens", num_prompt_tokens),
            as_integer("max_tokens", max_tokens),
        )
        if num_prompt_tokens + max_tokens > self.max_model_len:
            raise ValueError(
                f"prompt and max_tokens must fit into max_model_len={self.max_model_len}, "
                f"got {num_prompt_tokens} + {max_tokens}"
            )

    def compute(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Computes pieces of sequences that are nobody's requests, for which the manager has given room, in one forward
        pass; the caller commits. The logits of the wanted tokens: [their number, vocab_size].
        """
        with self._step():
            return self._forward(pieces)

    def make_room(self) -> bool:
        """Preempts the youngest request that runs; False if none does."""
        if not self.scheduler.running:
            return False
        self.scheduler.preempt_youngest()
        return True

    # --- inside ------------------------------------------------------------------------------------------------------

    def _wait_for(self, sink: deque[StepOutput], requests: Sequence[Request]) -> None:
        """Steps until something is in the sink. RuntimeError if one of its requests was aborted by somebody else."""
        while not sink:
            for request in requests:
                if request.is_aborted:
                    raise RuntimeError(f"request {request.request_id!r} was aborted")
            self._run_step()

    def _abort_unfinished(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if self._requests.get(request.request_id) is request:
                self.abort(request.request_id)

    def _drop(self, request: Request) -> None:
        """Aborts a request whose stream is gone; if that happens in the middle of a step, when the step is over."""
        self._dropped.append(request)
        if not self._is_stepping:
            self._abort_dropped()

    def _abort_dropped(self) -> None:
        while self._dropped:
            self._abort_unfinished([self._dropped.pop()])

    def _add(
        self,
        tokens: Tokens,
        params: SamplingParams,
        request_id: str | None,
        namespace: bytes,
        sink: deque[StepOutput] | None,
        blend: bool,
        segments: Sequence[int] | None,
    ) -> Request:
        check_params(params)
        if not isinstance(request_id, str | None):
            raise TypeError(f"request_id must be a str, got {type(request_id).__name__}")
        check_namespace(namespace)
        prompt = self.check_tokens(tokens)
        self.check_length(len(prompt), params.max_tokens)
        if request_id is None:
            request_id = self._new_id()
        if request_id in self._requests:
            raise ValueError(f"request_id must not be in use, {request_id!r} is")
        spans = self._spans(prompt, blend, segments)
        request = Request(request_id, prompt, params, self._num_arrivals, self.eos_token_ids, namespace, sink)
        request.spans, request.is_blend = spans, blend
        self.scheduler.add(request)
        self._requests[request_id] = request
        self._num_arrivals += 1
        return request

    def _spans(self, prompt: np.ndarray, blend: bool, segments: Sequence[int] | None) -> list[Span]:
        """The segments of a prompt."""
        if not blend and segments is None:
            return []
        if self._blender is None or self._blend_link is None:
            raise ValueError("blend and segments need an engine with a BlendConfig")
        if segments is None:
            return self._blender.config.spans(prompt)
        return spans_of_lengths(segments, len(prompt))

    def _is_held(self, request: Request) -> bool:
        return any(link.holds(request) for link in (self._link, self._blend_link) if link)

    def _new_id(self) -> str:
        number = self._num_arrivals
        while f"request-{number}" in self._requests:
            number += 1
        return f"request-{number}"

    @contextmanager
    def _step(self) -> Iterator[None]:
        """Inside, requests leave the scheduler only as the step itself wants; what else came up is done after it."""
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False
            self._abort_dropped()
            self.telemetry.tell()

    def _run_step(self) -> None:
        self._process.check()
        with self._step():
            self._compute_batch()

    def _schedule(self) -> Batch:
        links = [link for link in (self._link, self._blend_link) if link]
        while True:
            for link in links:
                link.ask(self.scheduler.waiting)
            batch = self.scheduler.schedule()
            if batch.chunks or not self.scheduler.waiting:
                return batch
            if self._blend_link and self._blend_link.is_busy:
                self._blend_link.wait()
            elif self._link:
                self._link.wait()

    def _compute_batch(self) -> None:
        batch = self._schedule()
        if not batch.chunks:
            return
        due = [chunk.request for chunk in batch.chunks if chunk.is_last]
        forks = {request: request.forks() for request in due if request.num_forks_due}
        sampled = due + [fork for each in forks.values() for fork in each]
        begin = time.monotonic()
        try:
            tokens = sample(_with_forks(self._forward(_pieces(batch)), due, forks), sampled)
        except BaseException:  # an interrupt too must leave no request without its blocks
            self.scheduler.requeue(batch)
            raise
        if self._blend_link:
            for request in due:
                if request.num_generated == 0:
                    self._blend_link.keep(request)
        is_blended = any(request.reuse for request in due)
        self.scheduler.complete(batch)
        for request, each in forks.items():
            self.scheduler.fork(request, each)
        now = time.monotonic()
        if batch.num_tokens >= 4 * len(batch.chunks) and not is_blended:  # prefill, mostly
            for rule in (self.manager.space.rule, self._store_rule):
                if rule:
                    rule.saw_prefill(batch.num_tokens, now - begin)
        if self._link:
            for request in due:
                if request.num_generated == 0:
                    self._link.save(request, request.num_tokens)
        for request, token in zip(sampled, tokens, strict=True):
            self._take_token(request, token, now)

    def _forward(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """The logits of the wanted tokens: [their number, vocab_size]."""
        self._move_blocks()
        ids, token_ids, starts, ends, wanted, _ = (list(column) for column in zip(*pieces, strict=True))
        first_rows = np.cumsum([0, *(len(tokens) for tokens in token_ids)])
        rows = [first + index for first, indices in zip(first_rows, wanted, strict=False) for index in indices]
        slots, tables = self.manager.slot_mappings(ids, starts, ends), self.manager.block_tables(ids)
        step = Step.make(self.cache, slots, tables, starts, ends)
        packed = PackedTokens(np.concatenate(token_ids), starts, ends, np.array(rows, np.int64))
        blend = self._begin_blend(step, pieces)
        logits = self._runner.forward(packed, step)
        self._num_steps += 1
        self._num_computed_tokens += len(packed.token_ids)
        if blend:
            self._end_blend(blend, pieces)
        return logits

    def _begin_blend(self, step: Step, pieces: Sequence[Piece]) -> BlendPass | None:
        if not any(piece.reuse for piece in pieces):
            return None
        assert self._blender is not None
        step.blend = blend = self._blender.begin(step, pieces)
        return blend

    def _end_blend(self, blend: BlendPass, pieces: Sequence[Piece]) -> None:
        assert self._blend_link is not None
        for piece, counts in zip(pieces, blend.counts(), strict=True):
            self._num_computed_tokens -= counts.num_reused
            if piece.reuse:
                self._blend_link.blended(self._requests[str(piece.seq_id)], counts)

    def _move_blocks(self) -> None:
        moves, rule = self.manager.take_moves(), self.manager.space.rule
        begin = time.monotonic()
        self._meter.move(moves)
        if rule and self.cache.device.type == "cpu" and moves.num_blocks("swap_in"):
            num_blocks = sum(moves.num_blocks(kind) for kind in ("swap_out", "swap_in", "copy"))
            rule.saw_transfer(num_blocks * rule.block_bytes, time.monotonic() - begin)

    def _end(self, request: Request) -> None:
        self.scheduler.finish(request)
        for link in (self._link, self._blend_link):
            if link:
                link.forget(request)

    def _take_token(self, request: Request, token: int, now: float) -> None:
        self._num_generated_tokens += 1
        output, finish_reason = None, request.append(token, now)
        if finish_reason:
            if self._link and self._link.save_generated:
                self._link.save(request, request.num_computed)
            self._end(request)
        if request.first.is_over:
            del self._requests[request.request_id]
            self._num_finished += 1
            output = request.first.output()
        sink = self._undelivered if request.sink is None else request.sink
        sink.append(StepOutput(request.request_id, token, request.sample_index, finish_reason, output))


def _keeps_rows(store: BlockStore | None, cache: CacheEngine) -> TypeGuard[KVStore]:
    """Whether rows of the cache's tokens can lie in the store as they are."""
    return (
        isinstance(store, KVStore) and store.metadata.kv_dtype == cache.layout.dtype and not cache.layout.is_quantized
    )


def _pieces(batch: Batch) -> list[Piece]:
    return [
        Piece(
            one.request.seq_id,
            one.request.tokens[one.start : one.end],
            one.start,
            one.end,
            [one.end - one.start - 1] if one.is_last else [],
            one.request.reuse,
        )
        for one in batch.chunks
    ]


def _with_forks(
    logits: torch.Tensor, requests: Sequence[Request], forks: Mapping[Request, Sequence[Request]]
) -> torch.Tensor:
    """A row for each request, then one for each of its forks: [len(requests) + number of forks, vocab_size]."""
    if not forks:
        return logits
    rows = {request: row for row, request in enumerate(requests)}
    return logits[list(rows.values()) + [rows[request] for request, each in forks.items() for _ in each]]


def _make_cache(
    runner: ModelRunner,
    cache_config: CacheConfig,
    model_config: ModelConfig,
    kv_scales: Sequence[KVScales] | Literal["calibrate"] | None,
    calibration_tokens: Tokens | None,
) -> CacheEngine:
    """The cache with its scales, which stay; where it quantises, something of the model must be left."""
    scales = choose_scales(runner, cache_config, model_config, kv_scales, calibration_tokens)
    device_config = DeviceConfig(runner.model.device)
    cache = CacheEngine(cache_config, model_config, device_config=device_config, kv_scales=scales)
    if cache.layout.is_quantized:
        verify_quantized(runner, cache_config, model_config, scales)
    return cache
