"""The arguments of operations on tokens: checked, and as the native calls take them.

Everything is checked but what lies in memory: slots and block ids are the native code's to check.
"""

import itertools
import numbers
import operator
from collections.abc import Sequence

import torch

from kvpage.layout import CacheLayout, check_layout
from kvpage.tensors import check_writable

Lengths = Sequence[int] | torch.Tensor  # [num_seqs] integers on the host


def block_view(blocks: torch.Tensor) -> tuple[int, int, int, int]:
    """Address and strides in bytes of K's or V's blocks [num_blocks, block_size, num_heads, head_size]."""
    item, strides = blocks.element_size(), blocks.stride()
    return blocks.data_ptr(), strides[0] * item, strides[1] * item, strides[2] * item


def row_view(rows: torch.Tensor) -> tuple[int, int, int]:
    """Address and strides in bytes of rows [..., num_tokens, num_heads, size]."""
    item, strides = rows.element_size(), rows.stride()
    return rows.data_ptr(), strides[-3] * item, strides[-2] * item


def row_bytes(rows: torch.Tensor) -> int:
    return rows.shape[-1] * rows.element_size()


def check_cache(cache: torch.Tensor, layout: CacheLayout) -> None:
    """`cache` must be of the layout, in memory that the operations reach."""
    check_layout(layout)
    layout.validate(cache)
    if cache.device.type not in ("cpu", "cuda"):
        raise ValueError(f"cache must be on the CPU or a CUDA device, got {cache.device}")


def check_tensor(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    if tensor.dtype != dtype:
        raise ValueError(f"{name}.dtype must be {dtype}, got {tensor.dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}.shape must be {shape}, got {tuple(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")


def check_rows(name: str, rows: torch.Tensor, num_tokens: int | None, cache: torch.Tensor, layout: CacheLayout) -> None:
    """`rows` must be [num_tokens, num_kv_heads, 1..head_size] like the cache, with its last dimension contiguous."""
    if rows.dim() != 3:
        raise ValueError(f"{name} must be [num_tokens, num_kv_heads, size], got shape {tuple(rows.shape)}")
    check_size(name, rows, layout)
    expected = (rows.shape[0] if num_tokens is None else num_tokens, layout.num_kv_heads, rows.shape[2])
    check_tensor(name, rows, cache.dtype, expected, cache.device)


def check_size(name: str, rows: torch.Tensor, layout: CacheLayout) -> None:
    if not 1 <= rows.shape[-1] <= layout.head_size:
        raise ValueError(f"{name}'s head size must be in [1, {layout.head_size}], got {rows.shape[-1]}")
    if rows.stride(-1) != 1 and rows.shape[-1] > 1:
        raise ValueError(f"{name} must be contiguous in its last dimension, got stride {rows.stride(-1)}")


def native_tables(
    cache: torch.Tensor, block_tables: torch.Tensor, layout: CacheLayout
) -> tuple[int, int, int, int, int, int]:
    """The block tables as the extension takes them, checked for all but the ids."""
    if block_tables.dim() != 2:
        raise ValueError(f"block_tables must be [num_seqs, max_blocks], got shape {tuple(block_tables.shape)}")
    num_seqs, max_blocks = block_tables.shape
    check_tensor("block_tables", block_tables, torch.int32, (num_seqs, max_blocks), cache.device)
    if max_blocks > 1 and block_tables.stride(1) != 1:
        raise ValueError(f"block_tables must be contiguous in its last dimension, got stride {block_tables.stride(1)}")
    num_blocks = cache.shape[layout.block_dim]
    return block_tables.data_ptr(), block_tables.stride(0), num_seqs, max_blocks, num_blocks, layout.block_size


def host_lengths(name: str, lengths: Lengths, num_seqs: int, maximum: int) -> list[int]:
    """`lengths` as a list of `num_seqs` integers, each in [0, maximum]. TypeError for what are no integers."""
    if isinstance(lengths, torch.Tensor):
        if lengths.dtype not in (torch.int32, torch.int64) or lengths.device.type != "cpu" or lengths.dim() != 1:
            raise ValueError(
                f"{name} must be one row of int32 or int64 on the host, "
                f"got {lengths.dtype} {tuple(lengths.shape)} on {lengths.device}"
            )
        counts = lengths.tolist()
    else:
        counts = _integers(name, lengths)
    if len(counts) != num_seqs:
        raise ValueError(f"{name} must have one entry for each of {num_seqs} block tables, got {len(counts)}")
    for bound in (min(counts), max(counts)) if counts else ():
        if not 0 <= bound <= maximum:
            raise ValueError(f"{name} must be in [0, {maximum}], got {bound}")
    return counts


def _integers(name: str, lengths: Sequence[int]) -> list[int]:
    try:
        return [operator.index(length) for length in lengths]
    except TypeError as error:
        raise TypeError(f"{name} must be integers, got {lengths!r}") from error


def integer(name: str, value: int) -> int:
    """`value` as an int. TypeError for a float, or what else is no integer."""
    try:
        return operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} must be an integer, got {value!r}") from error


def fp32_number(name: str, value: float) -> float:
    """`value` as a float. TypeError unless it is a real number, ValueError unless fp32 holds it and it is finite."""
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not abs(value) <= torch.finfo(torch.float32).max:
        raise ValueError(f"{name} must be a finite number of fp32, got {value}")
    return float(value)


def check_out_pair(out: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Two tensors that can be written, and that are not one and the same."""
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise TypeError(f"out must be a pair of tensors, got {type(out).__name__}")
    for name, rows in zip(("key", "value"), out, strict=True):
        check_writable(name, rows)
    if out[0].data_ptr() == out[1].data_ptr() and out[0].numel() and out[1].numel():
        raise ValueError("key and value must not be in the same memory")


def out_offsets(
    name: str, rows: torch.Tensor, lengths: list[int], cache: torch.Tensor, layout: CacheLayout
) -> list[int]:
    """Checks an output of gather_cache; bytes from its address to the first row of each sequence."""
    num_seqs, heads, size = len(lengths), layout.num_kv_heads, rows.shape[-1] if rows.dim() else 0
    if rows.dim() not in (3, 4):
        raise ValueError(f"{name} must have 3 or 4 dimensions, got shape {tuple(rows.shape)}")
    check_size(name, rows, layout)
    stride = rows.stride(0) * rows.element_size()
    if rows.dim() == 3:
        ends = [0, *itertools.accumulate(lengths)]
        check_tensor(name, rows, cache.dtype, (ends[-1], heads, size), cache.device)
        offsets = [end * stride for end in ends[:-1]]
    else:
        check_tensor(name, rows, cache.dtype, (num_seqs, rows.shape[1], heads, size), cache.device)
        if max(lengths, default=0) > rows.shape[1]:
            raise ValueError(f"{name} must have room for {max(lengths)} tokens a sequence, got {rows.shape[1]}")
        offsets = [seq * stride for seq in range(num_seqs)]
    return offsets
