"""vLLM's cache operations under its names: code written for `vllm._custom_ops` runs by changing one import.

    from vllm import _custom_ops as ops      ->      from kvpage import vllm_ops as ops

Names, arguments and their order are those of vLLM 0.33; of 0.9.2 for what was deleted since (copy_blocks,
copy_blocks_mla, and swap_blocks without a block size). The layout of a cache is what its shape and strides say:

    reshape_and_cache_flash   key_cache, value_cache [num_blocks, block_size, num_heads, head_size], any strides with
                              the last dimension contiguous: NHD or HND, K and V of one tensor or of two
    reshape_and_cache         key_cache [num_blocks, num_heads, head_size / x, block_size, x],
                              value_cache [num_blocks, num_heads, head_size, block_size]
    *_mla, *gather*           kv_cache [num_blocks, block_size, entry_size]

kv_cache_dtype: "auto", rows are stored as they are, "float16" and "bfloat16" too, in a cache of that dtype; "fp8" and
"fp8_e4m3", or "fp8_e5m2": quantised, rows divided by the scale (fp32, one for the tensor or one a head) and read times
it, in a cache of uint8 or of that 8-bit float. Some operations on latents know "fp8_ds_mla" as well.

Unlike vLLM's: every operation works on the CPU too; shapes, dtypes and ids are checked, and what is wrong is a
ValueError before anything is written (ids on a CUDA device are checked there: bad ones are skipped, and
kvpage.ops.check_device reports them); a slot of -1 is padding; raw addresses must lie in registered caches; what CUDA
reports is raised. REFUSED names vLLM's operations on caches that are not served here, and why.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NoReturn

import numpy as np
import torch

from kvpage.checks.tensors import check_plain, check_writable, tensor_list
from kvpage.checks.values import as_integer
from kvpage.integrations.vllm_ops.args import (
    blocks_of,
    byte_layout,
    check_gathered,
    check_kind,
    check_same_dtype,
    check_tensors,
    consecutive_blocks,
    fp8_dtype,
    latent_view,
    lengths_of,
    scales_of,
    sequences_of,
    stored,
)
from kvpage.integrations.vllm_ops.entries import cp_gather_and_upconvert_fp8_kv_cache
from kvpage.integrations.vllm_ops.indexer import cp_gather_indexer_k_quant_cache, indexer_k_quant_and_cache
from kvpage.integrations.vllm_ops.latents import (
    cache_at,
    check_group,
    concat_and_cache_mla,
    concat_and_cache_mla_rope_fused,
    concat_mla_q,
    grouped_layers,
    write_layers,
)
from kvpage.integrations.vllm_ops.registered_memory import RegisteredMemory
from kvpage.integrations.vllm_ops.rows import gather_rows, write_rows
from kvpage.layout.kv_scales import KVScales
from kvpage.layout.kv_view import KVView
from kvpage.ops import reference
from kvpage.ops.copies import BlockCopier

__all__ = [
    "concat_and_cache_mla",
    "concat_and_cache_mla_grouped",
    "concat_and_cache_mla_rope_fused",
    "concat_mla_q",
    "convert_fp8",
    "copy_blocks",
    "copy_blocks_mla",
    "cp_gather_and_upconvert_fp8_kv_cache",
    "cp_gather_cache",
    "cp_gather_indexer_k_quant_cache",
    "gather_and_maybe_dequant_cache",
    "indexer_k_quant_and_cache",
    "register_caches",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "swap_blocks",
    "swap_blocks_batch",
    "unregister_caches",
]

_FUSED = "it computes norms of one model's projections; write its rows with reshape_and_cache_flash"
_HISPARSE = "it moves entries between vLLM's own host and device tables; kvpage.CacheEngine swaps blocks"
_CPU = "it is of vLLM's CPU backend; the operations here work on the CPU under their usual names"
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "amx_mla_concat_and_cache": _CPU,
        "cp_gather_and_upconvert_nvfp4_kv_cache": "kvpage keeps no 4-bit floats; vLLM's needs a GPU of SM100",
        "cpu_attention_with_kv_cache": "it attends; kvpage.ops.paged_attention does",
        "cpu_attn_reshape_and_cache": _CPU,
        "fused_minimax_m3_qknorm_rope_kv_insert": _FUSED,
        "fused_muse_spark_qknorm_rope_kv_insert": _FUSED,
        "fused_qknorm_rope_cache": _FUSED,
        "gather_mla_context_cache_cpu": _CPU,
        "hisparse_gather_compact": _HISPARSE,
        "hisparse_gather_plan": _HISPARSE,
        "hisparse_invalidate_written_slots": _HISPARSE,
        "hisparse_resolve_residency": _HISPARSE,
        "mla_decode_kvcache_cpu": "it attends; kvpage.ops.paged_attention does",
        "paged_attention_rocm": "it attends, on ROCm; kvpage.ops.paged_attention attends on CUDA and the CPU",
    }
)


def __getattr__(name: str) -> NoReturn:
    """AttributeError, with the reason for an operation of vLLM's that is refused."""
    reason = REFUSED.get(name)
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}"
        + (f": this operation of vLLM is not served, {reason}" if reason else ""),
        name=name,
    )


_memory = RegisteredMemory()
register_caches = _memory.register
unregister_caches = _memory.unregister

# --- tokens ----------------------------------------------------------------------------------------------------------


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    interleaved_v: bool = False,
) -> None:
    """Writes rows [num_tokens, num_heads, head_size] into slots of a cache whose K comes in runs of x elements.

    slot_mapping: int64 [at most num_tokens]; rows past it are padding, like those whose slot is -1. interleaved_v: V in
    runs as well, a layout of ROCm's kernels; ValueError for True.
    """
    if interleaved_v is not False:
        raise ValueError(f"interleaved_v must be False, V in runs is a layout of ROCm's kernels, got {interleaved_v!r}")
    check_tensors(key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slot_mapping)
    keys, values = (stored(cache, kv_cache_dtype) for cache in (key_cache, value_cache))
    if keys.dim() != 5 or values.dim() != 4:
        raise ValueError(
            "key_cache and value_cache must have 5 and 4 dimensions, "
            f"got shapes {tuple(keys.shape)} and {tuple(values.shape)}"
        )
    key_view = KVView(keys.permute(0, 3, 1, 2, 4))
    value_view = KVView(values.permute(0, 3, 1, 2).unsqueeze(4))
    write_rows(key, value, key_view, value_view, slot_mapping, kv_cache_dtype, k_scale, v_scale)


def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Writes rows [num_tokens, num_heads, head_size] into slots of a cache [num_blocks, block_size, heads, head_size].

    slot_mapping: int64 [at most num_tokens]; rows past it are padding, like those whose slot is -1.
    """
    check_tensors(key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slot_mapping)
    keys, values = (stored(cache, kv_cache_dtype) for cache in (key_cache, value_cache))
    for name, cache in (("key_cache", keys), ("value_cache", values)):
        if cache.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions, got shape {tuple(cache.shape)}")
    views = KVView(keys.unsqueeze(3)), KVView(values.unsqueeze(3))
    write_rows(key, value, *views, slot_mapping, kv_cache_dtype, k_scale, v_scale)


def gather_and_maybe_dequant_cache(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    token_to_seq: torch.Tensor,
    num_tokens: int,
    kv_cache_dtype: str,
    scale: torch.Tensor,
    seq_starts: torch.Tensor | None = None,
) -> None:
    """Gathers `num_tokens` tokens of all sequences, one sequence after the other, into dst's first rows.

    src_cache: [num_blocks, block_size, entry_size] or [num_blocks, block_size, heads, head_size]. dst: [at least
    num_tokens, the same]; of the cache's dtype for "auto", else fp32, bf16 or fp16. block_table: int32 [num_seqs,
    max_blocks]. cu_seq_lens: int32 [num_seqs + 1], from 0 to num_tokens. token_to_seq: int32 [at least num_tokens], the
    sequence of each token, which cu_seq_lens says too. seq_starts: int32 [num_seqs], the first token of each sequence
    to gather, anywhere in a block; default 0. What cu_seq_lens and token_to_seq hold on a CUDA device is not checked
    here: nobody waits for it.
    """
    check_tensors(
        src_cache=src_cache,
        dst=dst,
        block_table=block_table,
        cu_seq_lens=cu_seq_lens,
        token_to_seq=token_to_seq,
        seq_starts=seq_starts,
    )
    check_gathered(dst, src_cache)
    num_tokens = as_integer("num_tokens", num_tokens)
    lengths = lengths_of(cu_seq_lens, block_table, num_tokens)
    if token_to_seq.dim() != 1 or len(token_to_seq) < num_tokens:
        raise ValueError(f"token_to_seq must name {num_tokens} sequences, got shape {tuple(token_to_seq.shape)}")
    if isinstance(lengths, list) and token_to_seq[:num_tokens].tolist() != sequences_of(lengths):
        raise ValueError("token_to_seq must name the sequences that cu_seq_lens gives the tokens to")
    cache = stored(src_cache, kv_cache_dtype)
    scales = scales_of(cache, kv_cache_dtype, scale, scale)
    _gather(cache, dst[:num_tokens], block_table, lengths, seq_starts, scales)


def cp_gather_cache(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    batch_size: int,
    seq_starts: torch.Tensor | None = None,
) -> None:
    """Gathers the first `batch_size` sequences, one after the other, into dst [num_tokens, ...] of the cache's dtype.

    Arguments as of gather_and_maybe_dequant_cache; rows of dst past the sequences stay.
    """
    check_tensors(src_cache=src_cache, dst=dst, block_table=block_table, cu_seq_lens=cu_seq_lens, seq_starts=seq_starts)
    check_gathered(dst, src_cache)
    batch_size = as_integer("batch_size", batch_size)
    if not 0 <= batch_size <= len(block_table) or len(cu_seq_lens) <= batch_size:
        raise ValueError(
            f"batch_size must be at most the sequences of block_table and of cu_seq_lens, got {batch_size} for "
            f"{len(block_table)} and {len(cu_seq_lens) - 1}"
        )
    table = block_table[:batch_size]
    lengths = lengths_of(cu_seq_lens[: batch_size + 1], table, None)
    check_same_dtype("dst", dst, src_cache)
    starts = None if seq_starts is None else seq_starts[:batch_size]
    rows = dst[: sum(lengths)] if isinstance(lengths, list) else dst
    _gather(src_cache, rows, table, lengths, starts, None)


def convert_fp8(output: torch.Tensor, input: torch.Tensor, scale: float = 1.0, kv_dtype: str = "fp8") -> None:
    """Quantises floats `input` into `output` of uint8 (or the 8-bit float), or reads such an `input` back as floats."""
    check_tensors(output=output, input=input)
    check_writable("output", output)
    dtype = fp8_dtype("kv_dtype", kv_dtype)
    if output.shape != input.shape or output.device != input.device:
        raise ValueError(
            f"output and input must have one shape and device, got {tuple(output.shape)} on {output.device} "
            f"and {tuple(input.shape)} on {input.device}"
        )
    row = KVScales.of(float(scale), 1.0, input.device).key
    if input.dtype.is_floating_point and input.dtype.itemsize > 1:
        quantised = reference.quantize_fp8(input.reshape(1, 1, -1), row, dtype).view(torch.uint8)
        stored(output, kv_dtype).view(torch.uint8).copy_(quantised.view(input.shape))
        return
    if not output.dtype.is_floating_point or output.dtype.itemsize == 1:
        raise ValueError(f"input or output must be of floats, got {input.dtype} and {output.dtype}")
    rows = stored(input, kv_dtype).reshape(1, 1, -1)
    output.copy_(reference.dequantize_fp8(rows, row, output.dtype).view(output.shape))


# --- blocks ----------------------------------------------------------------------------------------------------------


def swap_blocks(
    src: torch.Tensor,
    dst: torch.Tensor,
    block_size_in_bytes: int | torch.Tensor | None = None,
    block_mapping: torch.Tensor | None = None,
) -> None:
    """Copies block s of src to block d of dst for each row (s, d) of block_mapping, int64 [num_pairs, 2] on the CPU.

    With block_size_in_bytes, blocks of that many bytes lie one after the other from each tensor's first element on.
    Without (0.9.2's form, where block_mapping is the third argument), a block is src[0], and strides are looked at.
    Both may be on the CPU. Order, errors and what must stay alive: see kvpage.ops.copies.BlockCopier.
    """
    check_tensors(src=src, dst=dst)
    if isinstance(block_size_in_bytes, torch.Tensor) and block_mapping is None:
        block_size_in_bytes, block_mapping = None, block_size_in_bytes
    if block_mapping is None:
        raise ValueError("block_mapping must be given")
    if block_size_in_bytes is None:
        blocks = [blocks_of("src", src), blocks_of("dst", dst)]
    else:
        size = as_integer("block_size_in_bytes", block_size_in_bytes)
        blocks = [consecutive_blocks("src", src, size), consecutive_blocks("dst", dst, size)]
    BlockCopier(blocks[:1], blocks[1:], byte_layout(blocks[0].shape[2])).run(block_mapping)


def concat_and_cache_mla_grouped(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache_ptrs: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
    block_stride: int,
    entry_stride: int,
    kv_scales: torch.Tensor | None = None,
    kv_cache_dtype: str = "auto",
) -> None:
    """`concat_and_cache_mla` for some layers at once, whose caches are named by address and are laid out alike.

    kv_c, k_pe: [num_layers, num_tokens, size]. kv_cache_ptrs: int64 [num_layers], on the CPU or a device, which is
    waited for; each in a cache that `register_caches` was given, and whose blocks end with it. slot_mapping: int64
    [num_layers, at most num_tokens]. block_stride, entry_stride: elements from a block to the next, and from a token to
    the next. kv_scales: fp32 [num_layers] for 8-bit floats, else None. No two caches may share memory.
    """
    dtype = check_group(kv_c, k_pe, kv_cache_ptrs, slot_mapping, kv_scales, kv_cache_dtype)
    sizes = as_integer("block_size", block_size), kv_c.shape[2] + k_pe.shape[2]
    strides = as_integer("block_stride", block_stride), as_integer("entry_stride", entry_stride)
    caches = [cache_at(_memory, address, dtype, sizes, strides) for address in kv_cache_ptrs.tolist()]
    for cache in caches:
        check_kind("kv_cache_ptrs", cache, (dtype,), kv_c.device)
    write_layers(grouped_layers(kv_c, k_pe, caches, slot_mapping, kv_scales, kv_cache_dtype), kv_cache_dtype)


def swap_blocks_batch(
    src_ptrs: torch.Tensor, dst_ptrs: torch.Tensor, sizes: torch.Tensor, is_src_access_order_any: bool = False
) -> None:
    """Copies sizes[i] bytes from the address src_ptrs[i] to dst_ptrs[i], for all i: int64 [num_copies] on the CPU each.

    Every extent must lie in caches that `register_caches` was given. Destinations must overlap neither each other nor
    sources. is_src_access_order_any: taken, but sources are always read in the stream's order, which is always right.
    """
    arrays: list[np.ndarray] = []
    for name, tensor in (("src_ptrs", src_ptrs), ("dst_ptrs", dst_ptrs), ("sizes", sizes)):
        check_plain(name, tensor)
        if tensor.dtype not in (torch.int64, torch.uint64) or tensor.device.type != "cpu" or tensor.dim() != 1:
            raise ValueError(
                f"{name} must be one row of int64 on the CPU, got {tensor.dtype} {tuple(tensor.shape)} "
                f"on {tensor.device}"
            )
        arrays.append(tensor.view(torch.int64).numpy())
    if len({len(array) for array in arrays}) > 1:
        raise ValueError(f"src_ptrs, dst_ptrs and sizes must be as many, got {', '.join(str(len(a)) for a in arrays)}")
    _memory.copy(*arrays)


def copy_blocks(
    key_caches: Sequence[torch.Tensor], value_caches: Sequence[torch.Tensor], block_mapping: torch.Tensor
) -> None:
    """Copies block s to block d for each row (s, d) of block_mapping, within each of the caches, all layers at once.

    key_caches, value_caches: one tensor a layer, [num_blocks, ...], each block dense. block_mapping: int64 [num_pairs,
    2]; one on a device is waited for.
    """
    key_caches, value_caches = tensor_list("key_caches", key_caches), tensor_list("value_caches", value_caches)
    if len(key_caches) != len(value_caches):
        raise ValueError(f"key_caches and value_caches must be as many, got {len(key_caches)} and {len(value_caches)}")
    copy_blocks_mla([*key_caches, *value_caches], block_mapping)


def copy_blocks_mla(kv_caches: Sequence[torch.Tensor], block_mapping: torch.Tensor) -> None:
    """`copy_blocks` for caches that have no value part."""
    kv_caches = tensor_list("kv_caches", kv_caches)
    check_tensors(block_mapping=block_mapping)
    if not kv_caches:
        return
    blocks = [blocks_of("kv_caches", cache) for cache in kv_caches]
    BlockCopier(blocks, blocks, byte_layout(blocks[0].shape[2])).run(block_mapping.cpu())


def _gather(
    cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    lengths: list[int] | torch.Tensor,
    seq_starts: torch.Tensor | None,
    scales: KVScales | None,
) -> None:
    rows = dst.unsqueeze(1) if cache.dim() == 3 else dst
    gather_rows((latent_view("src_cache", cache), None), (rows, None), block_table, lengths, seq_starts, scales)
