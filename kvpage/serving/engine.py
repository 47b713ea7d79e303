"""Engine: requests in, tokens out, through a Hugging Face decoder whose K and V are in paged blocks.

prompts, SamplingParams ─► Engine ─► EngineCore: the loop, the scheduler, the blocks ─► tokens

The calls for requests and tokens are here, those for the engine as a whole in EngineCore.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvpage.blend.segments import SegmentCache
from kvpage.checks.interrupts import HeldInterrupts, made_or_undone
from kvpage.checks.tokens import Tokens, as_tokens
from kvpage.checks.values import check_namespace
from kvpage.serving.assembly.block_count import with_blocks
from kvpage.serving.assembly.core import EngineCore
from kvpage.serving.assembly.parts import assemble, assemble_rank, check_arguments, check_servable, default_segments
from kvpage.serving.config import EngineConfig
from kvpage.serving.generate.alternative import names_alternative
from kvpage.serving.loop.intake import Prompt, as_prompts
from kvpage.serving.loop.outputs import RequestOutput, StepOutput
from kvpage.serving.loop.ranks.follower import Follower
from kvpage.serving.loop.ranks.lead import Lead
from kvpage.serving.loop.ranks.ranked_store import RankedStore, StoreFollower
from kvpage.serving.loop.ranks.ranks import Ranks, Role
from kvpage.serving.loop.request import Request
from kvpage.serving.loop.store_connector import BlockStore
from kvpage.serving.loop.token_stream import TokenStream
from kvpage.serving.params.beam import BeamSearchParams
from kvpage.serving.params.sampling import SamplingParams, check_params, params_of_each
from kvpage.serving.steer.beam_search import BeamSearchOutput, search_beams


class Engine(EngineCore):
    """A serving loop over one model. Make it by `from_model`.

    It is not thread-safe: one engine, one thread. A forked process needs an engine of its own: in it, every call that
    computes raises RuntimeError.

    It owns the cache tensors and the block manager. The model stays the caller's, and is never changed. Other threads
    may use it at any time, also through engines and caches of their own. Ctrl-C is raised while the model computes, or
    between two steps; only the results of the call are lost.

    It computes with the model's weights as they are at each step, adapters included. After a change of weights, cached
    K and V are out of date: use a namespace for each set of weights, or `reset_prefix_cache`. Hooks of the model are
    called, too; those of modules that have a config are called with a copy of the module.

    Attributes:
        config: The settings.
        cache: The cache tensors of both tiers, with `kv_scales`.
        manager: The block manager.
        scheduler: The requests that wait and run.
        max_model_len: Tokens of a request at most, generated ones included.
        vocab_size: Token ids are less.
        eos_token_ids: The ids that end a sequence.
        defaults: The values of parameters that are None.
        tokenizer: The one that was given; else None.
    """

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        config: EngineConfig | None = None,
        *,
        store: BlockStore | None = None,
        segments: SegmentCache | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> "Engine":
        """Make an engine on the model's device.

        Args:
            model: A decoder in eval mode. It is tried out over a few blocks before it is accepted.
            config: The settings. None means an EngineConfig's own, with as many blocks as fit into memory.
            store: A store to ask, see `use_store`.
            segments: Keeps the segments for `config.blend`. None means `store`, if that is a KVStore of the cache's
                dtype, or host memory.
            tokenizer: The model's, for texts: `stop` and `guide` of SamplingParams, and `Sample.text`.

        Returns:
            The engine.

        Raises:
            ValueError: The model cannot be served from blocks, with the reason (and whether KVPageCache serves it). It
                cannot be blended, where that is asked for. It is compiled, or a weight has no memory. The scales do
                not fit the cache, or leave nothing of the model. The GPU is none of NVIDIA's, or its compute capability
                is less than 8.0.
            TypeError: `model` is no PreTrainedModel, for example a name; `config` or `tokenizer` is of another type.
            ModuleNotFoundError, zmq.ZMQError: Events cannot be published.
            RankLost: Not all ranks have come, or one has failed.
        """
        config = EngineConfig() if config is None else config
        check_arguments(model, config, tokenizer)
        if config.num_window_blocks == "auto" and isinstance(store, BlockStore) and not store.has_layers:
            config = replace(config, num_window_blocks=None)
        if config.tensor_parallel_size == 1:
            return cls._made(model, config, store, segments, None, tokenizer)
        lead = Lead(Ranks.join(model, config, Role.LEADS, store))
        with lead.assembling():
            ranked = None if store is None else RankedStore(store, lead.ranks, lead)
            return cls._made(model, config, ranked, segments, lead, tokenizer)

    @classmethod
    def _made(
        cls,
        model: PreTrainedModel,
        config: EngineConfig,
        store: BlockStore | None,
        segments: SegmentCache | None,
        lead: Lead | None,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> "Engine":
        """Make an engine. lead: the side of the other ranks; None where there are none."""
        # To name another way it computes, which ranks only do together.
        with names_alternative(model, config.cache_config) if lead is None else nullcontext():
            servable = check_servable(model, config)
        config = with_blocks(servable, config) if lead is None else with_blocks(servable, config, lead.ranks.least)
        parts = assemble(servable, config)
        if segments is not None and parts.blender is None:
            raise ValueError("segments must be None without blend")
        engine = cls(config, parts, lead, tokenizer)
        if store is not None:
            engine._connect_store(store, parts.store_rule)
        if config.blend is not None and parts.blender is not None:
            kept = default_segments(store, parts.caches.full, config.blend.max_bytes) if segments is None else segments
            engine.use_segments(parts.blender, kept)
        return engine

    @classmethod
    def follow(cls, model: PreTrainedModel, config: EngineConfig, *, store: BlockStore | None = None) -> None:
        """Compute with rank 0 until it closes its engine: the part of every other rank.

        Rank 0 decides, and has the requests and the tokens. This rank computes its heads, and holds their blocks.
        Ctrl-C is left to rank 0, which gets it, too: here KeyboardInterrupt is raised when rank 0 has ended.

        Args:
            model: The same model as on rank 0, with the shard of this rank.
            config: The same settings.
            store: This rank's store, where rank 0 has one. Its metadata name the rank.

        Raises:
            ValueError: As `from_model`. The ranks differ in model or config.
            RankLost: Rank 0 or another rank is gone, or has failed. The process groups are closed then.
            Exception: The model has failed on this rank alone. The process groups are closed then.
        """
        check_arguments(model, config)
        ranks = Ranks.join(model, config, Role.FOLLOWS, store)
        with HeldInterrupts():
            with ranks.together(), ranks.watch.waiting():
                servable = check_servable(model, config)
                caches = assemble_rank(servable, with_blocks(servable, config, ranks.least)).caches
                follower_store = None if store is None else StoreFollower(store, caches.full, ranks)
                ranks.meet()
            Follower(ranks, servable.runner, caches, follower_store).run()

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
        priority: int = 0,
        cache_at: Sequence[int] = (),
    ) -> str:
        """Queue a prompt. Its tokens come out of `step()`.

        Args:
            tokens: Token ids of the prompt, at least one.
            params: Fields that are None are taken from the model's generation config. None means all of them, as for
                `model.generate` without arguments.
            request_id: An id that no unfinished request has. None means a new one.
            namespace: Only requests of the same namespace (a tenant's salt, an adapter) share cached blocks and
                segments.
            blend: Reuse the kept segments of the prompt, and keep the others. A cached prefix is used first.
            segments: The lengths of the prompt's segments, from its first token on; the rest is in none. None means as
                the BlendConfig says. Without `blend` the prompt is computed in full, and its segments are kept.
            priority: Requests with a lower number are scheduled first, and preempted last.
            cache_at: Positions of the prompt, 1 to its length, at which other prompts may go on: the end of a system
                prompt, for example. They matter for models with recurrent layers alone.

        Returns:
            The request's id.

        Raises:
            ValueError: The id is in use. There are no tokens, or ids outside of the vocabulary. The request is longer
                than the model takes, or than all blocks. A position is out of range, or named twice. `blend` or
                `segments` is given to an engine without a BlendConfig. The segments are no lengths, longer than the
                prompt, or not found. `stop` or a guide is asked of an engine without a tokenizer. The guide cannot be
                compiled, with the reason.
            ModuleNotFoundError: A guide needs the extra `guided`.
            TypeError: The tokens are text, or another argument has another type.
        """
        prompt = Prompt(tokens, params, request_id, namespace, blend, segments, priority=priority, cache_at=cache_at)
        return made_or_undone(lambda: self._add(prompt), self._loop.drop).request_id

    def warm_segments(self, segments: Sequence[Tokens], namespace: bytes = b"") -> None:
        """Compute each segment by itself, and keep it, so that it serves in every context.

        A segment that is kept like that already, for example in a store, is not computed again. With
        BlendConfig.uses_sensitivity each is computed once more after itself, to see which of its tokens depend on the
        tokens before them; unless two of it, and a token, are more than the engine takes. Other requests go on.

        Args:
            segments: Token ids of each segment.
            namespace: Only requests of the same namespace share segments.

        Raises:
            ValueError: As `add_request`, before anything is computed.
            RuntimeError: Some segments could not be computed; the others are kept.
        """
        blend, config = self._connectors.blend, self._blend_config
        if blend is None or config is None:
            raise ValueError("segments need an engine with a BlendConfig")
        check_namespace(namespace)
        warmings = [self._intake.warming(tokens, namespace, config) for tokens in segments]
        asked = [(as_tokens(prompt.tokens)[: prompt.copy_at], prompt.copy_at is not None) for prompt in warmings]
        wanted = blend.wants_each(asked, namespace)
        outputs = self._generate([one for one, wants in zip(warmings, wanted, strict=True) if wants], lambda num: None)
        blend.drain()
        if errors := [output.error for output in outputs if output.error is not None]:
            raise RuntimeError(f"{len(errors)} of {len(outputs)} segments could not be computed: {errors[0]}")

    def abort(self, request_id: str) -> RequestOutput:
        """End a request now.

        Args:
            request_id: The id of an unfinished request.

        Returns:
            Its outcome.

        Raises:
            KeyError: There is no such unfinished request.
            RuntimeError: A step is under way, as in a hook of the model or a signal's handler.
        """
        if request_id not in self._loop.requests:
            raise KeyError(f"request_id must be that of an unfinished request, got {request_id!r}")
        return self._loop.abort(self._loop.requests[request_id])

    @property
    def has_unfinished(self) -> bool:
        """Whether there are requests to compute, or outputs that `step()` has not returned yet."""
        return self._loop.has_unfinished

    # --- tokens ------------------------------------------------------------------------------------------------------

    def step(self) -> list[StepOutput]:
        """Compute one batch.

        A request whose logits are no numbers (a NaN, or nothing finite) ends alone, with the finish_reason "error" and
        the reason in `error`.

        An exception of the model comes through the first time. The batch's requests are back in the queue then: nothing
        of it is cached, no token is lost, and the next step computes it again. If that raises, too, the next steps
        compute fewer of them. A request with which the model raises alone ends with an error. Of such a request only
        blocks that others use or share can be found afterwards.

        Returns:
            The tokens of the requests that `add_request` queued, those of steps inside `generate` and `stream`
            included. Empty if none is complete yet, or there is nothing to do.

        Raises:
            RuntimeError: Another step is under way.
            ValueError: The model is in training mode.
        """
        return self._loop.step()

    def generate(
        self,
        prompts: Sequence[Tokens],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: Callable[[int], object] | None = None,
        *,
        blend: bool = False,
        cache_at: Sequence[int] = (),
    ) -> list[RequestOutput]:
        """Run the prompts to their ends. Other requests go on meanwhile.

        Exceptions of the model do not come through: they are logged, and the step is tried again. Requests that cannot
        be computed have an `error`, see `step`. If another exception comes, the prompts are aborted.

        Args:
            prompts: Token ids of each prompt.
            params: One for all prompts, or one for each; see `add_request`.
            progress: Called with the number of prompts that a step has finished, like the `update` of a progress bar.
            blend: See `add_request`.
            cache_at: Positions of every prompt; see `add_request`.

        Returns:
            The outputs, in the order of the prompts.

        Raises:
            ValueError, TypeError: As `add_request`, before anything is computed.
        """
        prompts = as_prompts(prompts)
        each = params_of_each(params, len(prompts))
        if progress is not None and not callable(progress):
            raise TypeError(f"progress must be callable, got {type(progress).__name__}")
        about: dict[str, Any] = {"blend": blend, "cache_at": cache_at}
        asked = [Prompt(tokens, one, **about) for tokens, one in zip(prompts, each, strict=True)]
        return self._generate(asked, progress or (lambda num: None))

    def beam_search(
        self, prompts: Sequence[Tokens], params: BeamSearchParams | None = None, namespace: bytes = b""
    ) -> list[BeamSearchOutput]:
        """Find the likeliest continuations, as `model.generate(num_beams=..., do_sample=False)` does.

        It runs to its end before it returns. Other requests wait, and are preempted where blocks are short. Beams share
        the blocks of all that they have in common.

        Args:
            prompts: Token ids of each prompt.
            params: Fields that are None are taken from the model's generation config. None means all of them.
            namespace: See `add_request`.

        Returns:
            The beams of each prompt, in the order of the prompts.

        Raises:
            ValueError, TypeError: As `add_request`, before anything is computed.
            OutOfBlocks: The beams of one prompt do not fit into all blocks.
        """
        return search_beams(self, as_prompts(prompts), params, namespace)

    def stream(
        self,
        tokens: Tokens,
        params: SamplingParams | None = None,
        *,
        blend: bool = False,
        segments: Sequence[int] | None = None,
        cache_at: Sequence[int] = (),
    ) -> TokenStream:
        """Return an iterator over one prompt's tokens, which are computed as it is asked for them.

        Other requests go on meanwhile. Exceptions of the model do not come through, as in `generate`.

        Args:
            tokens: See `add_request`.
            params: See `add_request`; `n` must be 1.
            blend: See `add_request`.
            segments: See `add_request`.
            cache_at: See `add_request`.

        Returns:
            The tokens; after its end `finish_reason`, `output` and `error`.

        Raises:
            ValueError: `params.n` is not 1, or as `add_request`.
            TypeError: As `add_request`.
        """
        if params is not None and check_params(params).n != 1:
            raise ValueError(f"n must be 1 for a stream, got {params.n}")
        sink: deque[StepOutput] = deque()

        def take() -> StepOutput:
            self._loop.step_until(sink, [request])
            return sink.popleft()

        with HeldInterrupts():
            prompt = Prompt(tokens, params, blend=blend, segments=segments, sink=sink, cache_at=cache_at)
            request = self._add(prompt)
            return TokenStream(take, lambda: self._loop.drop(request), lambda: self._loop.forget(request))

    # --- inside ------------------------------------------------------------------------------------------------------

    def _generate(self, prompts: Sequence[Prompt], progress: Callable[[int], object]) -> list[RequestOutput]:
        """Run them to their ends. If anything raises, they are aborted."""
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

    def _add(self, prompt: Prompt) -> Request:
        """Queue a prompt; see add_request."""
        request_id = self._loop.new_id() if prompt.request_id is None else prompt.request_id
        request = self.prepare(prompt, request_id)
        self._loop.add(request)
        return request
