"""The interface of SGLang's storage backends that this one was written for. Another version must have the same."""

import inspect
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

TESTED = ("0.5.23",)
METHODS = {
    "register_mem_pool_host": ("mem_pool_host",),
    "register_mem_host_pool_v2": ("host_pool", "host_pool_name"),
    "batch_exists": ("keys", "extra_info"),
    "batch_get_v1": ("keys", "host_indices", "extra_info"),
    "batch_set_v1": ("keys", "host_indices", "extra_info"),
    "batch_exists_v2": ("keys", "pool_transfers", "extra_info"),
    "batch_get_v2": ("transfers", "extra_info"),
    "batch_set_v2": ("transfers", "extra_info"),
    "get": ("key", "target_location", "target_sizes"),
    "batch_get": ("keys", "target_locations", "target_sizes"),
    "set": ("key", "value", "target_location", "target_sizes"),
    "batch_set": ("keys", "values", "target_locations", "target_sizes"),
    "exists": ("key",),
    "clear": (),
    "get_stats": (),
}  # fmt: skip
FIELDS = {
    "HiCacheStorageConfig": (
        "tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "is_mla_model",
        "enable_storage_metrics", "model_name", "dp_rank", "extra_config", "dcp_size", "dcp_rank",
    ),
    "PoolTransfer": ("name", "host_indices", "keys", "hit_policy"),
    "PoolTransferResult": ("kv_hit_pages", "extra_pool_hit_pages", "restorable_prefix_pages"),
}  # fmt: skip
POLICIES = {"all_pages", "trailing_pages", "block_groups"}


def check_interface(version: str, module: ModuleType) -> None:
    """Raise RuntimeError unless the version was tested, or has the same interface.

    Args:
        version: Of SGLang.
        module: sglang.srt.mem_cache.hicache_storage.

    Raises:
        RuntimeError: The interface differs. The message names the version and the differences.
    """
    reasons = [] if version in TESTED else differences(module)
    if reasons:
        raise RuntimeError(
            f"sglang must be {', '.join(TESTED)}, or have its interface of storage backends, "
            f"got {version}: {'; '.join(reasons)}"
        )


def differences(module: ModuleType) -> list[str]:
    """Return the differences of the module, in words.

    Args:
        module: As for `check_interface`.
    """
    base = getattr(module, "HiCacheStorage", None)
    reasons = [f"{name} has no argument {argument}" for name, argument in _missing_arguments(base)]
    reasons += [f"{name} is new and must be written" for name in sorted(_abstract(base) - set(METHODS))]
    reasons += [f"{name} has no field {field}" for name, field in _missing_fields(module)]
    policies = {str(policy.value) for policy in getattr(module, "PoolHitPolicy", ())}
    return reasons + [f"the hit policy {policy} is new" for policy in sorted(policies - POLICIES)]


def _missing_arguments(base: Any) -> list[tuple[str, str]]:
    missing = []
    for name, arguments in METHODS.items():
        method = getattr(base, name, None)
        has = set(inspect.signature(method).parameters) if callable(method) else set()
        required = arguments if callable(method) else (*arguments, "self")
        missing += [(name, argument) for argument in required if argument not in has]
    return missing


def _abstract(base: Any) -> set[str]:
    return set(getattr(base, "__abstractmethods__", ()))


def _missing_fields(module: ModuleType) -> list[tuple[str, str]]:
    missing = []
    for name, required in FIELDS.items():
        owner: Any = getattr(module, name, None)
        has = {field.name for field in fields(owner)} if is_dataclass(owner) else set()
        missing += [(name, field) for field in required if field not in has]
    return missing
