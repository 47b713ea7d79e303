"""The operations on tokens as tests call them: on a CUDA device through their doors, else by the interpreter of Triton.

There is no device that the doors would take for the interpreter, so there the kernels' wrappers are called; the error
word comes back instead of being kept.
"""

import os

import pytest
import torch

from kvpage import ops
from kvpage.ops.cuda import chunks as chunk_ops_cuda

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
ON_KERNELS = pytest.mark.parametrize("where", ["interpreter"] if INTERPRETED else [CUDA])
ON_ALL = pytest.mark.parametrize("where", ["interpreter"] if INTERPRETED else ["cpu", CUDA])


def device_of(where):
    return torch.device("cuda", torch.cuda.current_device()) if where == "cuda" else torch.device("cpu")


def reshape(where, key, value, cache, slots, layout, scales=None):
    """Returns the error word of the kernel, where there is one."""
    if where != "interpreter":
        return ops.reshape_and_cache(key, value, cache, slots, layout, scales)
    from kvpage.kernels.reshape import reshape_and_cache

    error = torch.zeros(1, dtype=torch.int32)
    reshape_and_cache(key, value, layout.views(cache), slots.contiguous(), scales, error)
    return error.item()


def gather(where, cache, tables, lengths, layout, starts=None, out=None, scales=None, dtype=None):
    """Returns key, value and, from the interpreter, the error word instead of raising."""
    if where != "interpreter":
        return ops.gather_cache(cache, tables, lengths, layout, starts, out, scales, dtype)
    from kvpage.kernels.gather import gather_cache

    error, lengths = torch.zeros(1, dtype=torch.int32), [int(length) for length in lengths]
    starts = [0] * len(lengths) if starts is None else starts
    shape, dtype = (sum(lengths), layout.num_kv_heads, layout.head_size), dtype or layout.dtype
    views = layout.views(cache)
    out = out or [None if view is None else cache.new_empty(shape, dtype=dtype) for view in views]
    gather_cache(views, tables, starts, lengths, out, scales, error)
    return *out, error.item()


def gather_by_device_lengths(where, cache, tables, lengths, layout, starts, out, scales=None):
    """Fill `out` and return the interpreter's error word."""
    if where != "interpreter":
        ops.gather_cache(cache, tables, lengths, layout, starts, out, scales)
        return None
    from kvpage.kernels.gather import gather_cache_by_device_lengths

    error = torch.zeros(1, dtype=torch.int32)
    gather_cache_by_device_lengths(layout.views(cache), tables, starts, lengths, out, scales, error)
    return error.item()


def move_chunk(where, caches, block_ids, start, chunk, layout, scales, to_chunk, **options):
    """Returns the interpreter's error word. options: of the wrapper, which the door sets itself."""
    if where != "interpreter":
        move = chunk_ops_cuda.store_chunk if to_chunk else chunk_ops_cuda.load_chunk
        move(caches, block_ids, start, chunk, layout, scales)
        return None
    from kvpage.kernels.chunk import move_chunk as move

    error = torch.zeros(1, dtype=torch.int32)
    move(caches, layout.views(caches[0]), block_ids, start, chunk, scales, error, to_chunk, **options)
    return error.item()


def check_reported(where, error, bit, match):
    """Check that a kernel has reported its error once: in the interpreter's error word, or by ops.check_device."""
    if where == "interpreter":
        assert error == bit
        return
    with pytest.raises(ValueError, match=match):
        ops.check_device()
    ops.check_device()  # it is reported once
