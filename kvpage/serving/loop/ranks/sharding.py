"""The sharding of a model, as transformers has loaded it: over how many ranks, and how many KV heads each rank has.

from_pretrained(name, tp_plan="auto")      rank 0: q, k, v of heads 0 and 1      rank 1: of heads 2 and 3
latents of MLA                             the same rows on every rank
"""

from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from kvpage.layout.config import ModelConfig, ParallelConfig
from kvpage.layout.kv_scales import KVScales


def sharded_size(model: PreTrainedModel) -> int:
    """Return over how many ranks the model is sharded; 1 for a whole one."""
    size = getattr(model, "_tp_size", None)  # from_pretrained sets it
    if size is not None:
        return int(size)
    meshes = {mesh for weight in model.parameters() if (mesh := getattr(weight, "device_mesh", None)) is not None}
    return max((mesh.size() for mesh in meshes), default=1)


def check_sharded_size(model: PreTrainedModel, size: int) -> None:
    """Raise ValueError unless the model is sharded over `size` ranks, which are all ranks."""
    num_ranks = sharded_size(model)
    if num_ranks != size:
        how = "load it by from_pretrained(..., tp_plan='auto') in each process of torchrun" if num_ranks == 1 else ""
        raise ValueError(
            f"tensor_parallel_size must be {num_ranks}, over which {type(model).__name__} is sharded, got {size}"
            f"{how and '; '}{how}"
        )
    if size == 1:
        return
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if world != size:
        raise ValueError(f"tensor_parallel_size must be {world}, the number of processes, got {size}")


def check_heads(name: str, seen: ModelConfig, num_all: int, size: int) -> None:
    """Raise ValueError unless each layer has all KV heads on this rank, or its share of them.

    name: of the model. seen: the shapes of this rank. num_all: the heads of all ranks.
    """
    if size == 1:
        return
    counts = {seen.shape_of(layer).num_kv_heads for layer in seen.attention_layers(ParallelConfig())}
    if len(counts) > 1:
        raise ValueError(
            f"tensor_parallel_size must be 1 for {name}, whose layers have {sorted(counts)} KV heads, got {size}"
        )
    if not counts <= {num_all, num_all // size}:
        raise ValueError(f"{name} must have {num_all // size} of {num_all} KV heads on each rank, got {counts.pop()}")


def scales_of_this_rank(kv_scales: Any, num_heads: int, num_all_heads: int) -> Any:
    """Return the scales of this rank's heads, out of those of all; others than such rows as they are."""
    if kv_scales is None or isinstance(kv_scales, str) or num_heads == num_all_heads:
        return kv_scales
    begin = dist.get_rank() * num_heads

    def own(scales: torch.Tensor) -> torch.Tensor:
        return scales[begin : begin + num_heads].clone() if len(scales) == num_all_heads else scales

    return [KVScales(own(scales.key), own(scales.value)) for scales in kv_scales]
