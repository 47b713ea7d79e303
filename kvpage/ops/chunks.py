"""Chunk transforms: tokens of a sequence's blocks to and from one chunk, all layers in one call.

    blocks of every layer   [ 17 ][ 4 ][ 9 ] ...        chunk, "vllm"          [layers, parts, tokens, heads, size]
                               |<-- tokens -->|   ◄──►         "huggingface"   [layers, parts, heads, tokens, size]
                             start

It is the bridge to a store and to other formats: one run of memory, whatever the layout and dtype of the blocks.
"""

from collections.abc import Sequence

import torch

import kvpage._C as _C
from kvpage.checks.tensors import check_plain, check_writable, readable
from kvpage.checks.values import as_integer
from kvpage.layout.cache_layout import CacheLayout
from kvpage.layout.kv_scales import KVScales
from kvpage.layout.kv_view import KVView
from kvpage.ops.args.layers import KnownLayers
from kvpage.ops.args.tokens import (
    TokenPart,
    check_dtype,
    check_given_scales,
    check_tensor,
    native_part,
    part_of,
    row_dtypes,
)
from kvpage.ops.cuda import chunks as chunk_ops_cuda

FORMATS = ("vllm", "huggingface")


def store_chunk(
    caches: Sequence[torch.Tensor],
    block_ids: torch.Tensor,
    chunk: torch.Tensor,
    layout: CacheLayout,
    start: int = 0,
    fmt: str = "vllm",
    scales: Sequence[KVScales] | None = None,
    num_threads: int | None = None,
) -> None:
    """Copy the tokens from `start` on of some blocks, in all layers, to a chunk.

    On the CPU the copy is done on return. On CUDA it is ordered on the current stream. A chunk on the host must stay
    until the stream has passed. The chunk must not share memory with the caches.

    Args:
        caches: One cache a layer, on one device.
        block_ids: int32 [num_blocks], the blocks of a sequence in order, on the host or the caches' device. Ids of
            blocks without a wanted token are not read.
        chunk: [num_layers, parts, num_tokens, num_kv_heads, size] ("vllm") or [num_layers, parts, num_kv_heads,
            num_tokens, size] ("huggingface"). parts is 2, or 1 without a value part (MLA). size is at most K's and V's:
            the first elements of each head are moved. Any strides will do with the last dimension contiguous, so a
            slice of tokens is a chunk, too. It is on the caches' device or, for caches on CUDA, in pinned host memory.
            Its dtype is the cache's. Where the layout quantises, it is fp32, bf16, fp16 or raw, so that every bit
            survives. Raw are the 8-bit floats themselves, or int8 with the size padded_head_size + 4: each row with
            its scale after it.
        layout: The layout of the caches.
        start: First token, counted from the first block's beginning.
        fmt: The order of the chunk's dimensions, "vllm" or "huggingface".
        scales: Scales of 8-bit floats, one KVScales a layer; None means 1.
        num_threads: Threads of the host; None takes torch's number.

    Raises:
        TypeError: An argument is of another type.
        ValueError: A shape, a dtype, a device or a number is wrong, or a needed id names no block. On the host nothing
            is written then. Ids on a CUDA device are checked there: a bad one is skipped, and `check_device` reports
            it.
    """
    check_writable("chunk", chunk)
    _move(list(caches), block_ids, chunk, layout, start, fmt, scales, num_threads, to_chunk=True)


def load_chunk(
    caches: Sequence[torch.Tensor],
    block_ids: torch.Tensor,
    chunk: torch.Tensor,
    layout: CacheLayout,
    start: int = 0,
    fmt: str = "vllm",
    scales: Sequence[KVScales] | None = None,
    num_threads: int | None = None,
) -> None:
    """Copy a chunk to the tokens from `start` on of some blocks, in all layers. It is the way back of `store_chunk`.

    Args:
        caches: As in `store_chunk`.
        block_ids: As in `store_chunk`. Each block that is written is named once.
        chunk: As in `store_chunk`.
        layout: As in `store_chunk`.
        start: As in `store_chunk`.
        fmt: As in `store_chunk`.
        scales: As in `store_chunk`.
        num_threads: As in `store_chunk`.

    Raises:
        TypeError: As in `store_chunk`.
        ValueError: As in `store_chunk`, or ids on the host name a block twice among those that are written.
    """
    _move(list(caches), block_ids, readable("chunk", chunk), layout, start, fmt, scales, num_threads, to_chunk=False)


def _move(
    caches: Sequence[torch.Tensor],
    block_ids: torch.Tensor,
    chunk: torch.Tensor,
    layout: CacheLayout,
    start: int,
    fmt: str,
    scales: Sequence[KVScales] | None,
    num_threads: int | None,
    to_chunk: bool,
) -> None:
    device, num_blocks, num_parts, alike, blocks = _layers.check(caches, layout, is_written=not to_chunk)
    _check_scales(scales, caches, layout)
    rows = _by_token(chunk, fmt)
    start, num_tokens = as_integer("start", start), rows.shape[2]
    num_threads = torch.get_num_threads() if num_threads is None else as_integer("num_threads", num_threads)
    _check_chunk(rows, (len(caches), num_parts), layout, device)
    _check_block_ids(block_ids, device, start, num_tokens, layout)
    if not to_chunk and block_ids.device.type == "cpu":
        _check_distinct(block_ids, start, num_tokens, layout)
    if device.type == "cuda":
        move = chunk_ops_cuda.store_chunk if to_chunk else chunk_ops_cuda.load_chunk
        move(caches, block_ids, start, rows, layout, scales, alike)
        return
    ids = block_ids.contiguous()  # held until the call is over
    is_raw = rows.dtype == torch.int8 and layout.has_token_scales
    (_C.store_chunk if to_chunk else _C.load_chunk)(
        native_chunk_parts(caches, rows, layout) if is_raw else _chunk_parts(blocks, layout.dtype, rows, scales),
        ids.data_ptr(),
        len(ids),
        num_blocks,
        layout.block_size,
        start,
        num_tokens,
        layout.num_kv_heads,
        num_threads,
    )


_layers = KnownLayers()


def _check_scales(scales: Sequence[KVScales] | None, caches: Sequence[torch.Tensor], layout: CacheLayout) -> None:
    if scales is None:
        return
    if len(scales) != len(caches):
        raise ValueError(f"scales must be one for each of {len(caches)} layers, got {len(scales)}")
    for cache, layer_scales in zip(caches, scales, strict=True):
        check_given_scales("scales", layer_scales, cache, layout)


def _by_token(chunk: torch.Tensor, fmt: str) -> torch.Tensor:
    if fmt not in FORMATS:
        raise ValueError(f"fmt must be one of {', '.join(FORMATS)}, got {fmt!r}")
    if chunk.dim() != 5:
        raise ValueError(f"chunk must have 5 dimensions, got shape {tuple(chunk.shape)}")
    return chunk if fmt == "vllm" else chunk.transpose(2, 3)


def _check_chunk(rows: torch.Tensor, parts: tuple[int, int], layout: CacheLayout, device: torch.device) -> None:
    """parts: numbers of layers, and of a layer's parts."""
    raw_int8 = layout.has_token_scales and rows.dtype == torch.int8
    if not raw_int8:
        check_dtype("chunk", rows, row_dtypes(layout))
    if raw_int8 and len(set(layout.row_sizes)) > 1:
        raise ValueError(f"chunk must not be raw int8 for rows of K and V of several sizes, got {layout.row_sizes}")
    size, least, most = rows.shape[4], 1, min(layout.head_size, layout.head_size_v or layout.head_size)
    if raw_int8:
        least = most = layout.row_sizes[0]
    if not least <= size <= most:
        raise ValueError(f"chunk's head size must be in [{least}, {most}], got {size}")
    if rows.stride(4) != 1 and size > 1:
        raise ValueError(f"chunk must be contiguous in its last dimension, got stride {rows.stride(4)}")
    on_host = rows.device.type == "cpu"
    if on_host and device.type == "cuda" and not rows.is_pinned():
        raise ValueError(f"chunk must be on {device} or in pinned host memory, got pageable memory")
    shape = (*parts, rows.shape[2], layout.num_kv_heads, size)
    check_tensor("chunk", rows, rows.dtype, shape, rows.device if on_host else device)


def _check_block_ids(
    block_ids: torch.Tensor, device: torch.device, start: int, num_tokens: int, layout: CacheLayout
) -> None:
    check_plain("block_ids", block_ids)
    if block_ids.dim() != 1:
        raise ValueError(f"block_ids must be [num_blocks], got shape {tuple(block_ids.shape)}")
    expected_device = block_ids.device if block_ids.device.type == "cpu" else device
    check_tensor("block_ids", block_ids, torch.int32, tuple(block_ids.shape), expected_device)
    room = len(block_ids) * layout.block_size
    if start < 0 or start + num_tokens > room:
        raise ValueError(
            f"start + num_tokens must be in [0, {room}], the room of block_ids, got {start} + {num_tokens}"
        )


def _check_distinct(block_ids: torch.Tensor, start: int, num_tokens: int, layout: CacheLayout) -> None:
    needed = block_ids[start // layout.block_size : -(-(start + num_tokens) // layout.block_size)]
    if num_tokens and len(set(needed.tolist())) < len(needed):
        raise ValueError("block_ids must name a block once where it is written, got one twice")


def native_chunk_parts(caches: Sequence[torch.Tensor], rows: torch.Tensor, layout: CacheLayout) -> list[TokenPart]:
    """Return the moves of each layer's K and V as the extension takes them, which change no bit.

    rows: [layers, parts, tokens, heads, size] of the layout's dtype.
    """
    parts = []
    for layer, cache in enumerate(caches):
        for part, view in enumerate(layout.views(cache)):
            if view is not None and view.scales is not None:
                parts += _raw_parts(view, rows[layer, part], layout.padded_head_size)
            elif view is not None:
                parts.append(native_part(view, rows[layer, part], None))
    return parts


def _chunk_parts(
    blocks: Sequence[tuple[_C.KVPart, _C.KVPart | None]],
    dtype: torch.dtype,
    rows: torch.Tensor,
    scales: Sequence[KVScales] | None,
) -> list[TokenPart]:
    """Return the same of layers whose blocks are known, where the stored numbers may differ from the rows'."""
    parts = []
    for layer, pair in enumerate(blocks):
        pair_scales = (None, None) if scales is None else (scales[layer].key, scales[layer].value)
        for part, (part_blocks, scale) in enumerate(zip(pair, pair_scales, strict=True)):
            if part_blocks is not None:
                parts.append(part_of(part_blocks, dtype, rows[layer, part], scale))
    return parts


def _raw_parts(view: KVView, rows: torch.Tensor, size: int) -> list[TokenPart]:
    """Return the moves of the elements, and of each row's scale after them: four bytes that are one run."""
    assert view.scales is not None
    scales = KVView(view.scales.unsqueeze(3).unsqueeze(4).view(torch.int8))
    return [native_part(KVView(view.rows), rows[..., :size], None), native_part(scales, rows[..., size:], None)]
