"""Checks of the arguments of vLLM's operations, and their translation into arguments of kvpage's operations."""

import numbers
from functools import lru_cache

import torch

from kvpage.checks.tensors import check_dense, check_plain
from kvpage.layout.cache_layout import CacheLayout
from kvpage.layout.kv_scales import KVScales
from kvpage.layout.kv_view import KVView
from kvpage.ops.cuda import rows as token_ops_cuda

FP8_CACHE_DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
RAW_CACHE_DTYPES = {"auto": None, "float16": torch.float16, "bfloat16": torch.bfloat16}


def check_tensors(**tensors: torch.Tensor | None) -> None:
    """Raise TypeError unless they are tensors (seq_starts may be None), and ValueError unless they have memory."""
    for name, tensor in tensors.items():
        if tensor is not None or name != "seq_starts":
            check_reachable(name, tensor)


def check_shape(name: str, tensor: torch.Tensor, dims: str, shape: tuple[int | None, ...]) -> None:
    """Raise ValueError unless the tensor has this shape. None is any size; `dims` names the sizes in the message."""
    actual = tuple(tensor.shape)
    if len(actual) != len(shape) or any(size not in (None, got) for size, got in zip(shape, actual, strict=True)):
        sizes = ", ".join(dim if size is None else str(size) for dim, size in zip(dims.split(), shape, strict=True))
        raise ValueError(f"{name} must be [{sizes}], got shape {actual}")


def check_kind(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    """Raise ValueError unless the tensor has one of these dtypes and is on the device."""
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}.dtype must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")


def check_reachable(name: str, tensor: torch.Tensor | None) -> None:
    """Raise as check_dense does, and ValueError for a tensor that is neither on the CPU nor on a CUDA device."""
    check_dense(name, tensor)
    if tensor is not None and tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} must be on the CPU or a CUDA device, got {tensor.device}")


def overwrite(tensor: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows into a tensor without a record by autograd."""
    with torch.inference_mode():
        tensor.copy_(rows)


def fp8_dtype(name: str, kv_cache_dtype: str) -> torch.dtype:
    """Return the 8-bit float of that name. Raise ValueError for another name."""
    if not isinstance(kv_cache_dtype, str):
        raise TypeError(f"{name} must be a str, got {type(kv_cache_dtype).__name__}")
    dtype = FP8_CACHE_DTYPES.get(kv_cache_dtype)
    if dtype is None:
        raise ValueError(f"{name} must be one of {', '.join(FP8_CACHE_DTYPES)}, got {kv_cache_dtype!r}")
    return dtype


def is_raw(kv_cache_dtype: str) -> bool:
    """Return whether rows are stored as they are."""
    return isinstance(kv_cache_dtype, str) and kv_cache_dtype in RAW_CACHE_DTYPES


def stored(cache: torch.Tensor, kv_cache_dtype: str) -> torch.Tensor:
    """Return the cache as a view of the type that kv_cache_dtype says it holds."""
    check_plain("a cache", cache)
    if is_raw(kv_cache_dtype):
        named = RAW_CACHE_DTYPES[kv_cache_dtype]
        if named not in (None, cache.dtype):
            raise ValueError(f"a cache of {kv_cache_dtype} must be of {named}, got {cache.dtype}")
        return cache
    dtype = fp8_dtype("kv_cache_dtype", kv_cache_dtype)
    if cache.dtype not in (torch.uint8, dtype):
        raise ValueError(f"a cache of {kv_cache_dtype} must be of torch.uint8 or {dtype}, got {cache.dtype}")
    return cache.view(dtype)


def scales_of(
    cache: torch.Tensor, kv_cache_dtype: str, key: torch.Tensor | float, value: torch.Tensor | float
) -> KVScales | None:
    """Return the scales of K and V for 8-bit floats, or None where rows are stored as they are."""
    if is_raw(kv_cache_dtype):
        return None
    for name, scale in (("k_scale", key), ("v_scale", value)):
        if isinstance(scale, torch.Tensor):
            check_reachable(name, scale)
        elif not isinstance(scale, numbers.Real):
            raise TypeError(f"{name} must be a tensor or a number, got {type(scale).__name__}")
    rows = [torch.as_tensor(scale, dtype=torch.float32, device=cache.device).reshape(-1) for scale in (key, value)]
    # On a device, looking at the values would wait for it.
    return KVScales.unchecked(*rows) if cache.is_cuda else KVScales(*rows)


def check_rows(name: str, rows: torch.Tensor, cached: torch.Tensor, size: int, kv_cache_dtype: str) -> None:
    """Raise ValueError unless rows [num_tokens, num_heads, size] fit into the cached rows."""
    if cached.stride(4) != 1 and cached.shape[4] > 1:
        raise ValueError(f"the cache of {name} must be contiguous in its last dimension, got stride {cached.stride(4)}")
    if rows.dim() != 3 or not 1 <= rows.shape[2] <= size:
        raise ValueError(f"{name} must be [num_tokens, num_heads, 1 to {size}], got shape {tuple(rows.shape)}")
    if is_raw(kv_cache_dtype):
        check_same_dtype(name, rows, cached)


def check_same_dtype(name: str, rows: torch.Tensor, cache: torch.Tensor) -> None:
    if rows.dtype != cache.dtype:
        raise ValueError(f"{name}.dtype must be the cache's, {cache.dtype}, got {rows.dtype}")


def num_slots(slot_mapping: torch.Tensor, *rows: torch.Tensor) -> int:
    """Return the number of slots. Callers pad rows and not slots, so there may be fewer slots than rows."""
    if slot_mapping.dim() != 1 or any(len(slot_mapping) > len(tensor) for tensor in rows):
        raise ValueError(
            f"slot_mapping must name a slot for each of at most {min(map(len, rows))} rows, "
            f"got shape {tuple(slot_mapping.shape)}"
        )
    return len(slot_mapping)


def latent_view(name: str, cache: torch.Tensor) -> KVView:
    """Return a view of a cache of latents; [num_blocks, block_size, entry_size] is a cache of one head."""
    if cache.dim() == 3:
        cache = cache.unsqueeze(2)
    if cache.dim() != 4:
        raise ValueError(f"{name} must have 3 or 4 dimensions, got shape {tuple(cache.shape)}")
    if cache.stride(3) != 1 and cache.shape[3] > 1:
        raise ValueError(f"{name} must be contiguous in its last dimension, got stride {cache.stride(3)}")
    return KVView(cache.unsqueeze(3))


def check_gathered(dst: torch.Tensor, src_cache: torch.Tensor) -> None:
    """Raise ValueError unless dst has a dimension for the tokens, and the dimensions of an entry of the cache."""
    if src_cache.dim() not in (3, 4):
        raise ValueError(f"src_cache must have 3 or 4 dimensions, got shape {tuple(src_cache.shape)}")
    if dst.dim() != src_cache.dim() - 1:
        raise ValueError(f"dst must have {src_cache.dim() - 1} dimensions, got shape {tuple(dst.shape)}")


def lengths_of(
    cu_seq_lens: torch.Tensor, block_table: torch.Tensor, num_tokens: int | None
) -> list[int] | torch.Tensor:
    """Return each sequence's number of tokens: a list, or a tensor on a device whose kernels read it."""
    if cu_seq_lens.dim() != 1 or len(cu_seq_lens) != len(block_table) + 1:
        raise ValueError(f"cu_seq_lens must be [{len(block_table) + 1}], got shape {tuple(cu_seq_lens.shape)}")
    if cu_seq_lens.is_cuda and token_ops_cuda._has_triton():
        return cu_seq_lens.diff()
    ends = cu_seq_lens.tolist()
    if ends[0] != 0 or ends != sorted(ends):
        raise ValueError(f"cu_seq_lens must begin with 0 and not descend, got {ends}")
    if num_tokens is not None and ends[-1] != num_tokens:
        raise ValueError(f"cu_seq_lens must end with num_tokens, {num_tokens}, got {ends[-1]}")
    return [end - begin for begin, end in zip(ends, ends[1:], strict=False)]


def sequences_of(lengths: list[int]) -> list[int]:
    """Return the index of the sequence of each token."""
    return [sequence for sequence, length in enumerate(lengths) for _ in range(length)]


@lru_cache(maxsize=64)
def byte_layout(block_bytes: int) -> CacheLayout:
    """Return the layout of blocks that are plain bytes: [num_blocks, 1, block_bytes]."""
    return CacheLayout(1, 1, block_bytes, torch.uint8, "mla")


def blocks_of(name: str, cache: torch.Tensor) -> torch.Tensor:
    """Return the bytes of each block, [num_blocks, 1, block_bytes].

    Raises:
        ValueError: A block is not one run of memory, or there is none.
    """
    if cache.dim() < 2 or cache.numel() == 0:
        raise ValueError(f"{name} must be [num_blocks, ...], not empty, got shape {tuple(cache.shape)}")
    run = 1
    for stride, size in sorted(zip(cache.stride()[1:], cache.shape[1:], strict=True)):
        if size > 1 and stride != run:
            raise ValueError(f"a block of {name} must be one run of memory, got strides {cache.stride()}")
        run *= size
    item = cache.element_size()
    return _bytes(cache, len(cache), run * item, cache.stride(0) * item)


def consecutive_blocks(name: str, cache: torch.Tensor, block_bytes: int) -> torch.Tensor:
    """Return as many blocks as begin in the tensor's memory and end in its storage."""
    if block_bytes < 1:
        raise ValueError(f"block_size_in_bytes must be positive, got {block_bytes}")
    last = sum((size - 1) * stride for size, stride in zip(cache.shape, cache.stride(), strict=True))
    span = (last + 1) * cache.element_size() if cache.numel() else 0
    offset = cache.storage_offset() * cache.element_size()
    num_blocks = min(-(-span // block_bytes), (cache.untyped_storage().nbytes() - offset) // block_bytes)
    if num_blocks == 0:
        raise ValueError(f"{name} must hold a block of {block_bytes} bytes, got {span} bytes")
    return _bytes(cache, num_blocks, block_bytes, block_bytes)


def _bytes(cache: torch.Tensor, num_blocks: int, block_bytes: int, step: int) -> torch.Tensor:
    offset = cache.storage_offset() * cache.element_size()
    memory = torch.empty(0, dtype=torch.uint8, device=cache.device)
    return memory.set_(cache.untyped_storage(), offset, (num_blocks, 1, block_bytes), (step, block_bytes, 1))
