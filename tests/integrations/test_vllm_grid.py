"""The parameters of vLLM's own tests of its cache kernels, on kvpage.integrations.vllm_ops: every byte is compared.

On the CPU a selection in which every pair of parameters occurs, with 1,024 blocks and no more heads than fit a small
machine; on a GPU all of them. Rows are exact for "auto"; for "fp8" they are the reference's bits, and near fp32.
"""

import itertools
import mmap
import random

import pytest
import torch

from kvpage import ops
from kvpage.integrations import vllm_ops
from kvpage.ops import reference

FP8 = torch.float8_e4m3fn
MAX_BYTES = 24 << 20  # of one tensor on the CPU
MAP_NORESERVE = 0x4000  # of Linux; Python's mmap names it from 3.13 on
TOKENS = 42
GRID = {
    "heads": [8, 13],
    "size": [46, 64, 80, 256],
    "block_size": [8, 16, 32],
    "num_blocks": [1024, 10000],
    "dtype": [torch.bfloat16, torch.float32],
    "kind": ["auto", "fp8"],
}
FLASH_GRID = GRID | {"layout": ["NHD", "HND"], "scale": ["tensor", "head"], "apart": [False, True]}
SWAP_GRID = GRID | {"direction": [("cuda", "cpu"), ("cuda", "cuda"), ("cpu", "cuda")], "form": ["0.33", "0.9.2"]}
MLA_GRID = {
    "rank": [256, 512],
    "rope": [64],
    "block_size": [16],
    "num_blocks": [8, 1024],
    "dtype": GRID["dtype"],
    "kind": ["auto", "fp8"],
}


def pairwise(grid):
    """Few cases of the grid in which every two values of two parameters meet."""
    cases = list(itertools.product(*grid.values()))
    random.Random(0).shuffle(cases)
    chosen, seen = [], set()
    for least in range(len(list(itertools.combinations(grid, 2))), 0, -1):  # those that add most first
        for case in cases:
            pairs = set(itertools.combinations(enumerate(case), 2))
            if len(pairs - seen) >= least:
                chosen.append(case)
                seen |= pairs
    return chosen


def cases(grid, cpu):
    """Of the selection on the CPU, and of the whole grid on a GPU. `cpu`: what parameters are there."""
    small = {name: [value for value in values if value != 10000] for name, values in (grid | cpu).items()}
    names = list(grid)
    marked = [pytest.param("cpu", *case, id=_id("cpu", case)) for case in pairwise(small)]
    every = itertools.product(*grid.values())
    marked += [pytest.param("cuda", *case, marks=pytest.mark.gpu, id=_id("cuda", case)) for case in every]
    return pytest.mark.parametrize(["device", *names], marked)


def _id(device, case):
    return "-".join([device, *(str(value).removeprefix("torch.") for value in case)])


def fit(device, heads, bytes_per_head):
    return heads if device == "cuda" else max(1, min(heads, MAX_BYTES // bytes_per_head))


def cache_dtype(dtype, kind):
    return torch.uint8 if kind == "fp8" else dtype


def random_bytes(shape, dtype, device, stride_order=None):
    """Every kind of bits. stride_order: dimensions, the outermost in memory first."""
    order = stride_order or range(len(shape))
    size = [shape[dim] for dim in order]
    size[-1] *= dtype.itemsize
    lying = torch.randint(0, 256, size, dtype=torch.uint8, device=device).view(dtype)
    return lying.permute([list(order).index(dim) for dim in range(len(shape))])


def bits(tensor):
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def slots_of(num_slots, device):
    return torch.tensor(random.Random(0).sample(range(num_slots), TOKENS), device=device)


def make_rows(heads, size, dtype, device):
    """Strided rows, as a projection to queries, keys and values gives them."""
    return torch.randn(TOKENS, 3, heads, size, dtype=dtype, device=device).unbind(1)[1:]


def expected_bits(rows, kind, scale):
    """What is stored: the rows' own bits, or their quotients' as 8-bit floats."""
    if kind == "auto":
        return bits(rows)
    return (rows.float() / scale.reshape(-1, 1)).clamp(-448, 448).to(FP8).view(torch.uint8)


@cases(GRID, {})
def test_reshape_and_cache(device, heads, size, block_size, num_blocks, dtype, kind):
    cached = cache_dtype(dtype, kind)
    heads = fit(device, heads, num_blocks * block_size * size * cached.itemsize)
    run = 16 // cached.itemsize
    runs = -(-size // run)
    key_cache = random_bytes((num_blocks, heads, runs, block_size, run), cached, device)
    value_cache = random_bytes((num_blocks, heads, size, block_size), cached, device)
    expected_key, expected_value = bits(key_cache).clone(), bits(value_cache).clone()
    key, value = make_rows(heads, size, dtype, device)
    scales = [(rows.amax() / 64).float() for rows in (key, value)]
    slots = slots_of(num_blocks * block_size, device)
    vllm_ops.reshape_and_cache(key, value, key_cache, value_cache, slots, kind, *scales)
    stored_key, stored_value = expected_bits(key, kind, scales[0]), expected_bits(value, kind, scales[1])
    for token, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, block_size)
        for element in range(size):
            expected_key[block, :, element // run, offset, element % run] = stored_key[token, :, element]
        expected_value[block, :, :, offset] = stored_value[token]
    assert torch.equal(bits(key_cache), expected_key)
    assert torch.equal(bits(value_cache), expected_value)


@cases(FLASH_GRID, {})
def test_reshape_and_cache_flash(device, heads, size, block_size, num_blocks, dtype, kind, layout, scale, apart):
    """apart: K and V are tensors of their own; otherwise they lie side by side in every block."""
    cached = cache_dtype(dtype, kind)
    heads = fit(device, heads, 2 * num_blocks * block_size * size * cached.itemsize)
    shape = (num_blocks, 2, block_size, heads, size)
    order = (0, 1, 2, 3, 4) if layout == "NHD" else (0, 1, 3, 2, 4)
    cache = random_bytes(shape, cached, device, order)
    parts = [cache[:, part].clone() if apart else cache[:, part] for part in (0, 1)]
    assert all(part.stride()[2] == (size if layout == "NHD" else size * block_size) for part in parts)
    expected = [bits(part).clone() for part in parts]
    rows = make_rows(heads, size, dtype, device)
    scales = [((part.amax() if scale == "tensor" else part.amax((0, 2))) / 64).float() for part in rows]
    slots = slots_of(num_blocks * block_size, device)
    vllm_ops.reshape_and_cache_flash(*rows, *parts, slots, kind, *scales)
    for part, want, given, given_scale in zip(parts, expected, rows, scales, strict=True):
        stored = expected_bits(given, kind, given_scale)
        want[slots // block_size, slots % block_size] = stored
        assert torch.equal(bits(part), want)


@cases(SWAP_GRID, {"direction": [("cpu", "cpu")]})
def test_swap_blocks(device, heads, size, block_size, num_blocks, dtype, kind, direction, form):
    cached = cache_dtype(dtype, kind)
    heads = fit(device, heads, num_blocks * block_size * size * cached.itemsize)
    shape = (num_blocks, heads, size, block_size)
    src = random_bytes(shape, cached, direction[0])
    dst = random_bytes(shape, cached, direction[1])
    src, dst = (cache.pin_memory() if cache.device.type != device else cache for cache in (src, dst))
    ids = random.Random(1)
    targets = ids.sample(range(num_blocks), 256)
    pairs = torch.tensor(list(zip(ids.sample(range(num_blocks), 256), targets, strict=True)))
    before, expected = bits(src).clone(), bits(dst).clone()
    if form == "0.33":
        vllm_ops.swap_blocks(src, dst, src.element_size() * src.stride(0), pairs)
    else:
        vllm_ops.swap_blocks(src, dst, pairs)
    if device == "cuda":
        torch.cuda.synchronize()
    expected[pairs[:, 1]] = before[pairs[:, 0].to(before.device)].to(expected.device)
    assert torch.equal(bits(dst), expected)
    assert torch.equal(bits(src), before)


@cases(GRID, {})
def test_convert_fp8(device, heads, size, block_size, num_blocks, dtype, kind):
    """As vLLM's: floats in [-224, 224] there and back. kind: `auto` asks with the default, which means e4m3."""
    heads = fit(device, heads, num_blocks * block_size * size * 4)
    shape = (num_blocks, heads, size, block_size)
    given = torch.empty(shape, dtype=dtype, device=device).uniform_(-224, 224)
    stored, back = torch.empty_like(given, dtype=torch.uint8), torch.empty_like(given)
    asked = {} if kind == "auto" else {"kv_dtype": kind}
    vllm_ops.convert_fp8(stored, given, **asked)
    vllm_ops.convert_fp8(back, stored, **asked)
    assert torch.equal(stored, given.float().to(FP8).view(torch.uint8))
    assert torch.equal(back, stored.view(FP8).to(dtype))
    torch.testing.assert_close(back, given, atol=1e-3, rtol=0.1)


@cases(MLA_GRID, {})
def test_concat_and_cache_mla(device, rank, rope, block_size, num_blocks, dtype, kind):
    cache = random_bytes((num_blocks, block_size, rank + rope), cache_dtype(dtype, kind), device)
    expected = bits(cache).clone()
    kv_c = torch.randn(TOKENS, rank, dtype=dtype, device=device)
    k_pe = torch.randn(TOKENS, rope, dtype=dtype, device=device)
    slots, scale = slots_of(num_blocks * block_size, device), torch.tensor(0.1, device=device)
    vllm_ops.concat_and_cache_mla(kv_c, k_pe, cache, slots, kind, scale)
    expected[slots // block_size, slots % block_size] = expected_bits(torch.cat([kv_c, k_pe], 1), kind, scale)
    assert torch.equal(bits(cache), expected)


GATHER_GRID = MLA_GRID | {"rank": [512], "num_blocks": [1024], "start": [False, True], "op": ["cp", "dequant"]}


@cases(GATHER_GRID, {})
def test_gather(device, rank, rope, block_size, num_blocks, dtype, kind, start, op):
    """17, 32,768 and 71 tokens from tokens 3, 17 and 5 on (or from the first); rows of `dst` behind them stay."""
    entry, lengths = rank + rope, [17, 32768, 71]
    starts = [3, 17, 5] if start else [0, 0, 0]
    cached = cache_dtype(dtype, kind)
    cache = random_bytes((num_blocks, block_size, entry), cached, device)
    if kind == "fp8":
        cache &= 0x77  # no NaN, which would equal nothing
    max_blocks = 32768 // block_size + 3
    table = torch.full((3, max_blocks), 1 << 30, dtype=torch.int32, device=device)
    slots = []
    for row, first, length in zip(table, starts, lengths, strict=True):
        positions = torch.arange(first, first + length, device=device)
        used = torch.arange(first // block_size, (first + length - 1) // block_size + 1, device=device)
        row[used] = torch.randint(0, num_blocks, (len(used),), dtype=torch.int32, device=device)
        slots.append(row[positions // block_size].long() * block_size + positions % block_size)
    rows = bits(cache).view(-1, entry)[torch.cat(slots)]
    total, dst_dtype = sum(lengths), cached if op == "cp" else dtype
    dst = random_bytes((total + 3, entry), dst_dtype, device)
    expected = bits(dst).clone()
    ends = torch.tensor([0, 17, 17 + 32768, total], dtype=torch.int32, device=device)
    seq_starts = torch.tensor(starts, dtype=torch.int32, device=device) if start else None
    if op == "cp":
        vllm_ops.cp_gather_cache(cache, dst, table, ends, 3, seq_starts)
        expected[:total] = rows
    else:
        sequences = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), torch.tensor(lengths)).to(device)
        scale = torch.tensor(0.1, device=device)
        vllm_ops.gather_and_maybe_dequant_cache(cache, dst, table, ends, sequences, total, kind, scale, seq_starts)
        expected[:total] = bits((rows.view(FP8).float() * scale).to(dtype)) if kind == "fp8" else rows
    assert torch.equal(bits(dst), expected)
    if device == "cuda":
        ops.check_device(device)


# --- addresses -------------------------------------------------------------------------------------------------------


def virtual(num_elements, dtype):
    """Memory that is addressed and, but for the pages that are touched, not there."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, num_elements * dtype.itemsize, flags=flags), dtype=dtype)


@pytest.mark.parametrize("kind", ["auto", "fp8"])
@pytest.mark.parametrize("op", ["flash", "paged", "mla"])
def test_slots_past_two_to_the_31_elements(op, kind):
    heads, size, block_size, num_blocks = 8, 128, 16, (1 << 33) // (8 * 128 * 16) + 2
    dtype = cache_dtype(torch.bfloat16, kind)
    block = heads * size * block_size
    key_cache, value_cache = (virtual(num_blocks * block, dtype) for _ in range(2))
    blocks = torch.tensor([num_blocks - 1, (1 << 31) // block, 3, (1 << 32) // block + 1])
    slots = blocks * block_size + torch.tensor([15, 0, 7, 8])
    key, value = torch.randn(2, 4, heads, size).bfloat16()
    scale = torch.tensor(0.5)
    if op == "mla":
        cache = key_cache.view(num_blocks, block_size, heads * size)
        vllm_ops.concat_and_cache_mla(
            key.flatten(1)[:, :960].contiguous(), key.flatten(1)[:, 960:].contiguous(), cache, slots, kind, scale
        )
        stored = cache.view(-1, heads, size)[slots]
    elif op == "flash":
        caches = [cache.view(num_blocks, block_size, heads, size) for cache in (key_cache, value_cache)]
        vllm_ops.reshape_and_cache_flash(key, value, *caches, slots, kind, scale, scale)
        stored = caches[0].view(-1, heads, size)[slots]
        assert torch.equal(bits(caches[1].view(-1, heads, size)[slots]), expected_bits(value, kind, scale))
    else:
        run = 16 // dtype.itemsize
        keys = key_cache.view(num_blocks, heads, size // run, block_size, run)
        values = value_cache.view(num_blocks, heads, size, block_size)
        vllm_ops.reshape_and_cache(key, value, keys, values, slots, kind, scale, scale)
        stored = keys.permute(0, 3, 1, 2, 4)[blocks, slots % block_size].flatten(2)
        assert torch.equal(bits(values[blocks, :, :, slots % block_size]), expected_bits(value, kind, scale))
    assert torch.equal(bits(stored), expected_bits(key, kind, scale))
    written = set(blocks.tolist())
    for wrapped in (1 << 31, 1 << 32):  # where 31 or 32 bits would have put them
        for block_id in {place // block for place in (blocks * block % wrapped).tolist()} - written:
            assert not bits(key_cache[block_id * block : (block_id + 1) * block]).any(), block_id


def test_blocks_past_two_to_the_31_bytes():
    num_blocks, size = 5000, 1 << 20
    src, dst = (virtual(num_blocks * size, torch.uint8).view(num_blocks, size) for _ in range(2))
    src[4999], src[2048], src[7] = 1, 2, 3
    pairs = torch.tensor([[4999, 4096], [2048, 2049], [7, 4998]])
    vllm_ops.swap_blocks(src, dst, size, pairs)
    assert [int(dst[block].min()) for block in (4096, 2049, 4998)] == [1, 2, 3]
    assert not any(dst[block].any() for block in (0, 1, 902, 2048))


def test_the_reference_agrees():
    """The oracle of this file and kvpage's reference are two: their bits are the same."""
    rows = torch.randn(TOKENS, 3, 46) * 100
    scale = torch.tensor([0.1, 0.3, 0.7])
    assert torch.equal(expected_bits(rows, "fp8", scale), reference.quantize_fp8(rows, scale, FP8).view(torch.uint8))
