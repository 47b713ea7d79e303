"""Chunks of tokens to and from blocks in a CUDA device's memory: a Triton kernel, or torch where Triton is missing.

Arguments are checked by kvpage.ops.chunks, but for block ids in the device's memory. The kernel checks them, skips the
bad ones, and sets a bit of the device's error word (`check_device`).
"""

from collections.abc import Sequence

import torch

from kvpage.layout.cache_layout import CacheLayout
from kvpage.layout.kv_scales import KVScales
from kvpage.ops import reference
from kvpage.ops.args.layers import runs_alike
from kvpage.ops.cuda.rows import _check_if_debugging, _error_word, _has_triton

HOST_PROGRAMS = 64  # fill a bus; the other multiprocessors are left to computation


def store_chunk(
    caches: Sequence[torch.Tensor],
    block_ids: torch.Tensor,
    start: int,
    chunk: torch.Tensor,
    layout: CacheLayout,
    scales: Sequence[KVScales] | None = None,
    alike: Sequence[tuple[int, int]] | None = None,
) -> None:
    """Copy the tokens from `start` on of a sequence's blocks into the chunk, all layers with one launch.

    chunk: [num_layers, parts, num_tokens, num_kv_heads, size], any strides with the last dimension contiguous. It is on
        the caches' device or in pinned host memory; there it is complete once the stream is done.
    block_ids: int32, on the host or the device. See reference.store_chunk.
    alike: runs of layers that have equal strides and are as aligned as each other; None to find them.
    """
    _move(caches, block_ids, start, chunk, layout, scales, alike, to_chunk=True)


def load_chunk(
    caches: Sequence[torch.Tensor],
    block_ids: torch.Tensor,
    start: int,
    chunk: torch.Tensor,
    layout: CacheLayout,
    scales: Sequence[KVScales] | None = None,
    alike: Sequence[tuple[int, int]] | None = None,
) -> None:
    """Write the chunk's tokens into the blocks. A chunk on the host must stay until the stream is done."""
    _move(caches, block_ids, start, chunk, layout, scales, alike, to_chunk=False)


def _move(
    caches: Sequence[torch.Tensor],
    block_ids: torch.Tensor,
    start: int,
    chunk: torch.Tensor,
    layout: CacheLayout,
    scales: Sequence[KVScales] | None,
    alike: Sequence[tuple[int, int]] | None,
    to_chunk: bool,
) -> None:
    if not caches:
        return
    device = caches[0].device
    if not _has_triton():
        _check_ids(block_ids, layout.num_blocks(caches[0]))
        move = reference.store_chunk if to_chunk else reference.load_chunk
        move(caches, block_ids.to(device), start, chunk, layout, scales)
        return
    from kvpage.kernels.chunk import move_chunk

    with torch.cuda.device(device):  # the question, too, is for the stream of this device
        capturing = torch.cuda.is_current_stream_capturing()
        if capturing and block_ids.device != device:
            raise ValueError(
                "block_ids must be on the device where a graph captures: those of the host are gone at replay"
            )
        for first, last in _alike(caches, scales) if alike is None or scales is not None else alike:
            move_chunk(
                caches[first:last],
                layout.views(caches[first]),
                block_ids.contiguous(),
                start,
                chunk[first:last],
                None if scales is None else scales[first:last],
                _error_word(device),
                to_chunk,
                2**31 - 1 if chunk.is_cuda else HOST_PROGRAMS,
                one_by_one=capturing,
            )
        _check_if_debugging(device)


def _alike(caches: Sequence[torch.Tensor], scales: Sequence[KVScales] | None) -> list[tuple[int, int]]:
    """Return runs [first, last) of layers that one launch can serve: almost always one run of all."""
    return runs_alike(
        [
            (
                cache.stride(),
                cache.data_ptr() % 16,
                None if scales is None else (len(scales[i].key), len(scales[i].value)),
            )
            for i, cache in enumerate(caches)
        ]
    )


def _check_ids(block_ids: torch.Tensor, num_blocks: int) -> None:
    """Check the ids: torch would end the process for a bad index on a device, and waits for it in any case."""
    for block_id in block_ids.tolist():
        if not 0 <= block_id < num_blocks:
            raise ValueError(f"block_ids must be in [0, {num_blocks}), got {block_id}")
