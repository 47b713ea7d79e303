"""The part of vLLM 0.32 that a secondary tier calls, as modules that tests put in its place.

    fake_vllm.installed(monkeypatch)      import vllm.v1.kv_offload.tiering.base, ...

Names, fields and defaults are those of the wheel. tests/integrations/vllm/test_interface.py compares both where it is
installed.
"""

import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, ClassVar, NamedTuple

import numpy as np
from support.fake_modules import install

VERSION = "0.32.0"
MADE_OF_VLLM = tuple(f"kvpage.integrations.vllm.{name}" for name in ("tier", "cpu.copy_worker", "cpu.tiering_spec"))


class Medium(Enum):
    CPU = "CPU"
    STORAGE = "STORAGE"


class Locality(Enum):
    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


class LookupResult(Enum):
    MISS = auto()
    HIT = auto()
    HIT_PENDING = auto()
    RETRY = auto()


@dataclass
class OffloadingEvent:
    keys: list[bytes]
    medium: Medium
    removed: bool
    locality: Locality | None = None


@dataclass(frozen=True)
class OffloadingKVEventsConfig:
    enable_kv_cache_events: bool
    self_describing_kv_events: bool = False


class OffloadPolicy(Enum):
    CHUNK_LEVEL = "chunk_level"
    REQUEST_LEVEL = "request_level"


@dataclass
class RequestOffloadingContext:
    policy: OffloadPolicy = OffloadPolicy.CHUNK_LEVEL


@dataclass
class ReqContext:
    req_id: str
    kv_transfer_params: dict[str, Any] | None = None


class ScheduleEndContext(NamedTuple):
    new_req_ids: Collection[str] = ()
    preempted_req_ids: Collection[str] = ()


@dataclass(frozen=True)
class OffloadingMetricMetadata:
    documentation: str
    labelnames: tuple[str, ...] = ()


@dataclass(frozen=True)
class OffloadingCounterMetadata(OffloadingMetricMetadata):
    pass


@dataclass(frozen=True)
class OffloadingGaugeMetadata(OffloadingMetricMetadata):
    pass


@dataclass(frozen=True)
class OffloadingGroupConfig:
    tokens_per_block: int = 16
    layer_names: tuple[str, ...] = ("layers.0.attn", "layers.1.attn")
    group_id: int = 0


@dataclass(frozen=True)
class OffloadingModelConfig:
    name: str
    dtype: str = "float32"


@dataclass(frozen=True)
class OffloadingCacheConfig:
    tokens_per_hash: int = 16
    blocks_per_chunk: int = 1


@dataclass(frozen=True)
class OffloadingParallelConfig:
    world_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1
    data_parallel_index: int = 0


@dataclass(frozen=True)
class OffloadingConfig:
    model: OffloadingModelConfig
    worker_kv_bytes_per_block: int = 64
    groups: tuple[OffloadingGroupConfig, ...] = (OffloadingGroupConfig(),)
    cache: OffloadingCacheConfig = OffloadingCacheConfig()
    parallel: OffloadingParallelConfig = OffloadingParallelConfig()
    replicated_layout: bool = False
    canonical_layout: bool = False
    kv_cache_layout: str | None = None


@dataclass
class TransferJob:
    job_id: int
    keys: Collection[bytes]
    chunk_ids: np.ndarray
    is_promotion: bool
    req_context: ReqContext


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Collection[bytes] | None = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class SecondaryTierManager(ABC):
    medium: ClassVar[Medium | None] = None

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
    ) -> None:
        self._offloading_spec, self._primary_kv_view = offloading_spec, primary_kv_view
        self.tier_type, self.locality, self._bp_detector = tier_type, None, backpressure_detector

    @abstractmethod
    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult: ...

    @abstractmethod
    def submit_store(self, job_metadata: TransferJob) -> None: ...

    @abstractmethod
    def submit_load(self, job_metadata: TransferJob) -> None: ...

    @abstractmethod
    def get_finished_jobs(self) -> Iterable[JobResult]: ...

    def has_pending_work(self) -> bool:
        return False

    def take_events(self) -> Iterable[Any]:
        return ()

    def touch(self, keys: Collection[bytes], req_context: ReqContext) -> None:
        return

    @abstractmethod
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext: ...

    def on_request_finished(self, req_context: ReqContext) -> None:
        return

    def serve_external_requests(self, parent: Any) -> None:
        return

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        return

    @abstractmethod
    def drain_jobs(self) -> None: ...

    def shutdown(self) -> None:
        return

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return {}

    def get_stats(self) -> Any:
        return None


class GPULoadStoreSpec:
    def __init__(self, block_ids: list[int], group_sizes: Any, block_indices: Any) -> None:
        self.block_ids, self.group_sizes = np.array(block_ids, np.int32), group_sizes
        self.block_indices = block_indices


@dataclass
class CanonicalKVCacheTensor:
    tensor: Any
    page_size_bytes: int


@dataclass
class CanonicalKVCacheRef:
    tensor_idx: int
    page_size_bytes: int


@dataclass
class CanonicalKVCaches:
    tensors: list[CanonicalKVCacheTensor]
    group_data_refs: list[list[CanonicalKVCacheRef]]


@dataclass
class TransferResult:
    job_id: int
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None


class OffloadingWorker(ABC):
    @abstractmethod
    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool: ...

    @abstractmethod
    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool: ...

    @abstractmethod
    def get_finished(self) -> list[TransferResult]: ...

    @abstractmethod
    def wait(self, job_ids: set[int]) -> None: ...

    def shutdown(self) -> None:
        return


@dataclass
class OffloadingConnectorStats:
    """Keeps what was told: counters as sums, gauges as they are."""

    values: dict[tuple[str, tuple[str, ...]], float] = field(default_factory=dict)

    def is_empty(self) -> bool:
        return not self.values

    def increase_counter(self, counter_name: str, counter_increase_value: float = 1, labelvalues: Any = ()) -> None:
        at = counter_name, labelvalues
        self.values[at] = self.values.get(at, 0) + counter_increase_value

    def set_gauge(self, gauge_name: str, gauge_value: float, labelvalues: tuple[str, ...] = ()) -> None:
        self.values[gauge_name, labelvalues] = gauge_value


class current_platform:  # noqa: N801  # vLLM's name
    device_type = "cpu"


MODULES: dict[str, tuple[Any, ...]] = {
    "vllm.platforms": (current_platform,),
    "vllm.v1.kv_offload.base": (
        CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec, Locality, LookupResult,
        Medium, OffloadPolicy, OffloadingCounterMetadata, OffloadingEvent, OffloadingGaugeMetadata,
        OffloadingKVEventsConfig, OffloadingWorker, ReqContext, RequestOffloadingContext, ScheduleEndContext,
        TransferResult,
    ),
    "vllm.v1.kv_offload.config": (
        OffloadingCacheConfig, OffloadingConfig, OffloadingGroupConfig, OffloadingModelConfig, OffloadingParallelConfig,
    ),
    "vllm.v1.kv_offload.tiering.base": (JobResult, SecondaryTierManager, TransferJob),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics": (OffloadingConnectorStats,),
}  # fmt: skip


def installed(monkeypatch: Any, version: str = VERSION) -> None:
    """Let `import vllm...` find these modules until the end of the test."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    for name in MADE_OF_VLLM:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))  # at the end of the test it goes again
        del sys.modules[name]
    install(monkeypatch, {name: {one.__name__: one for one in members} for name, members in MODULES.items()})
    monkeypatch.setattr("kvpage.integrations.vllm.interface.vllm_version", lambda: version)
