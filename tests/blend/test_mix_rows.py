"""Rotated, mixed and compared rows against the reference, bit by bit: on the CPU, by the interpreter, on a GPU."""

import itertools
import os

import pytest
import torch

from kvpage import _C, ops
from kvpage.layout.rotation import Rotation
from kvpage.ops import reference
from kvpage.ops.args.tokens import ROW_TYPES

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
WHERE = pytest.mark.parametrize(
    "where", ["cpu", *(["interpreter"] if INTERPRETED else []), pytest.param("cuda", marks=pytest.mark.gpu)]
)
BLOCK = 4
# head size, first, number of pairs: whole heads, the first part, MLA's last, sizes that no vector divides
SHAPES = [(8, 0, 4), (128, 0, 64), (64, 0, 8), (46, 0, 23), (24, 5, 9), (72, 64, 4), (4, 1, 1)]


def mix(where, rows, out, *args):
    """Returns the interpreter's error word."""
    if where != "interpreter":
        return ops.mix_rows(rows, out, *args)
    from kvpage.kernels.rotary import mix_rows

    error = torch.zeros(1, dtype=torch.int32)
    mix_rows(rows, out, *args, *[None] * (5 - len(args)), error)
    return error.item()


def make_rotation(num_rows, size, first, num_pairs, is_interleaved, device="cpu"):
    angles = torch.randn(num_rows, num_pairs) * 3
    return Rotation(angles.cos().to(device), angles.sin().to(device), size, first, is_interleaved)


def poisoned(shape, dtype, device="cpu"):
    tensor = torch.empty(shape, dtype=dtype, device=device)
    tensor.view(torch.uint8).fill_(0xFF)
    return tensor


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def device_of(where):
    return "cuda" if where == "cuda" else "cpu"


def random_slots(num_rows, num_blocks, device):
    return torch.randperm(num_blocks * BLOCK)[:num_rows].to(device)


def check(where, rows, out, *args):
    """Every byte of out, as the reference has it."""
    want = out.clone()
    reference.mix_rows(rows, want, *args)
    before = rows.clone()
    assert not mix(where, rows, out, *args)
    assert torch.equal(bits(out), bits(want))
    assert torch.equal(bits(rows), bits(before))


@WHERE
@DTYPES
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("size, first, num_pairs", SHAPES)
def test_rows_are_turned(where, dtype, is_interleaved, size, first, num_pairs):
    device = device_of(where)
    for num_rows, heads in ((0, 2), (1, 1), (3, 2), (BLOCK + 1, 3)):
        rotation = make_rotation(num_rows, size, first, num_pairs, is_interleaved, device)
        rows = torch.randn(num_rows, heads, size).to(device, dtype)
        check(where, rows, poisoned(rows.shape, dtype, device), rotation)


@WHERE
@DTYPES
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("from_blocks, to_blocks, has_fresh", list(itertools.product([False, True], repeat=3)))
def test_from_anywhere_to_anywhere(where, dtype, is_interleaved, from_blocks, to_blocks, has_fresh):
    device, heads, size = device_of(where), 2, 24
    sizes = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 11) if where != "interpreter" else (0, 1, 11)
    for num_rows in sizes:
        rows = torch.randn(5, BLOCK, heads, size) if from_blocks else torch.randn(num_rows, heads, size)
        slots = random_slots(num_rows, 5, device) if from_blocks else None
        if from_blocks:  # what nobody reads is NaN
            unread = torch.ones(5 * BLOCK, dtype=torch.bool)
            unread[slots.cpu()] = False
            rows.view(5 * BLOCK, heads, size)[unread] = float("nan")
        out = poisoned((6, BLOCK, heads, size) if to_blocks else (num_rows, heads, size), dtype, device)
        out_slots = random_slots(num_rows, 6, device) if to_blocks else None
        if to_blocks and num_rows > 2:
            out_slots[1] = -1
        fresh_rows = fresh = None
        if has_fresh:
            fresh = torch.randn(max(num_rows // 2, 1), heads, size).to(device, dtype)
            fresh_rows = torch.full((num_rows,), -1, device=device)
            fresh_rows[: num_rows // 2] = torch.randperm(num_rows // 2, device=device)
        for rotation in (None, make_rotation(num_rows, size, 2, 9, is_interleaved, device)):
            check(where, rows.to(device, dtype), out.clone(), rotation, fresh, fresh_rows, slots, out_slots)


@WHERE
@DTYPES
def test_strides(where, dtype):
    """Heads before tokens, slices of a chunk, blocks of the layout HND, fresh rows that are a slice."""
    device = device_of(where)
    rotation = make_rotation(7, 16, 0, 8, False, device)
    chunk = torch.randn(3, 2, 2, 9, 16).to(device, dtype)  # [layers, parts, heads, tokens, size]
    rows = chunk[1, 0].transpose(0, 1)[1:8]
    room = poisoned((4, 2, BLOCK, 24), dtype, device)
    out = room.transpose(1, 2)[..., 4:20]
    slots = random_slots(7, 4, device)
    fresh = torch.randn(3, 5, 16).to(device, dtype)[:, 1:3]
    fresh_rows = torch.tensor([-1, 2, -1, 0, 0, -1, 1], device=device)
    want = room.clone()
    reference.mix_rows(rows, want.transpose(1, 2)[..., 4:20], rotation, fresh, fresh_rows, None, slots)
    mix(where, rows, out, rotation, fresh, fresh_rows, None, slots)
    assert torch.equal(bits(room), bits(want)), "bytes beside the rows, too"


@WHERE
@DTYPES
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_in_place(where, dtype, is_interleaved):
    device = device_of(where)
    rows = torch.randn(9, 2, 46).to(device, dtype)
    rotation = make_rotation(9, 46, 3, 17, is_interleaved, device)
    want = reference.rotated(rows, rotation)
    mix(where, rows, rows, rotation)
    assert torch.equal(bits(rows), bits(want))
    blocks = torch.randn(3, BLOCK, 2, 46).to(device, dtype)
    slots, want = random_slots(9, 3, device), blocks.clone()
    reference.mix_rows(blocks.clone(), want, rotation, None, None, slots, slots)
    mix(where, blocks, blocks, rotation, None, None, slots, slots)
    assert torch.equal(bits(blocks), bits(want))


@DTYPES
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_large_rows_past_the_cache(dtype, is_interleaved, num_threads):
    for heads, size, first, num_pairs in ((8, 128, 0, 64), (2, 576, 512, 32), (16, 80, 0, 20)):
        num_rows = 5 * 2**20 // (heads * size * dtype.itemsize)
        rows = torch.randn(num_rows, heads, size).to(dtype)
        rotation = make_rotation(num_rows, size, first, num_pairs, is_interleaved)
        fresh_rows = torch.full((num_rows,), -1)
        fresh_rows[::7] = 0
        for given in (rotation, None):
            want, out = (poisoned(rows.shape, dtype) for _ in range(2))
            reference.mix_rows(rows, want, given, -rows[:1], fresh_rows)
            ops.mix_rows(rows, out, given, -rows[:1], fresh_rows, num_threads=num_threads)
            assert torch.equal(bits(out), bits(want))


@pytest.mark.parametrize("kernel", ["base", "avx2", "avx512"])
@DTYPES
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_every_instruction_set(kernel, dtype, is_interleaved):
    def place(rows):
        item = rows.element_size()
        return rows.data_ptr(), rows.stride(0) * item, rows.stride(1) * item, 0, 0, 0, 0

    shape, nowhere = (0, 1, 1), (0,) * 7
    try:
        _C.mix_rows(nowhere, nowhere, nowhere, (0, 0), 0, shape, (0, 0, 0), 0, 0, 1, kernel=kernel)
    except ValueError as error:
        pytest.skip(str(error))
    for num_rows, heads, size, first, num_pairs in ((3, 2, 46, 1, 21), (5, 2, 128, 0, 64), (2, 1, 9, 0, 1)):
        rows, other = (torch.randn(num_rows, heads, size).to(dtype) for _ in range(2))
        rotation = make_rotation(num_rows, size, first, num_pairs, is_interleaved)
        out, shape = poisoned(rows.shape, dtype), (num_rows, heads, size)
        kind, part = ROW_TYPES[dtype], (first, num_pairs, int(is_interleaved))
        tables = rotation.cos.data_ptr(), rotation.sin.data_ptr()
        _C.mix_rows(place(rows), place(out), nowhere, (0, 0), kind, shape, part, *tables, 1, kernel=kernel)
        assert torch.equal(bits(out), bits(reference.rotated(rows, rotation)))
        valid, deviation = torch.ones(num_rows, dtype=torch.bool), torch.empty(num_rows)
        given = place(rows), place(other), valid.data_ptr(), deviation.data_ptr()
        _C.row_deviation(*given, kind, shape, 1, kernel=kernel)
        torch.testing.assert_close(deviation, reference.row_deviation(rows, other, valid), rtol=1e-5, atol=0)


def deviation(where, *args):
    if where != "interpreter":
        return ops.row_deviation(*args)
    from kvpage.kernels.blend import row_deviation

    return row_deviation(*args)


@WHERE
@DTYPES
@pytest.mark.parametrize("heads, size", [(1, 1), (2, 46), (8, 128), (1, 5000), (3, 15)])
def test_deviation(where, dtype, heads, size):
    device = device_of(where)
    for num_rows in (0, 1, 4, 9):
        fresh, retrieved = (torch.randn(num_rows, heads, size).to(device, dtype) for _ in range(2))
        valid = torch.rand(num_rows, device=device) < 0.7
        retrieved[~valid] = float("nan")
        large = 60000.0 if dtype == torch.float16 else 1e9
        if num_rows:
            fresh[0], retrieved[0], valid[0] = large, -large, True
        found = deviation(where, fresh, retrieved, valid)
        assert found.dtype == torch.float32 and torch.isfinite(found).all()
        want = (fresh.double() - retrieved.double()).square().flatten(1).mean(1).masked_fill(~valid, 0.0)
        torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=0)
        assert (found[~valid] == 0).all()


@WHERE
def test_bad_ids_change_nothing(where):
    """On the host all is refused; on a device the bad row is skipped and reported."""
    device = device_of(where)
    rows, fresh = torch.randn(3, 2, 8, device=device), torch.randn(2, 2, 8, device=device)
    blocks = torch.randn(2, BLOCK, 2, 8, device=device)
    none = torch.full((3,), -1, device=device)

    def tensor(*ids):
        return torch.tensor(ids, device=device)

    cases = [
        ((blocks, rows, None, None, None, tensor(0, 8, 1)), r"slots\[1\] must be in \[0, 8\), got 8", "slot_mapping"),
        ((blocks, rows, None, None, None, tensor(0, 3, -1)), r"slots\[2\] must be in \[0, 8\), got -1", "slot_mapping"),
        ((rows, blocks, None, None, None, None, tensor(0, 1, 8)), r"out_slots\[2\] must be in \[-1, 8\)", "slot_"),
        ((rows, blocks, None, None, None, None, tensor(0, 1, -2)), r"out_slots\[2\] must be in \[-1, 8\)", "slot_"),
        ((rows, rows.clone(), None, fresh, tensor(0, 2, -1)), r"fresh_rows\[1\] must be in \[-1, 2\)", "fresh_rows"),
        ((rows, rows.clone(), None, fresh, tensor(0, 1, -2)), r"fresh_rows\[2\] must be in \[-1, 2\)", "fresh_rows"),
    ]  # fmt: skip
    for args, message, reported in cases:
        target, before = args[1], args[1].clone()
        target.fill_(float("nan"))
        if where == "cpu":
            with pytest.raises(ValueError, match=message):
                ops.mix_rows(*args)
            assert target.isnan().all()
        elif where == "interpreter":
            assert mix(where, *args) == (8 if reported == "fresh_rows" else 1)
        else:
            ops.mix_rows(*args)
            with pytest.raises(ValueError, match=reported):
                ops.check_device()
        target.copy_(before)
    if where != "cpu":  # all but the bad one were written
        out = torch.full_like(rows, float("nan"))
        mix(where, blocks, out, None, None, None, tensor(3, 8, 1))
        if where == "cuda":
            with pytest.raises(ValueError, match="slot_mapping"):
                ops.check_device()
        flat = blocks.flatten(0, 1)
        assert torch.equal(out[[0, 2]], flat[[3, 1]]) and out[1].isnan().all()
    assert none.eq(-1).all()


def test_bad_arguments():
    rows, rotation = torch.randn(3, 2, 8), make_rotation(3, 8, 0, 4, False)
    blocks, slots = torch.randn(2, BLOCK, 2, 8), torch.tensor([0, 1, 2])
    fresh, fresh_rows = torch.randn(1, 2, 8), torch.tensor([-1, 0, -1])
    cases = [
        (TypeError, "rows must be a torch.Tensor", ([1], rows)),
        (ValueError, r"rows must be \[num_rows, heads, size\]", (rows[0], rows)),
        (ValueError, r"rows must be \[num_blocks, .* with slots", (rows, rows, None, None, None, slots)),
        (ValueError, r"out must be \[num_blocks, block_size", (rows, rows, None, None, None, None, slots)),
        (ValueError, "out must be of 3 rows, got 2", (rows, rows[:2])),
        (ValueError, "out.dtype must be", (rows, rows.half())),
        (ValueError, "rows.dtype must be", (rows.double(), rows.double())),
        (ValueError, r"out.shape must be \(3, 2, 8\)", (rows, rows[..., :4])),
        (ValueError, "out must be contiguous in its last dimension", (rows, torch.zeros(3, 8, 2).transpose(1, 2))),
        (ValueError, "out must have memory for each of its elements", (rows, rows[:1].expand(3, 2, 8))),
        (ValueError, "fresh and fresh_rows must be given together", (rows, rows, None, fresh)),
        (ValueError, "fresh and fresh_rows must be given together", (rows, rows, None, None, fresh_rows)),
        (ValueError, "fresh_rows.dtype must be torch.int64", (rows, rows, None, fresh, fresh_rows.int())),
        (ValueError, r"fresh.shape must be \(1, 2, 8\)", (rows, rows, None, fresh[:, :1], fresh_rows)),
        (ValueError, "slots.dtype must be torch.int64", (blocks, rows, None, None, None, slots.int())),
        (ValueError, "with heads of 8, got 2 and 8", (rows, rows, make_rotation(2, 8, 0, 4, False))),
        (ValueError, "rotation must be of 3 rows with heads of 8", (rows, rows, make_rotation(3, 9, 0, 4, False))),
    ]  # fmt: skip
    before = rows.clone()
    for error, message, args in cases:
        with pytest.raises(error, match=message):
            ops.mix_rows(*args)
    assert torch.equal(rows, before)
    valid = torch.ones(3, dtype=torch.bool)
    for message, args in (
        ("retrieved.dtype must be", (rows, rows.half(), valid)),
        ("retrieved.shape must be", (rows, rows[:2], valid)),
        ("valid.dtype must be torch.bool", (rows, rows, valid.int())),
        ("valid.shape must be", (rows, rows, valid[:2])),
    ):
        with pytest.raises(ValueError, match=message):
            ops.row_deviation(*args)
    table = torch.zeros(3, 4)
    for message, fields in (
        ("cos must be contiguous fp32", (table.double(), table, 8)),
        ("sin must be contiguous fp32", (table, table[0], 8)),
        ("cos and sin must be alike", (table, table[:2], 8)),
        ("pairs must lie within head_size=7", (table, table, 7)),
        ("pairs must lie within head_size=8", (table, table, 8, 1)),
        ("pairs must lie within head_size=8", (table, table, 8, -1)),
    ):
        with pytest.raises(ValueError, match=message):
            Rotation(*fields)
    assert rotation.num_rows == 3 and rotation.num_pairs == 4
