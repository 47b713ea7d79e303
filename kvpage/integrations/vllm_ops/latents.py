"""vLLM's operations on latents (MLA). Options that operations share are described in kvpage.integrations.vllm_ops."""

import torch

from kvpage.checks.tensors import check_plain, check_writable, readable
from kvpage.checks.values import check_flag
from kvpage.integrations.vllm_ops import ds_mla
from kvpage.integrations.vllm_ops.args import (
    check_kind,
    check_same_dtype,
    check_shape,
    check_tensors,
    is_raw,
    latent_view,
    num_slots,
    overwrite,
    stored,
)
from kvpage.integrations.vllm_ops.rows import write_rows
from kvpage.layout.kv_view import KVView
from kvpage.ops.args.tokens import COMPUTE_DTYPES

PAD_SLOT = -1


def concat_and_cache_mla(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    scale: torch.Tensor,
    skip_scale: bool = False,
) -> None:
    """Write latents, each followed by its rotary part, into slots.

    Args:
        kv_c: [num_tokens, kv_lora_rank]. For "fp8_ds_mla", bf16 [num_tokens, 512].
        k_pe: [num_tokens, rope size]. For "fp8_ds_mla", bf16 [num_tokens, 64 or 0].
        kv_cache: [num_blocks, block_size, kv_lora_rank + rope size]. For "fp8_ds_mla", bytes
            [num_blocks, block_size, 656] of the entries that kvpage.integrations.vllm_ops.ds_mla shows.
        slot_mapping: int64 [at most num_tokens]; -1 is padding.
        kv_cache_dtype: How the cache holds its rows; see kvpage.integrations.vllm_ops.
        scale: fp32. Read for 8-bit floats alone.
        skip_scale: Whether 8-bit floats are stored as if the scale were 1.

    Raises:
        TypeError: An argument is of another type.
        ValueError: A shape, dtype, scale or slot is wrong. Nothing is written.
    """
    check_tensors(kv_c=kv_c, k_pe=k_pe, kv_cache=kv_cache, slot_mapping=slot_mapping)
    check_flag("skip_scale", skip_scale)
    k_pe = k_pe.squeeze(1) if k_pe.dim() == 3 and k_pe.shape[1] == 1 else k_pe
    for name, rows in (("kv_c", kv_c), ("k_pe", k_pe)):
        if rows.dim() != 2:
            raise ValueError(f"{name} must be [num_tokens, size], got shape {tuple(rows.shape)}")
    if isinstance(kv_cache_dtype, str) and kv_cache_dtype == "fp8_ds_mla":
        _write_entries(kv_c, k_pe, kv_cache, slot_mapping)
        return
    view = latent_view("kv_cache", stored(kv_cache, kv_cache_dtype))
    if skip_scale and not is_raw(kv_cache_dtype):
        scale = torch.ones(1, device=kv_cache.device)
    write_latents(kv_c, k_pe, view, slot_mapping, kv_cache_dtype, scale)


def concat_and_cache_mla_rope_fused(
    positions: torch.Tensor,
    q_pe: torch.Tensor,
    k_pe: torch.Tensor,
    kv_c: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_cache_dtype: str,
    kv_cache_scale: torch.Tensor,
) -> None:
    """Rotate q_pe and k_pe in place by their positions, then write kv_c, followed by k_pe, into slots.

    Products are fp32, rounded once. On a CUDA device, a token whose position is out of range is skipped, and reported
    like a slot out of range.

    Args:
        positions: int64 [num_tokens].
        q_pe: [num_tokens, num_heads, rope size], rotated in place.
        k_pe: [num_tokens, rope size], rotated in place.
        kv_c: [num_tokens, kv_lora_rank].
        cos_sin_cache: [max_position, rope size], each row all cosines, then all sines.
        is_neox: Whether the halves of a pair are rope size / 2 apart. Otherwise they are side by side.
        slot_mapping: int64 [at most num_tokens]. Tokens after the last slot, and tokens whose slot is -1, are neither
            rotated nor written.
        kv_cache: [num_blocks, block_size, kv_lora_rank + rope size].
        kv_cache_dtype: How the cache holds its rows; see kvpage.integrations.vllm_ops.
        kv_cache_scale: fp32. Read for 8-bit floats alone.

    Raises:
        TypeError: An argument is of another type.
        ValueError: A shape, dtype, scale, position or slot is wrong. Nothing is written.
    """
    check_tensors(positions=positions, q_pe=q_pe, k_pe=k_pe, kv_c=kv_c, cos_sin_cache=cos_sin_cache)
    check_tensors(slot_mapping=slot_mapping, kv_cache=kv_cache)
    check_flag("is_neox", is_neox)
    _check_rotary(positions, q_pe, k_pe, kv_c, cos_sin_cache, kv_cache.device)
    num_tokens = num_slots(slot_mapping, kv_c)
    check_kind("slot_mapping", slot_mapping, (torch.int64,), kv_cache.device)
    view = latent_view("kv_cache", stored(kv_cache, kv_cache_dtype))
    positions, slots = _usable(positions[:num_tokens], slot_mapping, len(cos_sin_cache), view)
    table = cos_sin_cache[positions].float()
    turned_k = _turned(k_pe[:num_tokens], table, is_neox)
    turned_q = _turned(q_pe[:num_tokens], table[:, None], is_neox)
    write_latents(kv_c, turned_k, view, slots, kv_cache_dtype, kv_cache_scale)
    is_turned = (slots >= 0) & (slots < view.num_blocks * view.rows.shape[1])
    for rows, turned in ((q_pe[:num_tokens], turned_q), (k_pe[:num_tokens], turned_k)):
        overwrite(rows, torch.where(is_turned.view(-1, *[1] * (rows.dim() - 1)), turned, rows))


def concat_mla_q(ql_nope: torch.Tensor, q_pe: torch.Tensor, q_out: torch.Tensor) -> None:
    """Write ql_nope, followed by q_pe, into q_out.

    Args:
        ql_nope: [num_tokens, num_heads, size].
        q_pe: [num_tokens, num_heads, rope size].
        q_out: [num_tokens, num_heads, size + rope size]. It must share no memory with the others.

    Raises:
        TypeError: An argument is no tensor.
        ValueError: Shapes, dtypes or devices do not fit, or elements of q_out share memory.
    """
    check_tensors(ql_nope=ql_nope, q_pe=q_pe, q_out=q_out)
    check_writable("q_out", q_out)
    check_shape("ql_nope", ql_nope, "num_tokens num_heads size", (None, None, None))
    check_shape("q_pe", q_pe, "num_tokens num_heads rope_size", (*ql_nope.shape[:2], None))
    size = ql_nope.shape[2]
    check_shape("q_out", q_out, "num_tokens num_heads size", (*ql_nope.shape[:2], size + q_pe.shape[2]))
    for name, rows in (("ql_nope", ql_nope), ("q_pe", q_pe)):
        check_kind(name, rows, (q_out.dtype,), q_out.device)
    overwrite(q_out[..., :size], ql_nope)
    overwrite(q_out[..., size:], q_pe)


def write_latents(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    view: KVView,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    scale: torch.Tensor,
) -> None:
    """Write kv_c [num_tokens, rank], followed by k_pe [num_tokens, size], into slots of a view of one head."""
    rank, size = kv_c.shape[1], kv_c.shape[1] + k_pe.shape[1]
    if view.rows.shape[2:] != (1, 1, size):
        shape = (*view.rows.shape[:2], *view.rows.shape[4:])
        raise ValueError(f"kv_cache must have entries of {size} elements, got shape {shape}")
    views = view.columns(0, rank), view.columns(rank, size)
    write_rows(kv_c.unsqueeze(1), k_pe.unsqueeze(1), *views, slot_mapping, kv_cache_dtype, scale, scale)


def _write_entries(kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    check_shape("kv_c", kv_c, "num_tokens kv_lora_rank", (None, ds_mla.RANK))
    if k_pe.shape[1] not in (0, ds_mla.ROPE_SIZE):
        raise ValueError(f"k_pe must be [num_tokens, {ds_mla.ROPE_SIZE} or 0], got shape {tuple(k_pe.shape)}")
    check_plain("kv_cache", kv_cache)
    check_kind("kv_cache", kv_cache, (torch.uint8, torch.float8_e4m3fn), kv_cache.device)
    check_shape("kv_cache", kv_cache, "num_blocks block_size bytes", (None, None, ds_mla.ENTRY_BYTES))
    for name, rows in (("kv_c", kv_c), ("k_pe", k_pe)):
        check_kind(name, rows, (torch.bfloat16,), kv_cache.device)
    num_tokens = num_slots(slot_mapping, kv_c, k_pe)
    entries = ds_mla.pack_entries(kv_c[:num_tokens], readable("k_pe", k_pe)[:num_tokens])
    parts = entries[:, : ds_mla.ROPE_BEGIN], entries[:, ds_mla.ROPE_BEGIN :]
    write_latents(*parts, latent_view("kv_cache", kv_cache.view(torch.uint8)), slot_mapping, "auto", torch.ones(1))


def _check_rotary(
    positions: torch.Tensor,
    q_pe: torch.Tensor,
    k_pe: torch.Tensor,
    kv_c: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    device: torch.device,
) -> None:
    check_shape("positions", positions, "num_tokens", (None,))
    num_tokens = len(positions)
    check_shape("kv_c", kv_c, "num_tokens kv_lora_rank", (num_tokens, None))
    check_shape("k_pe", k_pe, "num_tokens rope_size", (num_tokens, None))
    size = k_pe.shape[1]
    check_shape("q_pe", q_pe, "num_tokens num_heads rope_size", (num_tokens, None, size))
    check_shape("cos_sin_cache", cos_sin_cache, "max_position rope_size", (None, size))
    if size % 2 or size == 0:
        raise ValueError(f"the rotary part must have an even number of elements, got {size}")
    if len(cos_sin_cache) == 0:
        raise ValueError("cos_sin_cache must have a row for each position, got none")
    check_kind("positions", positions, (torch.int64,), device)
    check_kind("cos_sin_cache", cos_sin_cache, COMPUTE_DTYPES, device)
    for name, rows in (("q_pe", q_pe), ("k_pe", k_pe)):
        check_kind(name, rows, COMPUTE_DTYPES, device)
        check_same_dtype(name, rows, kv_c)
        check_writable(name, rows)


def _usable(
    positions: torch.Tensor, slots: torch.Tensor, num_positions: int, view: KVView
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions that can be looked up, and slots that are out of range where the position was.

    Positions of padding are not read. On the CPU a position out of range is a ValueError.
    """
    is_bad = (slots != PAD_SLOT) & ((positions < 0) | (positions >= num_positions))
    if not slots.is_cuda and bool(is_bad.any()):
        bad = positions[is_bad][0].item()
        raise ValueError(f"positions must be in [0, {num_positions}), got {bad}")
    num_slots_there = view.num_blocks * view.rows.shape[1]
    slots = torch.where(is_bad, torch.full_like(slots, num_slots_there), slots)
    usable = torch.where((positions < 0) | (positions >= num_positions), torch.zeros_like(positions), positions)
    return usable, slots


def _turned(rows: torch.Tensor, table: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """Return rows [..., rope size] rotated by the cosines and sines [..., rope size] of the table."""
    half = rows.shape[-1] // 2
    cos, sin = table[..., :half], table[..., half:]
    if is_neox:
        x, y = rows[..., :half].float(), rows[..., half:].float()
    else:
        x, y = rows[..., 0::2].float(), rows[..., 1::2].float()
    pair = x * cos - y * sin, y * cos + x * sin
    turned = torch.cat(pair, -1) if is_neox else torch.stack(pair, -1).flatten(-2)
    return turned.to(rows.dtype)
