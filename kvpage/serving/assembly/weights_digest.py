"""weights_digest: a name that no other weights have, for stores."""

import hashlib
import json
from typing import Any

import torch
import xxhash

_IGNORED = ("_name_or_path", "transformers_version")  # where the model came from, and who read it


def weights_digest(model: Any) -> str:
    """Return the model's class and a digest of its config, its weights and its buffers, every byte of them.

    A store keeps K and V under this name. So two models share them only if they would compute the same ones.

    Args:
        model: A model of transformers.

    Returns:
        The name: equal for equal weights, wherever they were loaded from.
    """
    digest = hashlib.sha256(_settings(model).encode())
    weights = {**model.state_dict(), **dict(model.named_buffers())}  # a state has no buffers that are not saved
    for name, weight in sorted(weights.items()):
        if isinstance(weight, torch.Tensor):
            _update(digest, name, weight)
    return f"{type(model).__name__} {digest.hexdigest()[:32]}"


def _settings(model: Any) -> str:
    fields = {name: value for name, value in model.config.to_dict().items() if name not in _IGNORED}
    adapters = {name: vars(value) for name, value in getattr(model, "peft_config", {}).items()}
    return json.dumps([fields, adapters], sort_keys=True, default=_text)


def _text(value: Any) -> str:
    return str(sorted(value, key=str)) if isinstance(value, (set, frozenset)) else str(value)


def _update(digest: Any, name: str, weight: torch.Tensor) -> None:
    """Take in a weight's name, dtype, shape and bytes; of one made of several tensors, as quantized ones are, each."""
    digest.update(f"{name} {weight.dtype} {tuple(weight.shape)} {type(weight).__name__};".encode())
    if hasattr(weight, "__tensor_flatten__"):
        inner_names, context = weight.__tensor_flatten__()
        digest.update(repr(context).encode())
        for inner in inner_names:
            _update(digest, f"{name}.{inner}", getattr(weight, inner))
        return
    data = weight.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    digest.update(xxhash.xxh3_128_digest(data.numpy().data))
