"""gather_cache against its reference, bit by bit, over every byte of the destination."""

import pytest
import torch
from support.kernel_calls import ON_ALL, device_of, gather
from support.row_caches import (
    ALL_LAYOUTS,
    BLOCK,
    bits,
    filled,
    make_layout,
    negated,
    poisoned,
    random_rows,
    random_tables,
    two_threads,  # noqa: F401, a fixture for all that is here
)

from kvpage import CacheLayout, ops, register_backend
from kvpage.layout.backends import _backends
from kvpage.ops import reference


def test_caches_that_torch_negates_are_refused():
    layout = make_layout()
    cache = torch._neg_view(torch.zeros(layout.shape(2)))
    key, tables = torch.ones(3, 3, 10), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="cache must not be a view that torch negates or conjugates"):
        ops.reshape_and_cache(key, key, cache, torch.tensor([1, 5, 7]), layout)
    with pytest.raises(ValueError, match="cache must not be a view that torch negates or conjugates"):
        ops.gather_cache(cache, tables, [1], layout)
    assert not cache.any()


LENGTHS = [[], [0], [1], [BLOCK - 1], [BLOCK], [BLOCK + 1], [0, 5, 0, 13, 1, 8, 0]]


@ON_ALL
@ALL_LAYOUTS
@pytest.mark.parametrize("lengths", LENGTHS)
def test_gather_reads_what_the_reference_reads(where, backend, kv_layout, layer_layout, lengths):
    torch.manual_seed(5)
    layout = make_layout(backend, kv_layout, layer_layout)
    cache, tables = filled(layout, 12, where), random_tables(lengths, 12, layout, width=6).to(device_of(where))
    got = gather(where, cache, tables, lengths, layout)
    want = reference.gather_cache(cache, tables, torch.tensor(lengths, dtype=torch.int64), layout)
    assert where != "interpreter" or got[2] == 0
    for rows, expected in zip(got[:2], want, strict=True):
        assert rows.is_contiguous() and torch.equal(rows, expected)


@ON_ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads, size, block", [(1, 1, 1), (2, 8, 16), (5, 80, 3), (8, 128, 16)])
def test_gather_of_any_sizes(where, dtype, heads, size, block):
    torch.manual_seed(6)
    layout = make_layout(heads=heads, size=size, dtype=dtype, block=block)
    lengths = [2, 17, 1]
    cache, tables = filled(layout, 30, where), random_tables(lengths, 30, layout).to(device_of(where))
    got = gather(where, cache, tables, torch.tensor(lengths, dtype=torch.int32), layout)[:2]
    want = reference.gather_cache(cache, tables, torch.tensor(lengths), layout)
    assert all(torch.equal(rows, expected) for rows, expected in zip(got, want, strict=True))


@ON_ALL
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_gather_from_the_middle_of_sequences(where, kv_layout):
    """Blocks before the start may be gone: their table entries are not read."""
    torch.manual_seed(7)
    layout = make_layout(kv_layout=kv_layout)
    starts, lengths = [0, 1, 4, 7, 9, 2], [3, 9, 4, 2, 0, 1]
    cache, tables = filled(layout, 12, where), random_tables(lengths, 12, layout, starts).to(device_of(where))
    got = gather(where, cache, tables, lengths, layout, starts)[:2]
    safe = tables.clamp(max=11)
    ends = torch.tensor(starts) + torch.tensor(lengths)
    whole = [rows.split(ends.tolist()) for rows in reference.gather_cache(cache, safe, ends, layout)]
    for rows, parts in zip(got, whole, strict=True):
        assert torch.equal(rows, torch.cat([part[start:] for part, start in zip(parts, starts, strict=True)]))


@ON_ALL
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("heads_first", [False, True])
def test_gather_into_given_tensors(where, kv_layout, padded, heads_first):
    """Smaller heads, padding between rows and sequences, heads outside of tokens: what is not a row stays as it is."""
    torch.manual_seed(8)
    layout = make_layout(kv_layout=kv_layout)
    lengths = [5, 0, 8, 1]
    cache, tables = filled(layout, 12, where), random_tables(lengths, 12, layout).to(device_of(where))
    want = reference.gather_cache(cache, tables, torch.tensor(lengths), layout)
    memory, out, expected = [], [], []
    for rows, size in zip(want, (10, 7), strict=True):
        shape = ([4] if padded else []) + ([3, 9 if padded else 14] if heads_first else [9 if padded else 14, 3])
        whole = torch.full([*shape, size + 3], float("nan"), device=device_of(where))
        final = whole.clone()
        views = [(t.transpose(-2, -3) if heads_first else t)[..., 1 : 1 + size] for t in (whole, final)]
        if padded:
            for i, part in enumerate(rows.split(lengths)):
                views[1][i, : len(part)] = part[..., :size]
        else:
            views[1].copy_(rows[..., :size])
        memory.append(whole), out.append(views[0]), expected.append(final)
    got = gather(where, cache, tables, lengths, layout, out=tuple(out))
    assert got[0] is out[0] and got[1] is out[1]
    for whole, final in zip(memory, expected, strict=True):
        assert torch.equal(bits(whole), bits(final))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_gather_over_threads(kv_layout):
    """Enough bytes that two threads share the tokens in the middle of a sequence: 2 MiB."""
    torch.manual_seed(9)
    layout = make_layout(kv_layout=kv_layout, heads=8, size=64)
    lengths = [3, 400, 0, 111]
    cache, tables = filled(layout, 140), random_tables(lengths, 140, layout)
    got = ops.gather_cache(cache, tables, lengths, layout)
    want = reference.gather_cache(cache, tables, torch.tensor(lengths), layout)
    assert all(torch.equal(rows, expected) for rows, expected in zip(got, want, strict=True))


def test_what_was_written_is_what_is_gathered():
    torch.manual_seed(10)
    layout = make_layout("flashinfer", "HND", "packed", dtype=torch.bfloat16)
    cache, _ = poisoned(layout, 9)
    tables = random_tables([11], 9, layout)
    slots = tables[0].long().repeat_interleave(BLOCK) * BLOCK + torch.arange(BLOCK).repeat(3)
    key, value = (random_rows(11, layout, 10) for _ in range(2))
    ops.reshape_and_cache(key, value, cache, slots[:11], layout)
    got_key, got_value = ops.gather_cache(cache, tables, [11], layout)
    assert torch.equal(key, got_key) and torch.equal(value, got_value)


def bad_gathers():
    tables = torch.tensor([[0, 3], [2, 9]], dtype=torch.int32)
    key, value = torch.zeros(13, 3, 10), torch.zeros(13, 3, 10)
    yield "must be in .0, 4., got 9", {"seq_lens": [7, 5]}
    yield "got -1", {"block_tables": torch.tensor([[0, 3], [-1, 9]], dtype=torch.int32)}
    yield "seq_lens must be in", {"seq_lens": [-1, 13]}
    yield "seq_lens must be in", {"seq_lens": [9, 3]}
    yield "seq_starts must be in", {"seq_starts": [0, -4]}
    yield "must be at most 8, got 9", {"seq_starts": [1, 0]}
    yield "one entry for each", {"seq_lens": [12]}
    yield "one entry for each", {"seq_starts": [0, 0, 0]}
    yield "int32 or int64", {"seq_lens": torch.tensor([8.0, 4.0])}
    yield "one row of", {"seq_lens": torch.tensor([[8, 4]])}
    yield "block_tables.dtype", {"block_tables": tables.long()}
    yield "num_seqs, max_blocks", {"block_tables": tables[0]}
    yield "contiguous", {"block_tables": tables.t()}
    yield "must be on", {"block_tables": tables.to("meta")}
    yield "key.shape", {"out": (key, value[:12])}
    yield "value.dtype", {"out": (key[:12], value[:12].half())}
    yield "value's head size", {"out": (key[:12], torch.zeros(12, 3, 11))}
    yield "contiguous", {"out": (torch.zeros(12, 3, 20)[..., ::2], value[:12])}
    yield "3 or 4 dimensions", {"out": (key[:12], torch.zeros(12, 30))}
    yield "memory for each", {"out": (torch.zeros(1, 3, 10).expand(12, 3, 10), value[:12])}
    yield "as many dimensions", {"out": (key[:12], torch.zeros(2, 8, 3, 10))}
    yield "room for 8", {"out": (torch.zeros(2, 7, 3, 10), value[:12])}
    yield "cache.shape", {"layout": make_layout(size=12)}
    shared = torch.zeros(12, 3, 10)
    yield "key and value must not be in the same memory", {"out": (shared, shared)}
    yield "key and value must not be in the same memory", {"out": (shared, shared[..., :7])}
    yield "memory for each", {"out": (key[:12], torch.zeros(200).as_strided((12, 3, 10), (15, 10, 1)))}
    yield "key must not be a view", {"out": (torch._neg_view(torch.zeros(12, 3, 10)), value[:12])}
    yield "seq_starts must be in", {"seq_starts": [2**70, 0]}


def odd_gathers():
    rows = torch.zeros(12, 3, 10)
    yield "cache must be a torch.Tensor, got list", {"cache": [1]}
    yield "block_tables must be a torch.Tensor, got list", {"block_tables": [[0, 3], [2, 9]]}
    yield "layout must be a CacheLayout, got NoneType", {"layout": None}
    yield "seq_lens must be integers, got 12", {"seq_lens": 12}
    yield "seq_lens must be integers, got None", {"seq_lens": None}
    yield r"seq_lens must be integers, got \[8.0, 4\]", {"seq_lens": [8.0, 4]}
    yield "seq_starts must be integers, got '00'", {"seq_starts": "00"}
    yield "out must be a pair of tensors, got Tensor", {"out": torch.zeros(2, 12, 3, 10)}
    yield "out must be a pair of tensors, got tuple", {"out": (rows,)}
    yield "value must be a torch.Tensor, got list", {"out": (rows, [])}


@pytest.mark.parametrize("match, change", list(odd_gathers()))
def test_gather_names_what_is_of_another_type(match, change):
    out = (torch.zeros(12, 3, 10), torch.zeros(12, 3, 10))
    with pytest.raises(TypeError, match=match):
        ops.gather_cache(**{"cache": filled(make_layout(), 4), **GOOD_GATHER, "out": out, **change})
    assert not out[0].any() and not out[1].any()


def test_empty_outputs_may_be_the_same():
    nothing = torch.zeros(0, 3, 10)
    cache = filled(make_layout(), 4)
    assert ops.gather_cache(cache, GOOD_GATHER["block_tables"], [0, 0], make_layout(), out=(nothing, nothing))


def test_key_and_value_may_lie_side_by_side():
    cache, both = filled(make_layout(), 4), torch.zeros(12, 2, 3, 10)
    ops.gather_cache(cache, **GOOD_GATHER, out=(both[:, 0], both[:, 1]))
    for rows, want in zip(both.unbind(1), ops.gather_cache(cache, **GOOD_GATHER), strict=True):
        assert torch.equal(rows, want)


def test_gather_of_tables_that_torch_negates():
    cache = filled(make_layout(), 4)
    got = ops.gather_cache(cache, **GOOD_GATHER | {"block_tables": negated(GOOD_GATHER["block_tables"])})
    for rows, want in zip(got, ops.gather_cache(cache, **GOOD_GATHER), strict=True):
        assert torch.equal(rows, want)


def test_an_expanded_cache_may_be_read():
    layout = make_layout()
    block = torch.randn(layout.shape(1))
    got = ops.gather_cache(block.expand(layout.shape(10)), **GOOD_GATHER)
    want = ops.gather_cache(block.repeat(1, 10, 1, 1, 1), **GOOD_GATHER)
    assert all(torch.equal(rows, expected) for rows, expected in zip(got, want, strict=True))


GOOD_GATHER = {
    "block_tables": torch.tensor([[0, 3], [2, 9]], dtype=torch.int32),
    "seq_lens": [8, 4],
    "layout": make_layout(),
}


@pytest.mark.parametrize("match, change", list(bad_gathers()))
def test_a_refused_gather_writes_nothing(match, change):
    cache = filled(make_layout(), 4)
    out = change.get("out", (torch.zeros(12, 3, 10), torch.zeros(12, 3, 10)))
    before = [rows.clone() for rows in out]
    with pytest.raises(ValueError, match=match):
        ops.gather_cache(cache, **{**GOOD_GATHER, "out": out, **change})
    assert all(torch.equal(rows, old) for rows, old in zip(out, before, strict=True))


def test_the_call_that_the_refused_gathers_vary_is_good():
    cache = filled(make_layout(), 4)
    out = (torch.zeros(12, 3, 10), torch.zeros(12, 3, 10))
    assert ops.gather_cache(cache, **GOOD_GATHER, out=out)[0].abs().sum() > 0


def test_a_backend_without_split_kv_is_refused():
    class Opaque:
        block_dim = 0

        @staticmethod
        def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size):
            return (num_blocks, block_size, head_size)

    if "opaque" not in _backends:
        register_backend("opaque", Opaque)
    layout = CacheLayout(BLOCK, 1, 8, torch.float32, backend="opaque")
    cache = torch.zeros(layout.shape(2))
    with pytest.raises(ValueError, match="split_kv"):
        ops.gather_cache(cache, torch.zeros(1, 1, dtype=torch.int32), [1], layout)
    with pytest.raises(ValueError, match="split_kv"):
        ops.reshape_and_cache(torch.zeros(1, 1, 8), torch.zeros(1, 1, 8), cache, torch.tensor([0]), layout)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("padded", [False, True])
def test_layers_of_some_steps_into_tensors_of_one_kind(device, padded):
    """On a device launches are repeated, and layers share what was copied there for a step."""
    torch.manual_seed(15)
    layout = make_layout()
    caches = [ops.BoundCache(filled(layout, 12, device), layout) for _ in range(2)]
    for lengths, starts in (([5, 0, 8], [3, 2, 0]), ([5, 0, 8], None), ([4, 8, 1], [0, 0, 4]), ([5, 0, 8], [3, 2, 0])):
        tables = random_tables(lengths, 12, layout, starts).to(device)
        spans = torch.tensor(lengths), None if starts is None else torch.tensor(starts)
        for cache in [*caches, *caches]:
            out = tuple(
                torch.full([*([3, 8] if padded else [13]), 3, size], float("nan"), device=device) for size in (10, 6)
            )
            ops.gather_cache(cache, tables, lengths, seq_starts=starts, out=out)
            want = reference.gather_cache(cache.tensor, tables, spans[0], layout, spans[1])
            for rows, packed in zip(out, want, strict=True):
                found = torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)]) if padded else rows
                assert torch.equal(bits(found), bits(packed[..., : rows.shape[-1]]))
                assert not padded or all(row[length:].isnan().all() for row, length in zip(rows, lengths, strict=True))
