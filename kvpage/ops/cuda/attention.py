"""Attention over blocks in a CUDA device's memory: Triton kernels, or the reference where Triton is not installed.

Lengths may be on the device: then nothing is read back, and a captured graph reads them at each replay. The kernels
keep a wrong length from reaching beyond a table or a tensor.

    graph of a bucket     64 rows, tables of 64 x 512 blocks, max_seq_len = 8192, max_query_len = 1
    replay                45 sequences of up to 8192 tokens, 19 rows of padding of length 0

Grids, splits and the sizes of partial results follow from shapes and these bounds, never from the lengths. Partial
results come from torch's allocator, so a captured graph keeps them in its own pool. Splits of keys are shared out on
the device by the lengths that a replay finds. A row of length 0 reads no block, and its output is 0.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kvpage.layout.attention import Attention
from kvpage.layout.kv_view import KVView
from kvpage.ops import reference
from kvpage.ops.args.bound_cache import BoundCache
from kvpage.ops.args.sequences import Sequences
from kvpage.ops.cuda import rows as token_ops_cuda
from kvpage.ops.cuda.launches import is_plain
from kvpage.ops.cuda.served import check_served


def attends_in_place(device: torch.device) -> bool:
    """Return whether paged_attention reads the blocks of caches on `device` where they are, and waits for nothing.

    Args:
        device: The caches' device.
    """
    return device.type == "cpu" or token_ops_cuda._has_triton()


def takes_plans(cache: BoundCache) -> bool:
    """Return whether a plan of shared prefixes makes a difference to attention over a cache.

    Args:
        cache: A layer's cache.
    """
    return cache.is_cuda and cache.library is None and token_ops_cuda._has_triton()


def attend(
    query: torch.Tensor, cache: BoundCache, sequences: Sequences, attention: Attention, out: torch.Tensor
) -> None:
    """Write kvpage.ops.attend into `out`; all but values in the device's memory is checked."""
    if len(query) == 0:
        return
    if not token_ops_cuda._has_triton():
        _attend_by_reference(query, cache, sequences, attention, out)
        return
    from kvpage.kernels import attention_launch as launch

    scales = (None, None) if cache.scales is None else (cache.scales.key, cache.scales.value)
    key, value = (
        None if view is None else launch.Rows(view.rows, _scales_of(view, scale, cache.layout.num_kv_heads))
        for view, scale in zip(cache.views, scales, strict=True)
    )
    assert key is not None
    device = cache.device
    with torch.cuda.device(device):
        seq_lens, query_lens = sequences.lengths_on_device()
        positions = _positions_on_device(attention.query_positions, device)
        if positions is not attention.query_positions:
            attention = replace(attention, query_positions=positions)
        launched = _launching(sequences)(
            query,
            out,
            key,
            value,
            launch.DeviceSequences(
                sequences.block_tables,
                seq_lens,
                query_lens,
                sequences.max_seq_len,
                sequences.max_query_len,
                sequences.num_decodes,
                sequences.shared,
                sequences.has_fixed_order,
            ),
            attention,
            launch.Device(token_ops_cuda._error_word(device), *_facts(device)),
        )
        kind = _kind(query, cache, attention)
        if kind is not None and launched:
            sequences.launches[kind] = launched
        token_ops_cuda._check_if_debugging(device)


def _launching(sequences: Sequences) -> Callable[..., list[Any]]:
    """Return what launches attention over these sequences."""
    from kvpage.kernels import attention_launch, attention_shared

    is_apart = sequences.shared is None or sequences.has_fixed_order
    return attention_launch.paged_attention if is_apart else attention_shared.paged_attention


def attend_again(
    query: torch.Tensor, cache: BoundCache, sequences: Sequences, attention: Attention
) -> torch.Tensor | None:
    """Attend as an earlier layer of the step did, whose arguments were checked; None where none was like this one."""
    error = token_ops_cuda._error_words.get(cache.device)
    if error is None or token_ops_cuda._DEBUG or torch.cuda.current_device() != cache.device.index:
        return None
    launched = sequences.launches.get(_kind(query, cache, attention))
    if launched is None:
        return None
    cache.check()
    sequences.check(cache, query.shape[0])
    assert attention.value_size is not None, "every known kind has one"
    out = query.new_empty((*query.shape[:2], attention.value_size))
    _, value, key_scale, value_scale = places = cache.addresses
    if not value:
        places = places[0], places[0], key_scale, key_scale
    return out if all([part.again(query, out, places, error) for part in launched]) else None


def _kind(query: torch.Tensor, cache: BoundCache, attention: Attention) -> tuple[Any, ...] | None:
    """Return what layers of a step have in common that are launched alike; None for rare ones."""
    if attention.sinks is not None or attention.query_positions is not None or attention.value_size is None:
        return None
    if not is_plain(query):
        return None
    form = query.dtype, query.get_device(), query.shape, query.stride()
    return cache.geometry, *form, attention.scale, attention.sliding_window, attention.softcap, attention.value_size


def _positions_on_device(positions: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    if positions is None or positions.device == device:
        return positions
    if torch.cuda.is_current_stream_capturing():
        raise ValueError("query_positions must be on the device while a graph captures paged_attention")
    return positions.pin_memory().to(device, non_blocking=True)


@functools.cache
def _facts(device: torch.device) -> tuple[int, int, int]:
    """Return (multiprocessors, capability, bytes of shared memory that a thread block may opt into)."""
    from triton.runtime import driver

    check_served(device)
    properties = torch.cuda.get_device_properties(device)
    shared_memory = driver.active.utils.get_device_properties(driver.active.get_current_device())["max_shared_mem"]
    return properties.multi_processor_count, 10 * properties.major + properties.minor, shared_memory


def _scales_of(view: KVView, scale: torch.Tensor | None, num_kv_heads: int) -> torch.Tensor | None:
    return view.scales if scale is None else scale.expand(num_kv_heads)


def _attend_by_reference(
    query: torch.Tensor, cache: BoundCache, sequences: Sequences, attention: Attention, out: torch.Tensor
) -> None:
    """Do the same by torch operations, which wait for the device."""
    lengths = torch.as_tensor(sequences.seq_lens).cpu()
    counts = None if sequences.query_lens is None else torch.as_tensor(sequences.query_lens).cpu()
    tables = sequences.block_tables
    token_ops_cuda._check_blocks(tables, lengths.tolist(), [0] * len(lengths), *cache.shape[:2])
    out.copy_(
        reference.paged_attention(
            query, cache.tensor, tables, lengths, cache.layout, attention, query_lens=counts, scales=cache.scales
        )
    )
