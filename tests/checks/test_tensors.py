"""Checks of tensors: memory, views that torch reads otherwise than memory, numbers, selections, devices."""

import pytest
import torch

from kvpage.checks.tensors import (
    as_bounds,
    as_device,
    as_dim,
    as_floats,
    as_indices,
    as_numbers,
    as_ratio,
    as_selection,
    check_dense,
    check_plain,
    check_writable,
    parse_device,
    readable,
    tensor_list,
)

CONJUGATED = torch.imag(torch.randn(4, dtype=torch.complex64).conj())


@pytest.mark.parametrize(
    "tensor, error, message",
    [
        ([1], TypeError, "x must be a torch.Tensor, got list"),
        (torch.eye(2).to_sparse(), ValueError, "x must be a tensor with strides, got one that is torch.sparse_coo"),
    ],
)
def test_tensors_without_strides(tensor, error, message):
    with pytest.raises(error, match=message):
        check_dense("x", tensor)


def test_views_that_torch_negates():
    with pytest.raises(ValueError, match="x must not be a view that torch negates or conjugates"):
        check_plain("x", CONJUGATED)
    assert torch.equal(readable("x", CONJUGATED), CONJUGATED) and not readable("x", CONJUGATED).is_neg()
    plain = torch.arange(3)
    assert readable("x", plain) is plain


def test_elements_that_share_memory_are_not_written():
    for tensor in (torch.zeros(4, 6)[::2, 1::3], torch.zeros(2, 3, 4).permute(2, 0, 1), torch.zeros(0, 3)):
        check_writable("x", tensor)
    for tensor in (torch.zeros(3).expand(2, 3), torch.zeros(9).as_strided((3, 3), (2, 1))):
        with pytest.raises(ValueError, match="x must have memory for each of its elements, got shape "):
            check_writable("x", tensor)


def test_lists_of_tensors():
    rows = torch.arange(6).view(2, 3)
    assert [row.tolist() for row in tensor_list("x", rows)] == rows.tolist()
    with pytest.raises(TypeError, match=r"x\[1\] must be a torch.Tensor, got int"):
        tensor_list("x", [rows, 1])


def test_numbers_floats_and_indices():
    with pytest.raises(ValueError, match=r"x must have 2 dimensions, got shape \(3,\)"):
        as_numbers("x", torch.zeros(3), 2)
    with pytest.raises(ValueError, match="x must be on the CPU or a CUDA device, got meta"):
        as_numbers("x", torch.zeros(3, device="meta"))
    for dtype in (torch.int64, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match="x must be of a floating point type, got "):
            as_floats("x", torch.zeros(3).to(dtype))
    assert as_indices("x", torch.zeros(0)).numel() == 0  # no index is of any type
    with pytest.raises(ValueError, match="x must be integers, got torch.float32"):
        as_indices("x", torch.zeros(1))


def test_selections_by_number_and_by_mask():
    assert as_selection("rows", [0, -1], 4) == [0, 3]
    assert as_selection("rows", torch.tensor([True, False, True]), 3) == [0, 2]
    with pytest.raises(ValueError, match="rows must be a mask of 4 rows, got one of 1"):
        as_selection("rows", [True], 4)


def test_bounds_dimensions_and_ratios():
    assert as_bounds("bounds", torch.tensor([0, 2, 5]), 5) == [0, 2, 5]
    for bounds in ([], [1, 5], [0, 4], [0, 6, 5]):
        with pytest.raises(ValueError, match="bounds must ascend from 0 to 5, got "):
            as_bounds("bounds", bounds, 5)
    assert as_dim("dim", -1, torch.zeros(2, 3)) == 1
    with pytest.raises(ValueError, match=r"dim must be a dimension of shape \(2, 3\), got 2"):
        as_dim("dim", 2, torch.zeros(2, 3))
    assert as_ratio("ratio", 1) == 1.0
    for ratio in (True, 1.01, -0.1, float("nan"), "1"):
        with pytest.raises(ValueError, match=r"ratio must be in \[0, 1\], got "):
            as_ratio("ratio", ratio)


def test_devices():
    assert as_device("device", "cpu") == torch.device("cpu")
    assert parse_device("device", "cuda:99") == torch.device("cuda", 99)
    with pytest.raises(ValueError, match="device must be a device of this machine, got 'cuda:99'"):
        as_device("device", "cuda:99")
    for device in ("meta", "no device", 1.5):
        with pytest.raises(ValueError, match="device must be a CPU or a CUDA device, got "):
            parse_device("device", device)
