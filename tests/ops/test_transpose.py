"""Rows and columns exchanged, on every instruction set of this machine, and the backend "paged", which needs it."""

import pytest
import torch

from kvpage import _C, CacheLayout, ops
from kvpage.ops import reference

KERNELS = pytest.mark.parametrize("name", _C.norm_kernels())  # the transpositions have the same names
SIZES = (0, 1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 80)


@KERNELS
@pytest.mark.parametrize("element_bytes", [1, 2, 4, 8, 16])
def test_every_shape(name, element_bytes):
    """In matrices that begin nowhere in particular; all that lies between and around the rows stays."""
    torch.manual_seed(0)
    for num_rows in SIZES:
        for num_columns in SIZES:
            source = torch.randint(256, (num_rows + 1, num_columns + 3, element_bytes), dtype=torch.uint8)
            target = torch.randint(256, (num_columns + 1, num_rows + 5, element_bytes), dtype=torch.uint8)
            want = target.clone()
            want[:num_columns, 1 : num_rows + 1] = source[:num_rows, 2 : num_columns + 2].transpose(0, 1)
            _C._transpose(
                name,
                element_bytes,
                target.data_ptr() + element_bytes,
                target.stride(0),
                source.data_ptr() + 2 * element_bytes,
                source.stride(0),
                num_rows,
                num_columns,
            )
            assert torch.equal(target, want), (num_rows, num_columns)


LINES = [(1, 16, 64), (1, 64, 80), (2, 8, 64), (2, 32, 40), (4, 4, 80), (4, 16, 12), (8, 8, 6), (16, 16, 5), (16, 4, 1)]


@KERNELS
@pytest.mark.parametrize("element_bytes, num_rows, num_columns", LINES)
def test_whole_lines_go_past_the_cache(name, element_bytes, num_rows, num_columns):
    """Or nothing happens: where an instruction set has no such lines, and where `to` does not begin with one."""
    torch.manual_seed(0)
    source = torch.randint(256, (num_rows, num_columns + 3, element_bytes), dtype=torch.uint8)
    memory = torch.randint(256, (64 + num_columns * num_rows * element_bytes + 128,), dtype=torch.uint8)
    line = -memory.data_ptr() % 64
    for begin in (line, line + 64, line + 16):
        before = memory.clone()
        sizes = (memory.data_ptr() + begin, num_rows * element_bytes, source.data_ptr() + element_bytes)
        done = _C._transpose_past_cache(name, element_bytes, *sizes, source.stride(0), num_rows, num_columns)
        assert done == (name == "avx512" and begin != line + 16)
        if done:
            turned = source[:, 1 : num_columns + 1].transpose(0, 1).flatten()
            before[begin : begin + len(turned)] = turned
        assert torch.equal(memory, before)


@pytest.mark.parametrize("element_bytes, num_rows, num_columns", [(1, 16, 63), (1, 8, 64), (2, 16, 64), (16, 3, 4)])
def test_what_is_no_whole_lines_does_not_go_past_the_cache(element_bytes, num_rows, num_columns):
    memory = torch.zeros(64 + num_columns * num_rows * element_bytes, dtype=torch.uint8)
    source = torch.ones(num_rows, num_columns, element_bytes, dtype=torch.uint8)
    place = memory.data_ptr() + -memory.data_ptr() % 64
    sizes = (place, num_rows * element_bytes, source.data_ptr(), source.stride(0), num_rows, num_columns)
    assert not any(_C._transpose_past_cache(name, element_bytes, *sizes) for name in _C.norm_kernels())
    assert not memory.any()


@pytest.mark.parametrize("element_bytes", [-1, 0, 3, 32])
def test_other_elements_are_refused(element_bytes):
    with pytest.raises(ValueError, match=f"element_bytes must be 1, 2, 4, 8 or 16, got {element_bytes}"):
        _C._transpose("base", element_bytes, 0, 0, 0, 0, 0, 0)


def test_an_unknown_kernel_is_refused():
    with pytest.raises(ValueError, match="kernel must be one that this machine has, got abacus"):
        _C._transpose("abacus", 1, 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize("block_size", [7, 16, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tiles_past_the_cache(dtype, block_size):
    """More than 32 MiB: whole blocks as tiles; what begins or ends inside of one, stands alone or is padding."""
    torch.manual_seed(1)
    num_tokens = (34 << 20) // (2 * 4 * 80 * dtype.itemsize)
    num_blocks = num_tokens // block_size + 3
    layout = CacheLayout(block_size, 4, 80, dtype, "paged")
    blocks = torch.randperm(num_blocks)
    slots = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()[3 : num_tokens + 3]
    slots[[40, num_tokens // 2]] = -1
    slots[[100, 101]] = slots[[101, 100]]
    key, value = (torch.randn(num_tokens, 4, 80).to(dtype) for _ in range(2))
    cache, want = (layout.allocate(num_blocks, 1, torch.device("cpu"))[0].fill_(float("nan")) for _ in range(2))
    ops.reshape_and_cache(key, value, cache, slots, layout)
    reference.reshape_and_cache(key, value, want, slots, layout)
    assert torch.equal(cache.view(torch.uint8), want.view(torch.uint8))

    out = [torch.full((num_tokens + 1, 4, 80), 7.0, dtype=dtype) for _ in range(2)]
    tables = blocks.to(torch.int32)[None]
    ops.gather_cache(cache, tables, [num_tokens], layout, seq_starts=[3], out=[rows[:-1] for rows in out])
    written = slots >= 0
    written[[100, 101]] = False
    for rows, given in zip(out, (key, value), strict=True):
        assert torch.equal(rows[:-1][written], given[written])
        assert torch.equal(rows[[100, 101]], given[[101, 100]])
        assert rows[:-1][slots < 0].isnan().all() and (rows[-1] == 7).all()
