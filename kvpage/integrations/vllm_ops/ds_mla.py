"""The fp8_ds_mla entry: a token's latents as 8-bit floats with four scales, and its rotary part as it is.

    byte   0               512             528                656
           | 512 e4m3      | 4 fp32 scales | 64 bf16          |
           | 4 tiles of 128| one a tile    | the rotary part  |

Each scale is a power of two.
"""

import torch

from kvpage.integrations.vllm_ops.fp8_tiles import (
    bytes_of,
    dequantize_tiles,
    largest_magnitude,
    over_most,
    power_of_two_from,
    quantize_tiles,
)

RANK, TILE_SIZE, ROPE_SIZE = 512, 128, 64
NUM_TILES = RANK // TILE_SIZE
ROPE_BEGIN = RANK + 4 * NUM_TILES
ENTRY_BYTES = ROPE_BEGIN + 2 * ROPE_SIZE
LEAST_SCALE = 1e-4


def pack_entries(kv_c: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
    """Return entries uint8 [num_tokens, 656] of kv_c bf16 [num_tokens, 512] and k_pe bf16 [num_tokens, 64 or 0].

    Without a rotary part, its place is zeros.
    """
    num_tokens = len(kv_c)
    tiles = kv_c.reshape(num_tokens, NUM_TILES, TILE_SIZE)
    scales = power_of_two_from(over_most(largest_magnitude(tiles)).clamp(min=LEAST_SCALE))
    entries = torch.zeros(num_tokens, ENTRY_BYTES, dtype=torch.uint8, device=kv_c.device)
    entries[:, :RANK] = quantize_tiles(tiles, scales).view(num_tokens, RANK)
    entries[:, RANK:ROPE_BEGIN] = bytes_of(scales)
    if k_pe.shape[1]:
        entries[:, ROPE_BEGIN:] = bytes_of(k_pe)
    return entries


def unpack_entries(entries: torch.Tensor) -> torch.Tensor:
    """Return latents and rotary parts, bf16 [num_tokens, 576], of entries uint8 [num_tokens, 656]."""
    tiles = entries[:, :RANK].reshape(-1, NUM_TILES, TILE_SIZE)
    scales = entries[:, RANK:ROPE_BEGIN].contiguous().view(torch.float32)
    latents = dequantize_tiles(tiles, scales, torch.bfloat16).view(-1, RANK)
    return torch.cat([latents, entries[:, ROPE_BEGIN:].contiguous().view(torch.bfloat16)], 1)
