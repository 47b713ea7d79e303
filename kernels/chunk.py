"""Tokens of a sequence between its blocks and one chunk for all layers: one launch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvpage.checks.device_lock import synchronize
from kvpage.kernels.arguments import (
    BAD_BLOCK,
    KVViews,
    RowConstants,
    cache_pointers,
    cache_strides,
    row_constants,
)
from kvpage.kernels.constants import Constants
from kvpage.kernels.prepared import Prepared, PreparedKinds, addresses_of, form, form_of_scales
from kvpage.kernels.rehearsal import ALIGNMENT
from kvpage.kernels.rows import at, into_cache, out_of_cache, report, rows_of_tile
from kvpage.layout.kv_scales import KVScales

SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class ChunkConstants(Constants):
    """Constants of a chunk's launch, besides the constants of its rows.

    SCALED: whether the cache has scales. SCALES_AS_BYTES: whether they follow each row in the chunk, as they are.
    WIDTH: bits of the cache's elements. ALIGNED: its addresses divide by 16.
    TURNS: tiles of a program. BIT: of the error word, for a block id out of range.
    """

    SCALED: bool
    SCALES_AS_BYTES: bool
    WIDTH: int
    ALIGNED: bool
    TO_CHUNK: bool
    TURNS: int
    BIT: int = BAD_BLOCK


@triton.jit
def pointer_of(address, WIDTH: tl.constexpr, ALIGNED: tl.constexpr):
    address = address.to(tl.int64)  # a small one comes as int32
    if WIDTH == 8:
        pointer = address.to(tl.pointer_type(tl.int8))
    elif WIDTH == 16:
        pointer = address.to(tl.pointer_type(tl.int16))
    else:
        pointer = address.to(tl.pointer_type(tl.int32))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def move_scales(chunk_ptr, row, scale_ptr, scale_at, wanted, TO_CHUNK: tl.constexpr):
    """Move fp32 as four bytes, little end first, from row[i] on: their address need not be a multiple of four."""
    scale_ptr = scale_ptr.to(tl.pointer_type(tl.int32))
    if TO_CHUNK:
        word = tl.load(scale_ptr + scale_at, mask=wanted, other=0)
        for i in tl.static_range(4):
            tl.store(chunk_ptr + row + i, (word >> (8 * i)).to(tl.int8), mask=wanted)
    else:
        word = tl.zeros(row.shape, tl.int32)
        for i in tl.static_range(4):
            byte = tl.load(chunk_ptr + row + i, mask=wanted, other=0).to(tl.int32) & 0xFF
            word = word | (byte << (8 * i))
        tl.store(scale_ptr + scale_at, word, mask=wanted)


@triton.jit
def move_part(
    chunk_ptr, row, cache_address, scale_address, place, run_stride, scale_at, inside, wanted,
    PART: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Move rows of K or of V of one layer, from the chunk or to it."""
    cache_ptr = pointer_of(cache_address, CHUNK.value.WIDTH, CHUNK.value.ALIGNED)
    scale_ptr = scale_address.to(tl.int64).to(tl.pointer_type(tl.float32)) if CHUNK.value.SCALED else None
    if CHUNK.value.TO_CHUNK:
        out_of_cache(chunk_ptr, row, cache_ptr, place, run_stride, scale_ptr, scale_at, wanted, PART, ROWS)
    else:
        into_cache(chunk_ptr, row, cache_ptr, place, run_stride, scale_ptr, scale_at, inside, wanted, PART, ROWS)
    if CHUNK.value.SCALES_AS_BYTES:
        move_scales(chunk_ptr, row + PART.value.SIZE, scale_ptr, scale_at, wanted, CHUNK.value.TO_CHUNK)


# Arguments that change from call to call are not specialised on: each value would compile anew, amid serving.
@triton.jit(
    do_not_specialize=[
        "key_address",
        "value_address",
        "key_scale_address",
        "value_scale_address",
        "num_tokens",
        "start",
        "num_layers",
        "num_blocks",
    ],
    do_not_specialize_on_alignment=["address_ptr", "block_ptr", "error_ptr"],
)
def chunk_kernel(
    chunk_ptr,  # [num_layers, parts, num_tokens, NUM_HEADS, SIZE]
    address_ptr,  # int64 [4, num_layers], of K's and V's elements and scales; None for one layer, whose follow
    block_ptr,  # int32 or int64, the ids of the sequence's blocks
    error_ptr,  # int32 [1]
    key_address, value_address, key_scale_address, value_scale_address,
    num_tokens, start, num_layers, num_blocks,
    chunk_layer_stride, chunk_part_stride, chunk_token_stride, chunk_head_stride,  # all strides in elements
    key_block_stride, key_offset_stride, key_cache_head_stride, key_run_stride,
    value_block_stride, value_offset_stride, value_cache_head_stride, value_run_stride,
    key_scale_block_stride, key_scale_offset_stride, key_scale_head_stride,
    value_scale_block_stride, value_scale_offset_stride, value_scale_head_stride,
    ROWS: tl.constexpr,  # RowConstants
    CHUNK: tl.constexpr,  # ChunkConstants
):  # fmt: skip
    KEY: tl.constexpr = ROWS.value.KEY
    VALUE: tl.constexpr = ROWS.value.VALUE
    NUM_HEADS: tl.constexpr = ROWS.value.NUM_HEADS
    BLOCK_SIZE: tl.constexpr = ROWS.value.BLOCK_SIZE
    layer = tl.program_id(1)
    if address_ptr is not None:
        key_address = tl.load(address_ptr + layer)
        value_address = tl.load(address_ptr + num_layers + layer)
        key_scale_address = tl.load(address_ptr + 2 * num_layers + layer)
        value_scale_address = tl.load(address_ptr + 3 * num_layers + layer)
    for turn in range(0, CHUNK.value.TURNS):
        tile = tl.program_id(0) + turn * tl.num_programs(0)
        token, head, inside = rows_of_tile(tile, num_tokens, NUM_HEADS, ROWS.value.TILE_ROWS, KEY.value.IN_RUNS)
        position = start + token
        block_id = tl.load(block_ptr + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        offset = position % BLOCK_SIZE
        known = (block_id >= 0) & (block_id < num_blocks)
        report(inside & (known == 0), error_ptr, CHUNK.value.BIT)
        mask = inside & known
        row = at(layer.to(tl.int64), token, head, chunk_layer_stride, chunk_token_stride, chunk_head_stride)
        cache_row = at(block_id, offset, head, key_block_stride, key_offset_stride, key_cache_head_stride)
        scale_at = at(block_id, offset, head, key_scale_block_stride, key_scale_offset_stride, key_scale_head_stride)
        move_part(
            chunk_ptr, row, key_address, key_scale_address, cache_row, key_run_stride, scale_at, inside, mask,
            KEY, ROWS, CHUNK,
        )  # fmt: skip
        if VALUE.value.EXISTS:
            cache_row = at(block_id, offset, head, value_block_stride, value_offset_stride, value_cache_head_stride)
            scale_at = at(
                block_id, offset, head, value_scale_block_stride, value_scale_offset_stride, value_scale_head_stride
            )
            move_part(
                chunk_ptr, row + chunk_part_stride, value_address, value_scale_address, cache_row, value_run_stride,
                scale_at, inside, mask, VALUE, ROWS, CHUNK,
            )  # fmt: skip


def move_chunk(
    caches: Sequence[torch.Tensor],  # of equal strides, and as aligned as each other
    views: KVViews,  # of the first
    block_ids: torch.Tensor,  # int32 or int64, contiguous: on the host, or where the caches are
    start: int,
    chunk: torch.Tensor,  # [num_layers, parts, num_tokens, num_heads, size], there or in pinned host memory
    scales: Sequence[KVScales] | None,
    error: torch.Tensor,  # int32 [1]; gets BAD_BLOCK
    to_chunk: bool,
    max_programs: int = 2**31 - 1,
    one_by_one: bool = False,  # a launch a layer, for which nothing is uploaded: where a graph captures
) -> None:
    """Move a chunk; one of the dtype of int8 caches holds each row's scale after the row, as it is."""
    if chunk.shape[0] == 0 or chunk.shape[2] == 0:
        return
    part = _Part(views, chunk, None if scales is None else scales[0], to_chunk, max_programs)
    places = _places(caches, views, scales)
    if one_by_one:
        for layer, addresses in enumerate(zip(*places, strict=True)):
            layer_part = part._replace(chunk=chunk[layer : layer + 1])
            _launch(layer_part, None, addresses, block_ids, start, error)
        return
    table = _tables.on(error.device, places)
    if block_ids.device != error.device:
        pinned = torch.empty_like(block_ids, pin_memory=True).copy_(block_ids)  # a copy: the caller's may change
        block_ids = pinned.to(error.device, non_blocking=True)
    _launch(part, table, (0, 0, 0, 0), block_ids, start, error)


class _Part(NamedTuple):
    """Rows to be moved: of layers that lie in memory as `views` do, and of their chunk."""

    views: KVViews
    chunk: torch.Tensor
    scales: KVScales | None
    to_chunk: bool
    max_programs: int

    def num_turns(self, constants: RowConstants) -> int:
        """Return the tiles of a program: a power of two, so that few kernels are compiled."""
        num_layers, _, num_tokens = self.chunk.shape[:3]
        programs = -(-self.max_programs // num_layers)
        return 1 << (-(-constants.num_tiles(num_tokens) // programs) - 1).bit_length()

    def constants(self) -> RowConstants:
        rows, chunk = self.views[0].rows, self.chunk
        size = chunk.shape[4]
        if self.views[0].scales is not None and chunk.dtype == rows.dtype:
            size -= SCALE_BYTES
        return row_constants((size, size if chunk.shape[1] == 2 else 0), chunk.dtype, self.views)

    def prepared(self, constants: RowConstants, num_turns: int, is_aligned: bool) -> Prepared:
        rows, scales = self.views[0], self.scales
        has_scales = rows.scales is not None or (scales is not None and constants.CODE != "bits")
        as_bytes, width = has_scales and constants.CODE == "bits", 8 * rows.rows.element_size()
        options = ChunkConstants(has_scales, as_bytes, width, is_aligned, self.to_chunk, num_turns)
        fixed = *self.chunk.stride()[:4], *cache_strides(self.views, scales), constants, options
        return Prepared(chunk_kernel, fixed, constants.options, 1, range(1))


Places = tuple[tuple[int, ...], ...]  # addresses of all layers: of K's, of V's elements, of K's, of V's scales


def _places(caches: Sequence[torch.Tensor], views: KVViews, scales: Sequence[KVScales] | None) -> Places:
    """Return the addresses; 0 for a missing part."""
    bases = [cache.data_ptr() for cache in caches]
    none = (0,) * len(bases)
    places = []
    own_scales = [None if view is None else view.scales for view in views]
    for part in (views[0].rows, None if views[1] is None else views[1].rows, *own_scales):
        offset = 0 if part is None else part.data_ptr() - bases[0]
        places.append(none if part is None else tuple([base + offset for base in bases]))
    if scales is not None:
        places[2:] = [tuple([getattr(pair, name).data_ptr() for pair in scales]) for name in ("key", "value")]
    return tuple(places)


class _Tables:
    """Tables of addresses on devices, each uploaded once. They name no memory that they would have to keep alive."""

    def __init__(self, capacity: int = 256) -> None:
        self._capacity = capacity
        self._known: dict[tuple[torch.device, Places], torch.Tensor] = {}

    def on(self, device: torch.device, places: Places) -> torch.Tensor:
        """Return the table, int64 [4 * num_layers], which any stream may read."""
        table = self._known.get((device, places))
        if table is None:
            table = torch.tensor(places, dtype=torch.int64).flatten().to(device)  # waited for
            if len(self._known) >= self._capacity:
                if device.type == "cuda":  # kernels of other streams may still read tables
                    for other in {other for other, _ in self._known}:
                        synchronize(other)
                self._known.clear()
            self._known[device, places] = table
        return table


_tables = _Tables()
_kinds = PreparedKinds()


def _launch(
    part: _Part,
    table: torch.Tensor | None,
    addresses: tuple[int, ...],  # of one layer, where there is no table
    block_ids: torch.Tensor,
    start: int,
    error: torch.Tensor,
) -> None:
    views, chunk, scales, to_chunk, _ = part
    pointers = cache_pointers(views, scales)
    key, value, *_ = addresses_of(pointers)
    is_aligned = (key | value) % ALIGNMENT == 0
    kind = (
        *(error.device, to_chunk, is_aligned, table is None, block_ids.dtype),
        *(chunk.dtype, chunk.shape[1], chunk.shape[3:], chunk.stride(), *map(form, pointers)),
        form_of_scales(scales),
    )
    known = _kinds.get(kind)
    if known is None:
        known = part.constants(), {}
        _kinds.keep(kind, known)
    constants, by_turns = known
    num_turns, (num_layers, _, num_tokens, *_) = part.num_turns(constants), chunk.shape
    if num_turns not in by_turns:
        by_turns[num_turns] = part.prepared(constants, num_turns, is_aligned)
    by_turns[num_turns].launch(
        (-(-constants.num_tiles(num_tokens) // num_turns), num_layers, 1),
        (chunk, table, block_ids, error),
        (*addresses, num_tokens, start, num_layers, views[0].num_blocks),
    )
