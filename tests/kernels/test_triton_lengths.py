"""The Triton kernel that gathers by lengths on the device, some of which do not fit.

Every byte of the destination is compared, mapped or not.
"""

import pytest
import torch
from support.kernel_calls import ON_KERNELS, check_reported, device_of, gather_by_device_lengths
from support.kernel_rows import HEADS, NUM_BLOCKS, PLACES, SIZE, make_layout, noisy, same_bytes

from kvpage import ops
from kvpage.ops import reference

pytest.importorskip("triton")

BAD_LENGTHS = [([3, -1, 4], [0, 0, 0]), ([3, 13, 4], [0, 0, 0]), ([3, 2, 4], [0, -1, 0]), ([3, 2, 4], [0, 11, 0]),
               ([3, 2, 4], [0, 2**62, 0]), ([3, 2**62, 4], [0, 0, 0])]  # fmt: skip


@ON_KERNELS
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


@ON_KERNELS
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


@ON_KERNELS
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


@pytest.mark.gpu
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
