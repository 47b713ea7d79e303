"""Rows of K or V rotated, and mixed with fresh ones, wherever they are: one launch, one pass over memory.

a tile   TILE_ROWS of the rows (token * NUM_HEADS + head) with all their elements:

    [ ... FIRST | x x x x   y y y y | ... SIZE )     the pairs, as PAIRS columns of x and of y, and the rest

See kvpage.ops.mix_rows for the arguments, and kvpage.kernels.rows for tiles and offsets.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from kvpage.kernels.arguments import _ROWS, BAD_SLOT, MAX_TILE_ROWS, TILE_ELEMENTS
from kvpage.kernels.constants import Constants
from kvpage.kernels.prepared import Prepared, PreparedKinds, form
from kvpage.kernels.quantize import from_fp32, to_fp32
from kvpage.kernels.rows import at, report, rows_of_tile
from kvpage.layout.rotation import Rotation

LINE = 128  # bytes of memory that are moved together
BAD_FRESH_ROW = 8  # a bit of the error word, beside the bits of kvpage.kernels.arguments


@dataclass(frozen=True, slots=True)
class MixConstants(Constants):
    """How rows are cut into tiles.

    FIRST, NUM_PAIRS: where the pairs begin, and their number; 0 where nothing is rotated.
    PAIRS: as many or more, a power of two.
    REST: columns of the rest at once, a power of two; 0 where all are pairs.
    BLOCK_SIZE, OUT_BLOCK_SIZE: of rows found by slots; 0 for rows found by their numbers.
    ROW: the type of an element, see kvpage.kernels.quantize.
    SLOT_BIT, FRESH_BIT: of the error word.
    """

    NUM_HEADS: int
    SIZE: int
    FIRST: int
    NUM_PAIRS: int
    PAIRS: int
    REST: int
    INTERLEAVED: bool
    TILE_ROWS: int
    ROW: str
    BLOCK_SIZE: int = 0
    OUT_BLOCK_SIZE: int = 0
    SLOT_BIT: int = BAD_SLOT
    FRESH_BIT: int = BAD_FRESH_ROW

    @property
    def END(self) -> int:
        """The element after the pairs."""
        return self.FIRST + 2 * self.NUM_PAIRS

    @property
    def ROTATES(self) -> bool:
        """Whether there are pairs."""
        return self.NUM_PAIRS > 0

    @property
    def COPIES(self) -> bool:
        """Whether there are elements in no pair."""
        return self.REST > 0

    @property
    def num_warps(self) -> int:
        """Number the warps of a program: each thread has as many elements whatever the tile."""
        width = max(2 * self.PAIRS, self.REST)
        return min(max(4 * self.TILE_ROWS * width // TILE_ELEMENTS, 4), 16)


@triton.jit
def place_of(slot, head, block_stride, row_stride, head_stride, BLOCK_SIZE: tl.constexpr):
    """Return [rows] offsets of rows by their slots, or with BLOCK_SIZE 0 by their numbers."""
    if BLOCK_SIZE == 0:
        offset = slot * row_stride + head * head_stride
    else:
        offset = at(slot // BLOCK_SIZE, slot % BLOCK_SIZE, head, block_stride, row_stride, head_stride)
    return offset


@triton.jit
def slot_of(slot_ptr, token, inside, LEAST: tl.constexpr):
    """[rows] slots, or the tokens themselves where no slots are given; those outside are LEAST."""
    return token if slot_ptr is None else tl.load(slot_ptr + token, mask=inside, other=LEAST)


@triton.jit
def wanted_rows(slot_ptr, slot, num_slots, out_slot_ptr, out_slot, num_out_slots, inside, error_ptr, BIT: tl.constexpr):
    """[rows] whether a row has a slot, and a place.

    An out slot of -1 is no place. Other slots out of range are reported.
    """
    mask = inside
    if slot_ptr is not None:
        known = (slot >= 0) & (slot < num_slots)
        report(inside & (known == 0), error_ptr, BIT)
        mask = mask & known
    if out_slot_ptr is not None:
        report(inside & ((out_slot < -1) | (out_slot >= num_out_slots)), error_ptr, BIT)
        mask = mask & (out_slot >= 0) & (out_slot < num_out_slots)
    return mask


@triton.jit
def load_either(ptr, row, fresh_ptr, fresh, cols, wanted, is_fresh, mask):
    """Return each row's elements, or its fresh row's. Only wanted elements are read."""
    elements = tl.load(ptr + row[:, None] + cols, mask=(wanted & (is_fresh == 0))[:, None] & mask, other=0)
    if fresh_ptr is not None:
        others = tl.load(fresh_ptr + fresh[:, None] + cols, mask=(wanted & is_fresh)[:, None] & mask, other=0)
        elements = tl.where(is_fresh[:, None], others, elements)
    return elements


@triton.jit
def rotated(x, y, cos, sin, is_fresh, ROW: tl.constexpr):
    """Return bits of rotated pairs [rows, pairs]; fresh rows stay as they are, bit by bit."""
    a = to_fp32(x, ROW)
    b = to_fp32(y, ROW)
    new_x = from_fp32(a * cos - b * sin, ROW)
    new_y = from_fp32(b * cos + a * sin, ROW)
    return tl.where(is_fresh[:, None], x, new_x), tl.where(is_fresh[:, None], y, new_y)


@triton.jit
def rotate_pairs(
    row_ptr, row, out_ptr, place, fresh_ptr, fresh, cos_ptr, sin_ptr, token, wanted, is_fresh, MIX: tl.constexpr
):
    """Rotate the pairs of each row, from where it is to its place."""
    FIRST: tl.constexpr = MIX.value.FIRST
    NUM_PAIRS: tl.constexpr = MIX.value.NUM_PAIRS
    PAIRS: tl.constexpr = MIX.value.PAIRS
    ROW: tl.constexpr = MIX.value.ROW
    TILE_ROWS: tl.constexpr = MIX.value.TILE_ROWS
    pair = tl.arange(0, PAIRS)[None, :]
    table = token[:, None] * NUM_PAIRS + pair
    is_pair = wanted[:, None] & (pair < NUM_PAIRS)
    cos = tl.load(cos_ptr + table, mask=is_pair, other=0)
    sin = tl.load(sin_ptr + table, mask=is_pair, other=0)
    if MIX.value.INTERLEAVED:
        cols = FIRST + tl.arange(0, 2 * PAIRS)[None, :]
        mask = cols < FIRST + 2 * NUM_PAIRS
        both = load_either(row_ptr, row, fresh_ptr, fresh, cols, wanted, is_fresh, mask)
        x, y = tl.split(tl.reshape(both, (TILE_ROWS, PAIRS, 2)))
        x, y = rotated(x, y, cos, sin, is_fresh, ROW)
        both = tl.reshape(tl.join(x, y), (TILE_ROWS, 2 * PAIRS))
        tl.store(out_ptr + place[:, None] + cols, both, mask=wanted[:, None] & mask)
    else:
        mask = pair < NUM_PAIRS
        x_cols = FIRST + pair
        y_cols = FIRST + NUM_PAIRS + pair
        x = load_either(row_ptr, row, fresh_ptr, fresh, x_cols, wanted, is_fresh, mask)
        y = load_either(row_ptr, row, fresh_ptr, fresh, y_cols, wanted, is_fresh, mask)
        x, y = rotated(x, y, cos, sin, is_fresh, ROW)
        tl.store(out_ptr + place[:, None] + x_cols, x, mask=is_pair)
        tl.store(out_ptr + place[:, None] + y_cols, y, mask=is_pair)


@triton.jit
def copy_rest(row_ptr, row, out_ptr, place, fresh_ptr, fresh, wanted, is_fresh, MIX: tl.constexpr):
    """Copy the elements of each row that are in no pair."""
    SIZE: tl.constexpr = MIX.value.SIZE
    REST: tl.constexpr = MIX.value.REST
    FIRST: tl.constexpr = MIX.value.FIRST
    END: tl.constexpr = MIX.value.END
    for begin in range(0, SIZE, REST):
        rest = begin + tl.arange(0, REST)[None, :]
        is_unpaired = (rest < FIRST) | ((rest >= END) & (rest < SIZE))
        copied = load_either(row_ptr, row, fresh_ptr, fresh, rest, wanted, is_fresh, is_unpaired)
        tl.store(out_ptr + place[:, None] + rest, copied, mask=wanted[:, None] & is_unpaired)


# Arguments that change from call to call are not specialised on: each value would compile anew, amid serving.
@triton.jit(
    do_not_specialize=["num_rows", "num_fresh", "num_slots", "num_out_slots"],
    do_not_specialize_on_alignment=["fresh_row_ptr", "slot_ptr", "out_slot_ptr", "error_ptr"],
)
def mix_rows_kernel(
    row_ptr,  # [num_rows, NUM_HEADS, SIZE] or [num_blocks, BLOCK_SIZE, NUM_HEADS, SIZE]
    out_ptr,  # the same, with OUT_BLOCK_SIZE
    fresh_ptr,  # [num_fresh, NUM_HEADS, SIZE], or None
    fresh_row_ptr,  # int64 [num_rows], or None
    cos_ptr, sin_ptr,  # fp32 [num_rows, NUM_PAIRS], or None where NUM_PAIRS is 0
    slot_ptr, out_slot_ptr,  # int64 [num_rows], or None
    error_ptr,  # int32 [1]
    num_rows, num_fresh, num_slots, num_out_slots,
    block_stride, row_stride, head_stride,  # all strides in elements
    out_block_stride, out_row_stride, out_head_stride,
    fresh_row_stride, fresh_head_stride,
    MIX: tl.constexpr,  # MixConstants
):  # fmt: skip
    NUM_HEADS: tl.constexpr = MIX.value.NUM_HEADS
    SLOT_BIT: tl.constexpr = MIX.value.SLOT_BIT
    token, head, inside = rows_of_tile(tl.program_id(0), num_rows, NUM_HEADS, MIX.value.TILE_ROWS, False)
    slot = slot_of(slot_ptr, token, inside, 0)
    out_slot = slot_of(out_slot_ptr, token, inside, -1)
    mask = wanted_rows(slot_ptr, slot, num_slots, out_slot_ptr, out_slot, num_out_slots, inside, error_ptr, SLOT_BIT)
    is_fresh = token < 0
    fresh = token
    if fresh_ptr is not None:
        fresh_row = tl.load(fresh_row_ptr + token, mask=inside, other=-1)
        bad = inside & ((fresh_row < -1) | (fresh_row >= num_fresh))
        report(bad, error_ptr, MIX.value.FRESH_BIT)
        mask = mask & (bad == 0)
        is_fresh = fresh_row >= 0
        fresh = fresh_row * fresh_row_stride + head * fresh_head_stride
    row = place_of(slot, head, block_stride, row_stride, head_stride, MIX.value.BLOCK_SIZE)
    out_row = place_of(out_slot, head, out_block_stride, out_row_stride, out_head_stride, MIX.value.OUT_BLOCK_SIZE)
    if MIX.value.ROTATES:
        rotate_pairs(row_ptr, row, out_ptr, out_row, fresh_ptr, fresh, cos_ptr, sin_ptr, token, mask, is_fresh, MIX)
    if MIX.value.COPIES:
        copy_rest(row_ptr, row, out_ptr, out_row, fresh_ptr, fresh, mask, is_fresh, MIX)


def mix_rows(
    rows: torch.Tensor,
    out: torch.Tensor,
    rotation: Rotation | None,
    fresh: torch.Tensor | None,
    fresh_rows: torch.Tensor | None,
    slots: torch.Tensor | None,
    out_slots: torch.Tensor | None,
    error: torch.Tensor,  # int32 [1]; gets BAD_SLOT and BAD_FRESH_ROW
) -> None:
    """See kvpage.ops.mix_rows, which has checked all but the ids."""
    num_rows = len(rows) if slots is None else len(slots)
    if num_rows == 0 or rows.shape[-1] * rows.shape[-2] == 0:
        return
    if rotation is None:
        rows, out, fresh = _whole(rows, out, fresh)
    cos, sin = (None, None) if rotation is None else (rotation.cos, rotation.sin)
    ids = [None if row is None else row.contiguous() for row in (fresh_rows, slots, out_slots)]
    plan = None if rotation is None else (rotation.first, rotation.num_pairs, rotation.is_interleaved)
    kind = error.device, plan, slots is None, out_slots is None, *map(form, (rows, out, fresh))
    known = _kinds.get(kind)
    if known is None:
        known = _prepared(rows, out, fresh, plan, slots is None, out_slots is None)
        _kinds.keep(kind, known)
    constants, prepared = known
    prepared.launch(
        (-(-num_rows * constants.NUM_HEADS // constants.TILE_ROWS), 1, 1),
        (rows, out, fresh, ids[0], cos, sin, ids[1], ids[2], error),
        (
            *(num_rows, 0 if fresh is None else len(fresh)),
            0 if slots is None else rows.shape[0] * rows.shape[1],
            0 if out_slots is None else out.shape[0] * out.shape[1],
        ),
    )


_kinds = PreparedKinds()


def _prepared(
    rows: torch.Tensor,
    out: torch.Tensor,
    fresh: torch.Tensor | None,
    plan: tuple[int, int, bool] | None,  # first, num_pairs and is_interleaved of the rotation
    is_plain: bool,  # `rows` are rows, not blocks
    out_is_plain: bool,
) -> tuple[MixConstants, Prepared]:
    constants = replace(
        mix_constants(*rows.shape[-2:], *(plan or (0, 0, False)), rows.dtype),
        BLOCK_SIZE=0 if is_plain else rows.shape[1],
        OUT_BLOCK_SIZE=0 if out_is_plain else out.shape[1],
    )
    strides = *_strides(rows, is_plain), *_strides(out, out_is_plain)
    fixed = *strides, *((0, 0) if fresh is None else fresh.stride()[:2]), constants
    options = {"num_warps": constants.num_warps, "enable_fp_fusion": False}  # a product and a sum round twice
    return constants, Prepared(mix_rows_kernel, fixed, options, 3, range(6))


def mix_constants(
    num_heads: int, size: int, first: int, num_pairs: int, is_interleaved: bool, dtype: torch.dtype
) -> MixConstants:
    """Cut rows into tiles: enough rows for each thread to hold 16 bytes of pairs.

    Elements that are only copied follow in parts of as many rows.
    """
    pairs = triton.next_power_of_2(num_pairs) if num_pairs else 0
    width = 2 * pairs if pairs else min(triton.next_power_of_2(size), TILE_ELEMENTS)
    tile_rows = min(max(TILE_ELEMENTS // width, 1), MAX_TILE_ROWS)
    rest = min(triton.next_power_of_2(size), max(width, LINE // dtype.itemsize)) if size > 2 * num_pairs else 0
    return MixConstants(num_heads, size, first, num_pairs, pairs, rest, is_interleaved, tile_rows, _ROWS[dtype])


def _whole(
    rows: torch.Tensor, out: torch.Tensor, fresh: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return rows that are only copied as rows of one head, where all heads are side by side everywhere."""
    tensors = [part for part in (rows, out, fresh) if part is not None]
    if rows.shape[-2] == 1 or any(part.stride(-2) != part.shape[-1] for part in tensors):
        return rows, out, fresh
    whole = [None if part is None else part.flatten(-2).unsqueeze(-2) for part in (rows, out, fresh)]
    return whole[0], whole[1], whole[2]


def _strides(rows: torch.Tensor, is_plain: bool) -> tuple[int, ...]:
    return (0, *rows.stride()[:2]) if is_plain else rows.stride()[:3]
