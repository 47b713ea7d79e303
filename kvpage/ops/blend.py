"""Rows of K and V for blending: rotated, mixed with fresh ones, compared; each in one pass over memory.

                      rows, or slots of blocks ── rotated, or copied ──┐
                                                                      ├──►  out, or slots of blocks
    fresh_rows[i] >= 0:                       fresh rows ── copied ───┘

With neither slots nor fresh rows it rotates K. From slots it gathers and rotates. Into slots it loads rows that were
stored elsewhere. With fresh rows it scatters them over the retrieved ones.
"""

import torch

import kvpage._C as _C
from kvpage.checks.tensors import check_plain, check_writable, readable
from kvpage.checks.values import as_integer
from kvpage.layout.rotation import Rotation, check_rotation
from kvpage.ops.args.tokens import COMPUTE_DTYPES, ROW_TYPES, check_dtype, check_tensor
from kvpage.ops.cuda import blend as blend_ops_cuda


def mix_rows(
    rows: torch.Tensor,
    out: torch.Tensor,
    rotation: Rotation | None = None,
    fresh: torch.Tensor | None = None,
    fresh_rows: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    out_slots: torch.Tensor | None = None,
    num_threads: int | None = None,
) -> None:
    """Write each row of `out`: that of `rows`, rotated, or the fresh row that takes its place.

    On the CPU it is done on return. On CUDA it is ordered on the current stream.

    Args:
        rows: [num_rows, heads, size] in fp32, bf16 or fp16. With `slots` they are blocks [num_blocks, block_size,
            heads, size], of which the slots are read. Any strides will do with the last dimension contiguous.
        out: The same for the rows to write, of the same dtype, with `out_slots`. It may be `rows`, each row onto
            itself. Otherwise it must not share memory with the tensors that are read.
        rotation: Angles of num_rows rows; None to copy.
        fresh: [num_fresh, heads, size]; None without fresh rows.
        fresh_rows: int64 [num_rows], the fresh row that takes each row's place, or -1. Given together with `fresh`.
        slots: int64 [num_rows], slots of the blocks `rows`; None where `rows` are plain rows.
        out_slots: int64 [num_rows], slots of the blocks `out`, each at most once. Rows of slot -1 are skipped.
        num_threads: Threads of the host; None takes torch's number.

    Raises:
        TypeError: An argument is of another type.
        ValueError: A shape, a dtype or a device is wrong, or a slot or a fresh row is out of range. On the host
            nothing is written then. On CUDA the row with a bad id is skipped, and `check_device` reports it.
    """
    check_writable("out", out)
    rows = readable("rows", rows)
    num_rows = _num_rows("rows", rows, "slots", slots)
    if _num_rows("out", out, "out_slots", out_slots) != num_rows:
        raise ValueError(f"out must be of {num_rows} rows, got {len(out if out_slots is None else out_slots)}")
    shape = tuple(rows.shape[-2:])
    _check_place("rows", rows, shape, rows)
    _check_place("out", out, shape, rows)
    _check_fresh(fresh, fresh_rows, num_rows, rows)
    _check_rotation(rotation, num_rows, rows)
    for name, ids in (("slots", slots), ("out_slots", out_slots)):
        if ids is not None:
            check_tensor(name, ids, torch.int64, (num_rows,), rows.device)
    if rows.is_cuda:
        blend_ops_cuda.mix_rows(rows, out, rotation, fresh, fresh_rows, slots, out_slots)
        return
    id_tensors = [None if ids is None else ids.contiguous() for ids in (slots, out_slots, fresh_rows)]  # kept alive
    _C.mix_rows(
        _place(rows, id_tensors[0]),
        _place(out, id_tensors[1]),
        _place(rows[:0] if fresh is None else fresh, None),
        (0 if id_tensors[2] is None else id_tensors[2].data_ptr(), 0 if fresh is None else len(fresh)),
        ROW_TYPES[rows.dtype],
        (num_rows, shape[0], shape[1]),
        (0, 0, 0) if rotation is None else (rotation.first, rotation.num_pairs, int(rotation.is_interleaved)),
        0 if rotation is None else rotation.cos.data_ptr(),
        0 if rotation is None else rotation.sin.data_ptr(),
        _threads(num_threads),
    )


def row_deviation(
    fresh: torch.Tensor, retrieved: torch.Tensor, valid: torch.Tensor, num_threads: int | None = None
) -> torch.Tensor:
    """Return the mean squared difference of each row of `fresh` and `retrieved`.

    Args:
        fresh: [num_rows, heads, size] in fp32, bf16 or fp16, the last dimension contiguous.
        retrieved: The same, of the same dtype and device.
        valid: bool [num_rows] there. Rows where it is False are not read.
        num_threads: Threads of the host; None takes torch's number.

    Returns:
        fp32 [num_rows] there; 0 where `valid` is False.

    Raises:
        TypeError: An argument is of another type.
        ValueError: A shape, a dtype or a device is wrong.
    """
    fresh, retrieved = readable("fresh", fresh), readable("retrieved", retrieved)
    num_rows = _num_rows("fresh", fresh, "slots", None)
    check_plain("valid", valid)
    shape = tuple(fresh.shape[-2:])
    _check_place("fresh", fresh, shape, fresh)
    _check_place("retrieved", retrieved, shape, fresh)
    check_tensor("retrieved", retrieved, fresh.dtype, tuple(fresh.shape), fresh.device)
    check_tensor("valid", valid, torch.bool, (num_rows,), fresh.device)
    if fresh.is_cuda:
        return blend_ops_cuda.row_deviation(fresh, retrieved, valid)
    mask, out = valid.contiguous(), torch.zeros(num_rows)
    if shape[0] * shape[1] > 0:
        _C.row_deviation(
            _place(fresh, None),
            _place(retrieved, None),
            mask.data_ptr(),
            out.data_ptr(),
            ROW_TYPES[fresh.dtype],
            (num_rows, shape[0], shape[1]),
            _threads(num_threads),
        )
    return out


def _threads(num_threads: int | None) -> int:
    return torch.get_num_threads() if num_threads is None else as_integer("num_threads", num_threads)


def _num_rows(name: str, rows: torch.Tensor, ids_name: str, ids: torch.Tensor | None) -> int:
    num_dims = 3 if ids is None else 4
    if rows.dim() != num_dims:
        kind = "[num_rows, heads, size]" if ids is None else f"[num_blocks, block_size, heads, size] with {ids_name}"
        raise ValueError(f"{name} must be {kind}, got shape {tuple(rows.shape)}")
    if ids is None:
        return len(rows)
    check_plain(ids_name, ids)
    return len(ids)


def _check_place(name: str, rows: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor) -> None:
    check_dtype(name, rows, COMPUTE_DTYPES)
    check_tensor(name, rows, like.dtype, (*rows.shape[:-2], *shape), like.device)
    if like.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} must be on the CPU or a CUDA device, got {like.device}")
    if rows.stride(-1) != 1 and rows.shape[-1] > 1:
        raise ValueError(f"{name} must be contiguous in its last dimension, got stride {rows.stride(-1)}")


def _check_fresh(
    fresh: torch.Tensor | None, fresh_rows: torch.Tensor | None, num_rows: int, rows: torch.Tensor
) -> None:
    if fresh is None and fresh_rows is None:
        return
    if fresh is None or fresh_rows is None:
        raise ValueError("fresh and fresh_rows must be given together")
    check_plain("fresh", fresh)
    check_plain("fresh_rows", fresh_rows)
    _num_rows("fresh", fresh, "", None)
    _check_place("fresh", fresh, tuple(rows.shape[-2:]), rows)
    check_tensor("fresh_rows", fresh_rows, torch.int64, (num_rows,), rows.device)


def _check_rotation(rotation: Rotation | None, num_rows: int, rows: torch.Tensor) -> None:
    check_rotation(rotation)
    if rotation is None:
        return
    if rotation.num_rows != num_rows or rotation.head_size != rows.shape[-1]:
        raise ValueError(
            f"rotation must be of {num_rows} rows with heads of {rows.shape[-1]}, "
            f"got {rotation.num_rows} and {rotation.head_size}"
        )
    if rotation.cos.device != rows.device:
        raise ValueError(f"rotation must be on {rows.device}, got {rotation.cos.device}")


def _place(rows: torch.Tensor, slots: torch.Tensor | None) -> tuple[int, int, int, int, int, int, int]:
    """Return the RowPlace of csrc/blend/blend_rows.h."""
    item, strides = rows.element_size(), rows.stride()
    if slots is None:
        return rows.data_ptr(), strides[0] * item, strides[1] * item, 0, 0, 0, 0
    num_blocks, block_size = rows.shape[:2]
    # Torch has no memory for an empty tensor of slots. Any address but 0 says that there are slots.
    address = slots.data_ptr() or 8
    return rows.data_ptr(), strides[1] * item, strides[2] * item, address, num_blocks, block_size, strides[0] * item
