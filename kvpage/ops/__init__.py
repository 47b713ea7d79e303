"""The door to every operation: blocks are moved, rows written and gathered, attended over, blended.

Each operation validates its arguments and picks the implementation: `cpu`, `cuda`, or the plain torch of `reference`.
No other package of kvpage comes near a kernel. In code that torch.compile or a dispatch mode of torch (fake tensors)
traces, each operation stands for its operator in torch.ops.kvpage (`traced`), which does the same at run time. The
operations of blending are not traced: kvpage never compiles the code that calls them. Products and norms (`linear`,
`rms_norm`) are torch's own in traced code.
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
from kvpage.ops.args.sampling_record import RECORD_WORDS as SAMPLING_RECORD_WORDS
from kvpage.ops.args.sampling_record import SAMPLING_RECORD as SAMPLING_RECORD
from kvpage.ops.args.sequences import Sequences as Sequences
from kvpage.ops.blend import mix_rows as mix_rows
from kvpage.ops.blend import row_deviation as row_deviation
from kvpage.ops.copies import BlockCopier
from kvpage.ops.cpu.linear import gated_linear as gated_linear
from kvpage.ops.cpu.linear import has_fast_linear as has_fast_linear
from kvpage.ops.cpu.linear import linear as linear
from kvpage.ops.cpu.norm import add_rms_norm as add_rms_norm
from kvpage.ops.cpu.norm import rms_norm as rms_norm
from kvpage.ops.cuda import sampling as _sampling
from kvpage.ops.cuda.attention import attends_in_place as attends_in_place
from kvpage.ops.cuda.rows import check_device as check_device
from kvpage.ops.cuda.sampling import SamplingMemory as SamplingMemory
from kvpage.ops.cuda.sampling import can_sample_rows as can_sample_rows

__all__ = [
    "SAMPLING_RECORD",
    "SAMPLING_RECORD_WORDS",
    "Attention",
    "BlockCopier",
    "BoundCache",
    "Rotation",
    "SamplingMemory",
    "Sequences",
    "add_rms_norm",
    "attend",
    "attends_in_place",
    "can_sample_rows",
    "check_device",
    "copy_blocks",
    "gated_linear",
    "gather_cache",
    "has_fast_linear",
    "linear",
    "load_chunk",
    "mix_rows",
    "paged_attention",
    "reshape_and_cache",
    "rms_norm",
    "row_deviation",
    "sample_rows",
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
sample_rows = _or_traced(_traced.sample_rows)(_sampling.sample_rows)


@_or_traced(_traced.swap_blocks)
def swap_blocks(src: torch.Tensor, dst: torch.Tensor, block_mapping: torch.Tensor, layout: CacheLayout) -> None:
    """Copy block s of `src` to block d of `dst`, in one layer, for each row (s, d) of the mapping.

    Args:
        src: The cache to read, of the layout's generic shape.
        dst: The cache to write. It may differ from `src` in number of blocks, strides and device.
        block_mapping: int64 [num_pairs, 2] on the CPU.
        layout: The layout of both.

    Raises:
        TypeError: As in `BlockCopier` and its `run`, which also say what must stay alive.
        ValueError: As in `BlockCopier` and its `run`.
        RuntimeError: CUDA fails. The destination blocks are then undefined.
    """
    BlockCopier([src], [dst], layout).run(block_mapping)


@_or_traced(_traced.swap_blocks_layers)
def swap_blocks_layers(
    srcs: Sequence[torch.Tensor], dsts: Sequence[torch.Tensor], block_mapping: torch.Tensor, layout: CacheLayout
) -> None:
    """Copy blocks as `swap_blocks` does, in all layers with one plan.

    For many swaps between the same caches, hold a `BlockCopier` instead.

    Args:
        srcs: Caches to read, one a layer.
        dsts: Caches to write, one a layer.
        block_mapping: As in `swap_blocks`.
        layout: The layout of all.

    Raises:
        TypeError: As in `swap_blocks`.
        ValueError: As in `swap_blocks`.
        RuntimeError: As in `swap_blocks`.
    """
    BlockCopier(srcs, dsts, layout).run(block_mapping)


@_or_traced(_traced.copy_blocks)
def copy_blocks(caches: Sequence[torch.Tensor], block_mapping: torch.Tensor, layout: CacheLayout) -> None:
    """Copy block s to block d within the same caches, in all layers with one plan, for each row (s, d) of the mapping.

    Args:
        caches: The caches, one a layer.
        block_mapping: int64 [num_pairs, 2] on the CPU.
        layout: The layout of all.

    Raises:
        TypeError: As in `swap_blocks`.
        ValueError: As in `swap_blocks`, or one row reads a block that another writes. Nothing is written then.
        RuntimeError: As in `swap_blocks`.
    """
    BlockCopier(caches, caches, layout).run(block_mapping)
