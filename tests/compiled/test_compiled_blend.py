"""Blending's kernels as compiled for a GPU, against the reference: rotated, mixed and compared rows."""

import pytest
import torch

from kvpage.layout.rotation import Rotation
from kvpage.ops import reference

BLOCK = 4
SHAPES = {"whole heads": (128, 0, 64), "a first part": (80, 0, 16), "latents' last": (72, 64, 4), "odd": (46, 0, 23)}
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


def make_rotation(num_rows, size, first, num_pairs, is_interleaved):
    angles = torch.randn(num_rows, num_pairs) * 3
    return Rotation(angles.cos(), angles.sin(), size, first, is_interleaved)


@DTYPES
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_mixed(device, dtype, shape):
    """From blocks, or fresh, to blocks."""
    from kvpage.kernels.rotary import mix_rows

    size, first, num_pairs = SHAPES[shape]
    rows, fresh = torch.randn(5, BLOCK, 2, size).to(dtype), torch.randn(3, 2, size).to(dtype)
    out = torch.full((6, BLOCK, 2, size), 7.0).to(dtype)
    slots, out_slots = torch.randperm(20)[:9], torch.randperm(24)[:9]
    out_slots[1] = -1
    fresh_rows = torch.tensor([-1, 2, -1, 0, -1, -1, 1, -1, -1])
    rotation, want = make_rotation(9, size, first, num_pairs, shape == "odd"), out.clone()
    error = torch.zeros(1, dtype=torch.int32)
    mix_rows(rows, out, rotation, fresh, fresh_rows, slots, out_slots, error)
    reference.mix_rows(rows, want, rotation, fresh, fresh_rows, slots, out_slots)
    assert torch.equal(out.view(torch.uint8), want.view(torch.uint8)) and not error


@DTYPES
@pytest.mark.parametrize("heads, size", [(3, 128), (1, 576), (2, 46)])
def test_deviations(device, dtype, heads, size):
    from kvpage.kernels.blend import row_deviation

    fresh, retrieved = torch.randn(2, 7, heads, size).to(dtype)
    valid = torch.tensor([True, True, False, True, True, False, True])
    got = row_deviation(fresh, retrieved, valid)
    torch.testing.assert_close(got, reference.row_deviation(fresh, retrieved, valid), rtol=1e-5, atol=0)
