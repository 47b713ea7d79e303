"""DynamoWorker: the side of a worker that Dynamo's runtime calls.

    from_args ─► start ─► generate, abort ... ─► cleanup
                   └─► kv_event_sources, metrics

It is no subclass of Dynamo's LLMEngine, so that it can be imported without Dynamo; the command line joins both.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from kvpage.integrations.dynamo.chunks import Chunk, ChunkWriter
from kvpage.integrations.dynamo.hints import pin
from kvpage.integrations.dynamo.options import WorkerOptions, parse
from kvpage.integrations.dynamo.request import GenerationRequest, RequestDefaults, read_request
from kvpage.integrations.dynamo.served_model import ServedModel
from kvpage.integrations.dynamo.snapshots import Snapshots
from kvpage.serving import EngineClosed, LiveRequest, QueueFull, SamplingParams, StepOutput

PREFILL_PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
NO_MODEL = "start must be called before requests come"


class DynamoWorker:
    """One worker: a model, its requests, and the router's news of its cache."""

    def __init__(self, options: WorkerOptions) -> None:
        """Make a worker that has loaded nothing yet.

        Args:
            options: Its settings.
        """
        self.options = options
        self._served: ServedModel | None = None
        self._defaults = RequestDefaults(1)
        self._snapshots = Snapshots()
        self._live: dict[str, list[LiveRequest]] = {}  # by the ids of Dynamo's contexts

    @classmethod
    async def from_args(cls, argv: Sequence[str] | None = None) -> "tuple[DynamoWorker, Any]":
        """Read the command line.

        Args:
            argv: Its words. None means those of this process.

        Returns:
            The worker, and Dynamo's WorkerConfig.

        Raises:
            ValueError: As WorkerOptions.
        """
        options, config = parse(argv)
        return cls(options), config

    # --- life --------------------------------------------------------------------------------------------------------

    async def start(self, worker_id: int) -> Any:
        """Load the model.

        Args:
            worker_id: Not used: nothing of a worker needs a name.

        Returns:
            Dynamo's EngineConfig: by what the worker is registered.

        Raises:
            OSError, ValueError: As ServedModel.load.
        """
        return self.serve(await asyncio.to_thread(ServedModel.load, self.options))

    def serve(self, served: ServedModel) -> Any:
        """Serve a model that is loaded already.

        Args:
            served: The model. `cleanup` closes it.

        Returns:
            As `start`.
        """
        from dynamo.common.backend.engine import EngineConfig, LlmRegistration

        self._served, engine = served, served.engine.engine
        stated = engine.defaults.stated_sampling.temperature
        self._defaults = RequestDefaults(engine.max_model_len, 1.0 if stated is None else stated)
        self._snapshots.begin(served.engine)
        registration = LlmRegistration(
            context_length=engine.max_model_len,
            kv_cache_block_size=self.options.block_size,
            total_kv_blocks=self.options.num_gpu_blocks,
            max_num_seqs=self.options.max_num_seqs,
            max_num_batched_tokens=self.options.max_num_batched_tokens,
        )
        return EngineConfig(model=self.options.model, served_model_name=self.options.name, llm=registration)

    async def cleanup(self) -> None:
        """Let running requests end, and close the engine. A second call, or one without `start`, does nothing."""
        served, self._served = self._served, None
        await self._snapshots.end()
        if served is not None:
            await served.close(self.options.drain_timeout)

    async def is_quiescent(self) -> bool:
        """Return whether a prefill worker has stored its results: then it may end."""
        if self._served is None:
            return True
        return self._served.engine.stats().num_unfinished == 0 and not await self._saves(self._served)

    # --- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, request: Mapping[str, Any], context: Any) -> AsyncIterator[Chunk]:
        """Yield the chunks of one request as its tokens come.

        Args:
            request: Dynamo's GenerateRequest.
            context: Its life, by which it is cancelled.

        Raises:
            dynamo.llm.exceptions.InvalidArgument: The request cannot be served.
            dynamo.llm.exceptions.HttpError: 503, too many requests wait.
            dynamo.llm.exceptions.EngineShutdown: The worker ends. The frontend goes on at another.
            dynamo.llm.exceptions.Unknown: The engine has failed at this request.
        """
        served = self._served
        if served is None:
            raise RuntimeError(NO_MODEL)
        if (request.get("sampling_options") or {}).get("guided_decoding"):  # a form may take long to compile
            asked, live = await asyncio.to_thread(self._submit, served, request)
        else:
            asked, live = self._submit(served, request)
        writer = ChunkWriter(len(asked.tokens), lambda token: str(served.tokenizer.decode([token])), asked.shows_ids)
        with self._known(context, live):
            async for outputs in live:
                self._check(served, outputs, context)
                chunk = writer.chunk(outputs)
                if self.options.disaggregation_mode == "prefill" and "finish_reason" in chunk:
                    await self._stored(served)
                    chunk["disaggregated_params"] = {"kvpage": {"num_prompt_tokens": len(asked.tokens)}}
                yield chunk
        self._pin(served, asked)

    async def abort(self, context: Any) -> None:
        """End a request whose client has gone.

        Args:
            context: As given to `generate`.
        """
        for live in self._live.get(context.id(), ()):
            live.abort()

    def _submit(self, served: ServedModel, request: Mapping[str, Any]) -> tuple[GenerationRequest, LiveRequest]:
        from dynamo.llm.exceptions import EngineShutdown, HttpError, InvalidArgument

        try:
            asked = read_request(request, self._defaults)
            if self.options.disaggregation_mode == "prefill":
                asked = replace(asked, params=PREFILL_PARAMS)
            submit = served.engine.submit
            live = submit(asked.tokens, asked.params, namespace=asked.namespace, priority=asked.priority)
        except (ValueError, TypeError) as error:
            raise InvalidArgument(str(error)) from error
        except QueueFull as error:
            raise HttpError(503, str(error)) from error
        except EngineClosed as error:
            raise EngineShutdown(str(error)) from error
        return asked, live

    def _pin(self, served: ServedModel, asked: GenerationRequest) -> None:
        if asked.hints.pin_ttl is not None:
            ttl = min(asked.hints.pin_ttl, self.options.max_pin_seconds)
            with contextlib.suppress(EngineClosed):
                served.engine.call(lambda engine: pin(engine, asked.tokens, asked.namespace, ttl))

    @contextlib.contextmanager
    def _known(self, context: Any, live: LiveRequest) -> Any:
        """Let `abort` find the request. One context may have several: a migrated request may come back."""
        key = context.id()
        self._live.setdefault(key, []).append(live)
        if context.is_stopped():
            live.abort()
        try:
            yield
        finally:
            self._live[key].remove(live)
            if not self._live[key]:
                del self._live[key]

    def _check(self, served: ServedModel, outputs: Sequence[StepOutput], context: Any) -> None:
        """Raise if the request has failed, or was ended because the worker ends."""
        from dynamo.llm.exceptions import EngineShutdown, Unknown

        for output in outputs:
            if output.finish_reason == "error":
                raise Unknown(output.error or "the engine has failed")
            if output.finish_reason == "abort" and not context.is_stopped():
                if not served.engine.takes_requests:
                    raise EngineShutdown("the worker ends, and the request did not")
                raise Unknown(output.error or "the request was aborted")

    # --- prefill workers ---------------------------------------------------------------------------------------------

    async def _stored(self, served: ServedModel) -> None:
        """Wait until the store has all results so far. Other requests go on."""
        for future in await self._saves(served):
            with contextlib.suppress(Exception):  # the store connector counts it; a decode worker computes the prompt
                await asyncio.wrap_future(future)

    async def _saves(self, served: ServedModel) -> "list[Future[int]]":
        if served.store is None:
            return []
        return await asyncio.wrap_future(served.engine.call(lambda engine: engine.saves_under_way()))

    # --- the router's news -------------------------------------------------------------------------------------------

    async def kv_event_sources(self) -> list[Any]:
        """Return where the events of the cache come from."""
        from dynamo.common.backend.publisher import ZmqSource

        if self._served is None:
            raise RuntimeError(NO_MODEL)
        endpoints = self._served.engine.engine.telemetry.event_endpoints
        assert endpoints is not None
        return [ZmqSource(endpoint=endpoints[0].replace("0.0.0.0", "127.0.0.1"))]

    def component_metrics_dp_ranks(self) -> list[int]:
        """Return the ranks that tell how full they are."""
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Take the publisher of how full the cache is.

        Args:
            publisher: Dynamo's SnapshotPublisher.
        """
        self._snapshots.attach(publisher)

    async def register_prometheus(self, metrics: Any) -> None:
        """Add the engine's numbers to the runtime's /metrics.

        Args:
            metrics: Dynamo's EngineMetrics.
        """
        from dynamo.common.backend.metrics import register_engine_registry
        from prometheus_client import CollectorRegistry

        from kvpage.serving.stats.prometheus import EngineCollector

        if self._served is None:
            raise RuntimeError(NO_MODEL)
        registry = CollectorRegistry()
        registry.register(EngineCollector(self._served.engine.engine))
        register_engine_registry(metrics, registry)

    async def health_check_payload(self) -> Any:
        """Return a request of one token, by which the runtime sees that the worker answers."""
        from dynamo.common.backend.health_check import bos_token_id_or, build_health_check_payload

        tokenizer = None if self._served is None else self._served.tokenizer
        return build_health_check_payload(bos_token_id_or(tokenizer, 0))

    # --- controls ----------------------------------------------------------------------------------------------------

    def supported_controls(self) -> set[str]:
        """Return the names of an operator's requests."""
        return {"clear_kv_blocks"}

    async def engine_control(self, control: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Do an operator's request.

        Args:
            control: "clear_kv_blocks" forgets all cached blocks, as after a change of weights.
            body: Not used.

        Returns:
            Whether it was done.
        """
        if control != "clear_kv_blocks" or self._served is None:
            return {"status": "error", "message": f"{control!r} is not served"}
        await asyncio.wrap_future(self._served.engine.call(lambda engine: engine.reset_prefix_cache()))
        return {"status": "ok"}
