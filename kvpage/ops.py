"""Every operation: validates, picks the implementation, and is the only door to the kernels.

Until the native ones are wired in here, the plain torch reference does the work.
"""

from collections.abc import Sequence

import torch

from kvpage import reference
from kvpage.block_copy import BlockCopier
from kvpage.layout import CacheLayout


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


def reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor, layout: CacheLayout
) -> None:
    reference.reshape_and_cache(key, value, cache, slot_mapping, layout)


def gather_cache(
    cache: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor, layout: CacheLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.gather_cache(cache, block_tables, seq_lens, layout)
