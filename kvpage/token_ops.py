"""Operations on tokens: writing them into blocks, gathering them out of blocks, attending over blocks.

Each validates what needs a tensor (shapes, dtypes, devices, strides), then calls C++ for tensors on the CPU and Triton
for tensors on a CUDA device. Block ids and slots on the host are checked before anything is written; those on a device
are checked there, without waiting for it: a bad one is skipped, and `check_device` raises from it later.
"""

import functools
import importlib.util
import operator
import os
import warnings
from collections.abc import Sequence

import torch

from kvpage import _C, reference
from kvpage.layout import CacheLayout

Lengths = Sequence[int] | torch.Tensor
_DEBUG = os.environ.get("KVPAGE_DEBUG") == "1"


def reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor, layout: CacheLayout
) -> None:
    """Writes row i of `key` and `value` into slot `slot_mapping[i]` of `cache`.

    key, value: [num_tokens, num_kv_heads, size], any strides with the last dimension contiguous, the cache's dtype and
        device. `size` may be under the layout's head_size, and differ between the two: the rest of a cache row stays.
    slot_mapping: int64 [num_tokens], block_id * block_size + offset; -1 is padding and written nowhere.

    Raises ValueError for anything else, for a slot out of range, and for one named twice; on the host nothing has then
    been written. On a CUDA device a slot out of range is skipped and reported by `check_device`, and of tokens that
    share a slot any may win. `key` and `value` must not share memory with `cache`.
    """
    num_blocks = layout.num_blocks(cache)
    key_cache, value_cache = layout.split_kv(cache)
    _check_rows("key", key, None, cache, layout)
    _check_rows("value", value, key.shape[0], cache, layout)
    _check_tensor("slot_mapping", slot_mapping, torch.int64, (key.shape[0],), cache.device)
    slots = slot_mapping.contiguous()  # held until the call is over
    if cache.is_cuda:
        _reshape_on_cuda(key, value, cache, slots, layout)
        return
    _C.reshape_and_cache(
        _row_view(key),
        _row_view(value),
        _block_view(key_cache),
        _block_view(value_cache),
        (_row_bytes(key), _row_bytes(value)),
        slots.data_ptr(),
        key.shape[0],
        layout.num_kv_heads,
        num_blocks,
        layout.block_size,
        torch.get_num_threads(),
    )


def gather_cache(
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: Lengths,
    layout: CacheLayout,
    seq_starts: Lengths | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies the keys and values of `seq_lens[i]` tokens of each sequence, from `seq_starts[i]` on, out of its blocks.

    block_tables: int32 [num_seqs, max_blocks] on the cache's device; entries that no wanted token lies in are not read.
    seq_lens, seq_starts: [num_seqs] integers on the host (a list, or an int32 or int64 tensor); starts default to 0.
    out: (key, value) to write into, of the cache's dtype and device, any strides with the last dimension contiguous;
        `size` may be under head_size: so much of each row is read. Either [total_tokens, num_kv_heads, size], one
        sequence after the other, or [num_seqs, max_len, num_kv_heads, size], where the rows past a sequence stay as
        they are. Without `out`, new contiguous tensors [total_tokens, num_kv_heads, head_size].

    Returns (key, value): `out` where given. Raises ValueError for anything else, and for a needed table entry that
    names no block; on the host nothing has then been written. On a CUDA device the tokens of such a block are skipped,
    and `check_device` reports it. `out` must not share memory with `cache`.
    """
    layout.validate(cache)
    tables = _tables(cache, block_tables, layout)
    num_seqs = block_tables.shape[0]
    capacity = block_tables.shape[1] * layout.block_size
    lengths = _lengths("seq_lens", seq_lens, num_seqs, capacity)
    starts = _lengths("seq_starts", [0] * num_seqs if seq_starts is None else seq_starts, num_seqs, capacity)
    if out is None:
        shape = (int(lengths.sum()), layout.num_kv_heads, layout.head_size)
        out = cache.new_empty(shape), cache.new_empty(shape)
    offsets = [
        _out_offsets(name, rows, lengths, cache, layout) for name, rows in zip(("key", "value"), out, strict=True)
    ]
    if out[0].dim() != out[1].dim():
        raise ValueError(f"key and value must have as many dimensions, got {out[0].dim()} and {out[1].dim()}")
    key_cache, value_cache = layout.split_kv(cache)
    if cache.is_cuda:
        _gather_on_cuda(cache, block_tables, lengths, starts, out, layout)
        return out
    _C.gather_cache(
        _block_view(key_cache),
        _block_view(value_cache),
        _row_view(out[0]),
        _row_view(out[1]),
        (_row_bytes(out[0]), _row_bytes(out[1])),
        tables,
        starts.data_ptr(),
        lengths.data_ptr(),
        (offsets[0].data_ptr(), offsets[1].data_ptr()),
        layout.num_kv_heads,
        torch.get_num_threads(),
    )
    return out


def paged_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: Lengths,
    layout: CacheLayout,
    scale: float | None = None,
    query_lens: Lengths | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    value_size: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of each sequence's last tokens to all of its tokens, read in place from their blocks. CPU only.

    query: [num_tokens, num_heads, key_size], the queries of one sequence after those of the other; any strides with the
        last dimension contiguous; the cache's dtype (fp32, bf16 or fp16), or fp32. num_heads is a multiple of the
        layout's num_kv_heads; neighbours share a KV head. key_size <= head_size.
    block_tables: int32 [num_seqs, max_blocks]; entries that no visible token lies in are not read.
    seq_lens: [num_seqs], the tokens of each sequence in the cache, those of its queries included.
    query_lens: [num_seqs], default 1 each. Query j of a sequence is its token seq_len - query_len + j, and sees the
        tokens up to that; with `sliding_window` only as many of them as that, its own included.
    scale: of the products, default key_size ** -0.5. softcap: scores become softcap * tanh(score / softcap).
    sinks: [num_heads], one more logit in each head's softmax, that adds nothing to the sum; not scaled, not capped.
    value_size: of V's heads and of the output, default head_size.
    out: [num_tokens, num_heads, value_size] to write into, of the query's dtype, last dimension contiguous. It must not
        share memory with the others.

    Returns the output in the query's dtype; all sums are in fp32. Raises ValueError for anything else, and for a needed
    table entry that names no block, before anything is written. Best for few queries a sequence: for a long prompt
    gathering and torch's scaled_dot_product_attention are faster.
    """
    layout.validate(cache)
    tables = _tables(cache, block_tables, layout)
    num_seqs, max_blocks = block_tables.shape
    lengths = _lengths("seq_lens", seq_lens, num_seqs, max_blocks * layout.block_size)
    queries = _lengths("query_lens", [1] * num_seqs if query_lens is None else query_lens, num_seqs, query.shape[0])
    value_size = layout.head_size if value_size is None else value_size
    key_size, group_size = _check_query(query, cache, layout)
    if out is None:
        out = query.new_empty(*query.shape[:2], value_size)
    _check_size("out", out, layout)
    _check_tensor("out", out, query.dtype, (*query.shape[:2], value_size), cache.device)
    _check_options(sliding_window, softcap)
    if sinks is not None:
        _check_tensor("sinks", sinks, sinks.dtype, (query.shape[1],), cache.device)
        sinks = sinks.float().contiguous()
    key_cache, value_cache = layout.split_kv(cache)
    _C.paged_attention(
        _row_view(query),
        _row_view(out),
        _block_view(key_cache),
        _block_view(value_cache),
        (_TYPE_CODES[query.dtype], _TYPE_CODES[cache.dtype]),
        tables,
        (lengths.data_ptr(), queries.data_ptr()),
        (query.shape[0], layout.num_kv_heads, group_size, key_size, value_size),
        _EVERY_KEY if sliding_window is None else sliding_window,
        key_size**-0.5 if scale is None else scale,
        softcap or 0.0,
        0 if sinks is None else sinks.data_ptr(),
        torch.get_num_threads(),
    )
    return out


_TYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # ElementType of csrc/attention_kernel.h
_EVERY_KEY = 2**62


def _check_query(query: torch.Tensor, cache: torch.Tensor, layout: CacheLayout) -> tuple[int, int]:
    """Checks the queries of paged_attention; the size of their heads, and how many share a KV head."""
    if cache.device.type != "cpu":
        raise ValueError(f"cache must be on the CPU, got {cache.device}")
    if query.dim() != 3:
        raise ValueError(f"query must be [num_tokens, num_heads, size], got shape {tuple(query.shape)}")
    if cache.dtype not in _TYPE_CODES:
        raise ValueError(f"cache.dtype must be one of {', '.join(map(str, _TYPE_CODES))}, got {cache.dtype}")
    if query.dtype not in (cache.dtype, torch.float32):
        raise ValueError(f"query.dtype must be {cache.dtype} or torch.float32, got {query.dtype}")
    if query.shape[1] == 0 or query.shape[1] % layout.num_kv_heads:
        raise ValueError(f"query's heads must be a multiple of {layout.num_kv_heads}, got {query.shape[1]}")
    _check_size("query", query, layout)
    _check_tensor("query", query, query.dtype, tuple(query.shape), cache.device)
    return query.shape[2], query.shape[1] // layout.num_kv_heads


def _check_options(sliding_window: int | None, softcap: float | None) -> None:
    if sliding_window is not None and not 1 <= sliding_window <= _EVERY_KEY:
        raise ValueError(f"sliding_window must be at least 1, got {sliding_window}")
    if softcap is not None and not 0 < softcap < float("inf"):
        raise ValueError(f"softcap must be positive, got {softcap}")


# --- on a CUDA device ------------------------------------------------------------------------------------------------

_ERRORS = {1: "slot_mapping held a slot out of range", 2: "block_tables held a block id out of range"}
_error_words: dict[torch.device, torch.Tensor] = {}  # int32 [1] a device, for all kernels: bits, the keys of _ERRORS


def check_device(device: torch.device | str = "cuda") -> None:
    """Waits for the device's work so far; ValueError if a kernel met a bad slot or block id since the last call.

    What named it was skipped, everything else was done. With KVPAGE_DEBUG=1 in the environment every operation calls
    this itself.
    """
    device = _with_index(torch.device(device))
    if device not in _error_words:
        return
    word = int(_error_words[device].item())
    if word:
        _error_words[device].zero_()
        raise ValueError(
            "; ".join(text for bit, text in _ERRORS.items() if word & bit) + f" on {device}; it was skipped"
        )


def _with_index(device: torch.device) -> torch.device:
    if device.type != "cuda":
        raise ValueError(f"device must be a CUDA device, got {device}")
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def _error_word(device: torch.device) -> torch.Tensor:
    if device not in _error_words:
        _error_words[device] = torch.zeros(1, dtype=torch.int32, device=device)
    return _error_words[device]


@functools.cache
def _has_triton() -> bool:
    if importlib.util.find_spec("triton") is not None:
        return True
    warnings.warn("triton is not installed: tokens are written and gathered by slower torch operations", stacklevel=4)
    return False


def _reshape_on_cuda(
    key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, layout: CacheLayout
) -> None:
    if not _has_triton():
        reference.reshape_and_cache(key, value, cache, slots, layout)
        return
    from kvpage.kernels import reshape

    with torch.cuda.device(cache.device):
        reshape.reshape_and_cache(key, value, *layout.split_kv(cache), slots, _error_word(cache.device))
    if _DEBUG:
        check_device(cache.device)


def _gather_on_cuda(
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor],
    layout: CacheLayout,
) -> None:
    if not _has_triton():
        reference.gather_into(cache, block_tables, lengths, starts, out, layout)
        return
    from kvpage.kernels import gather

    with torch.cuda.device(cache.device):
        gather.gather_cache(*layout.split_kv(cache), block_tables, starts, lengths, *out, _error_word(cache.device))
    if _DEBUG:
        check_device(cache.device)


# --- what the native calls take ----------------------------------------------------------------------------------------


def _block_view(blocks: torch.Tensor) -> tuple[int, int, int, int]:
    """Address and strides in bytes of K's or V's blocks [num_blocks, block_size, num_heads, head_size]."""
    item, strides = blocks.element_size(), blocks.stride()
    return blocks.data_ptr(), strides[0] * item, strides[1] * item, strides[2] * item


def _row_view(rows: torch.Tensor) -> tuple[int, int, int]:
    """Address and strides in bytes of rows [..., num_tokens, num_heads, size]."""
    item, strides = rows.element_size(), rows.stride()
    return rows.data_ptr(), strides[-3] * item, strides[-2] * item


def _row_bytes(rows: torch.Tensor) -> int:
    return rows.shape[-1] * rows.element_size()


def _check_tensor(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    if tensor.dtype != dtype:
        raise ValueError(f"{name}.dtype must be {dtype}, got {tensor.dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}.shape must be {shape}, got {tuple(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")


def _check_rows(
    name: str, rows: torch.Tensor, num_tokens: int | None, cache: torch.Tensor, layout: CacheLayout
) -> None:
    """`rows` must be [num_tokens, num_kv_heads, 1..head_size] like the cache, with its last dimension contiguous."""
    if rows.dim() != 3:
        raise ValueError(f"{name} must be [num_tokens, num_kv_heads, size], got shape {tuple(rows.shape)}")
    _check_size(name, rows, layout)
    expected = (rows.shape[0] if num_tokens is None else num_tokens, layout.num_kv_heads, rows.shape[2])
    _check_tensor(name, rows, cache.dtype, expected, cache.device)


def _check_size(name: str, rows: torch.Tensor, layout: CacheLayout) -> None:
    if not 1 <= rows.shape[-1] <= layout.head_size:
        raise ValueError(f"{name}'s head size must be in [1, {layout.head_size}], got {rows.shape[-1]}")
    if rows.stride(-1) != 1 and rows.shape[-1] > 1:
        raise ValueError(f"{name} must be contiguous in its last dimension, got stride {rows.stride(-1)}")


def _tables(
    cache: torch.Tensor, block_tables: torch.Tensor, layout: CacheLayout
) -> tuple[int, int, int, int, int, int]:
    """The block tables as the extension takes them, checked for all but the ids."""
    if block_tables.dim() != 2:
        raise ValueError(f"block_tables must be [num_seqs, max_blocks], got shape {tuple(block_tables.shape)}")
    num_seqs, max_blocks = block_tables.shape
    _check_tensor("block_tables", block_tables, torch.int32, (num_seqs, max_blocks), cache.device)
    if max_blocks > 1 and block_tables.stride(1) != 1:
        raise ValueError(f"block_tables must be contiguous in its last dimension, got stride {block_tables.stride(1)}")
    num_blocks = cache.shape[layout.block_dim]
    return block_tables.data_ptr(), block_tables.stride(0), num_seqs, max_blocks, num_blocks, layout.block_size


def _lengths(name: str, lengths: Lengths, num_seqs: int, maximum: int) -> torch.Tensor:
    """`lengths` as a contiguous int64 tensor on the host, each in [0, maximum]."""
    if isinstance(lengths, torch.Tensor):
        if lengths.dtype not in (torch.int32, torch.int64) or lengths.device.type != "cpu":
            raise ValueError(f"{name} must be int32 or int64 on the host, got {lengths.dtype} on {lengths.device}")
        tensor = lengths.to(torch.int64).contiguous()
    else:
        tensor = torch.tensor([operator.index(length) for length in lengths], dtype=torch.int64)
    if tuple(tensor.shape) != (num_seqs,):
        raise ValueError(f"{name} must have one entry for each of {num_seqs} block tables, got {tuple(tensor.shape)}")
    for bound in (int(tensor.min()), int(tensor.max())) if num_seqs else ():
        if not 0 <= bound <= maximum:
            raise ValueError(f"{name} must be in [0, {maximum}], got {bound}")
    return tensor


def _out_offsets(
    name: str, rows: torch.Tensor, lengths: torch.Tensor, cache: torch.Tensor, layout: CacheLayout
) -> torch.Tensor:
    """Checks an output of gather_cache; bytes from its address to the first row of each sequence, int64 [num_seqs]."""
    heads, item = layout.num_kv_heads, rows.element_size()
    if rows.dim() == 3:
        expected: tuple[int, ...] = (int(lengths.sum()), heads, rows.shape[-1])
        offsets = (lengths.cumsum(0) - lengths) * (rows.stride(0) * item)
    elif rows.dim() == 4:
        expected = (len(lengths), rows.shape[1], heads, rows.shape[-1])
        offsets = torch.arange(len(lengths)) * (rows.stride(0) * item)
        if len(lengths) and int(lengths.max()) > rows.shape[1]:
            raise ValueError(f"{name} must have room for {int(lengths.max())} tokens a sequence, got {rows.shape[1]}")
    else:
        raise ValueError(f"{name} must have 3 or 4 dimensions, got shape {tuple(rows.shape)}")
    _check_size(name, rows, layout)
    _check_tensor(name, rows, cache.dtype, expected, cache.device)
    if any(stride == 0 and size > 1 for stride, size in zip(rows.stride(), rows.shape, strict=True)):
        raise ValueError(f"{name} must have memory for each of its elements, got strides {rows.stride()}")
    return offsets
