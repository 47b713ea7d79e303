"""The door to every operation: blocks are moved, rows written and gathered, attended over, blended.

Each operation validates its arguments and picks the implementation: `cpu`, `cuda`, or the plain torch of `reference`.
No other package of kvpage comes near a kernel. In code that torch.compile or a dispatch mode of torch (fake tensors)
traces, each operation stands for its operator in torch.ops.kvpage (`traced`), which does the same at run time. The
operations of blending are not traced.
"""

import functools
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch

from kvpage.layout.attention import Attention as Attention
from kvpage.layout.cache_layout import CacheLayout
from kvpage.layout.rotation import Rotation as Rotation
from kvpage.ops import attention as _blocks
from kvpage.ops import chunks as _chunks
from kvpage.ops import layer as _layer
from kvpage.ops import rows as _rows
from kvpage.ops import traced as _traced
from kvpage.ops.args.bound_cache import BoundCache as BoundCache
from kvpage.ops.args.sequences import Sequences as Sequences
from kvpage.ops.blend import mix_rows as mix_rows
from kvpage.ops.blend import row_deviation as row_deviation
from kvpage.ops.copies import BlockCopier
from kvpage.ops.cuda.attention import attends_in_place as attends_in_place
from kvpage.ops.cuda.rows import check_device as check_device

__all__ = [
    "Attention",
    "BlockCopier",
    "BoundCache",
    "Rotation",
    "Sequences",
    "attend",
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
    "write_and_attend",
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


reshape_and_cache = _or_traced(_traced.reshape_and_cache)(_rows.reshape_and_cache)
gather_cache = _or_traced(_traced.gather_cache)(_rows.gather_cache)
paged_attention = _or_traced(_traced.paged_attention)(_blocks.paged_attention)
attend = _or_traced(_traced.attend)(_blocks.attend)
write_and_attend = _or_traced(_traced.write_and_attend)(_layer.write_and_attend)
store_chunk = _or_traced(_traced.store_chunk)(_chunks.store_chunk)
load_chunk = _or_traced(_traced.load_chunk)(_chunks.load_chunk)


@_or_traced(_traced.swap_blocks)
def swap_blocks(src: torch.Tensor, dst: torch.Tensor, block_mapping: torch.Tensor, layout: CacheLayout) -> None:
    """Copies blocks of one layer: dst's block d becomes src's block s, for each row (s, d) of `block_mapping`.

    src, dst: caches of `layout`'s generic shape; they may differ in number of blocks, strides and device.
    block_mapping: int64 [num_pairs, 2] on the CPU. See `BlockCopier` for order, errors and what must stay alive.
    """
    BlockCopier([src], [dst], layout).run(block_mapping)


@_or_traced(_traced.swap_blocks_layers)
def swap_blocks_layers(
    srcs: Sequence[torch.Tensor], dsts: Sequence[torch.Tensor], block_mapping: torch.Tensor, layout: CacheLayout
) -> None:
    """`swap_blocks` in all layers with one plan. Whoever swaps often between the same caches holds a `BlockCopier`."""
    BlockCopier(srcs, dsts, layout).run(block_mapping)


@_or_traced(_traced.copy_blocks)
def copy_blocks(caches: Sequence[torch.Tensor], block_mapping: torch.Tensor, layout: CacheLayout) -> None:
    """Copies blocks within one tier, in all layers with one plan: block d becomes block s, for each row (s, d).

    ValueError, with nothing written, for a block that one row reads and another writes, besides `swap_blocks`' errors.
    """
    BlockCopier(caches, caches, layout).run(block_mapping)
