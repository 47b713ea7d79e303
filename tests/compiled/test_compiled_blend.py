"""Blending's kernels as compiled for a GPU, against the reference: rotated, mixed and compared rows."""

import torch
from support.ptx.archs import BOTH, every_case

from kvpage.layout.rotation import Rotation
from kvpage.ops import reference

BLOCK = 4
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MIXES = {  # dtype, elements of a row, the first of a pair, pairs
    "whole heads": (BOTH, BF16, 128, 0, 64),
    "a first part": ([80], FP16, 80, 0, 16),
    "latents' last": ([90], BF16, 72, 64, 4),
    "fp32": ([90], FP32, 128, 0, 64),
    "odd": ([80], FP32, 46, 0, 23),
}
DEVIATIONS = {  # dtype, heads, elements of a row
    "whole heads": (BOTH, BF16, 3, 128),
    "latents": ([90], FP16, 1, 576),
    "odd": ([80], FP32, 2, 46),
}


def make_rotation(num_rows, size, first, num_pairs, is_interleaved):
    angles = torch.randn(num_rows, num_pairs) * 3
    return Rotation(angles.cos(), angles.sin(), size, first, is_interleaved)


@every_case("dtype, size, first, num_pairs", MIXES)
def test_rows_are_mixed(device, dtype, size, first, num_pairs):
    """From blocks, or fresh, to blocks."""
    from kvpage.kernels.rotary import mix_rows

    rows, fresh = torch.randn(5, BLOCK, 2, size).to(dtype), torch.randn(3, 2, size).to(dtype)
    out = torch.full((6, BLOCK, 2, size), 7.0).to(dtype)
    slots, out_slots = torch.randperm(20)[:9], torch.randperm(24)[:9]
    out_slots[1] = -1
    fresh_rows = torch.tensor([-1, 2, -1, 0, -1, -1, 1, -1, -1])
    rotation, want = make_rotation(9, size, first, num_pairs, size == 46), out.clone()
    error = torch.zeros(1, dtype=torch.int32)
    mix_rows(rows, out, rotation, fresh, fresh_rows, slots, out_slots, error)
    reference.mix_rows(rows, want, rotation, fresh, fresh_rows, slots, out_slots)
    assert torch.equal(out.view(torch.uint8), want.view(torch.uint8)) and not error


@every_case("dtype, heads, size", DEVIATIONS)
def test_deviations(device, dtype, heads, size):
    from kvpage.kernels.blend import row_deviation

    fresh, retrieved = torch.randn(2, 7, heads, size).to(dtype)
    valid = torch.tensor([True, True, False, True, True, False, True])
    got = row_deviation(fresh, retrieved, valid)
    torch.testing.assert_close(got, reference.row_deviation(fresh, retrieved, valid), rtol=1e-5, atol=0)
    # A square that only the lane of its own adds unrounded would make a sum that differs from lane to lane.
    assert "fma" not in {each.opcode for each in device.last["row_deviation_kernel"].entry.instructions}
