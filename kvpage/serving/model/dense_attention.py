"""Causal attention of one sequence over contiguous K and V, with window, softcap and sinks, on any device.

The queries are the sequence's last positions, or some of them. They are taken in tiles, and a tile reads its own keys
only:

    keys        0 1 2 3 4 5 6 7 8        window 4, queries at positions 4..8 in tiles of 3 rows
    query 4     . # # # #                 tile 1 reads keys 1..6
          5     . . # # # #
          6     . . . # # # #
    query 7     . . . . # # # #           tile 2 reads keys 4..8
          8     . . . . . # # # #

torch's scaled_dot_product_attention does the work where it can. It has no softcap and no sinks: fp32 products do these.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from kvpage.layout.attention import Attention

MAX_MASK_ENTRIES = 1 << 20  # of one tile, [queries, keys]
MAX_SCORES = 1 << 22  # of one tile in fp32, [heads, queries, keys]: 16 MiB
MAX_TILE_ROWS = 256

Positions = range | npt.NDArray[np.int64]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention: Attention,
    positions: npt.NDArray[np.int64] | None = None,
) -> torch.Tensor:
    """Attend from queries to the keys up to their own positions.

    Returns [num_queries, num_heads, value size] in the query's dtype.

    query: [num_queries, num_heads, size]. key: [num_keys, num_kv_heads, size]. value: [num_keys, num_kv_heads, its own
    size]. All may be strided. A group of num_heads / num_kv_heads query heads shares a KV head.
    positions: those of the queries among the keys, ascending; None for the last ones.
    """
    num_kv_heads = key.shape[1]
    grouped = torch.unflatten(query, 1, (num_kv_heads, -1)).permute(1, 2, 0, 3)  # [kv heads, group, queries, size]
    keys, values = (x.transpose(0, 1).unsqueeze(1) for x in (key, value))  # [kv heads, 1, keys, size]
    one_tile = _by_products if _needs_products(attention) else _by_sdpa
    where = range(len(key) - len(query), len(key)) if positions is None else positions
    tiles = _tiles(where, len(key), query.shape[1], attention, query.device)
    outputs = [
        one_tile(grouped[:, :, tile.rows], keys[:, :, tile.span], values[:, :, tile.span], tile, attention)
        for tile in tiles
    ]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return output.permute(2, 0, 1, 3).flatten(1, 2)


def _needs_products(attention: Attention) -> bool:
    return attention.softcap is not None or attention.sinks is not None


class Tile(NamedTuple):
    """Rows of queries and the keys that they read.

    mask: bool [rows, keys], the keys that each row sees; None for all.
    is_causal: the tile is everything, with as many queries as keys, and needs no mask in memory.
    """

    rows: slice
    span: slice
    mask: torch.Tensor | None
    is_causal: bool = False


def _tiles(
    positions: Positions, num_keys: int, num_heads: int, attention: Attention, device: torch.device
) -> Iterator[Tile]:
    is_whole = len(positions) == num_keys
    if (
        is_whole
        and not _needs_products(attention)
        and (attention.sliding_window is None or attention.sliding_window >= num_keys)
    ):
        yield Tile(slice(None), slice(None), None, is_causal=True)
        return
    num_rows = MAX_MASK_ENTRIES // num_keys
    if _needs_products(attention):
        num_rows = min(num_rows, MAX_SCORES // (num_heads * num_keys))
    num_rows = max(1, min(num_rows, MAX_TILE_ROWS))
    for begin in range(0, len(positions), num_rows):
        part_positions = positions[begin : begin + num_rows]
        low = 0 if attention.sliding_window is None else max(0, int(part_positions[0]) - attention.sliding_window + 1)
        span = slice(low, int(part_positions[-1]) + 1)
        mask = _mask(part_positions, span, attention.sliding_window, device) if len(part_positions) > 1 else None
        yield Tile(slice(begin, begin + len(part_positions)), span, mask)


def _mask(positions: Positions, span: slice, window: int | None, device: torch.device) -> torch.Tensor:
    """Return whether each query sees each key: bool [queries, keys of span]."""
    queries = torch.as_tensor(positions, dtype=torch.int64, device=device)[:, None]
    keys = torch.arange(span.start, span.stop, device=device)
    visible = keys <= queries
    return visible if window is None else visible & (keys > queries - window)


def _by_sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tile: Tile, attention: Attention
) -> torch.Tensor:
    # One head size for all: the fused kernels know no other. Expanding gives a stride of 0, no copy.
    value_size, size = value.shape[-1], max(key.shape[-1], value.shape[-1])
    query, key, value = (F.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x for x in (query, key, value))
    key, value = (x.expand(-1, query.shape[1], -1, -1) for x in (key, value))
    output = F.scaled_dot_product_attention(
        query, key, value, tile.mask, is_causal=tile.is_causal, scale=attention.scale
    )
    return output[..., :value_size]


def _by_products(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tile: Tile, attention: Attention
) -> torch.Tensor:
    dtype = torch.promote_types(query.dtype, torch.float32)
    scale = query.shape[-1] ** -0.5 if attention.scale is None else attention.scale
    scores = (query.to(dtype) * scale) @ key.to(dtype).transpose(-1, -2)  # [kv heads, group, queries, keys]
    if attention.softcap is not None:
        scores = torch.tanh(scores / attention.softcap) * attention.softcap
    if tile.mask is not None:
        scores = scores.masked_fill(~tile.mask, float("-inf"))
    if attention.sinks is not None:
        sinks = attention.sinks.to(dtype).view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[-2]]
    return (weights @ value.to(dtype)).to(query.dtype)
