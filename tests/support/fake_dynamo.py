"""The part of ai-dynamo 1.6 that a worker calls, as modules that tests put in its place.

    fake_dynamo.installed(monkeypatch)      import dynamo.common.backend.worker, ...

Names, fields and defaults are those of the wheel; tests/integrations/dynamo/test_interface.py compares both where it is
installed.
"""

import argparse
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from support.fake_modules import install


class DisaggregationMode(Enum):
    AGGREGATED = "agg"
    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"


@dataclass
class LlmRegistration:
    context_length: int | None = None
    kv_cache_block_size: int | None = None
    total_kv_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None


@dataclass
class EngineConfig:
    model: str
    served_model_name: str | None = None
    runtime_data: dict[str, Any] | None = None
    llm: LlmRegistration | None = None


@dataclass(frozen=True)
class ZmqSource:
    endpoint: str
    topic: str = ""
    dp_rank: int = 0


@dataclass
class ComponentSnapshot:
    kv_used_blocks: int
    kv_total_blocks: int
    gpu_cache_usage: float
    dp_rank: int
    kv_cache_hit_rate: float | None = None


@dataclass
class WorkerConfig:
    namespace: str
    component: str = "backend"
    endpoint: str = "generate"
    model_name: str = ""
    served_model_name: str | None = None
    discovery_backend: str = "etcd"
    request_plane: str = "tcp"
    event_plane: str | None = None
    disaggregation_mode: DisaggregationMode = DisaggregationMode.AGGREGATED
    others: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_runtime_config(cls, runtime_cfg: Any, model_name: str, served_model_name: str | None = None, **overrides):
        names = ("namespace", "discovery_backend", "request_plane", "event_plane")
        found = {name: getattr(runtime_cfg, name) for name in names}
        return cls(model_name=model_name, served_model_name=served_model_name, **{**found, **overrides})


class DynamoRuntimeConfig:
    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "DynamoRuntimeConfig":
        made = cls()
        vars(made).update(vars(args))
        return made

    def validate(self) -> None:
        pass


class DynamoRuntimeArgGroup:
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--namespace", default="dynamo")
        parser.add_argument("--endpoint")
        parser.add_argument("--discovery-backend", default="etcd")
        parser.add_argument("--request-plane", default="tcp")
        parser.add_argument("--event-plane")


class DynamoException(Exception):
    pass


class InvalidArgument(DynamoException):
    pass


class EngineShutdown(DynamoException):
    pass


class Unknown(DynamoException):
    pass


class HttpError(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"HTTP {code}: {message}")
        self.code, self.message = code, message


class Context:
    """The life of a request. Tests stop it."""

    def __init__(self, id: str = "request") -> None:
        self._id, self.has_stopped = id, False

    def id(self) -> str:
        return self._id

    def is_stopped(self) -> bool:
        return self.has_stopped


class Metrics:
    """EngineMetrics: keeps the registries that were added."""

    def __init__(self) -> None:
        self.registries: list[Any] = []


class Publisher:
    """SnapshotPublisher: keeps what was told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, ComponentSnapshot]] = []

    def publish(self, rank: int, snapshot: ComponentSnapshot) -> None:
        self.told.append((rank, snapshot))


def parse_endpoint(endpoint: str) -> tuple[str, str, str]:
    namespace, component, name = endpoint.removeprefix("dyn://").split(".")
    return namespace, component, name


def register_engine_registry(metrics: Metrics, registry: Any) -> None:
    metrics.registries.append(registry)


def bos_token_id_or(tokenizer: Any, default: int = 1) -> int:
    found = getattr(tokenizer, "bos_token_id", None)
    return default if found is None else found


def build_health_check_payload(bos_token_id: int) -> dict[str, Any]:
    stops = {"max_tokens": 1, "ignore_eos": True}
    return {"token_ids": [bos_token_id], "stop_conditions": stops, "sampling_options": {"temperature": 0.0}}


MODULES: dict[str, tuple[Any, ...]] = {
    "dynamo.common.backend.engine": (EngineConfig, LlmRegistration),
    "dynamo.common.backend.publisher": (ComponentSnapshot, ZmqSource),
    "dynamo.common.backend.worker": (WorkerConfig,),
    "dynamo.common.backend.metrics": (register_engine_registry,),
    "dynamo.common.backend.health_check": (bos_token_id_or, build_health_check_payload),
    "dynamo.common.configuration.groups.runtime_args": (DynamoRuntimeArgGroup, DynamoRuntimeConfig),
    "dynamo.common.constants": (DisaggregationMode,),
    "dynamo.common.utils.runtime": (parse_endpoint,),
    "dynamo.llm.exceptions": (DynamoException, EngineShutdown, HttpError, InvalidArgument, Unknown),
}


def installed(monkeypatch: Any) -> None:
    """Let `import dynamo...` find these modules until the end of the test."""
    install(monkeypatch, {name: {one.__name__: one for one in members} for name, members in MODULES.items()})
