"""vLLM's operations on the keys of a sparse-attention indexer; kvpage.integrations.vllm_ops serves them.

    block      [ codes of token 0 | codes of token 1 | ... | scales of token 0 | scales of token 1 | ... ]
                 head_dim bytes                              4 bytes a tile

A cache is bytes [num_blocks, block_size, head_dim + 4 * tiles]. Its last dimension counts the bytes of a token.
"""

import torch

from kvpage.checks.tensors import check_plain, check_writable
from kvpage.checks.values import as_integer
from kvpage.integrations.vllm_ops.args import check_kind, check_shape, check_tensors, lengths_of, num_slots
from kvpage.integrations.vllm_ops.fp8_tiles import (
    FP8,
    bytes_of,
    largest_magnitude,
    over_most,
    power_of_two_from,
    quantize_tiles,
)
from kvpage.integrations.vllm_ops.rows import gather_rows, write_rows
from kvpage.layout.kv_view import KVView
from kvpage.ops.args.tokens import COMPUTE_DTYPES

SCALE_FORMATS = ("auto", "fp8", "fp8_e4m3", "ue8m0", "mxfp8")
MX_TILE = 128
LEAST_MAGNITUDE = 1e-4
_BYTES = (torch.uint8, FP8)


def indexer_k_quant_and_cache(
    k: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    quant_block_size: int,
    kv_cache_dtype: str,
) -> None:
    """Write keys into slots, as e4m3 floats with a scale for each quant_block_size of them.

    Args:
        k: [num_tokens, head_dim], fp32, bf16 or fp16.
        kv_cache: Bytes [num_blocks, block_size, head_dim + 4 * head_dim / quant_block_size], each block one run of
            memory.
        slot_mapping: int64 [at most num_tokens]; -1 is padding.
        quant_block_size: Elements of a tile, which share a scale. It must divide head_dim.
        kv_cache_dtype: The scale's format. "auto", "fp8" and "fp8_e4m3" leave the scale as it is. "ue8m0" rounds it up
            to a power of two. "mxfp8" stores that power's exponent, four times, in place of fp32; head_dim and
            quant_block_size are then 128.

    Raises:
        TypeError: An argument is no tensor, or quant_block_size no integer.
        ValueError: A shape, dtype, format or slot is wrong. Nothing is written.
    """
    check_tensors(k=k, kv_cache=kv_cache, slot_mapping=slot_mapping)
    if not isinstance(kv_cache_dtype, str) or kv_cache_dtype not in SCALE_FORMATS:
        raise ValueError(f"kv_cache_dtype must be one of {', '.join(SCALE_FORMATS)}, got {kv_cache_dtype!r}")
    check_shape("k", k, "num_tokens head_dim", (None, None))
    check_kind("k", k, COMPUTE_DTYPES, kv_cache.device)
    head_dim, tile = k.shape[1], as_integer("quant_block_size", quant_block_size)
    if tile < 1 or head_dim < 1 or head_dim % tile:
        raise ValueError(f"quant_block_size must divide head_dim, {head_dim}, got {tile}")
    if kv_cache_dtype == "mxfp8" and not head_dim == tile == MX_TILE:
        raise ValueError(f"head_dim and quant_block_size must be {MX_TILE} for mxfp8, got {head_dim} and {tile}")
    check_writable("kv_cache", kv_cache)
    views = _views(kv_cache, head_dim, head_dim // tile)
    num_tokens = num_slots(slot_mapping, k)
    tiles = k[:num_tokens].reshape(num_tokens, head_dim // tile, tile)
    scales = over_most(largest_magnitude(tiles).clamp(min=LEAST_MAGNITUDE))
    if kv_cache_dtype in ("ue8m0", "mxfp8"):
        scales = power_of_two_from(scales)
    codes = quantize_tiles(tiles, scales).flatten(1)
    stored = _exponents(scales) if kv_cache_dtype == "mxfp8" else bytes_of(scales)
    unit_scale = torch.ones(1)
    write_rows(codes.unsqueeze(1), stored.unsqueeze(1), *views, slot_mapping, "auto", unit_scale, unit_scale)


def cp_gather_indexer_k_quant_cache(
    kv_cache: torch.Tensor,
    dst_k: torch.Tensor,
    dst_scale: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
) -> None:
    """Gather the codes and the scales of all sequences, one after the other, into the first rows of two tensors.

    Rows after the sequences stay.

    Args:
        kv_cache: Bytes, as in `indexer_k_quant_and_cache`.
        dst_k: Bytes [num_rows, head_dim].
        dst_scale: uint8 [num_rows, 4 * head_dim / quant_block_size], the bytes of fp32.
        block_table: int32 [num_seqs, max_blocks].
        cu_seq_lens: int32 [num_seqs + 1], from 0 on to at most num_rows.

    Raises:
        TypeError: An argument is no tensor.
        ValueError: A shape, dtype, length or block id is wrong. Nothing is written.
    """
    check_tensors(kv_cache=kv_cache, dst_k=dst_k, dst_scale=dst_scale, block_table=block_table, cu_seq_lens=cu_seq_lens)
    check_plain("kv_cache", kv_cache)
    device = kv_cache.device
    for name, rows, dtypes in (("dst_k", dst_k, _BYTES), ("dst_scale", dst_scale, (torch.uint8,))):
        check_writable(name, rows)
        check_kind(name, rows, dtypes, device)
    check_shape("dst_k", dst_k, "num_rows head_dim", (None, None))
    check_shape("dst_scale", dst_scale, "num_rows scale_bytes", (len(dst_k), None))
    head_dim, scale_bytes = dst_k.shape[1], dst_scale.shape[1]
    if head_dim < 1 or scale_bytes < 4 or scale_bytes % 4 or head_dim % (scale_bytes // 4):
        raise ValueError(f"dst_scale must have 4 bytes for each tile of dst_k, got {scale_bytes} for {head_dim}")
    check_kind("cu_seq_lens", cu_seq_lens, (torch.int32,), device)
    lengths = lengths_of(cu_seq_lens, block_table, None)
    num_rows = sum(lengths) if isinstance(lengths, list) else len(dst_k)
    if num_rows > len(dst_k):
        raise ValueError(f"cu_seq_lens must end with at most {len(dst_k)}, the rows of dst_k, got {num_rows}")
    out = dst_k.view(torch.uint8)[:num_rows].unsqueeze(1), dst_scale[:num_rows].unsqueeze(1)
    gather_rows(_views(kv_cache, head_dim, scale_bytes // 4), out, block_table, lengths, None)


def _views(kv_cache: torch.Tensor, head_dim: int, num_tiles: int) -> tuple[KVView, KVView]:
    """Return views of the codes and of the scales' bytes of each slot."""
    check_kind("kv_cache", kv_cache, _BYTES, kv_cache.device)
    check_shape("kv_cache", kv_cache, "num_blocks block_size bytes", (None, None, head_dim + 4 * num_tiles))
    num_blocks, block_size, entry = kv_cache.shape
    if kv_cache.stride()[1:] != (entry, 1) and kv_cache.numel():
        raise ValueError(f"a block of kv_cache must be one run of memory, got strides {kv_cache.stride()}")
    blocks = kv_cache.view(torch.uint8).as_strided((num_blocks, block_size * entry), (kv_cache.stride(0), 1))
    num_codes = block_size * head_dim
    codes = blocks[:, :num_codes].view(num_blocks, block_size, 1, 1, head_dim)
    scales = blocks[:, num_codes:].view(num_blocks, block_size, 1, 1, 4 * num_tiles)
    return KVView(codes), KVView(scales)


def _exponents(scales: torch.Tensor) -> torch.Tensor:
    """Return the exponent's byte of each power of two [num_tokens, 1], four times: uint8 [num_tokens, 4]."""
    return (scales.view(torch.int32) >> 23).to(torch.uint8).repeat(1, 4)
