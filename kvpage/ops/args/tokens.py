"""The arguments of operations on tokens: checked, and as the native calls take them.

Everything is checked but what lies in memory: slots and block ids are the native code's to check.
"""

import itertools
import operator
from collections.abc import Sequence

import torch

import kvpage._C as _C
from kvpage.checks.tensors import check_dense, check_writable
from kvpage.checks.values import as_integer
from kvpage.layout.cache_layout import CacheLayout, check_layout
from kvpage.layout.kv_scales import FP8_DTYPES, KVScales
from kvpage.layout.kv_view import KVView

Lengths = Sequence[int] | torch.Tensor  # [num_seqs] integers on the host

TokenPart = tuple[_C.KVPart, int, int, int, int, int, int, int, int]
"""Blocks of K or V; address, strides of token and head in bytes of the rows to go there or come from there; RowType,
CodeType, elements of a head; address and stride of the heads' scales."""


# RowType and CodeType of csrc/quantize/code_type.h. A CodeType of 0 is any other dtype.
ROW_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # ElementType has the same numbers
BITS = 3  # the RowType of rows that are copied as they are
CODECS = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2, torch.int8: 3}


def native_blocks(view: KVView) -> _C.KVPart:
    """K's or V's blocks as the extension takes them."""
    rows, scales = view.rows, view.scales
    if scales is None:
        return _C.KVPart(rows.data_ptr(), rows.stride(), view.run_size, rows.element_size())
    places = rows.data_ptr(), rows.stride(), view.run_size, rows.element_size(), scales.data_ptr(), scales.stride()
    return _C.KVPart(*places)


def native_part(view: KVView, rows: torch.Tensor, scale: torch.Tensor | None) -> TokenPart:
    """K's or V's blocks with the rows [..., num_tokens, num_heads, size] to go there or come from there."""
    return part_of(native_blocks(view), view.rows.dtype, rows, scale)


def part_of(blocks: _C.KVPart, dtype: torch.dtype, rows: torch.Tensor, scale: torch.Tensor | None) -> TokenPart:
    """The same of blocks of this dtype as the extension takes them."""
    if rows.dtype == dtype:
        return blocks, *row_view(rows), BITS, 0, rows.shape[-1], 0, 0
    scales = (0, 0) if scale is None else (scale.data_ptr(), int(len(scale) > 1))
    return blocks, *row_view(rows), ROW_TYPES[rows.dtype], CODECS[dtype], rows.shape[-1], *scales


def row_view(rows: torch.Tensor) -> tuple[int, int, int]:
    """Address and strides in bytes of rows [..., num_tokens, num_heads, size]."""
    item, strides = rows.element_size(), rows.stride()
    return rows.data_ptr(), strides[-3] * item, strides[-2] * item


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


COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def row_dtypes(layout: CacheLayout) -> tuple[torch.dtype, ...]:
    """The dtypes of rows: the cache's dtype, or dtypes that are quantised on the way in and restored after."""
    if not layout.is_quantized:
        return (layout.dtype,)
    return COMPUTE_DTYPES if layout.has_token_scales else (*COMPUTE_DTYPES, layout.dtype)


def check_dtype(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}.dtype must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}")


def check_pair(name: str, key: object, value: object, has_values: bool) -> None:
    """Both, or the key alone where the layout has no value part."""
    if key is None:
        raise ValueError(f"{name}key must not be None")
    if (value is not None) != has_values:
        rule = "be given" if has_values else "be None, this layout has no value part"
        raise ValueError(f"{name}value must {rule}, got {type(value).__name__}")


def check_scales(scales: KVScales | None, cache: torch.Tensor, layout: CacheLayout) -> None:
    """Only caches of 8-bit floats take scales, on their device, one for the tensor or one a head."""
    if scales is not None:
        check_given_scales("scales", scales, cache, layout)


def check_given_scales(what: str, scales: object, cache: torch.Tensor, layout: CacheLayout) -> None:
    if not isinstance(scales, KVScales):
        raise TypeError(f"{what} must be KVScales, got {type(scales).__name__}")
    if layout.dtype not in FP8_DTYPES:
        raise ValueError(f"{what} must be None for a cache of {layout.dtype}")
    for name, scale in (("key", scales.key), ("value", scales.value)):
        if scale.device != cache.device:
            raise ValueError(f"{what}.{name} must be on {cache.device}, got {scale.device}")
        if len(scale) not in (1, layout.num_kv_heads):
            raise ValueError(f"{what}.{name} must have 1 or {layout.num_kv_heads} entries, got {len(scale)}")


def check_size(name: str, rows: torch.Tensor, most: int) -> None:
    if not 1 <= rows.shape[-1] <= most:
        raise ValueError(f"{name}'s head size must be in [1, {most}], got {rows.shape[-1]}")
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
    """Return `lengths` as a list of `num_seqs` integers, each in [0, maximum]. TypeError for other types."""
    if isinstance(lengths, torch.Tensor):
        check_dense(name, lengths)
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


def length_bound(name: str, bound: int | None, counts: list[int] | None, most: int) -> int:
    """The largest length: `bound` where given, which no known one may exceed, else the largest known one, or `most`."""
    largest = most if counts is None else max(counts, default=0)
    if bound is None:
        return largest
    bound = as_integer(name, bound)
    least = 0 if counts is None else largest
    if bound < least:
        raise ValueError(f"{name} must be at least {least}, got {bound}")
    return min(bound, most)


def _integers(name: str, lengths: Sequence[int]) -> list[int]:
    if isinstance(lengths, list) and set(map(type, lengths)) <= {int}:
        return lengths.copy()
    try:
        return [operator.index(length) for length in lengths]
    except TypeError as error:
        raise TypeError(f"{name} must be integers, got {lengths!r}") from error


def check_out_pair(out: tuple[torch.Tensor, torch.Tensor | None], has_values: bool) -> None:
    """Tensors that can be written, and that are not one and the same; the second is None where there is no V."""
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise TypeError(f"out must be a pair of tensors, got {type(out).__name__}")
    check_pair("out's ", *out, has_values)
    for name, rows in zip(("key", "value"), out, strict=True):
        if rows is not None:
            check_writable(name, rows)
    key, value = out
    if value is not None and key.data_ptr() == value.data_ptr() and key.numel() and value.numel():
        raise ValueError("key and value must not be in the same memory")


def check_out(name: str, rows: torch.Tensor, lengths: list[int], cache: torch.Tensor, layout: CacheLayout) -> None:
    """Check an output of gather_cache, named "key" or "value"."""
    num_seqs, heads, size = len(lengths), layout.num_kv_heads, rows.shape[-1] if rows.dim() else 0
    if rows.dim() not in (3, 4):
        raise ValueError(f"{name} must have 3 or 4 dimensions, got shape {tuple(rows.shape)}")
    check_size(name, rows, layout.head_size if name == "key" else layout.head_size_v)
    check_dtype(name, rows, row_dtypes(layout))
    if rows.dim() == 3:
        check_tensor(name, rows, rows.dtype, (sum(lengths), heads, size), cache.device)
        return
    check_tensor(name, rows, rows.dtype, (num_seqs, rows.shape[1], heads, size), cache.device)
    if max(lengths, default=0) > rows.shape[1]:
        raise ValueError(f"{name} must have room for {max(lengths)} tokens a sequence, got {rows.shape[1]}")


def out_offsets(rows: torch.Tensor | None, lengths: list[int]) -> list[int]:
    """Return the bytes from an output's address to the first row of each sequence; none for None."""
    if rows is None:
        return []
    stride = rows.stride(0) * rows.element_size()
    firsts = range(len(lengths)) if rows.dim() == 4 else [0, *itertools.accumulate(lengths)][:-1]
    return [first * stride for first in firsts]


def check_device_lengths(
    lengths: torch.Tensor, starts: object, num_seqs: int, cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Lengths, and starts where given, on the cache's device: checked but for their values, and contiguous."""
    if starts is not None and not isinstance(starts, torch.Tensor):
        raise ValueError(f"seq_starts must be on {cache.device} as seq_lens are, got {type(starts).__name__}")
    for name, row in (("seq_lens", lengths), ("seq_starts", starts)):
        if row is not None:
            check_dtype(name, row, (torch.int32, torch.int64))
            check_tensor(name, row, row.dtype, (num_seqs,), cache.device)
    return lengths.contiguous(), None if starts is None else starts.contiguous()


def check_open_out(
    out: tuple[torch.Tensor, torch.Tensor | None] | None,
    num_seqs: int,
    has_values: bool,
    cache: torch.Tensor,
    layout: CacheLayout,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """An output of gather_cache, for lengths that only the device knows."""
    if out is None:
        raise ValueError("out must be given where seq_lens are on the device, got None")
    check_pair("out's ", *out, has_values)
    key, value = out
    for name, rows in (("key", key), *([] if value is None else [("value", value)])):
        if rows.dim() not in (3, 4):
            raise ValueError(f"{name} must have 3 or 4 dimensions, got shape {tuple(rows.shape)}")
        check_size(name, rows, layout.head_size if name == "key" else layout.head_size_v)
        check_dtype(name, rows, row_dtypes(layout))
        room = (key.shape[0],) if key.dim() == 3 else (num_seqs, key.shape[1])
        check_tensor(name, rows, key.dtype, (*room, layout.num_kv_heads, rows.shape[-1]), cache.device)
        if any(stride == 0 and count > 1 for stride, count in zip(rows.stride(), rows.shape, strict=True)):
            raise ValueError(f"{name} must have memory for each of its elements, got strides {rows.stride()}")
    return out
