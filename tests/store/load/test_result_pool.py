"""The pool of results' memory: what it lends is nobody else's, what it keeps is bounded."""

import gc
from collections import deque
from typing import Any

import pytest
import torch

from kvpage.store.load.result_pool import ResultPool
from kvpage.store.load.tensor_calls import NewResult

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="beside a GPU, torch keeps pinned memory itself")
MIB = 1 << 20


def shape_of(num_bytes: int) -> tuple[int, int, int, int, int]:
    return 1, 1, num_bytes, 1, 1


def test_memory_comes_back_when_the_last_view_is_gone() -> None:
    pool = ResultPool(64 * MIB)
    first = pool.empty((2, 2, 16, 32, 1024), torch.bfloat16)
    assert first.shape == (2, 2, 16, 32, 1024) and first.dtype == torch.bfloat16 and first.is_contiguous()
    address = first.data_ptr()
    view, array = first[1, 1, 3:], first[0].view(torch.int16).numpy()
    assert pool.num_bytes == 0
    del first
    assert pool.num_bytes == 0
    del view
    assert pool.num_bytes == 0
    del array
    assert pool.num_bytes == 4 * MIB
    assert pool.empty(shape_of(4 * MIB), torch.uint8).data_ptr() == address


@pytest.mark.parametrize("num_mib, is_used", [(8, True), (4, True), (9, False)])
def test_kept_memory_serves_results_that_fill_half_of_it(num_mib: int, is_used: bool) -> None:
    pool = ResultPool(64 * MIB)
    address = pool.empty(shape_of(8 * MIB), torch.uint8).data_ptr()
    assert (pool.empty(shape_of(num_mib * MIB), torch.uint8).data_ptr() == address) == is_used


def test_a_closed_pool_keeps_nothing() -> None:
    pool = ResultPool(64 * MIB)
    held = pool.empty(shape_of(8 * MIB), torch.uint8)
    pool.empty(shape_of(8 * MIB), torch.uint8)
    assert pool.num_bytes == 8 * MIB
    pool.close()
    held.fill_(7)
    assert pool.num_bytes == 0 and bool((held == 7).all())
    del held
    assert pool.num_bytes == 0


def test_memory_that_comes_back_while_a_call_looks_is_kept() -> None:
    """The garbage collector runs anywhere, also within a call of the pool. No Ctrl-C can leave a lock behind."""
    pool = ResultPool(64 * MIB)
    circle = [pool.empty(shape_of(8 * MIB), torch.uint8)]
    circle.append(circle)

    class Collecting(deque):  # type: ignore[type-arg]
        def remove(self, value: Any) -> None:
            nonlocal circle
            circle = []
            gc.collect()
            super().remove(value)

    other = pool.empty(shape_of(8 * MIB), torch.uint8)
    del other
    pool._kept = Collecting(pool._kept)
    pool.empty(shape_of(8 * MIB), torch.uint8)
    assert pool.num_bytes == 16 * MIB
    assert not [name for name, held in vars(pool).items() if hasattr(held, "acquire")]


def test_the_rest_of_a_result_holds_nothing_of_before() -> None:
    """Where fewer tokens are read than were located, as of a damaged record."""
    pool = ResultPool(64 * MIB)
    pool.empty((2, 2, 4 * MIB), torch.uint8).fill_(7)
    result = NewResult(pool, "vllm", "cpu", False)
    result.room((1, 2, 4, MIB, 2), torch.uint8)
    assert pool.num_bytes == 0  # the same memory
    kv = result.finish(3)
    assert bool((kv == 7).all()) and kv.shape[2] == 3
    rest = torch.empty(0, dtype=torch.uint8).set_(kv.untyped_storage()).view(1, 2, 4, MIB, 2)[:, :, 3:]
    assert not rest.any()
