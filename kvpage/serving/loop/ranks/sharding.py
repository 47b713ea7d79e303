"""The sharding of a model, as transformers has loaded it: over how many ranks, and how many KV heads each rank has.

from_pretrained(name, tp_plan="auto")      rank 0: q, k, v of heads 0 and 1      rank 1: of heads 2 and 3
latents of MLA                             the same rows on every rank
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from kvpage.layout.config import ModelConfig
from kvpage.layout.kv_scales import KVScales
from kvpage.serving.model.kv_shape import KVShape


def sharded_size(model: PreTrainedModel) -> int:
    """Return over how many ranks the model is sharded; 1 for a whole one."""
    size = getattr(model, "_tp_size", None)  # from_pretrained sets it
    if size is not None:
        return int(size)
    meshes = {mesh for weight in model.parameters() if (mesh := getattr(weight, "device_mesh", None)) is not None}
    return max((mesh.size() for mesh in meshes), default=1)


def check_sharded_size(model: PreTrainedModel, size: int) -> None:
    """Raise ValueError unless the model is sharded over so many ranks, which are all that there are."""
    found = sharded_size(model)
    if found != size:
        how = "load it by from_pretrained(..., tp_plan='auto') in each process of torchrun" if found == 1 else ""
        raise ValueError(
            f"tensor_parallel_size must be {found}, over which {type(model).__name__} is sharded, got {size}"
            f"{how and '; '}{how}"
        )
    if size == 1:
        return
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if world != size:
        raise ValueError(f"tensor_parallel_size must be {world}, the number of processes, got {size}")


def of_this_rank(model: PreTrainedModel, config: ModelConfig, size: int) -> ModelConfig:
    """Return the config with the KV heads of one rank, which two computed tokens show. All ranks call it at once.

    Raises ValueError if the heads cannot be split over the ranks.
    """
    if size == 1 or config.use_mla:
        return config
    if config.num_kv_heads % size:
        raise ValueError(
            f"tensor_parallel_size must divide the {config.num_kv_heads} KV heads of {type(model).__name__}, got {size}"
        )
    num_heads = KVShape.of_model(model).num_heads
    if num_heads not in (config.num_kv_heads, config.num_kv_heads // size):
        raise ValueError(
            f"each rank must have {config.num_kv_heads // size} of {config.num_kv_heads} KV heads, or all, "
            f"{type(model).__name__} has {num_heads} on this one"
        )
    return replace(config, num_kv_heads=num_heads)


def scales_of_this_rank(kv_scales: Any, num_heads: int, num_all_heads: int) -> Any:
    """Return the scales of this rank's heads, out of those of all; others than such rows as they are."""
    if kv_scales is None or isinstance(kv_scales, str) or num_heads == num_all_heads:
        return kv_scales
    begin = dist.get_rank() * num_heads

    def own(scales: torch.Tensor) -> torch.Tensor:
        return scales[begin : begin + num_heads].clone() if len(scales) == num_all_heads else scales

    return [KVScales(own(one.key), own(one.value)) for one in kv_scales]
