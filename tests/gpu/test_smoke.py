"""One case of each operation against the reference, on a GPU (and on a CPU): what a new machine is tried with first."""

import pytest
import torch
from support.kernel_calls import CUDA

from kvpage import CacheLayout, ops
from kvpage.blend import RotaryTables
from kvpage.ops import reference

ON_DEVICES = pytest.mark.parametrize("device", ["cpu", CUDA])
LAYOUT = CacheLayout(16, 2, 64, torch.bfloat16)
LENGTHS, QUERIES = [70, 33, 5], [1, 20, 1]
TABLES = torch.tensor([[9, 2, 4, 7, 1], [3, 8, 5, 0, 0], [6, 0, 0, 0, 0]], dtype=torch.int32)


def make_cache(device):
    cache = LAYOUT.allocate(10, 2, torch.device(device))[1]
    cache.copy_(torch.randn(cache.shape, dtype=torch.float32))
    return cache


@pytest.fixture(autouse=True)
def nothing_reported(request):
    yield
    if request.node.callspec.params["device"] == "cuda":
        ops.check_device()


def check(got, want):
    torch.testing.assert_close(got.cpu(), want.cpu(), rtol=2e-2, atol=2e-2)


@ON_DEVICES
def test_rows_are_written_and_gathered(device):
    cache, rows = make_cache(device), torch.randn(2, 70, 2, 64, dtype=torch.bfloat16, device=device)
    slots = TABLES[0].long().repeat_interleave(16)[:70] * 16 + torch.arange(70) % 16
    ops.reshape_and_cache(rows[0], rows[1], cache, slots.to(device), LAYOUT)
    key, value = ops.gather_cache(cache, TABLES[:1].to(device), [70], LAYOUT)
    assert torch.equal(key, rows[0]) and torch.equal(value, rows[1])


@ON_DEVICES
@pytest.mark.parametrize("queries", [None, QUERIES])
def test_attention(device, queries):
    cache = make_cache(device)
    counts = None if queries is None else torch.tensor(queries)
    query = torch.randn(sum(queries or [1] * 3), 8, 64, dtype=torch.bfloat16, device=device)
    got = ops.paged_attention(query, cache, TABLES.to(device), LENGTHS, LAYOUT, query_lens=queries)
    want = reference.paged_attention(query, cache, TABLES.to(device), torch.tensor(LENGTHS), LAYOUT, query_lens=counts)
    check(got, want)


@ON_DEVICES
def test_a_chunk_goes_and_comes_back(device):
    caches = [make_cache(device) for _ in range(2)]
    ids, chunk = TABLES[0].to(device), torch.zeros(2, 2, 40, 2, 64, dtype=torch.bfloat16, device=device)
    ops.store_chunk(caches, ids, chunk, LAYOUT, 5)
    want = torch.zeros_like(chunk)
    reference.store_chunk(caches, ids, 5, want, LAYOUT)
    assert torch.equal(chunk, want)
    before = [cache.clone() for cache in caches]
    for cache in caches:
        cache.zero_()
    ops.load_chunk(caches, ids, chunk, LAYOUT, 5)
    again = torch.zeros_like(chunk)
    reference.store_chunk(caches, ids, 5, again, LAYOUT)
    assert torch.equal(again, chunk) and any(not torch.equal(*pair) for pair in zip(caches, before, strict=True))


@ON_DEVICES
def test_blocks_are_swapped_and_copied(device):
    there, host = make_cache(device), LAYOUT.allocate(10, 1, torch.device("cpu"), device == "cuda")[0]
    host.zero_()
    blocks = there.cpu().movedim(LAYOUT.block_dim, 0)
    ops.swap_blocks(there, host, torch.tensor([[3, 7], [4, 8], [9, 0]]), LAYOUT)
    if device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(host.movedim(LAYOUT.block_dim, 0)[[7, 8, 0]], blocks[[3, 4, 9]])
    ops.copy_blocks([there], torch.tensor([[3, 5]]), LAYOUT)
    assert torch.equal(there.cpu().movedim(LAYOUT.block_dim, 0)[5], blocks[3])


@ON_DEVICES
def test_rows_are_turned(device):
    tables = RotaryTables.of_frequencies(1e4 ** -(torch.arange(0, 64, 2, device=device) / 64), 64)
    new = torch.arange(40, device=device)
    rotation = tables.rotation(new + 7, new, torch.device(device))
    rows = torch.randn(40, 2, 64, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(rows)
    ops.mix_rows(rows, out, rotation)
    host = RotaryTables.of_frequencies(1e4 ** -(torch.arange(0, 64, 2) / 64), 64)
    want = torch.empty_like(out, device="cpu")
    ops.mix_rows(rows.cpu(), want, host.rotation((new + 7).cpu(), new.cpu(), torch.device("cpu")))
    check(out, want)
