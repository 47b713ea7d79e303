"""Tiles of 8-bit floats: runs of a row with a scale each, which their largest element determines.

row      [ x x ... x | x x ... x ]   -> codes  [ one e4m3 float each ]
          `- tile -'   `- tile -'       scales [ fp32, one a tile ]      a stored q means q * scale
"""

import torch

FP8 = torch.float8_e4m3fn
MOST = torch.finfo(FP8).max
EXPONENT_BITS, MANTISSA_BITS = 0x7F800000, 0x007FFFFF  # of fp32


def largest_magnitude(tiles: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of tiles [..., tile_size], fp32 [...]. NaNs do not count."""
    magnitudes = tiles.float().abs()
    return magnitudes.nan_to_num(0.0, posinf=torch.inf).amax(-1)


def over_most(magnitude: torch.Tensor) -> torch.Tensor:
    """Return the fp32 quotient by the largest e4m3 float."""
    return magnitude / magnitude.new_full((1,), MOST)  # a plain number would be multiplied with on CUDA


def power_of_two_from(scales: torch.Tensor) -> torch.Tensor:
    """Return the smallest power of two that is not below each scale. Scales are normal positive fp32, or infinity."""
    return ((scales.view(torch.int32) + MANTISSA_BITS) & EXPONENT_BITS).view(torch.float32)


def quantize_tiles(tiles: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the codes of tiles [..., tile_size] over scales [...], as bytes of the same shape. They saturate."""
    return (tiles.float() / scales[..., None]).clamp(-MOST, MOST).to(FP8).view(torch.uint8)


def dequantize_tiles(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return codes [..., tile_size] times scales [...]: the product in fp32, then rounded to `dtype`."""
    return (codes.view(FP8).float() * scales[..., None]).to(dtype)


def bytes_of(rows: torch.Tensor) -> torch.Tensor:
    """Return a copy of the bytes of rows [..., size]: uint8 [..., bytes of a row]."""
    # Rows of no elements, and expanded ones, may have strides that torch cannot view as bytes.
    return rows.clone(memory_format=torch.contiguous_format).view(torch.uint8)
