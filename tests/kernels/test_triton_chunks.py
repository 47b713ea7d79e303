"""The Triton kernels that move chunks against the reference: every layout, dtype, length and offset.

Every byte of the destination is compared, mapped or not.
"""

import pytest
import torch
from support.kernel_calls import ON_KERNELS, check_reported, device_of, move_chunk
from support.kernel_rows import (
    BLOCK,
    EVERY_CASE,
    HEADS,
    NUM_BLOCKS,
    PLACES,
    SIZE,
    chunk_scales,
    make_chunk,
    make_layout,
    noisy,
    same_bytes,
    same_numbers,
)

from kvpage.layout.kv_view import KVView
from kvpage.ops import reference
from kvpage.ops.cuda import chunks as chunk_ops_cuda

pytest.importorskip("triton")


@ON_KERNELS
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


@ON_KERNELS
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


@ON_KERNELS
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


@ON_KERNELS
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


@pytest.mark.gpu
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


@pytest.mark.gpu
def test_ids_of_the_host_are_refused_in_a_graph_on_cuda():
    layout = make_layout(PLACES[0])
    caches, ids = noisy(layout, "cuda"), torch.zeros(2, dtype=torch.int32)
    chunk = torch.zeros(3, 2, 6, HEADS, SIZE, device="cuda")
    chunk_ops_cuda.store_chunk(caches, ids, 1, chunk, layout)
    with pytest.raises(ValueError, match="block_ids must be on the device"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        chunk_ops_cuda.store_chunk(caches, ids, 1, chunk, layout)


@pytest.mark.gpu
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
