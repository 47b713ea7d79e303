"""Tokens of a sequence between its blocks and one chunk for all layers: one launch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvpage.kernels.arguments import BAD_BLOCK, KVViews, as_bits, cache_pointers, cache_strides, row_constants
from kvpage.kernels.constants import Constants
from kvpage.kernels.rows import at, into_cache, out_of_cache, report, rows_of_tile
from kvpage.layout.kv_scales import KVScales

SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class ChunkConstants(Constants):
    """Constants of a chunk's launch, besides those of its rows.

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
    key_address, value_address, key_scale_address, value_scale_address,
    block_ptr,  # int32 or int64, the ids of the sequence's blocks
    error_ptr,  # int32 [1]
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
        wanted = inside & known
        row = at(layer.to(tl.int64), token, head, chunk_layer_stride, chunk_token_stride, chunk_head_stride)
        place = at(block_id, offset, head, key_block_stride, key_offset_stride, key_cache_head_stride)
        scale_at = at(block_id, offset, head, key_scale_block_stride, key_scale_offset_stride, key_scale_head_stride)
        move_part(
            chunk_ptr, row, key_address, key_scale_address, place, key_run_stride, scale_at, inside, wanted,
            KEY, ROWS, CHUNK,
        )  # fmt: skip
        if VALUE.value.EXISTS:
            place = at(block_id, offset, head, value_block_stride, value_offset_stride, value_cache_head_stride)
            scale_at = at(
                block_id, offset, head, value_scale_block_stride, value_scale_offset_stride, value_scale_head_stride
            )
            move_part(
                chunk_ptr, row + chunk_part_stride, value_address, value_scale_address, place, value_run_stride,
                scale_at, inside, wanted, VALUE, ROWS, CHUNK,
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
    addresses, given = _addresses(caches, views, scales), None if scales is None else scales[0]
    if one_by_one:
        for layer, places in enumerate(addresses):
            one = chunk[layer : layer + 1]
            _launch(views, None, places, block_ids, start, one, given, error, to_chunk, max_programs)
        return
    table, block_ids = _uploaded(addresses, block_ids, error.device)
    _launch(views, table, addresses[0], block_ids, start, chunk, given, error, to_chunk, max_programs)


def _addresses(
    caches: Sequence[torch.Tensor], views: KVViews, scales: Sequence[KVScales] | None
) -> list[tuple[int, int, int, int]]:
    """Return the addresses of each layer's elements and scales of K and V; 0 for a missing one."""
    base = caches[0].data_ptr()
    offsets = [None if part is None else part.data_ptr() - base for part in cache_pointers(views, None)]
    layers = []
    for layer, cache in enumerate(caches):
        key, value, key_scale, value_scale = (0 if offset is None else cache.data_ptr() + offset for offset in offsets)
        if scales is not None:
            key_scale, value_scale = scales[layer].key.data_ptr(), scales[layer].value.data_ptr()
        layers.append((key, value, key_scale, value_scale))
    return layers


def _uploaded(
    addresses: list[tuple[int, int, int, int]], block_ids: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the addresses, int64 [4 * num_layers], and the ids on the device: in one copy that is not waited for."""
    table = torch.tensor([*zip(*addresses, strict=True)], dtype=torch.int64).flatten()
    num_addresses, ids_are_there = len(table), block_ids.device == device
    if not ids_are_there:
        table = torch.cat([table, block_ids.long()])
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    return table[:num_addresses], block_ids if ids_are_there else table[num_addresses:]


def _launch(
    views: KVViews,
    table: torch.Tensor | None,
    addresses: tuple[int, int, int, int],
    block_ids: torch.Tensor,
    start: int,
    chunk: torch.Tensor,
    scales: KVScales | None,
    error: torch.Tensor,
    to_chunk: bool,
    max_programs: int,
) -> None:
    rows, dtype = views[0].rows, chunk.dtype
    num_layers, parts, num_tokens, _, size = chunk.shape
    if views[0].scales is not None and dtype == rows.dtype:
        size -= SCALE_BYTES
    constants = row_constants((size, size if parts == 2 else 0), dtype, views)
    has_scales = views[0].scales is not None or (scales is not None and constants.CODE != "bits")
    num_tiles = constants.num_tiles(num_tokens)
    num_turns = triton.next_power_of_2(
        triton.cdiv(num_tiles, triton.cdiv(max_programs, num_layers))
    )  # few are compiled
    is_aligned = all(address % 16 == 0 for address in addresses)
    chunk_kernel[(triton.cdiv(num_tiles, num_turns), num_layers)](
        as_bits(chunk),
        table,
        *addresses,
        block_ids,
        error,
        num_tokens,
        start,
        num_layers,
        views[0].num_blocks,
        *chunk.stride()[:4],
        *cache_strides(views, scales),
        constants,
        ChunkConstants(
            has_scales,
            has_scales and constants.CODE == "bits",
            8 * rows.element_size(),
            is_aligned,
            to_chunk,
            num_turns,
        ),
        **constants.options,
    )
