"""Every operation: validates, picks the implementation, and is the only door to the kernels.

Until the native ones are wired in here, the plain torch reference does the work.
"""

from collections.abc import Sequence

import torch

from kvpage import reference
from kvpage.layout import CacheLayout
from kvpage.token_ops import gather_cache as gather_cache
from kvpage.token_ops import paged_attention as paged_attention
from kvpage.token_ops import reshape_and_cache as reshape_and_cache
from kvpage.token_ops_cuda import check_device as check_device


def swap_blocks(src: torch.Tensor, dst: torch.Tensor, block_mapping: torch.Tensor, layout: CacheLayout) -> None:
    reference.swap_blocks(src, dst, block_mapping, layout)


def swap_blocks_layers(
    srcs: Sequence[torch.Tensor], dsts: Sequence[torch.Tensor], block_mapping: torch.Tensor, layout: CacheLayout
) -> None:
    for src, dst in zip(srcs, dsts, strict=True):
        reference.swap_blocks(src, dst, block_mapping, layout)


def copy_blocks(caches: Sequence[torch.Tensor], block_mapping: torch.Tensor, layout: CacheLayout) -> None:
    reference.copy_blocks(caches, block_mapping, layout)
