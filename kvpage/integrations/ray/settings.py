"""AppSettings: the arguments of the application, as `serve run`, a YAML file or Python gives them."""

from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from kvpage.layout.config import CacheConfig
from kvpage.server.config import MAX_HINTED_PRIORITY
from kvpage.serving.config import EngineConfig
from kvpage.store import KVStoreConfig

Role = Literal["both", "prefill", "decode"]
DTYPES = ("auto", "float32", "bfloat16", "float16")


class AppSettings(BaseModel):
    """The arguments of the application. It checks itself.

    Attributes:
        model: A folder, or a name on the Hugging Face hub, that every node can read.
        served_model_name: The name that requests use. None means `model`.
        dtype: Of the weights: "auto", "float32", "bfloat16" or "float16".
        num_replicas: Replicas of the model; the decoding ones, where prefill is apart.
        max_replicas: More than `num_replicas` lets Serve start up to max_replicas, and stop them again.
        target_ongoing_requests: Requests of a replica that Serve aims at, where it may start and stop some.
        upscale_delay: Seconds of more load than that, before Serve starts replicas.
        downscale_delay: Seconds of less load, before it stops some. They finish their requests first.
        num_prefill_replicas: Replicas that only compute prompts. They need a `store` that all replicas reach.
        num_gateways: Replicas of the API itself.
        num_cpus: CPUs of a replica of the model.
        num_gpus: GPUs of one.
        router: "prefix" sends a prompt to the replica that holds most of it; "power_of_two" is Serve's own.
        imbalance: A replica with `imbalance` requests more than the least busy one gets no more for its prefixes.
        digest_blocks: Blocks that a replica reports to routers at most, 8 bytes each.
        digest_period: Seconds between two reports.
        store: URLs of the tiers of a KVStore, the fastest first. "{replica}" becomes the replica's own name.
        chunk_size: Tokens of a chunk of the store.
        layers_per_record: Layers of a record of the store. Prefill replicas store these at once, while they compute
            the next ones. None stores chunks whole.
        patience: Seconds without a new chunk after which a decode worker computes the rest of a prompt.
        min_prefill_tokens: Shorter prompts are computed where they are decoded.
        block_size: Tokens of a block.
        num_gpu_blocks: Blocks of a replica.
        num_cpu_blocks: Blocks of its host tier.
        max_num_seqs: See EngineConfig.
        max_num_batched_tokens: See EngineConfig.
        max_model_len: See EngineConfig.
        max_ongoing_requests: Requests that a replica has at once, waiting ones included.
        max_num_waiting: Requests that wait for their first token at most, for each gateway; beyond it 503.
        max_tries: Replicas that a request is given to, one after the other, where they are lost.
        drain_timeout: Seconds in which a replica that is stopped may finish its requests. Then they begin elsewhere.
        min_priority: See ServerConfig.
        max_retain_priority: See ServerConfig.
        api_key: The key that clients send. None lets everybody who reaches the port ask.

    Raises:
        ValueError: A value is of another type or out of its range, two contradict each other, or a name is unknown.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str = Field(min_length=1)
    served_model_name: str | None = None
    dtype: str = "auto"
    num_replicas: int = Field(1, ge=1)
    max_replicas: int | None = None
    target_ongoing_requests: float = Field(16.0, gt=0)
    upscale_delay: float = Field(30.0, ge=0)
    downscale_delay: float = Field(600.0, ge=0)
    num_prefill_replicas: int = Field(0, ge=0)
    num_gateways: int = Field(1, ge=1)
    num_cpus: float = Field(1.0, ge=0)
    num_gpus: float = Field(0.0, ge=0)
    router: Literal["prefix", "power_of_two"] = "prefix"
    imbalance: int = Field(8, ge=0)
    digest_blocks: int = Field(4096, ge=1)
    digest_period: float = Field(1.0, gt=0)
    store: tuple[str, ...] = ()
    chunk_size: int = Field(256, ge=1)
    layers_per_record: int | None = Field(None, ge=1)
    patience: float = Field(2.0, ge=0)
    min_prefill_tokens: int = Field(256, ge=1)
    block_size: int = Field(16, ge=1)
    num_gpu_blocks: int = Field(4096, ge=1)
    num_cpu_blocks: int = Field(0, ge=0)
    max_num_seqs: int = Field(64, ge=1)
    max_num_batched_tokens: int = Field(2048, ge=1)
    max_model_len: int | None = Field(None, ge=1)
    max_ongoing_requests: int = Field(256, ge=1)
    max_num_waiting: int = Field(1024, ge=1)
    max_tries: int = Field(4, ge=1)
    drain_timeout: float = Field(60.0, gt=0)
    min_priority: int | None = None
    max_retain_priority: int = Field(MAX_HINTED_PRIORITY, ge=0, le=MAX_HINTED_PRIORITY)
    api_key: str | None = Field(None, repr=False)

    @field_validator("store", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(value.split()) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> "AppSettings":
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.max_replicas is not None and self.max_replicas < self.num_replicas:
            raise ValueError(f"max_replicas must be at least num_replicas={self.num_replicas}, got {self.max_replicas}")
        if self.num_prefill_replicas and not self.store:
            raise ValueError("num_prefill_replicas needs a store, by which prompts reach the replicas that decode")
        if self.store:
            self.store_config("replica")
        self.engine_config("both")
        return self

    @property
    def name(self) -> str:
        """The name that requests use."""
        return self.served_model_name or self.model

    def engine_config(self, role: Role) -> EngineConfig:
        """Return the settings of a replica's engine.

        Args:
            role: The replica's work.
        """
        cache = CacheConfig(self.block_size, self.num_gpu_blocks, num_cpu_blocks=self.num_cpu_blocks)
        return EngineConfig(
            cache,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            generation_config="served",
            load_or_compute=role == "both",
            save_portions=role == "prefill",
            store_deadline=600.0 if role == "decode" else 5.0,
        )

    def store_config(self, replica: str) -> KVStoreConfig | None:
        """Return the settings of a replica's store; None without one.

        Args:
            replica: The replica's name.
        """
        tiers = tuple(url.replace("{replica}", replica) for url in self.store)
        return KVStoreConfig(self.chunk_size, tiers) if tiers else None

    def torch_dtype(self) -> torch.dtype | str:
        """Return the dtype as transformers takes it."""
        dtype: torch.dtype | str = "auto" if self.dtype == "auto" else getattr(torch, self.dtype)
        return dtype
