"""Replica: one engine of the application, in a process that Serve starts."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvpage.integrations.ray.settings import AppSettings, Role
from kvpage.integrations.remote import GenerateCall, Worker
from kvpage.integrations.routing import CacheDigest
from kvpage.serving import AsyncEngine, AsyncEngineConfig, Engine, EngineStats
from kvpage.serving.assembly.weights_digest import weights_digest
from kvpage.serving.loop.outputs import StepOutput
from kvpage.store import ArrivingStore, KVStore, LayerwiseStore, metadata_of


class Replica:
    """An engine, its store, and the digest of its cached blocks. Serve makes it, drains it and ends it.

    Args:
        settings: The fields of AppSettings.
        role: Its work.
    """

    def __init__(self, settings: dict[str, Any], role: Role = "both") -> None:
        self._settings = AppSettings(**settings)
        tokenizer = AutoTokenizer.from_pretrained(self._settings.model, trust_remote_code=False)
        model, config = _load_model(self._settings), self._settings.engine_config(role)
        engine = Engine.from_model(model, config, tokenizer=tokenizer)
        self._store, arriving = self._connect_store(engine, model, role)
        self._digest = CacheDigest(engine.manager.block_size, self._settings.digest_blocks)
        engine.telemetry.follow(self._digest)
        engine.warmup()
        limits = AsyncEngineConfig(self._settings.max_ongoing_requests, drain_timeout=self._settings.drain_timeout)
        self._live = AsyncEngine(engine, limits)
        self._worker = Worker(self._live, arriving)

    def _connect_store(self, engine: Engine, model: Any, role: Role) -> tuple[KVStore | None, ArrivingStore | None]:
        config = self._settings.store_config(_replica_name())
        if config is None:
            return None, None
        store = KVStore(config, metadata_of(engine.cache, weights_digest(model)))
        layers = self._settings.layers_per_record
        try:
            used = store if layers is None else LayerwiseStore(store, engine.cache, layers)
            arriving = ArrivingStore(used, self._settings.patience) if role == "decode" else None
            engine.use_store(used if arriving is None else arriving)
        except BaseException:
            store.close()
            raise
        return store, arriving

    async def generate(self, call: GenerateCall) -> AsyncGenerator[list[StepOutput], None]:
        """Run a call; see Worker.stream.

        Args:
            call: The request.
        """
        async for outputs in self._worker.stream(call):
            yield outputs

    async def stats(self) -> EngineStats:
        """Return the engine's numbers."""
        return self._live.engine.stats()

    def record_routing_stats(self) -> dict[str, Any]:
        """Return the digest for routers. Serve asks for it every `digest_period` seconds."""
        return self._digest.report().to_wire()

    def check_health(self) -> None:
        """Raise the error that has ended the engine's thread. Serve then starts another replica."""
        if self._live.failure is not None:
            raise self._live.failure

    async def close(self) -> None:
        """End all requests, the engine's thread and the store."""
        await asyncio.to_thread(self._live.close)
        if self._store is not None:
            await asyncio.to_thread(self._store.close)

    async def __del__(self) -> None:
        """Close it; Serve awaits this, after the last request of a replica that it stops."""
        if hasattr(self, "_live"):
            await self.close()


def _replica_name() -> str:
    """Return the name that Serve gave this replica."""
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)


def _load_model(settings: AppSettings) -> Any:
    device = "cuda" if torch.cuda.is_available() and settings.num_gpus else "cpu"
    dtype = settings.torch_dtype()
    model: Any = AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype, trust_remote_code=False)
    return model.to(device).eval()
