"""Attention over blocks in a CUDA device's memory: Triton kernels, or the reference where Triton is not installed.

Lengths may be on the device: then nothing is read back, a captured graph takes what they hold at each replay, and the
kernels see to it that no wrong one reaches beyond a table or a tensor.
"""

import functools

import torch

from kvpage.layout.cache_layout import CacheLayout
from kvpage.layout.kv_scales import KVScales
from kvpage.layout.kv_view import KVView
from kvpage.ops import reference
from kvpage.ops.cuda import rows as token_ops_cuda
from kvpage.ops.token_args import Lengths, host_lengths, length_bound


def attends_in_place(device: torch.device) -> bool:
    """Whether paged_attention reads the blocks of caches on `device` where they are, and waits for nothing."""
    return device.type == "cpu" or token_ops_cuda._has_triton()


def paged_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: Lengths,
    query_lens: Lengths | None,
    query_positions: torch.Tensor | None,
    bounds: tuple[int | None, int | None],
    layout: CacheLayout,
    options: tuple[float, int | None, float | None, torch.Tensor | None],
    out: torch.Tensor,
    scales: KVScales | None,
) -> None:
    """kvpage.ops.paged_attention into `out`; all but the lengths is checked. bounds: max_query_len and max_seq_len.
    options: scale, sliding_window, softcap, sinks."""
    num_seqs, capacity = len(block_tables), block_tables.shape[1] * layout.block_size
    counts = _check_lengths(seq_lens, query_lens, len(query), num_seqs, capacity, cache.device)
    max_query_len = length_bound("max_query_len", bounds[0], [1] if query_lens is None else counts[1], len(query))
    max_seq_len = length_bound("max_seq_len", bounds[1], counts[0], capacity)
    if len(query) == 0:
        return
    if not token_ops_cuda._has_triton():
        _by_reference(query, cache, block_tables, seq_lens, query_lens, query_positions, layout, options, out, scales)
        return
    from kvpage.kernels import attention_launch as launch

    key, value = (
        None if view is None else launch.Rows(view.rows, _scales_of(view, scale, layout.num_kv_heads))
        for view, scale in zip(layout.views(cache), _both(scales), strict=True)
    )
    with torch.cuda.device(cache.device):
        on_device = _on_device(counts, seq_lens, query_lens, cache.device)
        positions = _positions_on_device(query_positions, cache.device)
        num_keys = sum(counts[0]) if counts[0] is not None else num_seqs * max_seq_len
        launch.paged_attention(
            query,
            out,
            key,
            value,
            launch.Sequences(block_tables, *on_device, positions, max_seq_len, max_query_len, num_keys),
            launch.Options(*options),
            launch.Device(token_ops_cuda._error_word(cache.device), *_facts(cache.device)),
        )
        token_ops_cuda._check_if_debugging(cache.device)


Counts = tuple[
    list[int] | None, list[int] | None
]  # seq_lens, query_lens; None where they are on the device, or not given


def _check_lengths(
    seq_lens: Lengths,
    query_lens: Lengths | None,
    num_tokens: int,
    num_seqs: int,
    capacity: int,
    device: torch.device,
) -> Counts:
    """What the host knows of the lengths, checked."""
    known = [
        _known(name, lengths, num_seqs, most, device)
        for name, lengths, most in (("seq_lens", seq_lens, capacity), ("query_lens", query_lens, num_tokens))
    ]
    queries = [1] * num_seqs if query_lens is None else known[1]
    if queries is not None and sum(queries) != num_tokens:
        raise ValueError(f"query_lens must sum up to the {num_tokens} rows of query, got {sum(queries)}")
    if queries is not None and known[0] is not None:
        for seq, (count, length) in enumerate(zip(queries, known[0], strict=True)):
            if count > length:
                raise ValueError(f"query_lens[{seq}] must be in [0, seq_lens = {length}], got {count}")
    return known[0], known[1]


def _known(name: str, lengths: Lengths | None, num_seqs: int, most: int, device: torch.device) -> list[int] | None:
    if lengths is None:
        return None
    if not isinstance(lengths, torch.Tensor) or lengths.device != device:
        return host_lengths(name, lengths, num_seqs, most)
    if lengths.dtype not in (torch.int32, torch.int64) or lengths.dim() != 1 or not lengths.is_contiguous():
        raise ValueError(f"{name} must be one row of int32 or int64, got {lengths.dtype} {tuple(lengths.shape)}")
    if len(lengths) != num_seqs:
        raise ValueError(f"{name} must have one entry for each of {num_seqs} block tables, got {len(lengths)}")
    return None


def _on_device(
    counts: Counts, seq_lens: Lengths, query_lens: Lengths | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Both lengths on the device, what the host has in one copy from pinned memory, which waits for nothing."""
    rows = [row for row in counts if row is not None]
    if rows and torch.cuda.is_current_stream_capturing():
        raise ValueError("seq_lens and query_lens must be on the device while a graph captures paged_attention")
    copies = list(torch.tensor(rows, dtype=torch.int32).pin_memory().to(device, non_blocking=True)) if rows else []
    seq_lens = seq_lens if counts[0] is None else copies.pop(0)
    query_lens = query_lens if counts[1] is None else copies.pop(0)
    assert isinstance(seq_lens, torch.Tensor) and (query_lens is None or isinstance(query_lens, torch.Tensor))
    return seq_lens, query_lens


def _positions_on_device(positions: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    if positions is None or positions.device == device:
        return positions
    if torch.cuda.is_current_stream_capturing():
        raise ValueError("query_positions must be on the device while a graph captures paged_attention")
    return positions.pin_memory().to(device, non_blocking=True)


@functools.cache
def _facts(device: torch.device) -> tuple[int, int]:
    """(multiprocessors, capability), the latter that of sm_80 where it is no CUDA device's."""
    properties = torch.cuda.get_device_properties(device)
    capability = 80 if torch.version.hip else 10 * properties.major + properties.minor
    return properties.multi_processor_count, capability


def _both(scales: KVScales | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (None, None) if scales is None else (scales.key, scales.value)


def _scales_of(view: KVView, scale: torch.Tensor | None, num_kv_heads: int) -> torch.Tensor | None:
    return view.scales if scale is None else scale.expand(num_kv_heads)


def _by_reference(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: Lengths,
    query_lens: Lengths | None,
    query_positions: torch.Tensor | None,
    layout: CacheLayout,
    options: tuple[float, int | None, float | None, torch.Tensor | None],
    out: torch.Tensor,
    scales: KVScales | None,
) -> None:
    """The same by torch operations, which wait for the device."""
    lengths = torch.as_tensor(seq_lens).cpu()
    queries = torch.ones_like(lengths) if query_lens is None else torch.as_tensor(query_lens).cpu()
    token_ops_cuda._check_blocks(
        block_tables, lengths.tolist(), [0] * len(lengths), layout.num_blocks(cache), layout.block_size
    )
    scale, window, softcap, sinks = options
    out.copy_(
        reference.paged_attention(
            query,
            cache,
            block_tables,
            lengths,
            layout,
            scale,
            queries,
            window,
            softcap,
            sinks,
            out.shape[2],
            scales,
            query_positions,
        )
    )
