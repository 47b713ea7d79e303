"""Attention over blocks in Triton against its reference: every layout, dtype and option, poison all around.

On the device "interpreter", which test_attention_compile.py asks for in a process of its own, the kernels run on the
CPU: behind the same function as on a GPU, with lengths "on the device", which is the CPU.
"""

import contextlib
import itertools
import os
import random

import pytest
import torch

from kvpage import CacheLayout, KVScales, ops
from kvpage.ops import reference
from kvpage.ops.cuda import attention as attention_ops_cuda
from kvpage.ops.cuda import rows as token_ops_cuda

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
ON_KERNELS = pytest.mark.parametrize("where", ["interpreter"] if INTERPRETED else [CUDA])
HUGE = 2**31 - 1
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8


@pytest.fixture(autouse=True)
def cpu_as_device(monkeypatch):
    """What the kernels' callers ask of a CUDA device, answered for the CPU. Gives the error word and the facts."""
    if not INTERPRETED:
        yield None
        return
    from kvpage.kernels import attention_launch

    state = {"error": torch.zeros(1, dtype=torch.int32), "facts": (4, 90)}
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(token_ops_cuda, "_error_word", lambda device: state["error"])
    monkeypatch.setattr(attention_ops_cuda, "_facts", lambda device: state["facts"])
    # The interpreter multiplies the bits of bf16.
    monkeypatch.setitem(attention_launch._COMPUTE, BF16, attention_launch._COMPUTE[FP32])
    yield state


OPTIONS = ("scale", "sliding_window", "softcap", "sinks", "query_positions")


def attend_as_on_a_device(case, out, cache="cache"):
    """What ops.paged_attention does for CUDA devices, on tensors of the CPU."""
    held = ops.BoundCache(case[cache], case["layout"], case["scales"])
    held.is_cuda = True
    query, bounds = case["query"], (case.get("max_query_len"), case.get("max_seq_len"))
    given = case["query_lens"]
    sequences = ops.Sequences(held, len(query), case["block_tables"], case["seq_lens"], given, *bounds)
    options = {name: case.get(name) for name in OPTIONS}
    options["scale"] = query.shape[2] ** -0.5 if options["scale"] is None else options["scale"]
    attention_ops_cuda.attend(query, held, sequences, ops.Attention(**options, value_size=out.shape[2]), out)


def attend(where, case, out=None, multiprocessors=4, capability=90, state=None):
    """The operation on `where`: (output, whether a block id was reported)."""
    case = {name: value for name, value in case.items() if name not in ("clean",)}
    if where == "cuda":
        moved = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in case.items()}
        if case["scales"] is not None:
            moved["scales"] = KVScales(case["scales"].key.cuda(), case["scales"].value.cuda())
        cache = case["layout"].allocate(case["cache"].shape[case["layout"].block_dim], 2, torch.device("cuda"))[1]
        cache.view(torch.uint8).copy_(case["cache"].view(torch.uint8))
        got = ops.paged_attention(**{**moved, "cache": cache}, out=None if out is None else out)
        try:
            ops.check_device()
        except ValueError as error:
            assert "block_tables held a block id out of range" in str(error)
            return got.cpu(), True
        return got.cpu(), False
    state["facts"] = (multiprocessors, capability)
    query, value_size = case["query"], case["value_size"]
    if out is None:
        out = query.new_full((*query.shape[:2], value_size), float("nan"))
    attend_as_on_a_device(case, out)
    reported = state["error"].item()
    state["error"].zero_()
    assert reported in (0, 2)
    return out, reported == 2


def make_case(
    seq_lens,
    query_lens,
    place=("flash", "NHD"),
    layer_layout="separate",
    dtype=FP32,
    query_dtype=None,
    heads=2,
    group=3,
    size=20,
    key_size=None,
    value_size=None,
    block=4,
    window=None,
    softcap=None,
    sinks=False,
    scales=None,
    index=torch.int32,
):
    """Random queries, and a cache that is NaN wherever no visible token lies; unused table entries are huge.

    "clean" is a cache of the same tokens with zeros in place of the rest. query_lens None: one each.
    """
    backend, kv_layout = place
    heads = 1 if backend == "mla" else heads
    layout = CacheLayout(block, heads, size, dtype, backend, kv_layout, layer_layout)
    key_size, value_size = key_size or size, value_size or size
    counts = [1] * len(seq_lens) if query_lens is None else query_lens
    width = max(-(-n // block) for n in seq_lens) + 1
    num_blocks = sum(-(-n // block) for n in seq_lens) + 2
    cache, clean = (layout.allocate(num_blocks, 2, torch.device("cpu"))[1] for _ in range(2))
    cache.view(torch.uint8).fill_(255)
    tables = torch.full((len(seq_lens), width), HUGE, dtype=torch.int32)
    free = torch.randperm(num_blocks).tolist()
    rows_dtype = dtype if not layout.is_quantized else FP32
    given = {None: None, "tensor": KVScales.of(0.5, 2.0)}.get(scales) if scales != "head" else None
    if scales == "head":
        given = KVScales(torch.rand(heads) + 0.5, torch.rand(heads) + 0.5)
    for table, length, queries in zip(tables, seq_lens, counts, strict=True):
        low = max(0, length - queries - window + 1) if window else 0
        tokens = torch.arange(low, length)
        for number in (tokens // block).unique().tolist():
            table[number] = free.pop()
        slots = table.long()[tokens // block] * block + tokens % block
        key = torch.randn(len(tokens), heads, key_size).to(rows_dtype)
        value = None if backend == "mla" else torch.randn(len(tokens), heads, value_size).to(rows_dtype)
        for each in (cache, clean):
            ops.reshape_and_cache(key, value, each, slots, layout, given)
    query_dtype = query_dtype or rows_dtype
    return {
        "query": torch.randn(sum(counts), heads * group, key_size).to(query_dtype),
        "cache": cache,
        "clean": clean,
        "block_tables": tables,
        "seq_lens": torch.tensor(seq_lens, dtype=index),
        "query_lens": None if query_lens is None else torch.tensor(query_lens, dtype=index),
        "layout": layout,
        "value_size": value_size,
        "sliding_window": window,
        "softcap": softcap,
        "sinks": torch.randn(heads * group) * 2 if sinks else None,
        "scales": given,
    }


def expected(case):
    num_blocks = case["clean"].shape[case["layout"].block_dim]
    skipped = ("clean", "max_query_len", "max_seq_len")
    clean = {name: value for name, value in case.items() if name not in skipped}
    return reference.paged_attention(
        **{**clean, "cache": case["clean"], "block_tables": case["block_tables"].clamp(0, num_blocks - 1)}
    )


def check(where, case, **how):
    got, reported = attend(where, case, **how)
    want = expected(case)
    assert not reported and got.dtype == case["query"].dtype and got.shape == want.shape
    tolerance = {FP32: 2e-5, BF16: 1.6e-2, FP16: 2e-3}[got.dtype]
    if where == "cuda" and got.dtype == FP32:
        tolerance = 2e-4
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    return got


GRID = {
    "place": [("flash", "NHD"), ("flash", "HND"), ("flashinfer", "NHD"), ("flashinfer", "HND"), ("paged", "NHD"),
              ("mla", "NHD")],
    "layer_layout": ["separate", "packed"],
    "dtypes": [(FP32, FP32), (BF16, BF16), (BF16, FP32), (FP16, FP16), (E4M3, BF16), (E4M3, FP32), (E5M2, FP16),
               (E5M2, BF16), (INT8, BF16), (INT8, FP16), (INT8, FP32)],
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
    "picked", list(pairwise(GRID, 0)), ids=lambda picked: f"{picked['place'][0]}-{picked['dtypes']}"
)
def test_every_pair_of_parameters(where, picked, cpu_as_device):
    (dtype, query_dtype), (heads, group) = picked["dtypes"], picked["heads"]
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
@pytest.mark.parametrize("dtype, query_dtype", [(BF16, BF16), (FP32, FP32), (E4M3, BF16), (INT8, BF16)], ids=str)
@pytest.mark.parametrize("value_size", [512, 576])
def test_latents_of_deepseek(where, dtype, query_dtype, value_size, cpu_as_device):
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
    case = make_case([500, 3], queries, heads=1, group=2, size=16, block=16, **extra)
    for multiprocessors in (1, 1000):
        check(where, case, multiprocessors=multiprocessors, state=cpu_as_device)


@ON_KERNELS
def test_extreme_scores_and_sinks(where, cpu_as_device):
    case = make_case([40, 64], [1, 5], sinks=True)
    for scale in (1e4, -1e4, 0.0):
        check(where, {**case, "scale": scale}, state=cpu_as_device)
    case["sinks"][0], case["sinks"][1] = -float("inf"), 100.0
    got = check(where, case, state=cpu_as_device)
    assert got[:, 1].abs().max() < 1e-6  # a large one takes all


@ON_KERNELS
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("query_dtype", [FP32, BF16, FP16], ids=str)
def test_every_8_bit_float_is_read_exactly(where, dtype, capability, query_dtype, cpu_as_device):
    """With one key the output is its value: all 256 in, the same numbers out (NaN for NaN)."""
    layout = CacheLayout(1, 4, 64, dtype)
    cache = torch.zeros(layout.shape(1), dtype=dtype)
    values = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(1, 1, 4, 64)
    cache[1] = values.view(dtype)
    case = {
        "query": torch.zeros(1, 4, 64, dtype=query_dtype),
        "cache": cache,
        "block_tables": torch.zeros(1, 1, dtype=torch.int32),
        "seq_lens": torch.ones(1, dtype=torch.int32),
        "query_lens": None,
        "layout": layout,
        "value_size": 64,
        "scales": None,
    }
    got, _ = attend(where, case, capability=capability, state=cpu_as_device)
    want = values.view(dtype).to(query_dtype).view(1, 4, 64)
    if where == "interpreter" and dtype == E4M3 and capability == 90:  # its own conversion makes numbers of NaN
        got, want = got[want.isfinite()], want[want.isfinite()]
        assert len(want) > 240
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(0.5), want.nan_to_num(0.5))


@ON_KERNELS
@pytest.mark.parametrize("magnitude", [1e-6, 1e-3, 1e3])
@pytest.mark.parametrize("query_dtype", [BF16, FP16], ids=str)
def test_token_scales_of_any_magnitude(where, magnitude, query_dtype, cpu_as_device):
    """Values of 1e-6 are subnormal in fp16, and their scales are below it."""
    case = make_case([40, 9], [1, 3], dtype=INT8, query_dtype=query_dtype)
    for cache in (case["cache"], case["clean"]):
        for view in case["layout"].views(cache):
            view.scales.mul_(magnitude)
    case["scale"] = 0.3 / magnitude
    got, _ = attend(where, case, state=cpu_as_device)
    exact = expected({**case, "query": case["query"].float()})
    step = {BF16: 2.0**-8, FP16: 2.0**-11}[query_dtype]
    assert ((got.float() - exact).abs() <= 4 * step * magnitude * 4 + 2.0**-24).all()


@ON_KERNELS
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_queries_beyond_the_range_of_fp16(where, size, cpu_as_device):
    case = make_case([40], [3], dtype=E4M3, query_dtype=BF16)
    case["query"] = (case["query"].float() * size).to(BF16)
    case["query"][:, 0] = 0.0
    check(where, {**case, "scale": 0.2 / size}, state=cpu_as_device)


@ON_KERNELS
@pytest.mark.parametrize("what", [float("nan"), float("inf")])
@pytest.mark.parametrize("queries", [9, 40])
def test_what_is_not_finite_reaches_only_those_who_see_it(where, what, queries, cpu_as_device):
    case = make_case([40], [queries])
    want, _ = attend(where, case, state=cpu_as_device)
    block = case["block_tables"][0, 38 // 4]
    for part in (0, 1):
        case["cache"][part, block, 38 % 4] = what
    got, _ = attend(where, case, state=cpu_as_device)
    assert torch.equal(got[:-2], want[:-2]) and got[-2:].isnan().all()


@ON_KERNELS
@pytest.mark.parametrize("bad", [-1, HUGE, 12, -(2**31)])
@pytest.mark.parametrize("queries", [1, 6])
@pytest.mark.parametrize("multiprocessors", [1, 1000])
def test_a_bad_block_is_reported_and_its_keys_are_not_there(where, bad, queries, multiprocessors, cpu_as_device):
    case = make_case([40, 5], [queries, 1], block=8, group=2)
    assert case["cache"].shape[1] <= 12
    key, value = (x[:, :, :20] for x in reference.gather_cache(
        case["clean"], case["block_tables"][:1].clamp(max=0 if bad == 0 else 7), torch.tensor([40]), case["layout"])
    )  # fmt: skip
    case["block_tables"][0, 2] = bad
    got, reported = attend(where, case, multiprocessors=multiprocessors, state=cpu_as_device)
    assert reported
    for row in range(queries):
        there = [i for i in range(40 - queries + row + 1) if i // 8 != 2]
        for head in range(4):
            scores = key[there, head // 2] @ case["query"][row, head] * 20**-0.5
            torch.testing.assert_close(
                got[row, head], scores.softmax(0) @ value[there, head // 2], rtol=2e-4, atol=2e-4
            )
    torch.testing.assert_close(got[queries:], expected(case)[queries:], rtol=2e-4, atol=2e-4)


@ON_KERNELS
@pytest.mark.parametrize("multiprocessors", [1, 1000])
def test_lengths_on_the_device_may_be_anything(where, multiprocessors, cpu_as_device):
    """Longer than the table: it ends there. No keys: zeros. Rows of no sequence stay as they are."""
    case = make_case([80, 4, 6], [2, 3, 2], block=4)
    case["seq_lens"] = torch.tensor([80, 0, 6], dtype=torch.int64)
    case["query_lens"] = torch.tensor([2, 3, -5], dtype=torch.int64)
    out = torch.full((7, 6, 20), 7.0, device="cuda" if where == "cuda" else "cpu")
    got, reported = attend(where, case, out=out, multiprocessors=multiprocessors, state=cpu_as_device)
    want = expected({**case, "seq_lens": torch.tensor([80, 4, 6]), "query_lens": torch.tensor([2, 3, 2])})
    assert not reported and (got[2:5] == 0).all() and (got[5:] == 7.0).all()
    torch.testing.assert_close(got[:2], want[:2], rtol=2e-4, atol=2e-4)
    case["seq_lens"][0] = 2**40
    case["block_tables"] = case["block_tables"][:, :20].contiguous()  # without the huge entry at the end
    got, reported = attend(where, case, out=out, multiprocessors=multiprocessors, state=cpu_as_device)
    assert reported
    torch.testing.assert_close(got[:2], want[:2], rtol=2e-4, atol=2e-4)
    case["query_lens"] = torch.tensor([5, 100, 100])  # more than there are rows
    attend(where, case, multiprocessors=multiprocessors, state=cpu_as_device)


@ON_KERNELS
@pytest.mark.parametrize("multiprocessors", [1, 1000])
def test_bounds_may_be_larger_than_what_is_there(where, multiprocessors, cpu_as_device):
    case = make_case([40, 9, 7], [1, 4, 2])
    for bounds in ((None, None), (7, 44), (5, 40), (100, 10**9)):
        bounded = {**case, "max_query_len": bounds[0], "max_seq_len": bounds[1]}
        check(where, bounded, multiprocessors=multiprocessors, state=cpu_as_device)


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


def at_positions(case, at):
    """The case, one whose queries are all tokens of its sequences, for those at some positions alone."""
    first = [0, *itertools.accumulate(case["seq_lens"].tolist())]
    rows = [begin + position for begin, some in zip(first, at, strict=False) for position in some]
    positions = torch.tensor([position for some in at for position in some])
    some = {"query": case["query"][rows], "query_positions": positions}
    return {**case, **some, "query_lens": torch.tensor([len(some) for some in at])}, rows


@ON_KERNELS
@pytest.mark.parametrize("split", [(1, 90), (1000, 80)])
@pytest.mark.parametrize("window", [None, 7, 64])
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (E4M3, BF16), (INT8, BF16)])
def test_queries_at_some_positions(where, cpu_as_device, split, window, dtypes):
    seq_lens = [70, 1, 33, 2, 300]
    at = [[0, 5, 6, 31, 32, 33, 69], [0], [], [0, 1], sorted(torch.randperm(300)[:100].tolist())]
    whole = make_case(seq_lens, seq_lens, dtype=dtypes[0], query_dtype=dtypes[1], window=window, sinks=True)
    case, rows = at_positions(whole, at)
    got = check(where, case, multiprocessors=split[0], capability=split[1], state=cpu_as_device)
    tolerance = {FP32: 2e-4, BF16: 1.6e-2}[got.dtype]
    torch.testing.assert_close(got, expected(whole)[rows], rtol=tolerance, atol=tolerance)


@ON_KERNELS
@pytest.mark.parametrize("window", [None, 7])
def test_one_query_each_at_some_position(where, cpu_as_device, window):
    whole = make_case([70, 1, 33], [70, 1, 33], window=window)
    case, _ = at_positions(whole, [[31], [0], [32]])
    check(where, {**case, "query_lens": None}, state=cpu_as_device)
    check(where, {**case, "max_query_len": 1}, state=cpu_as_device)


@ON_KERNELS
@pytest.mark.parametrize("queries", [None, [4]])
def test_nothing_is_read_behind_the_last_position(where, cpu_as_device, queries):
    """What lies there is NaN, in blocks that no table entry names."""
    seen = make_case([33], [33], window=7)
    at = [32] if queries is None else [20, 21, 30, 32]
    case, _ = at_positions(seen, [at])
    tables = torch.full((1, 12), HUGE, dtype=torch.int32)
    tables[:, : seen["block_tables"].shape[1]] = seen["block_tables"]
    got, reported = attend(where, {**case, "block_tables": tables, "seq_lens": torch.tensor([40])}, state=cpu_as_device)
    assert not reported
    torch.testing.assert_close(got, expected(case), rtol=2e-4, atol=2e-4)


@ON_KERNELS
def test_positions_behind_a_sequence_count_as_its_last(where, cpu_as_device):
    case, _ = at_positions(make_case([40, 9], [40, 9]), [[3, 39], [8]])
    beyond = {**case, "query_positions": torch.tensor([3, 2**40, 9])}
    got, reported = attend(where, beyond, state=cpu_as_device)
    assert not reported
    torch.testing.assert_close(got, expected(case), rtol=2e-4, atol=2e-4)


def bad_lengths():
    yield "seq_lens must be in .0, 44., got 45", {"seq_lens": [45, 9]}
    yield "seq_lens must be in .0, 44., got -1", {"seq_lens": [-1, 9]}
    yield r"query_lens.1. must be in .0, seq_lens? = 2", {"seq_lens": [40, 2], "query_lens": [1, 4]}
    yield "sum up to the 5 rows of query, got 4", {"query_lens": [1, 3]}
    yield "sum up to the 5 rows of query, got 2", {"query_lens": None}
    yield "one entry for each of 2 block tables, got 1", {"seq_lens": [5]}
    yield "one entry for each of 2 block tables, got 3", {"query_lens": torch.ones(3, dtype=torch.int32)}
    yield "seq_lens must be one row of int32 or int64", {"seq_lens": torch.ones(2)}
    yield "query_lens must be one row of int32 or int64", {"query_lens": torch.ones(4, dtype=torch.int32)[::2]}
    yield "on the host", {"seq_lens": torch.ones(2, dtype=torch.int32, device="meta")}
    yield "max_query_len must be at least 4, got 3", {"query_lens": [1, 4], "max_query_len": 3}
    yield "max_seq_len must be at least 40, got 39", {"seq_lens": [40, 9], "max_seq_len": 39}
    yield "max_seq_len must be at least 0, got -1", {"max_seq_len": -1}


@pytest.mark.parametrize("match, change", list(bad_lengths()), ids=str)
def test_bad_lengths_are_refused(match, change):
    """What is checked before a GPU is asked for anything; lengths on "the device" are those on the CPU."""
    case = {**make_case([40, 9], [1, 4]), **change}
    out = torch.zeros(5, 6, 20)
    with pytest.raises(ValueError, match=match):
        attend_as_on_a_device(case, out)
    assert not out.any()


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


def on_cuda(case):
    """The case on the device: arguments of ops.paged_attention."""
    moved = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in case.items() if name != "clean"}
    cache = case["layout"].allocate(case["cache"].shape[case["layout"].block_dim], 2, torch.device("cuda"))[1]
    cache.view(torch.uint8).copy_(case["cache"].view(torch.uint8))
    scales = case["scales"] and KVScales(case["scales"].key.cuda(), case["scales"].value.cuda())
    return {**moved, "cache": cache, "scales": scales}


@pytest.mark.gpu
@pytest.mark.parametrize("place", [("flash", "NHD"), ("flash", "HND"), ("paged", "NHD"), ("mla", "NHD")], ids=str)
@pytest.mark.parametrize("dtype, query_dtype", [(BF16, BF16), (FP16, FP16), (E4M3, BF16), (INT8, BF16)], ids=str)
@pytest.mark.parametrize("queries", [None, [1, 64, 9]])
def test_gpu_long_sequences(place, dtype, query_dtype, queries):
    """Many splits, whatever the layout; results of full size against fp32."""
    case = make_case([20_000, 70, 4097], queries, place, "packed", dtype, query_dtype, 2, 4, 128, block=16)
    check("cuda", case)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [46, 64, 80, 96, 112, 128, 192, 256, 576])
@pytest.mark.parametrize("dtype, query_dtype", [(FP32, FP32), (BF16, BF16), (BF16, FP32), (E5M2, FP16)], ids=str)
@pytest.mark.parametrize("queries", [None, [300, 1, 77]])
def test_gpu_head_sizes(size, dtype, query_dtype, queries):
    check("cuda", make_case([700, 5, 90], queries, dtype=dtype, query_dtype=query_dtype, size=size, block=16))


@pytest.mark.gpu
def test_gpu_lengths_from_the_host():
    case = on_cuda(make_case([700, 5, 90], [300, 1, 77], block=16))
    want = ops.paged_attention(**case)
    for kind in (list, torch.tensor):
        given = {name: kind(case[name].tolist()) for name in ("seq_lens", "query_lens")}
        assert torch.equal(ops.paged_attention(**{**case, **given}), want)
    mixed = ops.paged_attention(**{**case, "seq_lens": [700, 5, 90]})
    torch.testing.assert_close(mixed, want, rtol=2e-4, atol=2e-4)  # split otherwise: fewer keys are known to be there
    with pytest.raises(ValueError, match="sum up to"):
        ops.paged_attention(**{**case, "query_lens": [300, 1, 76]})


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [None, [3, 1, 40]])
def test_gpu_nothing_is_waited_for(queries):
    case = on_cuda(make_case([700, 5, 90], queries, block=16))
    host = {**case, "seq_lens": [700, 5, 90], "query_lens": queries}
    ops.paged_attention(**case), ops.paged_attention(**host)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.paged_attention(**case), ops.paged_attention(**host)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [None, [3, 1, 40]])
def test_gpu_a_graph_takes_the_lengths_of_its_replay(queries):
    case = make_case([700, 5, 90], queries, block=16, dtype=BF16, size=64)
    device = on_cuda(case)
    bounds = {"max_query_len": 1 if queries is None else 40, "max_seq_len": 700}
    out = ops.paged_attention(**device, **bounds)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.paged_attention(**device, **bounds, out=out)
    for lengths in ([700, 5, 90], [44, 3, 90], [650, 4, 41]):
        device["query"].normal_()
        device["seq_lens"].copy_(torch.tensor(lengths))
        if queries is not None:
            device["query_lens"].copy_(torch.tensor([lengths[0] % 3 + 1, 1, 40]))
        out.fill_(float("nan"))
        graph.replay()
        used = len(out) if queries is None else int(device["query_lens"].sum())
        now = {**case, "query": device["query"][:used].cpu(), "seq_lens": torch.tensor(lengths)}
        now["query_lens"] = None if queries is None else device["query_lens"].cpu()
        torch.testing.assert_close(out[:used].cpu(), expected(now), rtol=1.6e-2, atol=1.6e-2)
        assert out[used:].isnan().all()
    capture = torch.cuda.graph(torch.cuda.CUDAGraph())
    with pytest.raises(ValueError, match="must be on the device while a graph captures"), capture:
        ops.paged_attention(**{**device, "seq_lens": [700, 5, 90]})


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [None, [3, 1, 40]])
def test_gpu_addresses_beyond_32_bits(queries):
    """The blocks lie behind 2^31 elements of the cache."""
    case = on_cuda(make_case([70, 5, 90], queries, block=16, dtype=BF16, size=64))
    layout, num_blocks = case["layout"], 2**31 // (16 * 2 * 64) + 64
    if torch.cuda.mem_get_info()[0] < 2 * num_blocks * layout.block_bytes:
        pytest.skip("needs 16 GiB of the device's memory")
    want = ops.paged_attention(**case)
    used = case["cache"].shape[1]
    cache = torch.empty(layout.shape(num_blocks), dtype=BF16, device="cuda")
    cache[:, -used:] = case["cache"]
    tables = torch.where(case["block_tables"] == HUGE, HUGE, case["block_tables"] + num_blocks - used)
    assert torch.equal(ops.paged_attention(**{**case, "cache": cache, "block_tables": tables.to(torch.int32)}), want)


@pytest.mark.gpu
def test_gpu_the_serving_loop_reads_in_place(monkeypatch):
    """The same tokens as on the CPU, without a call of gather_cache."""
    transformers = pytest.importorskip("transformers")
    from kvpage import CacheConfig
    from kvpage.serving import Engine, EngineConfig, SamplingParams

    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    prompts = [torch.randint(97, (n,)).tolist() for n in (1, 16, 50, 33)]
    found = []
    for device in ("cpu", "cuda"):
        if device == "cuda":
            monkeypatch.delattr(ops, "gather_cache")
        engine = Engine.from_model(model.to(device), EngineConfig(CacheConfig(block_size=16, num_gpu_blocks=64)))
        found.append([output.token_ids for output in engine.generate(prompts, SamplingParams(max_tokens=12))])
    assert found[0] == found[1]
