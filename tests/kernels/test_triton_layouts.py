"""The Triton kernels that write and read rows against the reference: every layout, dtype and size, far addresses.

Every byte of the destination is compared, mapped or not.
"""

import mmap

import pytest
import torch
from support.kernel_calls import (
    INTERPRETED,
    ON_KERNELS,
    device_of,
    gather,
    gather_by_device_lengths,
    move_chunk,
    reshape,
)
from support.kernel_rows import (
    BLOCK,
    EVERY_CASE,
    HEADS,
    NUM_BLOCKS,
    PLACES,
    SIZE,
    VALUE_SIZE,
    given_scales,
    make_layout,
    make_rows,
    noisy,
    same_bytes,
    same_numbers,
    to_host,
)

from kvpage import CacheLayout, KVScales, ops
from kvpage.layout.kv_scales import FP8_DTYPES
from kvpage.ops import reference

pytest.importorskip("triton")


UNRESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE


@ON_KERNELS
@EVERY_CASE
def test_rows_are_written_as_the_reference_writes_them(where, place, layer_layout, dtype, rows_dtype, flag):
    torch.manual_seed(0)
    layout = make_layout(place, layer_layout, dtype)
    got, want = noisy(layout, where), noisy(layout)
    slots = torch.randperm(NUM_BLOCKS * BLOCK)[:9]
    if flag:
        slots[4] = -1
    key = make_rows(layout, 9, SIZE, rows_dtype, where)
    value = None if place[0] == "mla" else make_rows(layout, 9, VALUE_SIZE, rows_dtype, where)
    scales = given_scales(layout, where)
    assert not reshape(where, key, value, got[1], slots.to(device_of(where)), layout, scales)
    reference.reshape_and_cache(key.cpu(), to_host(value), want[1], slots, layout, given_scales(layout))
    assert all(same_bytes(cache, expected) for cache, expected in zip(got, want, strict=True))


@ON_KERNELS
@EVERY_CASE
def test_rows_are_read_as_the_reference_reads_them(where, place, layer_layout, dtype, rows_dtype, flag):
    torch.manual_seed(1)
    layout, device = make_layout(place, layer_layout, dtype), device_of(where)
    on_host, tables = (
        noisy(layout),
        torch.tensor([[5, 1, 0], [2**31 - 1, 2**31 - 1, 4], [3, 2, 2**31 - 1]], dtype=torch.int32),
    )
    lengths, starts = [9, 2, 5], [2, 9, 0]
    if not layout.is_quantized:
        on_host[1].copy_(torch.randn(on_host[1].shape))
    cache = noisy(layout, where)[1].copy_(on_host[1].to(device))
    room = (3, 11) if flag else (16,)  # padded or packed
    want = tuple(torch.full((*room, layout.num_kv_heads, size), 5.0).to(rows_dtype) for size in (SIZE, VALUE_SIZE))
    want = (want[0], None if place[0] == "mla" else want[1])
    outs = [tuple(None if rows is None else rows.to(device, copy=True) for rows in want) for _ in range(2)]
    given, safe = given_scales(layout, where), tables.clamp(max=0)
    reference.gather_into(
        on_host[1], torch.where(tables < NUM_BLOCKS, tables, safe), torch.tensor(lengths), torch.tensor(starts), want,
        layout, given_scales(layout),
    )  # fmt: skip
    error = gather(where, cache, tables.to(device), lengths, layout, starts, outs[0], given)[2:]
    on_device = torch.tensor([lengths, starts], device=device)
    wrong = gather_by_device_lengths(
        where, cache, tables.to(device), on_device[0].int(), layout, on_device[1], outs[1], given
    )
    assert not wrong and not any(error)
    for out in outs:
        assert all(
            rows is expected is None or same_numbers(rows, expected) for rows, expected in zip(out, want, strict=True)
        )


@ON_KERNELS
@pytest.mark.parametrize("place", [PLACES[0], PLACES[4]], ids=str)
@pytest.mark.parametrize("block_size, heads, size", [(1, 2, 3), (3, 5, 80), (256, 1, 112), (16, 2, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_sizes_of_blocks_and_heads(where, place, block_size, heads, size, dtype):
    """Also rows far shorter than a run of the cache, and 0, 1, B - 1, B and B + 1 tokens."""
    torch.manual_seed(2)
    layout, device = make_layout(place, "packed", dtype, block_size, size, heads), device_of(where)
    num_blocks = -(-20 // block_size)
    got, want = noisy(layout, where, num_blocks), noisy(layout, "cpu", num_blocks)
    for num_tokens in sorted({0, 1, min(block_size - 1, 19), min(block_size, 19), min(block_size + 1, 19)}):
        slots = torch.randperm(num_blocks * block_size)[:num_tokens]
        key, value = (make_rows(layout, num_tokens, width, torch.bfloat16, where) for width in (size, 1))
        assert not reshape(where, key, value, got[1], slots.to(device), layout)
        reference.reshape_and_cache(key.cpu(), value.cpu(), want[1], slots, layout)
        assert all(same_bytes(cache, expected) for cache, expected in zip(got, want, strict=True))
    tables = torch.randperm(num_blocks).int()[None]
    out = gather(where, got[1], tables.to(device), [20], layout, dtype=torch.bfloat16)[:2]
    expected = reference.gather_cache(want[1], tables, torch.tensor([20]), layout, dtype=torch.bfloat16)
    assert all(same_numbers(rows, other) for rows, other in zip(out, expected, strict=True))


@pytest.fixture
def far_cache():
    """A cache of 3 * 2**31 elements and more, of which memory is taken for what is written alone."""
    layout = CacheLayout(16, 2, 64, torch.float8_e4m3fn)
    num_blocks = 3 * 2**31 // (2 * 16 * 2 * 64) + 1
    memory = mmap.mmap(-1, layout.block_bytes * num_blocks, flags=UNRESERVED)
    cache = torch.frombuffer(memory, dtype=torch.uint8).view(layout.dtype).view(layout.shape(num_blocks))
    return layout, num_blocks, cache


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter's test")
def test_far_slots_in_the_interpreter(far_cache):
    layout, num_blocks, cache = far_cache
    far = num_blocks - 1
    slots = torch.tensor([far * 16 + 15, (far - 1) * 16, 0])
    key, value = (torch.randn(3, 2, 64) for _ in range(2))
    assert reshape("interpreter", key, value, cache, slots, layout) == 0
    for rows, part in ((key, cache[0]), (value, cache[1])):
        want = reference.quantize_fp8(rows, torch.ones(1), layout.dtype)
        got = torch.stack(
            [part[far, 15].view(torch.uint8), part[far - 1, 0].view(torch.uint8), part[0, 0].view(torch.uint8)]
        )
        assert same_bytes(got, want)
    tables = torch.tensor([[far, 0, far - 1]], dtype=torch.int32)
    raw = gather("interpreter", cache, tables, [33], layout, dtype=layout.dtype)
    assert raw[2] == 0
    for rows, written in zip(raw, (key, value), strict=False):
        want = reference.quantize_fp8(written, torch.ones(1), layout.dtype)
        assert same_bytes(rows.view(torch.uint8)[[15, 32, 16]].view(layout.dtype), want)
    chunk = torch.zeros(1, 2, 17, 2, 64, dtype=layout.dtype)
    assert move_chunk("interpreter", [cache], tables[0], 15, chunk, layout, None, True) == 0
    assert same_bytes(chunk[0, 0, :2], raw[0][15:17]) and same_bytes(chunk[0, 1, :2], raw[1][15:17])
    assert move_chunk("interpreter", [cache], tables[0, :1], 0, chunk[:, :, :16], layout, None, False) == 0
    assert same_bytes(cache[1, far], chunk[0, 1, :16])


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter's test")
def test_far_rows_in_the_interpreter():
    """Rows that lie 2**31 elements apart, as views of memory that is not there."""
    layout = make_layout(PLACES[0], size=2, heads=1)
    memory = mmap.mmap(-1, 4 * (2 * 2**31 + 2), flags=UNRESERVED)
    rows = torch.frombuffer(memory, dtype=torch.float32).as_strided((3, 1, 2), (2**31, 2**31, 1))
    rows.copy_(torch.arange(6.0).view(3, 1, 2))
    cache = layout.allocate(1, 1, torch.device("cpu"))[0]
    assert reshape("interpreter", rows, rows, cache, torch.tensor([2, 0, 1]), layout) == 0
    assert cache[1, 0, :, 0].tolist() == [[2, 3], [4, 5], [0, 1], [0, 0]]
    rows.zero_()
    gather("interpreter", cache, torch.zeros(1, 1, dtype=torch.int32), [3], layout, out=(rows, rows.clone()))
    assert rows[:, 0].tolist() == [[2, 3], [4, 5], [0, 1]]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("place", [("flash", "NHD"), ("paged", "NHD"), ("mla", "NHD")], ids=str)
def test_a_call_like_one_before_does_what_the_first_did_on_cuda(place, dtype):
    """Other memory, other slots, other scales; then what is no such call: rows that are not aligned."""
    layout = make_layout(place, "packed", dtype, size=48)
    width = 48 if place[0] == "mla" else 32
    for turn, shift in ((0, 0), (1, 0), (2, 0), (3, 1)):
        torch.manual_seed(turn)
        got, want = noisy(layout, "cuda"), noisy(layout)
        slots = torch.randperm(NUM_BLOCKS * BLOCK)[:9]
        key = make_rows(layout, 9, 48 + 16, torch.bfloat16, "cuda")[..., shift : 48 + shift]
        value = None if place[0] == "mla" else make_rows(layout, 9, width + 16, torch.bfloat16, "cuda")[..., :width]
        given = [None if dtype not in FP8_DTYPES else KVScales.of(0.3 + turn, 1.7, where) for where in ("cuda", "cpu")]
        ops.reshape_and_cache(key, value, got[turn % 3], slots.cuda(), layout, given[0])
        reference.reshape_and_cache(key.cpu(), to_host(value), want[turn % 3], slots, layout, given[1])
        assert all(same_bytes(cache, other) for cache, other in zip(got, want, strict=True))


@pytest.mark.gpu
def test_an_unlike_call_is_checked_on_cuda():
    layout = make_layout(PLACES[0])
    cache, slots = noisy(layout, "cuda")[0], torch.arange(3, device="cuda")
    rows = torch.zeros(3, HEADS, SIZE, device="cuda")
    ops.reshape_and_cache(rows, rows, cache, slots, layout)
    with pytest.raises(ValueError, match="slot_mapping.shape"):
        ops.reshape_and_cache(rows, rows, cache, slots[:2], layout)
    with pytest.raises(ValueError, match="value.dtype"):
        ops.reshape_and_cache(rows, rows.half(), cache, slots, layout)
