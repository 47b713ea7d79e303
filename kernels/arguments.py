"""Arguments of kernels over rows: pointers and strides of K and V, and constants; see kvpage.kernels.rows."""

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import triton

from kvpage.kernels.constants import Constants
from kvpage.layout.kv_scales import KVScales
from kvpage.layout.kv_view import KVView

TILE_ELEMENTS = 2048  # of 4 warps: 16 for each thread; twice as many spill where rows are not aligned
MAX_NUM_WARPS = 32  # of a thread block
MAX_ROW_SIZE = 2**16  # elements: more would not fit into the registers of MAX_NUM_WARPS warps
MAX_TILE_ROWS = 128  # one a thread: the addresses of more would not fit into registers
SECTOR = 32  # bytes that memory moves at least: a tile should have this many of neighbouring tokens

BAD_SLOT = 1  # bits of the error word
BAD_BLOCK = 2
BAD_LENGTH = 4


KVViews = tuple[KVView, KVView | None]

_BY_WIDTH = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROWS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_CODES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8"}


@dataclass(frozen=True, slots=True)
class Part(Constants):
    """How a row of K, or of V, is cut into a tile's columns.

    SIZE: elements of a row; 0 where there is no such part.
    TILE: as many or more, a power of two.
    RUN: elements of a row that are side by side in the cache, a power of two; 0 for all of them.
    """

    SIZE: int
    TILE: int
    RUN: int

    @property
    def EXISTS(self) -> bool:
        """Whether there is such a part."""
        return self.SIZE > 0

    @property
    def IN_RUNS(self) -> bool:
        """Whether a row is in several runs."""
        return self.RUN > 0


@dataclass(frozen=True, slots=True)
class RowConstants(Constants):
    """How rows of K and V are cut into tiles, and converted: the ROWS of a kernel.

    ROW, CODE: the type of a row's elements, and of the cache's; see kvpage.kernels.quantize. Both are "bits" where
        nothing is converted.
    """

    KEY: Part
    VALUE: Part
    TILE_ROWS: int
    ROW: str
    CODE: str
    NUM_HEADS: int
    BLOCK_SIZE: int

    @property
    def options(self) -> dict[str, Any]:
        """Options of the launch: each thread has as many elements whatever the tile, as long as there are threads.

        A product and a sum round twice.
        """
        elements = self.TILE_ROWS * max(self.KEY.TILE, self.VALUE.TILE)
        num_warps = min(max(4 * elements // TILE_ELEMENTS, 4), MAX_NUM_WARPS)
        return {"num_warps": num_warps, "enable_fp_fusion": False}

    def num_tiles(self, num_tokens: int) -> int:
        """Number the tiles that hold the tokens; see kvpage.kernels.rows.rows_of_tile."""
        if self.KEY.RUN:
            return -(-num_tokens // self.TILE_ROWS) * self.NUM_HEADS
        return -(-num_tokens * self.NUM_HEADS // self.TILE_ROWS)


def row_constants(sizes: tuple[int, int], dtype: torch.dtype, views: KVViews) -> RowConstants:
    """Choose the constants for rows of these sizes and this dtype.

    Args:
        sizes: elements of a row of K and of V; V's is 0 where there is none.
        dtype: of the rows; `views` has the cache's.

    Raises:
        ValueError: a row has more than 65,536 elements.
    """
    rows = views[0].rows
    if max(sizes) > MAX_ROW_SIZE:
        raise ValueError(f"rows must have at most {MAX_ROW_SIZE} elements, got {max(sizes)}")
    runs = [_run_size(view) for view in views]
    tiles = [max(triton.next_power_of_2(size), run, 1) for size, run in zip(sizes, runs, strict=True)]
    neighbours = min(SECTOR // rows.element_size(), 2 * TILE_ELEMENTS // max(tiles)) if runs[0] else 1
    same = dtype == rows.dtype
    return RowConstants(
        *map(Part, sizes, tiles, runs),
        TILE_ROWS=min(max(TILE_ELEMENTS // max(tiles), neighbours, 1), MAX_TILE_ROWS),
        ROW="bits" if same else _ROWS[dtype],
        CODE="bits" if same else _CODES[rows.dtype],
        NUM_HEADS=rows.shape[2],
        BLOCK_SIZE=rows.shape[1],
    )


def _run_size(view: KVView | None) -> int:
    num_runs, size = (1, 0) if view is None else view.rows.shape[3:]
    if num_runs > 1 and size & (size - 1):
        raise ValueError(f"runs of a row must be a power of two of elements, got {size}")
    return 0 if num_runs == 1 else size


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """View the same memory as integers, so that a NaN keeps every bit."""
    return tensor.view(_BY_WIDTH[tensor.element_size()])


def cache_pointers(views: KVViews, scales: KVScales | None) -> tuple[torch.Tensor | None, ...]:
    """Return K's and V's elements, then their scales: the cache's own where it has some, else the given ones."""
    scale_pair = (None, None) if scales is None else (scales.key, scales.value)
    own_scales = [None if view is None else view.scales for view in views]
    elements = [None if view is None else view.rows for view in views]
    return *elements, *[
        scale if own_scale is None else own_scale for own_scale, scale in zip(own_scales, scale_pair, strict=True)
    ]


def cache_strides(views: KVViews, scales: KVScales | None) -> tuple[int, ...]:
    """Return K's strides, then V's: block, offset, head, run. Those of the scales follow, without runs."""
    scale_pair = (None, None) if scales is None else (scales.key, scales.value)
    elements = [(0,) * 4 if view is None else view.rows.stride()[:4] for view in views]
    by_place = [_scale_strides(view, scale) for view, scale in zip(views, scale_pair, strict=True)]
    return tuple(itertools.chain(*elements, *by_place))


def _scale_strides(view: KVView | None, scale: torch.Tensor | None) -> tuple[int, ...]:
    if view is not None and view.scales is not None:
        return view.scales.stride()
    return 0, 0, 0 if scale is None or len(scale) == 1 else 1
