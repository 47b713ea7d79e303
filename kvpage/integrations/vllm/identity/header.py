"""header_of: all that the bytes of a chunk depend on besides its key, for the records of a store.

vLLM's key of a chunk covers the tokens, the name and path of an adapter, images and the salt. The rest is here.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from kvpage.store.bytes.header import Value

FORMAT = 2


def header_of(
    config: Any, facts: Mapping[str, Value], weights: str, num_bytes: int, version: str, device: str
) -> dict[str, Value]:
    """Return the header of a store for vLLM's chunks.

    Args:
        config: vLLM's OffloadingConfig.
        facts: The facts of vLLM's whole configuration, by `facts_of`.
        weights: Names the weights.
        num_bytes: Bytes of a chunk.
        version: Of vLLM.
        device: Kind of the device. A CPU's instruction set is added: vLLM arranges a block by it.

    Returns:
        The header.
    """
    parallel, cache = config.parallel, config.cache
    return {
        "format": FORMAT,
        "engine": f"vllm {version}",
        "device": f"cpu {torch.backends.cpu.get_cpu_capability()}" if device == "cpu" else device,
        "weights": weights,
        "cache_dtype": config.model.dtype,
        "layout": config.kv_cache_layout,
        "is_canonical": config.canonical_layout,
        "is_replicated": config.replicated_layout,
        "num_bytes": num_bytes,
        "worker_bytes_per_block": config.worker_kv_bytes_per_block,
        "tokens_per_hash": cache.tokens_per_hash,
        "blocks_per_chunk": cache.blocks_per_chunk,
        "ranks": [parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
        "groups": _groups(config.groups),
        **facts,
    }


def _groups(groups: Any) -> str:
    """Return a digest of the layers of each group: a large model's names are longer than a header may be."""
    layers = [(group.group_id, group.tokens_per_block, tuple(group.layer_names)) for group in groups]
    return hashlib.sha256(repr(layers).encode()).hexdigest()
