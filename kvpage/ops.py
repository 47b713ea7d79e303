"""Every operation: validates, picks the implementation, and is the only door to the kernels.

Until the native ones are wired in here, the plain torch reference does the work.
"""

from collections.abc import Sequence

import torch

from kvpage import reference
from kvpage.layout import CacheLayout


def swap_blocks(src: torch.Tensor, dst: torch.Tensor, block_mapping: torch.Tensor, layout: CacheLayout) -> None:
    reference.swap_blocks(src, dst, block_mapping, layout)


def swap_blocks_layers(
    srcs: Sequence[torch.Tensor], dsts: Sequence[torch.Tensor], block_mapping: torch.Tensor, layout: CacheLayout
) -> None:
    for src, dst in zip(srcs, dsts, strict=True):
        reference.swap_blocks(src, dst, block_mapping, layout)


def copy_blocks(caches: Sequence[torch.Tensor], block_mapping: torch.Tensor, layout: CacheLayout) -> None:
    reference.copy_blocks(caches, block_mapping, layout)


def reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor, layout: CacheLayout
) -> None:
    reference.reshape_and_cache(key, value, cache, slot_mapping, layout)


def gather_cache(
    cache: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor, layout: CacheLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.gather_cache(cache, block_tables, seq_lens, layout)
