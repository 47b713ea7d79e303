"""Attention over blocks in Triton against its reference: every layout, dtype, size and option, poison all around."""

import itertools
import random

import pytest
import torch
from support.attention_cases import (
    BF16,
    E4M3,
    E5M2,
    FP16,
    FP32,
    HUGE,
    INT8,
    attend,
    attend_as_on_a_device,
    check,
    expected,
    make_case,
)
from support.kernel_calls import ON_KERNELS

from kvpage.ops.cuda import rows as token_ops_cuda

GRID = {
    "place": [("flash", "NHD"), ("flash", "HND"), ("flashinfer", "NHD"), ("flashinfer", "HND"), ("paged", "NHD"),
              ("mla", "NHD")],
    "layer_layout": ["separate", "packed"],
    "dtype": [FP32, BF16, FP16, E4M3, E5M2, INT8],
    "query": [0, 1, 2],  # of QUERY_DTYPES
    "scales": [None, "tensor", "head"],
    "size": [20, 46, 64, 80, 96, 112],
    "block": [1, 3, 16, 32, 256],
    "heads": [(1, 1), (2, 3), (3, 4), (1, 18)],
    "queries": [None, [1, 1, 1, 1], [5, 0, 18, 1], [0, 14, 2, 9]],
    "window": [None, 1, 7, 64],
    "softcap": [None, 2.0],
    "sinks": [False, True],
    "split": [(1, 90), (1000, 80), (1000, 90)],
}  # fmt: skip
QUERY_DTYPES = {
    FP32: (FP32, FP32, FP32),
    BF16: (BF16, FP32, BF16),
    FP16: (FP16, FP16, FP16),
    E4M3: (BF16, FP32, BF16),
    E5M2: (FP16, BF16, FP16),
    INT8: (BF16, FP16, FP32),
}


def pairwise(grid, seed):
    """Combinations in which each pair of values of two parameters occurs."""
    chance = random.Random(seed)
    names = list(grid)
    missing = {
        (a, i, b, j)
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(grid[names[a]]))
        for j in range(len(grid[names[b]]))
    }
    while missing:
        tries = []
        for _ in range(30):
            a, i, b, j = next(iter(sorted(missing)))
            picks = [chance.randrange(len(grid[name])) for name in names]
            picks[a], picks[b] = i, j
            pairs = {(a, picks[a], b, picks[b]) for a, b in itertools.combinations(range(len(names)), 2)}
            tries.append((len(pairs & missing), picks, pairs))
        _, picks, pairs = max(tries, key=lambda each: each[0])
        missing -= pairs
        yield {name: grid[name][pick] for name, pick in zip(names, picks, strict=True)}


@ON_KERNELS
@pytest.mark.parametrize(
    "picked", list(pairwise(GRID, 0)), ids=lambda picked: f"{picked['place'][0]}-{picked['dtype']}"
)
def test_every_pair_of_parameters(where, picked, cpu_as_device):
    dtype, (heads, group) = picked["dtype"], picked["heads"]
    query_dtype = QUERY_DTYPES[dtype][picked["query"]]
    scales = picked["scales"] if dtype in (E4M3, E5M2) else None
    lengths = [1 + (queries or 1) for queries in (picked["queries"] or [1] * 4)]
    lengths = [
        length + before for length, before in zip(lengths, (20, 0, 34, min(picked["block"], 40) - 1), strict=True)
    ]
    names = ("place", "layer_layout", "size", "block", "window", "softcap", "sinks")
    case = make_case(
        lengths,
        picked["queries"],
        dtype=dtype,
        query_dtype=query_dtype,
        heads=heads,
        group=group,
        scales=scales,
        value_size=picked["size"] - 4,
        **{name: picked[name] for name in names},
    )
    multiprocessors, capability = picked["split"]
    check(where, case, multiprocessors=multiprocessors, capability=capability, state=cpu_as_device)


@ON_KERNELS
@pytest.mark.parametrize("before", [0, 1, 3, 4, 5, 37, 130])
@pytest.mark.parametrize("queries", [[0], [1], [0, 1, 0], [1, 2, 3], [7, 0, 12], [40, 1, 33]])
def test_any_number_of_queries(where, queries, before, cpu_as_device):
    """Whole prompts, chunks at the end of cached tokens, and sequences that have no turn."""
    check(where, make_case([before + n for n in queries], queries), state=cpu_as_device)


@ON_KERNELS
def test_more_sequences_than_are_looked_at_at_once(where, cpu_as_device):
    queries = [(7 * i) % 3 for i in range(150)]
    case = make_case([n + i % 5 for i, n in enumerate(queries)], queries, heads=1, group=1, size=4)
    check(where, case, state=cpu_as_device)


@ON_KERNELS
@pytest.mark.parametrize("key_size, value_size", [(20, 7), (9, 20), (16, 16), (24, 1), (1, 24)])
@pytest.mark.parametrize("place", [("flash", "NHD"), ("paged", "NHD"), ("mla", "NHD")], ids=str)
def test_keys_and_values_of_different_sizes(where, place, key_size, value_size, cpu_as_device):
    """For latents, V is a part of K, whichever is larger."""
    if place[0] == "mla":
        key_size, value_size = max(key_size, value_size), min(key_size, value_size)
    case = make_case([9, 40], [3, 1], place=place, size=24, key_size=key_size, value_size=value_size)
    check(where, case, state=cpu_as_device)


@ON_KERNELS
@pytest.mark.parametrize(
    "dtype, query_dtype, value_size",
    [(BF16, BF16, 512), (FP32, FP32, 512), (E4M3, BF16, 512), (INT8, BF16, 512), (BF16, BF16, 576), (INT8, BF16, 576)],
    ids=str,
)
def test_latents_of_deepseek(where, dtype, query_dtype, value_size, cpu_as_device):
    """V is a part of the latent or all of it: whether rows have scales of their own matters there, no other dtype."""
    case = make_case(
        [70, 5],
        [1, 3],
        ("mla", "NHD"),
        "packed",
        dtype,
        query_dtype,
        group=40,
        size=576,
        value_size=value_size,
        block=64,
    )
    check(where, case, state=cpu_as_device)


@ON_KERNELS
@pytest.mark.parametrize("extra", [{}, {"window": 200}, {"softcap": 5.0}, {"sinks": True}])
@pytest.mark.parametrize("queries", [[1, 1], [30, 3]])
def test_long_sequences_are_split_and_merged(where, queries, extra, cpu_as_device):
    """Splits that some queries, or all, do not see merge to nothing."""
    case = make_case([300, 3], queries, heads=1, group=2, size=16, block=16, **extra)
    for multiprocessors in (1, 1000):
        check(where, case, multiprocessors=multiprocessors, state=cpu_as_device)


@ON_KERNELS
@pytest.mark.parametrize("multiprocessors", [1, 1000])
def test_strided_queries_and_outputs(where, multiprocessors, cpu_as_device):
    case = make_case([40, 9], [1, 4])
    fused = torch.randn(6, 5, 50)  # [heads, tokens, ...]: the head outside, as models hand it in
    case["query"] = fused[:, :, 5:25].transpose(0, 1)
    memory = torch.full((5, 8, 30), float("nan"), device="cuda" if where == "cuda" else "cpu")
    got, _ = attend(where, case, out=memory[:, 1:7, 2:22], multiprocessors=multiprocessors, state=cpu_as_device)
    torch.testing.assert_close(got, expected(case), rtol=2e-4, atol=2e-4)
    memory[:, 1:7, 2:22] = float("nan")
    assert memory.isnan().all()


@ON_KERNELS
def test_no_queries_at_all(where, cpu_as_device):
    case = make_case([4, 5], [0, 0])
    assert attend(where, case, state=cpu_as_device)[0].shape == (0, 6, 20)
    case = {**case, "block_tables": case["block_tables"][:0], "seq_lens": case["seq_lens"][:0]}
    for query_lens in (case["query_lens"][:0], None):
        got, _ = attend(where, {**case, "query_lens": query_lens}, state=cpu_as_device)
        assert got.shape == (0, 6, 20)


def test_without_triton_the_reference_answers(monkeypatch):
    monkeypatch.setattr(token_ops_cuda, "_has_triton", lambda: False)
    case = make_case([40, 9], [1, 4], dtype=E4M3, query_dtype=BF16, scales="head", window=7, sinks=True)
    case["block_tables"] = case["block_tables"].clamp(max=1)  # the reference reads what is then masked
    out = torch.zeros(5, 6, 20, dtype=BF16)
    attend_as_on_a_device({**case, "scale": 0.3, "sliding_window": 7}, out, "clean")
    assert torch.equal(out, expected({**case, "scale": 0.3}))
    case["block_tables"][0, 1] = HUGE
    with pytest.raises(ValueError, match="block_tables must name blocks"):
        attend_as_on_a_device({**case, "scale": 0.3}, out, "clean")
