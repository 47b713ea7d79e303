"""Every operation, under one roof: blocks are moved (block_copy), tokens written and read (token_ops),
blended (blend_ops).

Each validates what it is given and picks the implementation; nothing else of kvpage comes near a kernel. In code that
torch.compile or a dispatch mode of torch's (fake tensors) traces, each stands for its operation in torch.ops.kvpage
(torch_ops), which does the same at run time; blending's are not traced.
"""

import functools
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch

from kvpage.layout.cache_layout import CacheLayout
from kvpage.layout.rotation import Rotation as Rotation
from kvpage.ops import chunks as chunk_ops
from kvpage.ops import rows as token_ops
from kvpage.ops import traced as torch_ops
from kvpage.ops.blend import mix_rows as mix_rows
from kvpage.ops.blend import row_deviation as row_deviation
from kvpage.ops.copies import BlockCopier
from kvpage.ops.cuda.attention import attends_in_place as attends_in_place
from kvpage.ops.cuda.rows import check_device as check_device

__all__ = [
    "BlockCopier",
    "Rotation",
    "attends_in_place",
    "check_device",
    "copy_blocks",
    "gather_cache",
    "load_chunk",
    "mix_rows",
    "paged_attention",
    "reshape_and_cache",
    "row_deviation",
    "store_chunk",
    "swap_blocks",
    "swap_blocks_layers",
]

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def _or_traced(
    traced: Callable[_Given, _Result],
) -> Callable[[Callable[_Given, _Result]], Callable[_Given, _Result]]:
    """The operation itself when it runs, `traced` while torch traces what calls it: tensors have no memory then."""

    def choose(run: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
        @functools.wraps(run)
        def operation(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
            is_traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
            return (traced if is_traced else run)(*args, **kwargs)

        return operation

    return choose


reshape_and_cache = _or_traced(torch_ops.reshape_and_cache)(token_ops.reshape_and_cache)
gather_cache = _or_traced(torch_ops.gather_cache)(token_ops.gather_cache)
paged_attention = _or_traced(torch_ops.paged_attention)(token_ops.paged_attention)
store_chunk = _or_traced(torch_ops.store_chunk)(chunk_ops.store_chunk)
load_chunk = _or_traced(torch_ops.load_chunk)(chunk_ops.load_chunk)


@_or_traced(torch_ops.swap_blocks)
def swap_blocks(src: torch.Tensor, dst: torch.Tensor, block_mapping: torch.Tensor, layout: CacheLayout) -> None:
    """Copies blocks of one layer: dst's block d becomes src's block s, for each row (s, d) of `block_mapping`.

    src, dst: caches of `layout`'s generic shape; they may differ in number of blocks, strides and device.
    block_mapping: int64 [num_pairs, 2] on the CPU. See `BlockCopier` for order, errors and what must stay alive.
    """
    BlockCopier([src], [dst], layout).run(block_mapping)


@_or_traced(torch_ops.swap_blocks_layers)
def swap_blocks_layers(
    srcs: Sequence[torch.Tensor], dsts: Sequence[torch.Tensor], block_mapping: torch.Tensor, layout: CacheLayout
) -> None:
    """`swap_blocks` in all layers with one plan. Whoever swaps often between the same caches holds a `BlockCopier`."""
    BlockCopier(srcs, dsts, layout).run(block_mapping)


@_or_traced(torch_ops.copy_blocks)
def copy_blocks(caches: Sequence[torch.Tensor], block_mapping: torch.Tensor, layout: CacheLayout) -> None:
    """Copies blocks within one tier, in all layers with one plan: block d becomes block s, for each row (s, d).

    ValueError, with nothing written, for a block that one row reads and another writes, besides `swap_blocks`' errors.
    """
    BlockCopier(caches, caches, layout).run(block_mapping)
