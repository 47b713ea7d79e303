"""Chunk transforms: blocks of a table to and from one contiguous chunk, all layers in one call."""

from collections.abc import Sequence

import torch

from kvpage import reference
from kvpage.kv_scales import KVScales
from kvpage.layout import CacheLayout

FORMATS = ("vllm", "huggingface")


def store_chunk(
    caches: Sequence[torch.Tensor],
    block_ids: torch.Tensor,
    chunk: torch.Tensor,
    layout: CacheLayout,
    start: int = 0,
    fmt: str = "vllm",
    scales: Sequence[KVScales] | None = None,
) -> None:
    """`chunk` becomes the tokens from `start` on of the blocks, of all layers."""
    reference.store_chunk(caches, block_ids, start, _by_token(chunk, fmt), layout, scales)


def load_chunk(
    caches: Sequence[torch.Tensor],
    block_ids: torch.Tensor,
    chunk: torch.Tensor,
    layout: CacheLayout,
    start: int = 0,
    fmt: str = "vllm",
    scales: Sequence[KVScales] | None = None,
) -> None:
    """The tokens from `start` on of the blocks, of all layers, become `chunk`."""
    reference.load_chunk(caches, block_ids, start, _by_token(chunk, fmt), layout, scales)


def _by_token(chunk: torch.Tensor, fmt: str) -> torch.Tensor:
    if fmt not in FORMATS:
        raise ValueError(f"fmt must be one of {', '.join(FORMATS)}, got {fmt!r}")
    return chunk if fmt == "vllm" else chunk.transpose(2, 3)
