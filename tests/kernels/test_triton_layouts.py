"""The Triton kernels that move rows: every layout and dtype, chunks, lengths on the device; against the reference.

Every byte of the destination is compared, mapped or not. On the device "interpreter", which test_triton_compile.py asks
for in a process of its own, they run on the CPU; tests for that one device alone have its name in theirs.
"""

import itertools
import mmap

import pytest
import torch
from support.kernel_calls import INTERPRETED, device_of, gather, gather_by_device_lengths, move_chunk, reshape

from kvpage import CacheLayout, KVScales, ops
from kvpage.layout.config import CACHE_DTYPES
from kvpage.layout.kv_scales import FP8_DTYPES
from kvpage.layout.kv_view import KVView
from kvpage.ops import reference
from kvpage.ops.cuda import chunks as chunk_ops_cuda

pytest.importorskip("triton")

BLOCK, HEADS, SIZE, VALUE_SIZE, NUM_BLOCKS = 4, 3, 46, 33, 6
PLACES = [("flash", "NHD"), ("flash", "HND"), ("flashinfer", "NHD"), ("flashinfer", "HND"), ("paged", "NHD")]
EVERY_PLACE = [
    *itertools.product(PLACES, ("separate", "packed")),
    *((("mla", "NHD"), kind) for kind in ("separate", "packed")),
]
ROWS = (torch.float32, torch.bfloat16, torch.float16)
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
UNRESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
ON = pytest.mark.parametrize("where", ["interpreter"] if INTERPRETED else [CUDA])


def make_layout(place, layer_layout="separate", dtype=torch.float32, block_size=BLOCK, size=SIZE, heads=HEADS):
    backend, kv_layout = place
    return CacheLayout(block_size, 1 if backend == "mla" else heads, size, dtype, backend, kv_layout, layer_layout)


def row_dtypes(dtype):
    if dtype in FP8_DTYPES:
        return (*ROWS, dtype)
    return ROWS if dtype == torch.int8 else (dtype,)


def every_case():
    """All places with all dtypes of caches. In the interpreter the dtypes of rows, and a flag, take turns."""
    for i, ((place, layer_layout), dtype) in enumerate(itertools.product(EVERY_PLACE, CACHE_DTYPES.values())):
        kinds = list(itertools.product(row_dtypes(dtype), (False, True)))
        for rows, flag in (kinds[(i + i // 6) % len(kinds)],) if INTERPRETED else kinds:
            yield pytest.param(
                place, layer_layout, dtype, rows, flag, id=f"{place}-{layer_layout}-{dtype}-{rows}-{flag}"
            )


EVERY_CASE = pytest.mark.parametrize("place, layer_layout, dtype, rows_dtype, flag", list(every_case()))


def noisy(layout, where="cpu", num_blocks=NUM_BLOCKS):
    """Three layers' caches of random bytes, equal each time."""
    caches = layout.allocate(num_blocks, 3, device_of(where))
    noise = torch.Generator().manual_seed(7)
    for cache in caches:
        bits = cache.view(torch.uint8)
        bits.copy_(torch.randint(256, bits.shape, generator=noise, dtype=torch.uint8))
    return caches


def given_scales(layout, where="cpu"):
    if layout.dtype not in FP8_DTYPES:
        return None
    return KVScales.of([0.3, 1.0, 70.0][: layout.num_kv_heads], 1.7, device_of(where))


def make_rows(layout, num_tokens, size, dtype, where="cpu"):
    """Of many magnitudes, with zeros, what saturates, and what becomes zero."""
    rows = torch.randn(num_tokens, layout.num_kv_heads, size) * torch.logspace(-5, 5, size)
    if num_tokens:
        rows[0, 0, :4] = torch.tensor([0.0, -0.0, 6e4, -6e4])[:size]
        rows[-1] = 0
    return rows.to(dtype).to(device_of(where))


def same_bytes(got, want):
    return torch.equal(got.cpu().view(torch.uint8), want.cpu().view(torch.uint8))


def same_numbers(got, want):
    """Bit by bit, but for the bits of a NaN."""
    got, want = got.cpu(), want.cpu()
    if got.dtype in FP8_DTYPES:
        return same_bytes(got, want)
    return torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(3.0), want.nan_to_num(3.0))


def to_host(tensor):
    return None if tensor is None else tensor.cpu()


# --- reshape and gather ----------------------------------------------------------------------------------------------


@ON
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


@ON
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


@ON
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


# --- numbers ---------------------------------------------------------------------------------------------------------


def every_pattern(dtype):
    """All of 16 bits; of 32, those around which a rounding changes, with subnormals, infinities and NaNs."""
    if dtype != torch.float32:
        return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    upper = torch.arange(-(2**15), 2**15).int() << 16
    ties = torch.arange(-(2**15), 2**15).int() << 16 | 0x8000
    return torch.cat([upper, upper - 1, ties, ties + 1, upper ^ 0x0007FFFF, upper | 1]).view(torch.float32)


@ON
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("rows_dtype", ROWS, ids=str)
@pytest.mark.parametrize("scale", [None, 1.0, 0.37, 2.0**-100, 1e30])
def test_every_number_becomes_the_8_bit_float_of_the_reference(where, dtype, rows_dtype, scale):
    numbers = every_pattern(rows_dtype).reshape(-1, 1, 2**15 if INTERPRETED else 2**11)
    layout = CacheLayout(len(numbers), 1, numbers.shape[2], dtype)
    got, want = (layout.allocate(1, 1, device_of(place))[0] for place in (where, "cpu"))
    slots = torch.arange(len(numbers))
    given = [None if scale is None else KVScales.of(scale, scale, device_of(place)) for place in (where, "cpu")]
    numbers_there = numbers.to(device_of(where))
    reshape(where, numbers_there, numbers_there, got, slots.to(device_of(where)), layout, given[0])
    reference.reshape_and_cache(numbers, numbers, want, slots, layout, given[1])
    assert same_bytes(got, want)


@ON
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("rows_dtype", ROWS, ids=str)
@pytest.mark.parametrize("scale", [None, 0.37, 2.0**-140, 3e38])
def test_every_8_bit_float_becomes_the_number_of_the_reference(where, dtype, rows_dtype, scale):
    layout = CacheLayout(1, 1, 256, dtype)
    cache = layout.allocate(1, 1, torch.device("cpu"))[0]
    cache.view(torch.uint8).copy_(torch.arange(256, dtype=torch.uint8))
    if scale == 2.0**-140:  # KVScales has no subnormal ones, but products may be
        cache.view(torch.uint8).fill_(1)
    given = [
        None if scale is None else KVScales.of(max(scale, 2.0**-126), scale if scale > 1 else 1, device_of(place))
        for place in (where, "cpu")
    ]
    table, device = torch.zeros(1, 1, dtype=torch.int32), device_of(where)
    got = gather(where, cache.to(device), table.to(device), [1], layout, scales=given[0], dtype=rows_dtype)
    want = reference.gather_cache(cache, table, torch.tensor([1]), layout, scales=given[1], dtype=rows_dtype)
    for rows, expected in zip(got, want, strict=False):
        assert same_numbers(rows, expected)
        assert torch.equal(rows.cpu().signbit(), expected.signbit()) or rows.isnan().any()


@ON
@pytest.mark.parametrize("rows_dtype", ROWS, ids=str)
def test_int8_takes_every_magnitude(where, rows_dtype):
    torch.manual_seed(3)
    rows = torch.randn(400, 1, 64) * torch.logspace(-44, 38, 400)[:, None, None]
    rows[0], rows[1, 0, 5], rows[2] = 0, 1e-45, -1e-45
    rows[3, 0, :4] = torch.tensor([127.0, 0.5, 1.5, -2.5])  # ties
    rows[3, 0, 4:] = 0
    rows[4] = torch.finfo(torch.float32).max
    rows = rows.to(rows_dtype)
    rows[~rows.isfinite()] = 0
    rows[5, 0, 7], rows[6, 0, 7], rows[7, 0, 7] = float("inf"), float("nan"), float("-inf")
    layout = CacheLayout(8, 1, 64, torch.int8)
    got, want = (layout.allocate(50, 1, device_of(place))[0] for place in (where, "cpu"))
    slots, device = torch.randperm(400), device_of(where)
    reshape(where, rows.to(device), rows.to(device), got, slots.to(device), layout)
    reference.reshape_and_cache(rows, rows, want, slots, layout)
    for part, expected in zip(layout.views(got), layout.views(want), strict=True):
        places = slots // 8, slots % 8
        scales = part.scales.cpu()[places]
        assert same_numbers(scales, expected.scales[places]) and not scales[5:8].isfinite().any()
        finite = torch.arange(400) != 6  # where the largest is a NaN, nothing else means anything
        assert torch.equal(part.rows.cpu()[places][finite], expected.rows[places][finite])


# --- chunks ----------------------------------------------------------------------------------------------------------


def make_chunk(layout, num_tokens, size, dtype, heads_first, where="cpu"):
    """[3, parts, num_tokens, heads, size] of random bits, and its memory, which is larger."""
    parts = 1 if layout.backend == "mla" else 2
    heads = layout.num_kv_heads
    shape = (3, parts, heads, num_tokens, size + 3) if heads_first else (3, parts, num_tokens, heads, size + 3)
    memory = torch.randn(shape).mul(9).to(dtype).to(device_of(where))
    return (memory.transpose(2, 3) if heads_first else memory)[..., 1 : 1 + size], memory


def chunk_scales(layout, where="cpu"):
    if layout.dtype not in FP8_DTYPES:
        return None
    heads = layout.num_kv_heads
    return [KVScales.of([0.3 + layer] * heads, 1.7 / (1 + layer), device_of(where)) for layer in range(3)]


@ON
@EVERY_CASE
def test_chunks_are_stored_and_loaded_as_by_the_reference(where, place, layer_layout, dtype, rows_dtype, flag):
    torch.manual_seed(4)
    layout, device = make_layout(place, layer_layout, dtype), device_of(where)
    got, want = noisy(layout, where), noisy(layout)
    if not layout.is_quantized:
        for cache, other in zip(got, want, strict=True):
            cache.copy_(other.normal_())
    ids, start = torch.tensor([5, 1, 0], dtype=torch.int32), 3
    ids_there = ids if flag else ids.to(device)
    scales, expected_scales = chunk_scales(layout, where), chunk_scales(layout)
    chunk, memory = make_chunk(layout, 7, SIZE, rows_dtype, flag, where)
    before = memory.cpu()
    expected = before.clone()
    out = (expected.transpose(2, 3) if flag else expected)[..., 1 : 1 + SIZE]
    options = {"max_programs": 2, "one_by_one": layer_layout == "packed"} if where == "interpreter" else {}
    assert not move_chunk(where, got, ids_there, start, chunk, layout, scales, True, **options)
    reference.store_chunk(want, ids, start, out, layout, expected_scales)
    assert same_numbers(memory, expected)
    memory.copy_(before)
    assert not move_chunk(where, got, ids_there, start, chunk, layout, scales, False, **options)
    reference.load_chunk(want, ids, start, chunk.cpu(), layout, expected_scales)
    assert all(same_bytes(cache, other) for cache, other in zip(got, want, strict=True))


@ON
@pytest.mark.parametrize("place", [("flash", "HND"), ("paged", "NHD"), ("mla", "NHD")], ids=str)
def test_an_int8_chunk_holds_rows_and_scales_as_they_are(where, place):
    torch.manual_seed(5)
    layout, device = make_layout(place, "packed", torch.int8), device_of(where)
    src, dst, want = noisy(layout, where), noisy(layout, where), noisy(layout)
    for cache in (*dst, *want):
        cache.zero_()
    padded, ids = layout.padded_head_size, torch.tensor([5, 1, 0], dtype=torch.int32)
    chunk, memory = make_chunk(layout, 7, padded + 4, torch.int8, True, where)
    around = memory.clone()
    move_chunk(where, src, ids.to(device), 3, chunk, layout, None, True)
    places = reference._places(ids, 3, 7, layout)
    for layer, (cache, other) in enumerate(zip(src, want, strict=True)):
        for part, (view, target) in enumerate(zip(layout.views(cache), layout.views(other), strict=True)):
            if view is None:
                continue
            rows, scales = KVView(view.rows.cpu()).read(*places, padded), view.scales.cpu()[places]
            assert torch.equal(chunk[layer, part].cpu()[..., :padded], rows)
            assert same_bytes(chunk[layer, part].cpu()[..., padded:].flatten(1), scales.contiguous())
            target.write(*places, rows)
            target.scales[places] = scales
    assert torch.equal(memory[..., :1], around[..., :1]) and torch.equal(memory[..., -2:], around[..., -2:])
    move_chunk(where, dst, ids.to(device), 3, chunk, layout, None, False)
    assert all(same_bytes(cache, other) for cache, other in zip(dst, want, strict=True))


@ON
@pytest.mark.parametrize("num_tokens", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("start", [0, 1, BLOCK - 1])
def test_chunks_of_every_length_from_every_offset(where, num_tokens, start):
    layout, device = make_layout(PLACES[0]), device_of(where)
    caches, ids = noisy(layout), torch.tensor([3, 0, 2], dtype=torch.int32)
    for cache in caches:
        cache.normal_()
    there = [cache.to(device) for cache in caches]
    chunk, expected = (make_chunk(layout, num_tokens, SIZE, torch.float32, False)[0] for _ in range(2))
    chunk = chunk.to(device)
    move_chunk(where, there, ids, start, chunk, layout, None, True)
    reference.store_chunk(caches, ids, start, expected, layout)
    assert torch.equal(chunk.cpu(), expected)


def check_reported(where, error, bit, match):
    if where == "interpreter":
        assert error == bit
        return
    with pytest.raises(ValueError, match=match):
        ops.check_device()


@ON
@pytest.mark.parametrize("bad", [-1, NUM_BLOCKS, 2**31 - 1])
@pytest.mark.parametrize("to_chunk", [True, False])
def test_a_bad_block_of_a_chunk_is_skipped_and_reported(where, bad, to_chunk):
    torch.manual_seed(6)
    layout, device = make_layout(PLACES[0]), device_of(where)
    caches, want = ([cache.zero_() for cache in noisy(layout, place)] for place in (where, "cpu"))
    chunk, _ = make_chunk(layout, 10, SIZE, torch.float32, False, where)
    before = chunk.cpu().clone()
    error = move_chunk(where, caches, torch.tensor([4, bad, 2], device=device).int(), 0, chunk, layout, None, to_chunk)
    if to_chunk:
        assert not chunk[:, :, :4].any() and not chunk[:, :, 8:].any()
        assert torch.equal(chunk[:, :, 4:8].cpu(), before[:, :, 4:8])
    else:
        reference.load_chunk(want, torch.tensor([4]), 0, before[:, :, :4], layout)
        reference.load_chunk(want, torch.tensor([2]), 0, before[:, :, 8:], layout)
        assert all(same_bytes(cache, other) for cache, other in zip(caches, want, strict=True))
    check_reported(where, error, 2, "block id")


# --- lengths on the device -------------------------------------------------------------------------------------------

BAD_LENGTHS = [([3, -1, 4], [0, 0, 0]), ([3, 13, 4], [0, 0, 0]), ([3, 2, 4], [0, -1, 0]), ([3, 2, 4], [0, 11, 0]),
               ([3, 2, 4], [0, 2**62, 0]), ([3, 2**62, 4], [0, 0, 0])]  # fmt: skip


@ON
@pytest.mark.parametrize("lengths, starts", BAD_LENGTHS)
@pytest.mark.parametrize("padded", [False, True])
def test_a_sequence_that_does_not_fit_is_skipped_and_reported(where, lengths, starts, padded):
    torch.manual_seed(7)
    layout, device = make_layout(PLACES[0]), device_of(where)
    cache = noisy(layout, where)[0].normal_()
    tables = torch.tensor([[0, 1, 2], [3, 4, 5], [5, 4, 3]], dtype=torch.int32, device=device)
    shape = (3, 12, HEADS, SIZE) if padded else (24, HEADS, SIZE)
    out = tuple(torch.full(shape, 7.0, device=device) for _ in range(2))
    rows = torch.tensor([lengths, starts], device=device)
    error = gather_by_device_lengths(where, cache, tables, rows[0], layout, rows[1], out)
    want = [(part[0, :3], part[2, :4]) if padded else (part[:3],) for part in out]
    first = reference.gather_cache(cache.cpu(), tables.cpu()[:1], torch.tensor([3]), layout)
    third = reference.gather_cache(cache.cpu(), tables.cpu()[2:], torch.tensor([4]), layout)
    for got, one, three in zip(want, first, third, strict=True):
        assert torch.equal(got[0].cpu(), one) and (not padded or torch.equal(got[1].cpu(), three))
    if padded:
        assert all((part[1] == 7).all() and (part[0, 3:] == 7).all() and (part[2, 4:] == 7).all() for part in out)
    check_reported(where, error, 4, "seq_lens or seq_starts")


@ON
@pytest.mark.parametrize("padded", [False, True])
def test_an_output_with_less_room_than_the_lengths_is_reported(where, padded):
    layout, device = make_layout(PLACES[0]), device_of(where)
    cache = noisy(layout, where)[0].normal_()
    tables = torch.tensor([[0, 1], [3, 4]], dtype=torch.int32, device=device)
    whole = torch.full((2, 6, HEADS, SIZE) if padded else (12, HEADS, SIZE), 7.0, device=device)
    out = whole[:, :4] if padded else whole[:7]
    error = gather_by_device_lengths(
        where, cache, tables, torch.tensor([3, 5], device=device), layout, None, (out, out)
    )
    one, two = reference.gather_cache(cache.cpu(), tables.cpu(), torch.tensor([3, 5]), layout)[1].split([3, 5])
    assert torch.equal((out[0, :3] if padded else out[:3]).cpu(), one)
    assert (out[1] == 7).all() if padded else torch.equal(out[3:].cpu(), two[:4])
    assert (whole[:, 4:] == 7).all() if padded else (whole[7:] == 7).all()
    check_reported(where, error, 4, "seq_lens or seq_starts")


@ON
def test_many_sequences_are_told_apart(where):
    """More than the check of lengths takes at once, empty ones among them."""
    torch.manual_seed(8)
    layout, device = make_layout(PLACES[0], size=2, heads=1), device_of(where)
    cache = noisy(layout, where)[0].normal_()
    lengths = torch.randint(0, 4, (150,))
    tables = torch.randint(0, NUM_BLOCKS, (150, 1), dtype=torch.int32)
    out = tuple(torch.zeros(int(lengths.sum()), 1, 2, device=device) for _ in range(2))
    assert not gather_by_device_lengths(where, cache, tables.to(device), lengths.to(device), layout, None, out)
    for rows, want in zip(out, reference.gather_cache(cache.cpu(), tables, lengths, layout), strict=True):
        assert torch.equal(rows.cpu(), want)
    lengths[140] = 5
    error = gather_by_device_lengths(where, cache, tables.to(device), lengths.to(device), layout, None, out)
    check_reported(where, error, 4, "seq_lens or seq_starts")


# --- far addresses ---------------------------------------------------------------------------------------------------


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


# --- on a device alone -----------------------------------------------------------------------------------------------

GPU = pytest.mark.gpu


@GPU
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


@GPU
def test_an_unlike_call_is_checked_on_cuda():
    layout = make_layout(PLACES[0])
    cache, slots = noisy(layout, "cuda")[0], torch.arange(3, device="cuda")
    rows = torch.zeros(3, HEADS, SIZE, device="cuda")
    ops.reshape_and_cache(rows, rows, cache, slots, layout)
    with pytest.raises(ValueError, match="slot_mapping.shape"):
        ops.reshape_and_cache(rows, rows, cache, slots[:2], layout)
    with pytest.raises(ValueError, match="value.dtype"):
        ops.reshape_and_cache(rows, rows.half(), cache, slots, layout)


@GPU
@pytest.mark.parametrize("padded", [False, True])
def test_a_graph_gathers_by_lengths_that_change_on_cuda(padded):
    layout = make_layout(PLACES[1], dtype=torch.bfloat16)
    cache = noisy(layout, "cuda")[0].normal_()
    tables = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32, device="cuda")
    lengths, starts = (torch.zeros(2, dtype=torch.int32, device="cuda") for _ in range(2))
    out = tuple(
        torch.zeros((2, 9, HEADS, SIZE) if padded else (18, HEADS, SIZE), device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    )
    ops.gather_cache(cache, tables, lengths, layout, starts, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.gather_cache(cache, tables, lengths, layout, starts, out)
    for counts, firsts in (([9, 4], [0, 3]), ([0, 7], [5, 5])):
        lengths.copy_(torch.tensor(counts)), starts.copy_(torch.tensor(firsts))
        for rows in out:
            rows.fill_(7)
        want = tuple(torch.full(rows.shape, 7.0, dtype=torch.bfloat16) for rows in out)
        graph.replay()
        packed = want if padded else tuple(rows[: sum(counts)] for rows in want)
        reference.gather_into(cache.cpu(), tables.cpu(), torch.tensor(counts), torch.tensor(firsts), packed, layout)
        assert all(same_bytes(rows, other) for rows, other in zip(out, want, strict=True))
    ops.check_device()


@GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2, torch.int8], ids=str)
def test_a_graph_moves_chunks_on_cuda(dtype):
    layout = make_layout(PLACES[2], dtype=dtype)
    caches, ids = noisy(layout, "cuda"), torch.zeros(2, dtype=torch.int32, device="cuda")
    for cache in caches:
        cache.view(torch.uint8).clamp_(max=100)
    scales = [chunk_scales(layout, where) for where in ("cuda", "cpu")]
    chunk = torch.zeros(3, 2, 6, HEADS, SIZE, dtype=torch.bfloat16, device="cuda")
    chunk_ops_cuda.store_chunk(caches, ids, 1, chunk, layout, scales[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chunk_ops_cuda.store_chunk(caches, ids, 1, chunk, layout, scales[0])
    ids.copy_(torch.tensor([4, 2]))
    graph.replay()
    want = torch.zeros(chunk.shape, dtype=torch.bfloat16)
    reference.store_chunk([cache.cpu() for cache in caches], ids.cpu(), 1, want, layout, scales[1])
    assert same_numbers(chunk, want)


@GPU
def test_ids_of_the_host_are_refused_in_a_graph_on_cuda():
    layout = make_layout(PLACES[0])
    caches, ids = noisy(layout, "cuda"), torch.zeros(2, dtype=torch.int32)
    chunk = torch.zeros(3, 2, 6, HEADS, SIZE, device="cuda")
    chunk_ops_cuda.store_chunk(caches, ids, 1, chunk, layout)
    with pytest.raises(ValueError, match="block_ids must be on the device"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        chunk_ops_cuda.store_chunk(caches, ids, 1, chunk, layout)


@GPU
@EVERY_CASE
def test_chunks_in_pinned_host_memory_on_cuda(place, layer_layout, dtype, rows_dtype, flag):
    torch.manual_seed(9)
    layout = make_layout(place, layer_layout, dtype)
    got, want = noisy(layout, "cuda"), noisy(layout)
    if not layout.is_quantized:
        for cache, other in zip(got, want, strict=True):
            cache.copy_(other.normal_())
    ids = torch.tensor([5, 1, 0], dtype=torch.int32)
    chunk, memory = make_chunk(layout, 7, SIZE, rows_dtype, flag)
    pinned = memory.pin_memory()
    there = (pinned.transpose(2, 3) if flag else pinned)[..., 1 : 1 + SIZE]
    chunk_ops_cuda.store_chunk(got, ids, 3, there, layout, chunk_scales(layout, "cuda"))
    torch.cuda.synchronize()
    before = chunk.clone()
    reference.store_chunk(want, ids, 3, chunk, layout, chunk_scales(layout))
    assert same_numbers(pinned, memory)
    there.copy_(before)
    chunk_ops_cuda.load_chunk(got, ids, 3, there, layout, chunk_scales(layout, "cuda"))
    reference.load_chunk(want, ids, 3, before, layout, chunk_scales(layout))
    assert all(same_bytes(cache, other) for cache, other in zip(got, want, strict=True))


def test_chunks_by_torch(monkeypatch):
    """Where Triton is not installed."""
    monkeypatch.setattr(chunk_ops_cuda, "_has_triton", lambda: False)
    layout = make_layout(PLACES[1])
    got, want = noisy(layout), noisy(layout)
    ids, (chunk, _) = torch.tensor([2, 4], dtype=torch.int32), make_chunk(layout, 6, SIZE, torch.float32, True)
    chunk_ops_cuda.load_chunk(got, ids, 1, chunk, layout)
    reference.load_chunk(want, ids, 1, chunk, layout)
    assert all(same_bytes(cache, other) for cache, other in zip(got, want, strict=True))
    with pytest.raises(ValueError, match="got 6"):
        chunk_ops_cuda.load_chunk(got, torch.tensor([2, NUM_BLOCKS]), 1, chunk, layout)
    assert all(same_bytes(cache, other) for cache, other in zip(got, want, strict=True))
    back = torch.zeros(chunk.shape)
    chunk_ops_cuda.store_chunk(got, ids, 1, back, layout)
    assert torch.equal(back, chunk)
