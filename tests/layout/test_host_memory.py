"""Memory in huge pages is memory like any other: zeros of the size and dtype that was asked for, a tensor's own."""

import pytest
import torch

from kvpage.layout.host_memory import HUGE_PAGE_BYTES, zeros

SIZES = [(0,), (1,), (3, 0, 5), (2 * HUGE_PAGE_BYTES - 1,), (2 * HUGE_PAGE_BYTES,), (3, 7, HUGE_PAGE_BYTES // 4 + 1)]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("size", SIZES)
def test_zeros_of_any_size(size: tuple[int, ...], dtype: torch.dtype) -> None:
    made, other = zeros(size, dtype), zeros(size, dtype)
    assert made.shape == torch.Size(size) and made.dtype == dtype and made.is_contiguous()
    assert not made.view(torch.uint8).any()
    if made.numel():
        made.view(torch.uint8).fill_(0xAB)
        assert not other.view(torch.uint8).any(), "two tensors share memory"
        assert made.untyped_storage().nbytes() == made.numel() * made.element_size()
        assert made.data_ptr() % 64 == 0
