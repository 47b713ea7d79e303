"""Reading the keys and values of sequences out of their blocks: one launch for all sequences, for both."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from kvpage.kernels.arguments import (
    BAD_BLOCK,
    BAD_LENGTH,
    KVViews,
    RowConstants,
    cache_pointers,
    cache_strides,
    row_constants,
)
from kvpage.kernels.prepared import Grid, Prepared, PreparedKinds, form, form_of_scales
from kvpage.kernels.rows import at, out_of_cache, report, rows_of_tile
from kvpage.layout.kv_scales import KVScales


@triton.jit
def sequence_of(token, inside, end_ptr, num_seqs, num_steps):
    """[rows] the first sequence that ends behind the packed token, or num_seqs. 2**num_steps must exceed that."""
    low = tl.zeros_like(token)
    high = low + num_seqs
    step = 0
    while step < num_steps:  # not range: interpreters of some versions take no bound from an argument
        middle = (low + high) // 2
        searching = inside & (low < high)
        before = tl.load(end_ptr + middle, mask=searching, other=0) <= token
        low = tl.where(searching & before, middle + 1, low)
        high = tl.where(searching & (before == 0), middle, high)
        step += 1
    return low


@triton.jit
def start_of(start_ptr, seq, wanted):
    return tl.zeros_like(seq) if start_ptr is None else tl.load(start_ptr + seq, mask=wanted, other=0).to(tl.int64)


@triton.jit
def check_lengths(length_ptr, start_ptr, end_ptr, error_ptr, num_seqs, num_tokens, capacity, BIT: tl.constexpr):
    """Lengths from the device: all at once, since a sequence may be so wrong that no row asks for it."""
    first = 0
    while first < num_seqs:
        seq = first + tl.arange(0, 128).to(tl.int64)
        known = seq < num_seqs
        length = tl.load(length_ptr + seq, mask=known, other=0).to(tl.int64)
        start = start_of(start_ptr, seq, known)
        bad = (length < 0) | (length > capacity) | (start < 0) | (start > capacity - length)
        if end_ptr is None:
            bad = bad | (length > num_tokens)
        else:
            bad = bad | (tl.load(end_ptr + seq, mask=known, other=0) > num_tokens)
        report(bad, error_ptr, BIT)
        first += 128


@triton.jit
def sequence_of_rows(program, row, inside, length_ptr, start_ptr, end_ptr, tiles_per_seq, num_seqs, num_steps):
    """Return each row's sequence, its token there, the sequence's start and length, and whether there is such a one."""
    if end_ptr is None:
        seq = tl.zeros_like(row) + program // tiles_per_seq
    else:
        seq = sequence_of(row, inside, end_ptr, num_seqs, num_steps)
        inside = inside & (seq < num_seqs)
    start = start_of(start_ptr, seq, inside)
    length = tl.load(length_ptr + seq, mask=inside, other=0).to(tl.int64)
    first = seq * 0 if end_ptr is None else tl.load(end_ptr + seq, mask=inside, other=0) - length
    token = row - first
    return seq, token, start, length, inside & (token >= 0) & (token < length)


# Arguments that change from call to call are not specialised on: each value would compile anew, amid serving.
@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "tiles_per_seq",
        "num_seqs",
        "num_steps",
        "max_blocks",
        "num_blocks",
        "table_stride",
    ],
    do_not_specialize_on_alignment=[
        "key_scale_ptr",
        "value_scale_ptr",
        "table_ptr",
        "length_ptr",
        "start_ptr",
        "end_ptr",
        "error_ptr",
    ],
)
def gather_cache_kernel(
    key_ptr, value_ptr,  # [num_tokens, NUM_HEADS, SIZE] packed, or [num_seqs, num_tokens, NUM_HEADS, SIZE]; or None
    key_cache_ptr, value_cache_ptr,  # [num_blocks, BLOCK_SIZE, NUM_HEADS, num_runs, run_size]
    key_scale_ptr, value_scale_ptr,  # fp32: the cache's own, or given ones; or None
    table_ptr,  # int32 [num_seqs, max_blocks]
    length_ptr,  # int32 or int64 [num_seqs]
    start_ptr,  # the same, or None: 0
    end_ptr,  # int64 [num_seqs], sums of the lengths, where sequences are packed; else None
    error_ptr,  # int32 [1]
    num_tokens, tiles_per_seq, num_seqs, num_steps, max_blocks, num_blocks,
    table_stride,  # all strides in elements
    key_seq_stride, key_token_stride, key_head_stride,
    value_seq_stride, value_token_stride, value_head_stride,
    key_block_stride, key_offset_stride, key_cache_head_stride, key_run_stride,
    value_block_stride, value_offset_stride, value_cache_head_stride, value_run_stride,
    key_scale_block_stride, key_scale_offset_stride, key_scale_head_stride,
    value_scale_block_stride, value_scale_offset_stride, value_scale_head_stride,
    ROWS: tl.constexpr,  # RowConstants
    CHECK: tl.constexpr,
    BIT: tl.constexpr,
    LENGTH_BIT: tl.constexpr,
):  # fmt: skip
    KEY: tl.constexpr = ROWS.value.KEY
    VALUE: tl.constexpr = ROWS.value.VALUE
    NUM_HEADS: tl.constexpr = ROWS.value.NUM_HEADS
    BLOCK_SIZE: tl.constexpr = ROWS.value.BLOCK_SIZE
    program = tl.program_id(0)
    capacity = max_blocks.to(tl.int64) * BLOCK_SIZE
    if CHECK:  # noqa: SIM102, the compiler's condition and the program's
        if program == tl.num_programs(0) - 1:  # one more than there are tiles
            check_lengths(length_ptr, start_ptr, end_ptr, error_ptr, num_seqs, num_tokens, capacity, LENGTH_BIT)
            return
    tile = program % tiles_per_seq
    row, head, inside = rows_of_tile(tile, num_tokens, NUM_HEADS, ROWS.value.TILE_ROWS, KEY.value.IN_RUNS)
    seq, token, start, length, inside = sequence_of_rows(
        program, row, inside, length_ptr, start_ptr, end_ptr, tiles_per_seq, num_seqs, num_steps
    )
    inside = inside & (length <= num_tokens)
    inside = inside & (start >= 0) & (length <= capacity) & (start <= capacity - length)
    position = start + token
    block_id = tl.load(table_ptr + seq * table_stride + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    offset = position % BLOCK_SIZE
    known = (block_id >= 0) & (block_id < num_blocks)
    report(inside & (known == 0), error_ptr, BIT)
    mask = inside & known
    out = at(seq, row, head, key_seq_stride, key_token_stride, key_head_stride)
    cache_row = at(block_id, offset, head, key_block_stride, key_offset_stride, key_cache_head_stride)
    scale_at = at(block_id, offset, head, key_scale_block_stride, key_scale_offset_stride, key_scale_head_stride)
    out_of_cache(key_ptr, out, key_cache_ptr, cache_row, key_run_stride, key_scale_ptr, scale_at, mask, KEY, ROWS)
    if VALUE.value.EXISTS:
        out = at(seq, row, head, value_seq_stride, value_token_stride, value_head_stride)
        cache_row = at(block_id, offset, head, value_block_stride, value_offset_stride, value_cache_head_stride)
        scale_at = at(
            block_id, offset, head, value_scale_block_stride, value_scale_offset_stride, value_scale_head_stride
        )
        out_of_cache(
            value_ptr, out, value_cache_ptr, cache_row, value_run_stride, value_scale_ptr, scale_at, mask, VALUE, ROWS
        )


class Spans:
    """Lengths and starts on a device. The last ones stay there: the layers of a step share them."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: tuple[int, list[int], list[int] | None, torch.Tensor] | None = None

    def on_device(self, lengths: list[int], starts: list[int] | None, tables: torch.Tensor) -> torch.Tensor:
        """Return int64 [3, num_seqs] beside the tables: lengths, starts (None: 0), and sums of lengths.

        Only the stream that copied them there takes them again: another one would not wait for the copy.
        """
        stream = torch.cuda.current_stream(tables.device).cuda_stream
        last = self._last
        if last is not None and last[:3] == (stream, lengths, starts):
            return last[3]
        spans = _upload(lengths, starts, tables)
        self._last = stream, lengths.copy(), None if starts is None else starts.copy(), spans
        return spans


class Gather(NamedTuple):
    """A launch that can be made again, for any sequences. packed: `out` is [total_tokens, num_heads, size]."""

    constants: RowConstants
    prepared: Prepared
    packed: bool
    spans: Spans

    def again(
        self,
        addresses: Sequence[int],
        tables: torch.Tensor,
        lengths: list[int],
        starts: list[int] | None,
        num_blocks: int,
        error: torch.Tensor,
    ) -> bool:
        """Launch on the current stream.

        Args:
            addresses: The kernel's first six arguments, 0 for None.
            tables: int32 [num_seqs, max_blocks], as gather_cache takes them, with lengths and starts.
            lengths: One of them is at least 1.
            starts: None for 0.
            num_blocks: Of the cache.
            error: int32 [1].

        Returns:
            Whether it was launched. False, for addresses that are less aligned than most: nothing was done.
        """
        spans = self.spans.on_device(lengths, starts, tables)
        first, step = spans.data_ptr(), spans.stride(0) * spans.element_size()
        places = tables.data_ptr(), first, first + step, first + 2 * step if self.packed else 0, error.data_ptr()
        grid, numbers = self.cut(sum(lengths) if self.packed else max(lengths), tables, num_blocks)
        return self.prepared.repeat(grid, (*addresses, *places), numbers)

    def cut(self, num_tokens: int, tables: torch.Tensor, num_blocks: int) -> tuple[Grid, tuple[int, ...]]:
        """Return the grid, without a program that checks lengths, and the kernel's numbers.

        Args:
            num_tokens: Rows of `out` that may be written, or of each sequence in it.
            tables: int32 [num_seqs, max_blocks].
            num_blocks: Of the cache.
        """
        num_seqs, max_blocks = tables.shape
        tiles = self.constants.num_tiles(num_tokens)
        numbers = num_tokens, tiles, num_seqs, num_seqs.bit_length(), max_blocks, num_blocks, tables.stride(0)
        return (tiles if self.packed else tiles * num_seqs, 1, 1), numbers


def gather_cache(
    views: KVViews,
    block_tables: torch.Tensor,  # int32 [num_seqs, max_blocks]
    starts: list[int],  # [num_seqs]
    lengths: list[int],  # [num_seqs]
    out: tuple[torch.Tensor, torch.Tensor | None],  # [total_tokens, num_heads, size], or [num_seqs, max_len, ...]
    scales: KVScales | None,
    error: torch.Tensor,  # int32 [1]; gets BAD_BLOCK
) -> Gather | None:
    """Lengths and starts on the host: checked, and packed sequences fill `out` exactly. None: there was no token."""
    if max(lengths, default=0) == 0:
        return None
    spans = _upload(lengths, starts, block_tables)
    packed = out[0].dim() == 3
    num_tokens = sum(lengths) if packed else max(lengths)
    sequences = spans[0], spans[1], spans[2] if packed else None
    return _launch(views, block_tables, sequences, num_tokens, out, scales, error, False)


def _upload(lengths: list[int], starts: list[int] | None, tables: torch.Tensor) -> torch.Tensor:
    """Return int64 [3, num_seqs] beside the tables: lengths, starts, and sums of lengths."""
    rows = np.zeros((3, len(lengths)), np.int64)
    rows[0] = lengths
    if starts is not None:
        rows[1] = starts
    rows[0].cumsum(out=rows[2])
    spans = torch.from_numpy(rows)
    # pinned, so that the copy waits for nothing
    return spans.pin_memory().to(tables.device, non_blocking=True) if tables.is_cuda else spans


def gather_cache_by_device_lengths(
    views: KVViews,
    block_tables: torch.Tensor,
    starts: torch.Tensor | None,  # int32 or int64 [num_seqs], contiguous, or None: 0
    lengths: torch.Tensor,  # int32 or int64 [num_seqs], contiguous
    out: tuple[torch.Tensor, torch.Tensor | None],
    scales: KVScales | None,
    error: torch.Tensor,  # int32 [1]; gets BAD_BLOCK, and BAD_LENGTH for a sequence that does not fit, which is skipped
) -> None:
    """Gather without waiting for lengths and starts; rows of `out` beyond them stay."""
    if len(lengths) == 0:
        return
    packed = out[0].dim() == 3
    ends = lengths.clamp(min=0).cumsum(0, dtype=torch.int64) if packed else None
    num_tokens = out[0].shape[0 if packed else 1]
    _launch(views, block_tables, (lengths, starts, ends), num_tokens, out, scales, error, True)


def _launch(
    views: KVViews,
    block_tables: torch.Tensor,
    sequences: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],  # lengths, starts, ends
    num_tokens: int,  # rows of `out` that may be written, or of each sequence in it
    out: tuple[torch.Tensor, torch.Tensor | None],
    scales: KVScales | None,
    error: torch.Tensor,
    check: bool,
) -> Gather:
    key, value = out
    pointers = cache_pointers(views, scales)
    kind = (
        *(key.device, check, *map(form, (key, value, *pointers))),
        *(None if row is None else row.dtype for row in sequences),
        form_of_scales(scales),
    )
    known: Gather | None = _kinds.get(kind)
    if known is None:
        known = _prepared(views, out, scales, check)
        _kinds.keep(kind, known)
    (programs, *_), numbers = known.cut(num_tokens, block_tables, views[0].num_blocks)
    tensors = key, value, *pointers, block_tables, *sequences, error
    known.prepared.launch((programs + check, 1, 1), tensors, numbers)
    return known


_kinds = PreparedKinds()


def _prepared(
    views: KVViews, out: tuple[torch.Tensor, torch.Tensor | None], scales: KVScales | None, check: bool
) -> Gather:
    key, value = out
    rows = key if value is None else value
    constants = row_constants((key.shape[-1], 0 if value is None else rows.shape[-1]), key.dtype, views)
    strides = *_row_strides(key), *_row_strides(rows), *cache_strides(views, scales)
    fixed = *strides, constants, check, BAD_BLOCK, BAD_LENGTH
    prepared = Prepared(gather_cache_kernel, fixed, constants.options, 4, range(4))
    return Gather(constants, prepared, key.dim() == 3, Spans())


def _row_strides(rows: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of sequence, token and head in elements; packed sequences are tokens alone."""
    return (0, *rows.stride()[:2]) if rows.dim() == 3 else rows.stride()[:3]
