"""Engine: requests in, tokens out, through a Hugging Face decoder whose K and V are in paged blocks.

prompts, SamplingParams ─► Engine ─► ServingLoop, Scheduler, BlockManager: see EngineParts ─► tokens
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvpage.blend.segments import SegmentCache
from kvpage.blocks.load_or_compute import LoadOrCompute
from kvpage.checks.interrupts import HeldInterrupts, made_or_undone, uninterrupted
from kvpage.checks.tokens import Tokens, as_tokens
from kvpage.checks.values import check_at_least, check_namespace
from kvpage.ops.cuda.libraries.rules import OURS
from kvpage.serving.assembly.engine_parts import EngineParts, assemble, follow
from kvpage.serving.assembly.updatable import UpdatableEngine
from kvpage.serving.config import EngineConfig
from kvpage.serving.generate.alternative import names_alternative
from kvpage.serving.loop.intake import Prompt, as_prompts
from kvpage.serving.loop.outputs import RequestOutput, StepOutput
from kvpage.serving.loop.request import Request
from kvpage.serving.loop.serving_loop import ServingLoop
from kvpage.serving.loop.token_stream import TokenStream
from kvpage.serving.model.step import BatchItem
from kvpage.serving.params.beam import BeamSearchParams
from kvpage.serving.params.sampling import SamplingParams, check_params, params_of_each
from kvpage.serving.sessions.session_engine import SessionEngine
from kvpage.serving.stats import EngineStats
from kvpage.serving.stats.debug import EngineDebug
from kvpage.serving.stats.explaining import ExplainingEngine
from kvpage.serving.stats.request_state import RequestState, request_states
from kvpage.serving.steer.beam_search import BeamSearchOutput, search_beams
from kvpage.serving.steer.prompt_runs import run_to_ends, stream_of
from kvpage.serving.steer.scoring import ScoringEngine
from kvpage.serving.steer.steerable import SteerableEngine
from kvpage.store.block_store import BlockStore


class Engine(UpdatableEngine, SteerableEngine, ScoringEngine, SessionEngine, ExplainingEngine):
    """A serving loop over one model. Make it by `from_model`.

    It is not thread-safe: one engine, one thread. A forked process needs an engine of its own: in it, every call that
    computes raises RuntimeError.

    It owns the cache tensors and the block manager. The model stays the caller's, and is never changed. Other threads
    may use it at any time, also through engines and caches of their own. Ctrl-C is raised while the model computes, or
    between two steps; only the results of the call are lost.

    It computes with the model's weights as they are at each step, adapters in the model included. After a change of
    weights, cached K and V are out of date: call `update_weights`, or `reset_prefix_cache`. Hooks of the model are
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
        telemetry: Publishes events; see EngineConfig.events.
        states: The states of a model whose layers keep some; else None.
        window_caches: The blocks of layers with windows of their own, one cache for each size.
    """

    _parts: EngineParts

    def __init__(self, parts: EngineParts) -> None:
        """Take the parts, which `from_model` makes. They must belong to no other engine.

        Args:
            parts: The parts, joined with each other.
        """
        self._parts, self._loop, self._intake, self._connectors = parts, parts.loop, parts.intake, parts.connectors
        self.config, self.defaults, self.tokenizer = parts.config, parts.defaults, parts.intake.tokenizer
        self.manager, self.scheduler, self.telemetry = parts.manager, parts.scheduler, parts.telemetry
        self.cache, self.states = parts.caches.full, parts.caches.states
        self.window_caches = tuple(parts.caches.windows)
        self.max_model_len, self.vocab_size = parts.intake.max_model_len, parts.intake.vocab_size
        self.eos_token_ids, self.sessions = parts.intake.eos_token_ids, parts.sessions

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
        return cls(assemble(model, config, store, segments, tokenizer, names_alternative))

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
        follow(model, config, store)

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
        return made_or_undone(partial(self._add, prompt), self._loop.drop).request_id

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
        blend = self._connectors.blend
        if blend is None:
            raise ValueError("segments need an engine with a BlendConfig")
        check_namespace(namespace)
        warmings = [self._intake.warming(tokens, namespace, blend.blender.config) for tokens in segments]
        prompts = [(as_tokens(prompt.tokens)[: prompt.copy_at], prompt.copy_at is not None) for prompt in warmings]
        is_new = blend.wants_each(prompts, self.kv_namespace(namespace))
        new_prompts = [prompt for prompt, new in zip(warmings, is_new, strict=True) if new]
        outputs = run_to_ends(self._loop, self._add, new_prompts)
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
        params_by_prompt = params_of_each(params, len(prompts))
        if progress is not None and not callable(progress):
            raise TypeError(f"progress must be callable, got {type(progress).__name__}")
        pairs = zip(prompts, params_by_prompt, strict=True)
        checked = [Prompt(*pair, blend=blend, cache_at=cache_at) for pair in pairs]
        return run_to_ends(self._loop, self._add, checked, progress)

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
        prompt = Prompt(tokens, params, blend=blend, segments=segments, cache_at=cache_at)
        return stream_of(self._loop, self._add, prompt)

    def _add(self, prompt: Prompt) -> Request:
        """Queue a prompt; see add_request."""
        request_id = self._loop.new_id() if prompt.request_id is None else prompt.request_id
        request = self._intake.request(prompt, request_id)
        self._loop.add(request)
        return request

    # --- prompts that are not queued ---------------------------------------------------------------------------------

    def check_tokens(self, tokens: Tokens) -> npt.NDArray[np.int32]:
        return self._intake.check_tokens(tokens)

    def check_length(self, num_prompt_tokens: int, max_tokens: int) -> None:
        self._intake.check_length(num_prompt_tokens, max_tokens)

    # --- the whole engine --------------------------------------------------------------------------------------------

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
        if self._parts.lead is not None:
            raise ValueError("use_store needs tensor_parallel_size=1: with more, give stores to from_model and follow")
        self._parts.connect_store(store, rule)

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
        self._parts.warm_up(progress)

    def close(self) -> None:
        """Wait for all that is on its way to a store and to kept segments, and publish the last events.

        The engine goes on without them. Without a store, blending and events there is nothing to close. Other ranks
        end: an engine with these computes no more.
        """
        try:
            self._connectors.drain()
            self._close()
        finally:
            if self._parts.lead is not None:
                self._parts.lead.close()

    @uninterrupted
    def _close(self) -> None:
        self.sessions.close()
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
            self._loop.restart(self._loop.entries(self.weights_version))
            self._connectors.forget_kept()
            self.manager.reset_prefix_cache()
            self._parts.updates.accept()
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
        """The name of the library that attends over the blocks, or "kvpage"."""
        library = self._parts.caches.library
        return OURS if library is None else library.name

    def stats(self) -> EngineStats:
        """Return counters and the state now.

        Returns:
            The numbers. Another thread may ask while the engine works; then they are not all of one moment.
        """
        return self._parts.stats()

    @property
    def debug(self) -> EngineDebug:
        """The parts inside, by the names of their roles: for tests."""
        return self._parts.debug()

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
        request = self._intake.request(prompt, request_id)
        self.scheduler.check(request)
        return request

    @property
    def loop(self) -> ServingLoop:
        """The loop: it queues requests that are prepared, and computes them."""
        return self._loop

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
        return self._loop.compute(items)

    @uninterrupted
    def preempt_or_reclaim(self) -> bool:
        if not self.scheduler.running:
            return self._connectors.reclaim()
        self.scheduler.preempt_last()
        return True

    def add_reclaimer(self, reclaimer: Callable[[], bool]) -> None:
        self.scheduler.reclaimers.append(reclaimer)

    def remove_reclaimer(self, reclaimer: Callable[[], bool]) -> None:
        reclaimers = self.scheduler.reclaimers
        reclaimers[:] = [other for other in reclaimers if other != reclaimer]
