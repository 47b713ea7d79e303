"""vLLM's operations on rows of tokens: written into slots, gathered out of blocks, converted."""

import torch

from kvpage.checks.tensors import check_writable
from kvpage.checks.values import as_integer
from kvpage.integrations.vllm_ops.args import (
    check_gathered,
    check_same_dtype,
    check_tensors,
    fp8_dtype,
    latent_view,
    lengths_of,
    scales_of,
    sequences_of,
    stored,
)
from kvpage.integrations.vllm_ops.rows import gather_rows, write_rows
from kvpage.layout.kv_scales import KVScales
from kvpage.layout.kv_view import KVView
from kvpage.ops import reference


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
    """Write rows into slots of a cache whose keys come in runs of x elements.

    Args:
        key: [num_tokens, num_heads, head_size].
        value: [num_tokens, num_heads, head_size].
        key_cache: [num_blocks, num_heads, head_size / x, block_size, x].
        value_cache: [num_blocks, num_heads, head_size, block_size].
        slot_mapping: int64, at most one slot for each token. Rows after the last slot are padding, and so are rows
            whose slot is -1.
        kv_cache_dtype: How the caches hold their rows; see kvpage.integrations.vllm_ops.
        k_scale: fp32, one for the tensor or one a head. Read for 8-bit floats alone.
        v_scale: The same for values.
        interleaved_v: Values in runs as well, a layout of ROCm's kernels. It must be False.

    Raises:
        TypeError: An argument is no tensor.
        ValueError: A shape, dtype, scale or slot is wrong, or interleaved_v is not False. Nothing is written.
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
    """Write rows into slots of a cache [num_blocks, block_size, num_heads, head_size].

    Args:
        key: [num_tokens, num_heads, head_size].
        value: [num_tokens, num_heads, head_size].
        key_cache: [num_blocks, block_size, num_heads, head_size], any strides with the last dimension contiguous.
        value_cache: The same for values.
        slot_mapping: int64, at most one slot for each token. Rows after the last slot are padding, and so are rows
            whose slot is -1.
        kv_cache_dtype: How the caches hold their rows; see kvpage.integrations.vllm_ops.
        k_scale: fp32, one for the tensor or one a head. Read for 8-bit floats alone.
        v_scale: The same for values.

    Raises:
        TypeError: An argument is no tensor.
        ValueError: A shape, dtype, scale or slot is wrong. Nothing is written.
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
    """Gather tokens of all sequences, one sequence after the other, into the first rows of `dst`.

    On a CUDA device the contents of cu_seq_lens and token_to_seq are not checked, since that would wait for the device.

    Args:
        src_cache: [num_blocks, block_size, entry_size] or [num_blocks, block_size, heads, head_size].
        dst: [at least num_tokens, entry_size] or [at least num_tokens, heads, head_size]. Of the cache's dtype for
            "auto", else fp32, bf16 or fp16.
        block_table: int32 [num_seqs, max_blocks].
        cu_seq_lens: int32 [num_seqs + 1], from 0 to num_tokens.
        token_to_seq: int32 [at least num_tokens], the sequence of each token. It must agree with cu_seq_lens.
        num_tokens: How many tokens to gather.
        kv_cache_dtype: How the cache holds its rows; see kvpage.integrations.vllm_ops.
        scale: fp32, one for the tensor or one a head. Read for 8-bit floats alone.
        seq_starts: int32 [num_seqs], the first token of each sequence to gather, anywhere in a block; None for 0.

    Raises:
        TypeError: An argument is no tensor.
        ValueError: A shape, dtype, scale, length or block id is wrong. Nothing is written.
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
    """Gather the first `batch_size` sequences, one after the other, into `dst`. Rows of `dst` after them stay.

    Args:
        src_cache: [num_blocks, block_size, entry_size] or [num_blocks, block_size, heads, head_size].
        dst: [num_rows, entry_size] or [num_rows, heads, head_size], of the cache's dtype.
        block_table: int32 [num_seqs, max_blocks].
        cu_seq_lens: int32 [at least batch_size + 1], from 0 on.
        batch_size: How many sequences to gather.
        seq_starts: int32 [num_seqs], the first token of each sequence to gather, anywhere in a block; None for 0.

    Raises:
        TypeError: An argument is no tensor.
        ValueError: A shape, dtype, length or block id is wrong. Nothing is written.
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
    """Quantise floats into 8-bit floats, or read 8-bit floats back, as the two dtypes say.

    Args:
        output: Of uint8, the 8-bit float, or a wider float; of the shape and device of `input`.
        input: A wider float to quantise; or uint8 or the 8-bit float, to read back.
        scale: The number that a row is divided by when quantised, and multiplied by when read.
        kv_dtype: "fp8", "fp8_e4m3" or "fp8_e5m2".

    Raises:
        TypeError: An argument is of another type.
        ValueError: Shapes or devices differ, or neither tensor is a wider float.
    """
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
