"""The part of SGLang 0.5.23 that its storage backends see, as modules that tests put in its place.

    fake_sglang.installed(monkeypatch)      import kvpage.integrations.sglang.backend

Names, fields and arguments are those of the wheel; tests/integrations/sglang/test_with_sglang.py compares both where it
is installed.
"""

import importlib
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from support.fake_modules import install

VERSION = "0.5.23"


@dataclass
class HiCacheStorageConfig:
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    enable_storage_metrics: bool
    is_page_first_layout: bool
    model_name: str | None
    dp_rank: int = 0
    extra_config: dict | None = None
    dcp_size: int = 1
    dcp_rank: int = 0


class PoolName(str, Enum):
    KV = "kv"
    MAMBA = "mamba"
    SWA = "swa"
    INDEXER = "indexer"
    DRAFT = "draft"


class PoolHitPolicy(str, Enum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    name: PoolName
    host_indices: torch.Tensor | None = None
    device_indices: torch.Tensor | None = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


@dataclass
class StorageMetrics:
    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


class HiCacheStorage(ABC):
    def register_mem_pool_host(self, mem_pool_host):
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool, host_pool_name):
        self.registered_pools = {**getattr(self, "registered_pools", {}), host_pool_name: host_pool}

    def batch_exists_v2(self, keys, pool_transfers=None, extra_info=None):
        raise NotImplementedError()

    def batch_get_v2(self, transfers, extra_info=None):
        raise NotImplementedError()

    def batch_set_v2(self, transfers, extra_info=None):
        raise NotImplementedError()

    def batch_get_v1(self, keys, host_indices, extra_info=None):
        raise NotImplementedError()

    def batch_set_v1(self, keys, host_indices, extra_info=None):
        raise NotImplementedError()

    @abstractmethod
    def get(self, key, target_location=None, target_sizes=None): ...

    @abstractmethod
    def batch_get(self, keys, target_locations=None, target_sizes=None): ...

    @abstractmethod
    def set(self, key, value=None, target_location=None, target_sizes=None): ...

    @abstractmethod
    def batch_set(self, keys, values=None, target_locations=None, target_sizes=None): ...

    @abstractmethod
    def exists(self, key): ...

    def batch_exists(self, keys, extra_info=None):
        raise NotImplementedError()

    def clear(self): ...  # noqa: B027

    def get_stats(self): ...  # noqa: B027


SERVER: dict[str, Any] = {}
"""The configuration of a server; empty for none."""


class RuntimeContext:
    def config_leaf(self, name):
        if name not in SERVER:
            raise ValueError(f"{name!r} is not a config leaf (no namespace)")
        return SERVER[name]


def get_context():
    return RuntimeContext()


STORAGE, METRICS = "sglang.srt.mem_cache.hicache_storage", "sglang.srt.observability.metrics_collector"
MODULES: dict[str, dict[str, Any]] = {
    "sglang.version": {"__version__": VERSION},
    STORAGE: {
        one.__name__: one
        for one in (HiCacheStorageConfig, PoolName, PoolHitPolicy, PoolTransfer, PoolTransferResult, HiCacheStorage)
    },
    METRICS: {"StorageMetrics": StorageMetrics},
    "sglang.srt.runtime_context": {"get_context": get_context, "RuntimeContext": RuntimeContext},
}
BACKEND = "kvpage.integrations.sglang.backend"


def installed(monkeypatch: Any) -> Any:
    """Let `import sglang...` find these modules until the end of the test, and return the backend's module."""
    install(monkeypatch, MODULES)
    monkeypatch.delitem(sys.modules, BACKEND, raising=False)
    module = importlib.import_module(BACKEND)
    monkeypatch.setitem(sys.modules, BACKEND, module)
    return module


def config(extra: dict | None = None, **given: Any) -> HiCacheStorageConfig:
    """Return the configuration of a lone rank."""
    values = dict(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=False, model_name="model", extra_config=extra,
    )  # fmt: skip
    return HiCacheStorageConfig(**{**values, **given})
