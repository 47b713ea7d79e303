"""Engine: requests in, tokens out, through a Hugging Face decoder whose K and V lie in paged blocks.

    Engine ─► ServingLoop ─► PieceRunner ─► the model, over the blocks of CacheEngine
                  ├────────► Scheduler ───► BlockManager: who has which block
                  └────────► Links ───────► a store, kept segments

What a user calls is here; what happens in a step is the loop's.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from kvpage.blend.config import BlendConfig
from kvpage.blend.segments import SegmentCache
from kvpage.blend.spans import Span, spans_of_lengths
from kvpage.blocks.load_or_compute import LoadOrCompute
from kvpage.blocks.manager import BlockManager
from kvpage.blocks.space import HostPolicy
from kvpage.cache.cache_engine import CacheEngine
from kvpage.checks.interrupts import HeldInterrupts, made_or_undone, uninterrupted
from kvpage.checks.tokens import Tokens, as_tokens
from kvpage.checks.values import as_integer, check_flag, check_namespace
from kvpage.layout.config import CacheConfig
from kvpage.layout.kv_scales import KVScales
from kvpage.observe.events import EventConfig
from kvpage.observe.telemetry import Telemetry
from kvpage.serving import assembly
from kvpage.serving.blending.blender import Blender
from kvpage.serving.blending.link import BlendLink
from kvpage.serving.generate.alternative import names_alternative
from kvpage.serving.loop.links import Links
from kvpage.serving.loop.piece_runner import PieceRunner
from kvpage.serving.loop.prompts import as_prompts
from kvpage.serving.loop.scheduler import Scheduler
from kvpage.serving.loop.serving_loop import ServingLoop
from kvpage.serving.loop.store_link import BlockStore, StoreLink
from kvpage.serving.loop.token_stream import TokenStream
from kvpage.serving.model.argument_check import check_model
from kvpage.serving.model.limits import eos_token_ids, limited_model_len, rope_limit, vocab_size
from kvpage.serving.model.runner import ModelRunner
from kvpage.serving.model.step import Piece
from kvpage.serving.params.beam import BeamSearchParams
from kvpage.serving.params.defaults import GenerationDefaults, ParamDefaults
from kvpage.serving.params.sampling import SamplingParams, check_params, params_of_each
from kvpage.serving.requests import Request, RequestOutput, StepOutput
from kvpage.serving.stats import EngineStats
from kvpage.serving.steer.beam_search import BeamSearchOutput, search_beams


class Prompt(NamedTuple):
    """What a request is made of. tokens to segments: see Engine.add_request. sink: where its outputs go; None for those
    that `step` returns. copy_at: where its one segment comes once more, see Engine.warm_segments.
    is_warming: it comes from there.
    """

    tokens: Tokens
    params: SamplingParams | None
    request_id: str | None = None
    namespace: bytes = b""
    blend: bool = False
    segments: Sequence[int] | None = None
    sink: deque[StepOutput] | None = None
    copy_at: int | None = None
    is_warming: bool = False


class Engine:
    """A serving loop over one model. Make it by `from_model`. Not thread-safe: one engine, one thread. A forked process
    needs one of its own: there, whatever computes raises RuntimeError.

    It owns the cache tensors and the block manager. The model stays the caller's, and as it is: other threads may use
    it at any time, also through engines and caches of their own. Ctrl-C is raised while the model computes, or between
    two steps, and costs nothing but what the call would have returned.

    It computes with the model's weights as they are at each step, adapters included; what changes them leaves cached K
    and V of before, so that other weights need a namespace of their own. Hooks of the model are called here, too, but
    for modules with a config with a copy of the module.
    """

    def __init__(
        self,
        runner: ModelRunner,
        cache: CacheEngine,
        scheduler: Scheduler,
        max_model_len: int,
        telemetry: Telemetry | None = None,
        defaults: ParamDefaults | None = None,
    ) -> None:
        self.cache = cache
        self.scheduler = scheduler
        self.manager = scheduler.manager
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size(runner.model)
        self.eos_token_ids = eos_token_ids(runner.model)
        self.defaults = defaults or ParamDefaults.of_model(runner.model)
        self.telemetry = telemetry or Telemetry(self.manager.tree, None, 0.0)
        self._runner, self._links = runner, Links()
        self._loop = ServingLoop(PieceRunner(runner, cache, self.manager), scheduler, self._links, self.telemetry)

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
        generation_config: GenerationDefaults = "model",
    ) -> "Engine":
        """An engine on the model's device.

        cache_config: with the backend "mla", blocks keep the latents of models that have some (DeepSeek's and others
            with MLA), a fraction of the bytes; with any other, the K and V of heads that these expand to.
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
        generation_config: parameters of requests that are left at None are taken from the model's generation config,
            as it is now: "model" refuses one that asks for what is not served, "served" leaves that out, "ignore" takes
            its end-of-sequence tokens only.

        Raises ValueError, with the reason, for a model that cannot be served from blocks (and says if KVPageCache
        serves it), or not be blended where that is asked for, for a compiled one, for a cache without any, and for
        scales that the cache takes none of or that leave nothing of the model. TypeError for what is no
        PreTrainedModel, as its name. ModuleNotFoundError and zmq.ZMQError where events cannot be published.
        """
        check_model(model)
        with names_alternative(model, cache_config):
            model_config = assembly.check_servable(model, cache_config)
            runner = ModelRunner(model)
            window = assembly.verify(runner, cache_config, model_config)
        defaults = ParamDefaults.of_model(model, generation_config)
        cache = assembly.make_cache(runner, cache_config, model_config, kv_scales, calibration_tokens)
        manager = BlockManager(
            cache_config.num_gpu_blocks,
            cache_config.block_size,
            enable_prefix_caching,
            num_host_blocks=cache_config.num_cpu_blocks,
            share_parts=share_parts,
            host_policy=host_policy,
            rule=assembly.make_rule(cache_config, model_config) if load_or_compute else None,
            pin_quota=pin_quota,
        )
        scheduler = Scheduler(manager, max_num_seqs, max_num_batched_tokens, window)
        length = limited_model_len(model, max_model_len)
        telemetry = Telemetry(manager.tree, events, residency_sample_rate)
        engine = cls(runner, cache, scheduler, length, telemetry, defaults)
        if store is not None:
            rule = assembly.make_rule(cache_config, model_config) if load_or_compute else None
            engine.use_store(store, store_deadline, save_generated, rule)
        if blend is not None:
            kept = assembly.default_segments(store, cache, blend.max_bytes) if segments is None else segments
            engine.use_blend(Blender.of_model(blend, runner, cache_config, model_config), kept)
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
        if self._links.store:
            raise ValueError("store must be given once, the engine has one")
        if save_generated is None:
            save_generated = getattr(getattr(store, "config", None), "save_decode_cache", False)
        check_flag("save_generated", save_generated)
        move = self._loop.pieces.move_blocks
        self._links.store = StoreLink(
            store, self.cache, self.manager, move, rule, deadline=deadline, save_generated=save_generated
        )
        self.scheduler.reclaimers.append(self._links.store.reclaim)

    def use_blend(self, blender: Blender, segments: SegmentCache) -> None:
        """From now on, requests may reuse what `segments` has; see from_model.

        ValueError without prefix caching, or with segments already.
        """
        if not self.manager.enable_prefix_caching:
            raise ValueError(
                "blend needs enable_prefix_caching, which keeps K and V until they can be kept as segments"
            )
        if self._links.blend:
            raise ValueError("blend must be given once, the engine has it")
        dtype, config = self._runner.model.dtype, blender.config
        self._links.blend = BlendLink(segments, self.cache, self.manager, dtype, config.deadline, config.max_bytes)
        self._loop.pieces.blender = blender

    def close(self) -> None:
        """Waits for what is on its way to the store and to the kept segments, publishes the last events, and closes
        what `events` has opened; the engine goes on without. Without any of these there is nothing to close.
        """
        self._links.drain()
        self._close()

    @uninterrupted
    def _close(self) -> None:
        if self._links.store:
            self.scheduler.reclaimers.remove(self._links.store.reclaim)
        self._links.close()
        for request in self.scheduler.waiting:
            request.reusable = []
        self.telemetry.close()

    def reset_prefix_cache(self) -> None:
        """Forgets all K and V, for one whose model has got other weights in place: call it after the change, before the
        next step. Nothing that was computed before is found by a request, whether it is new or under way.

        Forgotten is what is cached in both tiers, in all namespaces, pinned or not, and the segments that are kept in
        host memory for blending. Unfinished requests keep their tokens, and compute the K and V of all of them again.
        Waits for what is on its way to a store, and from it.

        A store is left as it is, with the segments in it, and is asked as before: its keys name the model. For other
        weights make a store whose metadata name another model, or another revision of it, and give it to another
        engine. `segments` of one's own are forgotten if they have a method `clear`. KVScales stay.

        RuntimeError, and nothing is forgotten, during a step, and while there are live Branches: close these, and
        `clear` each PagedTokenTrie, which keeps log-probabilities besides.
        """
        self._loop.check_between_steps("reset_prefix_cache")
        self._links.drain()
        with HeldInterrupts():
            num_branches = self.manager.stats().num_sequences - len(self.scheduler.running)
            if num_branches:
                raise RuntimeError(f"reset_prefix_cache needs all Branches to be closed, {num_branches} are live")
            self._loop.restart()
            self._links.forget_kept()
            self.manager.reset_prefix_cache()
            self.telemetry.tell()

    # --- requests ----------------------------------------------------------------------------------------------------

    def add_request(
        self,
        tokens: Tokens,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        namespace: bytes = b"",
        *,
        blend: bool = False,
        segments: Sequence[int] | None = None,
    ) -> str:
        """Queues a prompt; returns its id. Its tokens come out of `step()`.

        params: what of them is None comes from the model's generation config, see from_model. None: all of them, as
            `model.generate` has it without arguments.
        namespace: only requests of the same one (a tenant's salt, an adapter) share cached blocks, and segments.
        blend: reuse the segments of the prompt that are kept, and keep the others. What of the prompt is cached as a
            prefix is taken from there first.
        segments: the lengths of the prompt's segments, from its first token on; the rest is in none. By default they
            end where the BlendConfig says. Given without `blend`, the prompt is computed in full, and its
            segments are kept.

        Raises ValueError, and changes nothing, for an id in use, no tokens, tokens that are no ids of the vocabulary, a
        request that is longer than the model or than all blocks, blend and segments in an engine without a BlendConfig,
        and segments that are no lengths, longer than the prompt, or neither given nor found by the BlendConfig;
        TypeError for text, and for params, an id or a namespace of another type.
        """
        prompt = Prompt(tokens, params, request_id, namespace, blend, segments)
        return made_or_undone(lambda: self._add(prompt), self._loop.drop).request_id

    def warm_segments(self, segments: Sequence[Tokens], namespace: bytes = b"") -> None:
        """Computes each by itself, and keeps it: a segment that knows of no context serves in all of them. What is kept
        like that already, say in a store of before, is not computed again.

        With BlendConfig.uses_sensitivity each is computed once more behind itself, to see which of its tokens change
        with what stands before them; but for those of which two, and a token, are more than the engine takes.

        Other requests go on meanwhile. ValueError as of add_request, before anything is computed. RuntimeError for
        those that could not be computed; the others are kept.
        """
        blend = self._links.blend
        if blend is None:
            raise ValueError("segments need an engine with a BlendConfig")
        check_namespace(namespace)
        warmings = [self._warming(tokens, namespace) for tokens in segments]
        asked = [(as_tokens(prompt.tokens)[: prompt.copy_at], prompt.copy_at is not None) for prompt in warmings]
        wanted = blend.wants_each(asked, namespace)
        outputs = self._generate([one for one, wants in zip(warmings, wanted, strict=True) if wants], lambda num: None)
        blend.drain()
        if errors := [output.error for output in outputs if output.error is not None]:
            raise RuntimeError(f"{len(errors)} of {len(outputs)} segments could not be computed: {errors[0]}")

    def abort(self, request_id: str) -> RequestOutput:
        """Ends a request now, and returns what came of it. KeyError if there is no such unfinished request;
        RuntimeError during a step, as in a hook of the model or a signal's handler.
        """
        if request_id not in self._loop.requests:
            raise KeyError(f"request_id must be that of an unfinished request, got {request_id!r}")
        return self._loop.abort(self._loop.requests[request_id])

    @property
    def has_unfinished(self) -> bool:
        """There are requests to compute, or outputs that `step()` has not returned yet."""
        return self._loop.has_unfinished

    def stats(self) -> EngineStats:
        """May be called in another thread while the engine works; its numbers then are not all of one moment."""
        loop, scheduler, links = self._loop, self.scheduler, self._links
        pieces = loop.pieces
        return EngineStats(
            num_steps=pieces.num_passes,
            num_computed_tokens=pieces.num_computed_tokens,
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
            transfers=pieces.meter.stats(),
            residency=self.telemetry.residency(),
            num_lost_events=self.telemetry.num_lost_events,
            store=replace(links.store.stats) if links.store else None,
            blend=replace(links.blend.stats) if links.blend else None,
        )

    # --- tokens ------------------------------------------------------------------------------------------------------

    def step(self) -> list[StepOutput]:
        """Computes one batch; the tokens of the requests that `add_request` queued, those of steps inside `generate`
        and `stream` included. Empty if none is complete yet, or there is nothing to do.

        A request whose logits are no numbers (a NaN, or nothing finite) ends alone, with the finish_reason "error" and
        the reason in `error`. If the model raises, its exception comes through the first time, and the batch's requests
        are back in the queue: nothing of it is cached, no token is lost, and the next step computes it again. If that
        raises, too, the next steps compute fewer of them, and a request with which the model raises alone ends with an
        error. Nothing of a request that ends so is found afterwards but what others use or share.

        RuntimeError within another step, ValueError for a model in training mode.
        """
        self._loop.step()
        outputs, self._loop.outputs = self._loop.outputs, []
        return outputs

    def generate(
        self,
        prompts: Sequence[Tokens],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: Callable[[int], object] | None = None,
        *,
        blend: bool = False,
    ) -> list[RequestOutput]:
        """Runs the prompts to their ends; the outputs in their order. Other requests go on meanwhile.

        params: one for all, or one a prompt; None: see add_request, as for blend. progress: called with the number of
            prompts that a step has finished, like the `update` of a progress bar.

        If anything raises, the prompts are aborted; for a bad prompt, before a step. What the model raises does not
        come through: it is logged, the step is tried again, and the requests that cannot be computed have an `error`,
        see step.
        """
        prompts = as_prompts(prompts)
        each = params_of_each(params, len(prompts))
        if progress is not None and not callable(progress):
            raise TypeError(f"progress must be callable, got {type(progress).__name__}")
        asked = [Prompt(tokens, one, blend=blend) for tokens, one in zip(prompts, each, strict=True)]
        return self._generate(asked, progress or (lambda num: None))

    def beam_search(
        self, prompts: Sequence[Tokens], params: BeamSearchParams | None = None, namespace: bytes = b""
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt, as `model.generate(num_beams=..., do_sample=False)` finds them.

        params: what of them is None comes from the model's generation config. None: all of them, num_beams as well.
        Runs to its end before it returns; other requests wait, and are preempted where blocks lack. Beams share the
        blocks of what they have in common. Raises as `add_request` does, before anything is computed, and OutOfBlocks
        if the beams of one prompt do not fit into all blocks.
        """
        return search_beams(self, as_prompts(prompts), params, namespace)

    def stream(
        self,
        tokens: Tokens,
        params: SamplingParams | None = None,
        *,
        blend: bool = False,
        segments: Sequence[int] | None = None,
    ) -> TokenStream:
        """The generated tokens of one prompt as they come. Other requests go on meanwhile.

        The request is queued at once. Closing the iterator aborts it; one that is merely forgotten does, too, by the
        next step or when has_unfinished is asked. After its end it has a finish_reason. What the model raises does not
        come through, as in generate. ValueError for params.n > 1.
        params, blend, segments: see add_request.
        """
        if params is not None and check_params(params).n != 1:
            raise ValueError(f"n must be 1 for a stream, got {params.n}")
        sink: deque[StepOutput] = deque()

        def take() -> StepOutput:
            self._loop.step_until(sink, [request])
            return sink.popleft()

        with HeldInterrupts():
            request = self._add(Prompt(tokens, params, blend=blend, segments=segments, sink=sink))
            return TokenStream(take, lambda: self._loop.drop(request), lambda: self._loop.forget(request))

    # --- for those who steer sequences themselves: Branches ----------------------------------------------------------

    def check_tokens(self, tokens: Tokens) -> np.ndarray:
        """The same as an array. ValueError for none, and for what are no ids of the vocabulary; TypeError for text."""
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
            why = rope_limit(self._runner.model, num_prompt_tokens + max_tokens)
            raise ValueError(
                f"prompt and max_tokens must fit into max_model_len={self.max_model_len}, "
                f"got {num_prompt_tokens} + {max_tokens}{why}"
            )

    def compute(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Computes pieces of sequences that are nobody's requests, for which the manager has given room, in one forward
        pass; the caller commits. The logits of the wanted tokens: [their number, vocab_size].
        """
        return self._loop.compute(pieces)

    @uninterrupted
    def make_room(self) -> bool:
        """Preempts the youngest request that runs; False if none does."""
        if not self.scheduler.running:
            return False
        self.scheduler.preempt_youngest()
        return True

    # --- inside ------------------------------------------------------------------------------------------------------

    def _generate(self, prompts: Sequence[Prompt], progress: Callable[[int], object]) -> list[RequestOutput]:
        """Runs them to their ends. If anything raises, they are aborted."""
        sink: deque[StepOutput] = deque()
        outputs: dict[str, RequestOutput] = {}
        requests: list[Request] = []
        try:
            with HeldInterrupts():
                for prompt in prompts:
                    requests.append(self._add(prompt._replace(sink=sink)))
            while len(outputs) < len(requests):
                self._loop.step_until(sink, requests)
                finished = {output.request_id: output.output for output in sink if output.output}
                sink.clear()
                outputs.update(finished)
                if finished:
                    progress(len(finished))
        finally:
            self._loop.drop(*requests)
        return [outputs[request.request_id] for request in requests]

    def _warming(self, tokens: Tokens, namespace: bytes) -> Prompt:
        """Computes and keeps a segment; see warm_segments."""
        array, one, blender = self.check_tokens(tokens), SamplingParams(max_tokens=1), self._loop.pieces.blender
        lengths, num_twice = [len(array)], 2 * len(array)
        takes_two = num_twice < self.max_model_len and num_twice <= self.manager.num_blocks * self.manager.block_size
        if blender is None or not blender.config.uses_sensitivity or not takes_two:
            return Prompt(array, one, namespace=namespace, segments=lengths, is_warming=True)
        twice = np.concatenate([array, array])
        return Prompt(twice, one, namespace=namespace, segments=lengths, copy_at=len(array), is_warming=True)

    def _add(self, prompt: Prompt) -> Request:
        """See add_request."""
        tokens, given, request_id, namespace, blend, segments, sink, copy_at, is_warming = prompt
        if given is not None:
            check_params(given)
        if not isinstance(request_id, str | None):
            raise TypeError(f"request_id must be a str, got {type(request_id).__name__}")
        check_namespace(namespace)
        check_flag("blend", blend)
        array = self.check_tokens(tokens)
        params = self.defaults.sampling(given, len(array), self._max_default_len)
        self.check_length(len(array), params.max_tokens or 0)
        params.check_vocabulary(self.vocab_size)
        request_id = self._loop.new_id() if request_id is None else request_id
        if request_id in self._loop.requests:
            raise ValueError(f"request_id must not be in use, {request_id!r} is")
        spans = self._spans(array, blend, segments)
        request = Request(request_id, array, params, self._loop.num_arrivals, self.eos_token_ids, namespace, sink)
        request.spans, request.is_blend, request.copy_at, request.is_warming = spans, blend, copy_at, is_warming
        self._loop.add(request)
        return request

    @property
    def _max_default_len(self) -> int:
        """The longest that a default makes a sequence: the last token is never fed back."""
        return min(self.max_model_len, self.manager.num_blocks * self.manager.block_size + 1)

    def _spans(self, prompt: np.ndarray, blend: bool, segments: Sequence[int] | None) -> list[Span]:
        """The segments of a prompt."""
        if not blend and segments is None:
            return []
        blender = self._loop.pieces.blender
        if blender is None or self._links.blend is None:
            raise ValueError("blend and segments need an engine with a BlendConfig")
        return blender.config.spans(prompt) if segments is None else spans_of_lengths(segments, len(prompt))
