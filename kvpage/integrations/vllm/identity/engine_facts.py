"""Facts that K and V depend on and that vLLM does not pass to a tier: the device, and facts of its configuration.

A tier is given dtype and layout of the cache. With `--kv-cache-dtype fp8` that says nothing of the dtype in which K and
V were computed. vLLM's connector has the whole configuration, and makes the tier: so it is in the frames of the calls.
"""

import hashlib
import json
import logging
import os
import sys
from types import FrameType
from typing import Any

import torch

from kvpage.store.bytes.header import Value

logger = logging.getLogger(__name__)

UNKNOWN = "unknown"
RANDOM_SEEDED = ("xxhash", "xxhash_cbor")  # hashes that vLLM seeds at random in each process
FP8_NAMES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
DUMMY = "dummy"  # a format of loading: weights that come later, or never
FACTS: dict[str, tuple[str, str]] = {
    "compute_dtype": ("model_config", "dtype"),
    "quantization": ("model_config", "quantization"),
    "quantization_config": ("model_config", "quantization_config"),
    "hf_overrides": ("model_config", "hf_overrides"),
    "hf_config_path": ("model_config", "hf_config_path"),
    "max_model_len": ("model_config", "max_model_len"),  # some rotary embeddings choose their frequencies by it
    "attention_backend": ("attention_config", "backend"),
    "attention_backends": ("attention_config", "backend_per_kind"),
    "skipped_layers": ("cache_config", "kv_cache_dtype_skip_layers"),
    "state_dtype": ("cache_config", "mamba_cache_dtype"),
    "scan_dtype": ("cache_config", "mamba_ssm_cache_dtype"),
    "load_format": ("load_config", "load_format"),
}
"""Names in the header, and where vLLM's configuration has them."""


def device_kind() -> str:
    """Return the kind of device, such as "cuda" or "cpu"."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def engine_config() -> Any:
    """Return vLLM's configuration from the calls that are under way; None if none of them has it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        config = frame.f_locals.get("vllm_config")
        if type(config).__name__ == "VllmConfig":
            return config
        frame = frame.f_back
    return None


def facts_of(config: Any) -> dict[str, Value]:
    """Return the facts that K and V depend on besides the weights, as far as the configuration tells.

    Args:
        config: vLLM's; None if it was not found. Then a warning is logged, and the user's `weights` must tell.

    Returns:
        Facts by the names of FACTS. A fact that vLLM leaves open is None, or has vLLM's name for that.
    """
    if config is None:
        logger.warning(
            "vLLM's configuration was not found: compute dtype, quantization, overrides and attention backend are not "
            "compared. Without `weights`, nothing that is stored outlives vLLM. Give another `weights` for each"
        )
        return dict.fromkeys(FACTS, UNKNOWN)
    return {name: _text(getattr(getattr(config, part, None), field, None)) for name, (part, field) in FACTS.items()}


def torch_dtype(name: str) -> str | None:
    """Return torch's name of the dtype of K and V; None where it has none.

    Args:
        name: vLLM's, such as "bfloat16" or "fp8_e4m3".
    """
    known = FP8_NAMES.get(name, name.removeprefix("torch."))
    return known if isinstance(getattr(torch, known, None), torch.dtype) else None


def is_dummy(config: Any) -> bool:
    """Return whether the weights come from elsewhere than the model's folder.

    Args:
        config: vLLM's, or None.
    """
    return str(getattr(getattr(config, "load_config", None), "load_format", None)) == DUMMY


def warn_of_random_keys(config: Any) -> None:
    """Log a warning if no other process will find this one's chunks, since vLLM seeds its keys at random.

    Args:
        config: vLLM's, or None.
    """
    algorithm = str(getattr(getattr(config, "cache_config", None), "prefix_caching_hash_algo", None))
    if algorithm in RANDOM_SEEDED and "PYTHONHASHSEED" not in os.environ:
        logger.warning(
            "prefix_caching_hash_algo %s has a random seed in each process: no other process finds these chunks. Set "
            "PYTHONHASHSEED to the same number everywhere, or use sha256",
            algorithm,
        )


def _text(value: Any) -> str | None:
    """Return a short text that no other value has. Functions are known by their names alone."""
    if value is None or isinstance(value, str):
        return value
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, dict | list | tuple):
        whole = json.dumps(value, sort_keys=True, default=repr)
        return whole if len(whole) < 64 else hashlib.sha256(whole.encode()).hexdigest()
    return str(value)
