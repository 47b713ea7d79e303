"""read_adapter: a LoRA from the folder that peft's `save_pretrained` has written.

adapter_config.json          rank, alpha, targets; all other settings must be neutral
adapter_model.safetensors    base_model.model.{path of a layer}.lora_A.weight, .lora_B.weight
"""

import hashlib
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from kvpage.serving.weights.adapters.adapter import Adapter, LoraLayer

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 2**20
READ = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
ABOUT = (
    "auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "inference_mode", "layers_pattern",
    "layers_to_transform", "lora_dropout", "loftq_config", "megatron_core", "peft_version", "qalora_group_size",
    "revision", "target_modules", "task_type",
)  # fmt: skip
"""Settings that say nothing of what the weights in the file compute."""
NEUTRAL: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),  # others change the base model's weights
}
WEIGHT = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
LAYER = re.compile(r"(.*\.)?layers\.(\d+)\.(.+)")
AFTER_KV = {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2", "dense"}
"""Layers that, within the last block of a decoder, change neither its keys nor its values."""


def read_adapter(name: str, folder: Path, model: nn.Module) -> Adapter:
    """Return the adapter in a folder, for the linear layers of a model, on their devices.

    Args:
        name: By which requests ask for it.
        folder: Where peft has saved it.
        model: The base model.

    Returns:
        The adapter. Its factors have the layers' dtype, but fp32 beside 16 bits, as peft has them.

    Raises:
        ValueError: The folder has no adapter, or one that is not served, with the setting or the layer.
        OSError: A file cannot be read.
    """
    config = _read_config(folder)
    try:
        weights = load_file(folder / WEIGHTS)
    except SafetensorError as error:
        raise ValueError(f"{WEIGHTS} must hold the adapter's weights, that in {folder} does not: {error}") from error
    pairs = _pairs(weights)
    layers = {path: _layer(config, path, pair, _linear(model, path)) for path, pair in pairs.items()}
    return Adapter(name, _digest(config, weights), layers, _keeps_kv(model, layers))


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file() or not (folder / WEIGHTS).is_file():
        raise ValueError(f"adapter must be a folder with {CONFIG} and {WEIGHTS}, {folder} has not both")
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ValueError(f"{CONFIG} must have at most {MAX_CONFIG_BYTES} bytes, got {path.stat().st_size}")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{CONFIG} must be JSON, that in {folder} is not: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{CONFIG} must be a JSON object, that in {folder} is of type {type(config).__name__}")
    for key, value in config.items():
        is_served = value in NEUTRAL[key] if key in NEUTRAL else key in (*READ, *ABOUT) or not value
        if not is_served:
            raise ValueError(f"{key} of an adapter is not served, got {value!r} in {folder}")
    _check_numbers(config, folder)
    return config


def _check_numbers(config: dict[str, Any], folder: Path) -> None:
    """Raise ValueError, with the setting, for a rank or an alpha that is none, or patterns that no path can have."""
    for key, pattern_key, is_right, rule in (
        ("r", "rank_pattern", _is_rank, "a positive integer"),
        ("lora_alpha", "alpha_pattern", _is_finite, "a finite number"),
    ):
        pattern = config.get(pattern_key) or {}
        if not isinstance(pattern, dict):
            raise ValueError(f"{pattern_key} of an adapter must be an object, got {pattern!r} in {folder}")
        named = {key: config.get(key, 8), **{f"{pattern_key}[{path!r}]": value for path, value in pattern.items()}}
        for name, value in named.items():
            if not is_right(value):
                raise ValueError(f"{name} of an adapter must be {rule}, got {value!r} in {folder}")
        for path in pattern:
            try:
                _compiled(path)
            except (re.error, OverflowError) as error:
                raise ValueError(
                    f"{pattern_key} of an adapter must have regular expressions, got {path!r} in {folder}: {error}"
                ) from error


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({pattern})$")


def _pairs(weights: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in weights.items():
        match = WEIGHT.fullmatch(key)
        if match is None:
            raise ValueError(f"weights of an adapter must be lora_A and lora_B of linear layers, got {key!r}")
        pairs.setdefault(match[1], {})[match[2]] = tensor
    for path, pair in pairs.items():
        if len(pair) != 2:
            raise ValueError(f"weights of an adapter must come in pairs, {path!r} has lora_{'/'.join(pair)} alone")
    return pairs


def _linear(model: nn.Module, path: str) -> nn.Linear:
    """Return the layer. ValueError for another kind: what takes its rows otherwise cannot be told them apart."""
    try:
        layer = model.get_submodule(path)
    except AttributeError:
        raise ValueError(f"adapter must be of this model, which has no layer {path!r}") from None
    if type(layer) is not nn.Linear:
        raise ValueError(f"adapters are served on nn.Linear, {path!r} is {type(layer).__name__}")
    block = LAYER.fullmatch(path)
    if block is None or "expert" in path:
        raise ValueError(f"adapters are served on attention and dense MLPs of decoder layers, {path!r} is in none")
    return layer


def _layer(config: dict[str, Any], path: str, pair: dict[str, torch.Tensor], linear: nn.Linear) -> LoraLayer:
    a, b = pair["A"], pair["B"]
    rank = _of_pattern(config.get("rank_pattern"), path, config.get("r", 8))
    alpha = _of_pattern(config.get("alpha_pattern"), path, config.get("lora_alpha", 8))
    if a.shape != (rank, linear.in_features) or b.shape != (linear.out_features, rank):
        shapes = f"[{rank}, {linear.in_features}] and [{linear.out_features}, {rank}]"
        raise ValueError(f"lora_A and lora_B of {path!r} must be {shapes}, got {list(a.shape)} and {list(b.shape)}")
    scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    dtype = torch.promote_types(linear.weight.dtype, torch.float32)
    device = linear.weight.device
    return LoraLayer(a.to(device, dtype), b.to(device, dtype) * scaling)


def _of_pattern(pattern: dict[str, float] | None, path: str, default: float) -> Any:
    """Return a layer's own number: of the first pattern that its path ends with, as peft has it."""
    for key, value in (pattern or {}).items():
        if _compiled(key).match(path):
            return value
    return default


def _digest(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(json.dumps({key: config.get(key) for key in READ}, sort_keys=True).encode())
    for key, tensor in sorted(weights.items()):
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)};".encode())
        data = tensor.contiguous().reshape(-1).view(torch.uint8)
        digest.update(xxhash.xxh3_128_digest(data.numpy().data))
    return digest.hexdigest()[:32]


def _keeps_kv(model: nn.Module, layers: dict[str, LoraLayer]) -> bool:
    """Whether all layers come after the last keys and values: in the last block of each stack, and none of K or V.

    By names that are known. A block whose layers have others may change K and V, and counts so.
    """
    blocks = [match for path, _ in model.named_modules() if (match := LAYER.fullmatch(path))]
    last: dict[str, int] = {}
    for block in blocks:
        last[block[1] or ""] = max(last.get(block[1] or "", 0), int(block[2]))
    if len(last) != 1:
        return False
    adapted = [match for path in layers if (match := LAYER.fullmatch(path))]
    return all(int(m[2]) == last[m[1] or ""] and m[3].rpartition(".")[2] in AFTER_KV for m in adapted)
