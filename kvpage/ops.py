"""Every operation, under one roof: blocks are moved (block_copy), tokens written and read (token_ops).

Each validates what it is given and picks the implementation; nothing else of kvpage comes near a kernel.
"""

from collections.abc import Sequence

import torch

from kvpage.attention_ops_cuda import attends_in_place as attends_in_place
from kvpage.block_copy import BlockCopier
from kvpage.layout import CacheLayout
from kvpage.token_ops import gather_cache as gather_cache
from kvpage.token_ops import paged_attention as paged_attention
from kvpage.token_ops import reshape_and_cache as reshape_and_cache
from kvpage.token_ops_cuda import check_device as check_device


def swap_blocks(src: torch.Tensor, dst: torch.Tensor, block_mapping: torch.Tensor, layout: CacheLayout) -> None:
    """Copies blocks of one layer: dst's block d becomes src's block s, for each row (s, d) of `block_mapping`.

    src, dst: caches of `layout`'s generic shape; they may differ in number of blocks, strides and device.
    block_mapping: int64 [num_pairs, 2] on the CPU. See `BlockCopier` for order, errors and what must stay alive.
    """
    BlockCopier([src], [dst], layout).run(block_mapping)


def swap_blocks_layers(
    srcs: Sequence[torch.Tensor], dsts: Sequence[torch.Tensor], block_mapping: torch.Tensor, layout: CacheLayout
) -> None:
    """`swap_blocks` in all layers with one plan. Whoever swaps often between the same caches holds a `BlockCopier`."""
    BlockCopier(srcs, dsts, layout).run(block_mapping)


def copy_blocks(caches: Sequence[torch.Tensor], block_mapping: torch.Tensor, layout: CacheLayout) -> None:
    """Copies blocks within one tier, in all layers with one plan: block d becomes block s, for each row (s, d).

    ValueError, with nothing written, for a block that one row reads and another writes, besides `swap_blocks`' errors.
    """
    BlockCopier(caches, caches, layout).run(block_mapping)
