"""ServedModel: an engine for many, its tokenizer and its store, made from a folder."""

from dataclasses import dataclass
from typing import Any

from kvpage.integrations.dynamo.options import WorkerOptions
from kvpage.layout.config import CacheConfig
from kvpage.observe.events import EventConfig
from kvpage.serving import AsyncEngine, AsyncEngineConfig, Engine, EngineConfig
from kvpage.serving.assembly.weights_digest import weights_digest
from kvpage.store import KVStore, KVStoreConfig, LayerwiseStore, metadata_of


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that a worker serves.

    Attributes:
        engine: Steps in a thread of its own.
        tokenizer: The model's, of transformers.
        store: Shared with other workers; None for none.
    """

    engine: AsyncEngine
    tokenizer: Any
    store: KVStore | None

    @classmethod
    def load(cls, options: WorkerOptions) -> "ServedModel":
        """Load the model, and make its engine.

        Args:
            options: The worker's.

        Returns:
            The model. `close` it.

        Raises:
            OSError: There is no model in the folder.
            ValueError: The model cannot be served, or an option does not fit it.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=False)
        model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype, trust_remote_code=False)
        model = model.to(options.device).eval()
        engine = Engine.from_model(model, engine_config(options), tokenizer=tokenizer)
        try:
            store = None if options.store is None else _open_store(options, engine, model)
            live = AsyncEngine(engine, AsyncEngineConfig(options.max_num_waiting, drain_timeout=options.drain_timeout))
        except BaseException:
            engine.close()
            raise
        return cls(live, tokenizer, store)

    async def close(self, drain_timeout: float) -> None:
        """Let running requests end, then close the engine and the store.

        Args:
            drain_timeout: Seconds that they have.
        """
        try:
            if self.engine.takes_requests:
                await self.engine.drain(drain_timeout)
        finally:
            await self.engine.aclose()
            if self.store is not None:
                self.store.close()


def engine_config(options: WorkerOptions) -> EngineConfig:
    """Return the settings of a worker's engine.

    Args:
        options: The worker's.

    Raises:
        ValueError: A number is out of its range.
    """
    return EngineConfig(
        CacheConfig(options.block_size, options.num_gpu_blocks, options.num_cpu_blocks),
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=options.max_model_len,
        pin_quota=options.pin_quota,
        load_or_compute=options.disaggregation_mode != "decode",  # loading is its purpose
        save_portions=options.disaggregation_mode == "prefill",
        events=EventConfig(options.events),
        generation_config="served",
    )


def _open_store(options: WorkerOptions, engine: Engine, model: Any) -> KVStore:
    assert options.store is not None
    config = KVStoreConfig(options.tokens_of_chunk, (options.store,))
    store = KVStore(config, metadata_of(engine.cache, weights_digest(model)))
    layers = options.layers_per_record
    try:
        engine.use_store(store if layers is None else LayerwiseStore(store, engine.cache, layers))
    except BaseException:
        store.close()
        raise
    return store
