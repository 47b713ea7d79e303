"""Attention over blocks against its reference: every kernel of this machine, every layout, poison all around."""

import functools
import itertools

import numpy as np
import pytest
import torch
from support.cache_rows import split_kv

from kvpage import _C, CacheLayout, ops
from kvpage.ops import reference

BLOCK = 4
NAN = float("nan")
PAIRS = ["avx512bf16", "pairs_model"]  # kernels that multiply bf16 in pairs, whose subnormal numbers count as zeros


@pytest.fixture(params=_C.attention_kernels(), autouse=True)
def kernel(request, monkeypatch):
    """Each test runs with each kernel, over two threads."""
    monkeypatch.setattr(_C, "paged_attention", functools.partial(_C.paged_attention, kernel=request.param))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield request.param
    torch.set_num_threads(before)


def make_layout(heads=2, size=20, dtype=torch.float32, block=BLOCK, backend="flash", kv_layout="NHD", layer="separate"):
    return CacheLayout(block, heads, size, dtype, backend, kv_layout, layer)


def make_case(seq_lens, query_lens, layout, group=3, key_size=None, value_size=None, window=None, dtype=None):
    """Random queries, and a cache that is NaN wherever no visible token lies; unused table entries are huge."""
    key_size, value_size = key_size or layout.head_size, value_size or layout.head_size
    width = max((-(-n // layout.block_size) for n in seq_lens), default=0) + 1
    num_blocks = width * len(seq_lens) + 1
    cache = layout.allocate(num_blocks, 2, torch.device("cpu"))[1].fill_(NAN)
    key_cache, value_cache = split_kv(layout, cache)
    tables = torch.full((len(seq_lens), width), 2**31 - 1, dtype=torch.int32)
    free = torch.randperm(num_blocks).tolist()
    for table, length, queries in zip(tables, seq_lens, query_lens, strict=True):
        first = max(0, length - queries - window + 1) if window else 0
        for token in range(first, length):
            block, offset = divmod(token, layout.block_size)
            if table[block] == 2**31 - 1:
                table[block] = free.pop()
            key_cache[table[block], offset, :, :key_size] = torch.randn(layout.num_kv_heads, key_size).to(layout.dtype)
            value_cache[table[block], offset, :, :value_size] = torch.randn(layout.num_kv_heads, value_size).to(
                layout.dtype
            )
    query = torch.randn(sum(query_lens), layout.num_kv_heads * group, key_size).to(dtype or layout.dtype)
    return {
        "query": query,
        "cache": cache,
        "block_tables": tables,
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int64),
        "query_lens": torch.tensor(query_lens, dtype=torch.int64),
        "layout": layout,
        "value_size": value_size,
        "sliding_window": window,
    }


def expected(case):
    """The reference on a cache without NaN (it multiplies what is masked by zero), and tables without huge ids."""
    num_blocks = case["cache"].shape[case["layout"].block_dim]
    clean = {"cache": case["cache"].nan_to_num(0.0), "block_tables": case["block_tables"].clamp(max=num_blocks - 1)}
    return reference.paged_attention(**{**case, **clean})


def check(case):
    got = ops.paged_attention(**case)
    want = expected(case)
    assert got.dtype == case["query"].dtype and got.shape == want.shape
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[got.dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance / 4)
    return got


@pytest.mark.parametrize(
    "backend, kv_layout, layer",
    list(itertools.product(("flash", "flashinfer"), ("NHD", "HND"), ("separate", "packed"))),
)
def test_decoding_in_every_layout(backend, kv_layout, layer):
    torch.manual_seed(0)
    lengths = [1, BLOCK - 1, BLOCK, BLOCK + 1, 31, 32, 33, 70]
    layout = make_layout(backend=backend, kv_layout=kv_layout, layer=layer)
    check(make_case(lengths, [1] * len(lengths), layout))


@pytest.mark.parametrize("queries", [[], [0], [0, 1, 0], [1, 2, 3], [7, 0, 12], [40, 1, 33]])
def test_any_number_of_queries(queries):
    """Whole prompts, chunks at the end of cached tokens, and sequences that have no turn."""
    torch.manual_seed(1)
    for before in (0, 1, BLOCK - 1, BLOCK, 37):
        check(make_case([before + n for n in queries], queries, make_layout()))


@pytest.mark.parametrize("size", [1, 3, 4, 8, 15, 16, 17, 31, 33, 64, 80, 100, 128, 160])
def test_any_head_size(size):
    torch.manual_seed(2)
    check(make_case([9, 40], [2, 1], make_layout(size=size)))


@pytest.mark.parametrize("heads, group", [(1, 1), (3, 1), (1, 5), (2, 8), (2, 33), (9, 12)])
def test_any_number_of_heads(heads, group):
    torch.manual_seed(3)
    check(make_case([9, 40, 5], [2, 1, 5], make_layout(heads=heads, size=16), group=group))


@pytest.mark.parametrize("key_size, value_size", [(20, 7), (9, 20), (16, 16), (24, 1)])
def test_keys_and_values_of_different_sizes(key_size, value_size):
    torch.manual_seed(4)
    check(make_case([9, 40], [3, 1], make_layout(size=24), key_size=key_size, value_size=value_size))


@pytest.mark.parametrize("block", [1, 3, 16, 32, 64, 100])
def test_any_block_size(block):
    torch.manual_seed(5)
    check(make_case([1, block - 1, block, block + 1, 2 * block + 1], [1, 0, 1, 1, 2], make_layout(block=block)))


@pytest.mark.parametrize("window", [1, 2, BLOCK, 5, 33, 1000])
def test_sliding_window(window):
    """What lies before the window of the first query is NaN, and its blocks are no longer in the table."""
    torch.manual_seed(6)
    check(make_case([1, 4, 50, 90, 64], [1, 3, 1, 40, 9], make_layout(), window=window))


@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_softcap(softcap):
    torch.manual_seed(7)
    case = make_case([40, 9], [1, 9], make_layout())
    check({**case, "softcap": softcap, "scale": 3.0})
    check({**case, "softcap": softcap, "scale": 1e-3})


def test_sinks():
    torch.manual_seed(8)
    case = make_case([40, 9, 1], [1, 9, 1], make_layout(), window=20)
    plain = check(case)
    sinks = torch.randn(6) * 5
    sinks[0], sinks[1] = -float("inf"), 100.0
    got = check({**case, "sinks": sinks})
    torch.testing.assert_close(got[:, 0], plain[:, 0])  # a logit of -inf takes nothing
    assert got[:, 1].abs().max() < 1e-6  # a large one takes all
    check({**case, "sinks": sinks.bfloat16(), "softcap": 3.0})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("query_dtype", ["cache", torch.float32])
def test_half_precision_is_as_good_as_torch(dtype, query_dtype, kernel):
    """fp32 arithmetic on half-precision values, fp32 out exact. Where weights are rounded to bf16, as torch does, the
    error is no larger than its: 1.46 times what rounding the output costs."""
    torch.manual_seed(9)
    layout = make_layout(size=64, dtype=dtype)
    case = make_case([50, 33], [1, 20], layout, dtype=dtype if query_dtype == "cache" else query_dtype)
    exact = expected({**case, "query": case["query"].float()})
    got = ops.paged_attention(**case)
    check(case)
    if query_dtype == torch.float32:
        torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-6)
    elif kernel in PAIRS and dtype == torch.bfloat16:
        assert (got.float() - exact).norm() <= 1.46 * (exact.to(dtype).float() - exact).norm()
    else:
        assert (got.float() - exact).abs().max() <= 1.01 * (exact.to(dtype).float() - exact).abs().max() + 1e-6


def flushed(numbers, kernel):
    """Numbers of bf16 as a kernel takes them."""
    is_subnormal = numbers.abs() < torch.finfo(torch.float32).tiny
    return numbers.masked_fill(is_subnormal, 0) if kernel in PAIRS and numbers.dtype != torch.float16 else numbers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_half_precision_number_is_read_and_written_exactly(dtype, kernel):
    """With one key the output is its value: all 65,536 bit patterns in, the same numbers out (NaN for NaN)."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    layout = make_layout(heads=64, size=1024, dtype=dtype, block=1)
    cache = torch.zeros(layout.shape(1), dtype=dtype)
    cache[1] = values.view(1, 1, 64, 1024)
    for query_dtype in (dtype, torch.float32):
        query = torch.zeros(1, 64, 1024, dtype=query_dtype)
        got = ops.paged_attention(query, cache, torch.zeros(1, 1, dtype=torch.int32), [1], layout)
        read = flushed(values, kernel) if query_dtype == dtype else values
        want = read.to(query_dtype).view(1, 64, 1024)
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.nan_to_num(0.5), want.nan_to_num(0.5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_are_rounded_as_torch_rounds(dtype, kernel):
    """Two keys of equal weight: their mean, exact in fp32, rounded to even, subnormals and overflow included."""
    torch.manual_seed(10)
    bits = torch.randint(0, 2**16, (2, 64 * 512), dtype=torch.int32).to(torch.int16)
    values = bits.view(dtype).nan_to_num(0.0, 0.0, 0.0)
    layout = make_layout(heads=64, size=512, dtype=dtype, block=2)
    cache = torch.zeros(layout.shape(1), dtype=dtype)
    cache[1] = values.view(1, 2, 64, 512)
    query = torch.zeros(1, 64, 512, dtype=dtype)
    got = ops.paged_attention(query, cache, torch.zeros(1, 1, dtype=torch.int32), [2], layout)
    a, b = flushed(values, kernel).float()
    total = a + b if dtype == torch.float16 else flushed(a + b, kernel)
    want = (total * 0.5).to(dtype).view(1, 64, 512)
    assert torch.equal(got, want)


@pytest.mark.parametrize("extra", [{}, {"sliding_window": 700}, {"softcap": 5.0}])
def test_queries_at_some_positions(extra):
    seq_lens = [70, 1, 33, 2, 300]
    at = [[0, 5, 6, 31, 32, 33, 69], [0], [32], [0, 1], sorted(torch.randperm(300)[:100].tolist())]
    case = make_case(seq_lens, seq_lens, make_layout())
    want = expected({**case, **extra})
    rows = torch.tensor([sum(seq_lens[:seq]) + position for seq, some in enumerate(at) for position in some])
    case |= {"query": case["query"][rows], "query_lens": torch.tensor([len(some) for some in at]), **extra}
    positions = torch.tensor([position for some in at for position in some])
    got = ops.paged_attention(**case, query_positions=positions)
    torch.testing.assert_close(got, want[rows], rtol=1e-5, atol=2.5e-6)


@pytest.mark.parametrize("extra", [{}, {"sliding_window": 7}])
def test_nothing_is_read_that_no_query_at_its_position_sees(extra):
    case = make_case([40], [4], make_layout())
    seen = make_case([33], [33], make_layout())
    first = 20 - 7 + 1 if extra else 0
    table = torch.full((1, 11), 2**31 - 1, dtype=torch.int32)
    table[:, first // BLOCK : 9] = seen["block_tables"][:, first // BLOCK : 9]
    some = {"cache": seen["cache"], "block_tables": table, "query_positions": torch.tensor([20, 21, 30, 32])}
    got = ops.paged_attention(**{**case, **some, **extra})
    want = expected({**seen, "query": case["query"][[0, 0]].repeat(17, 1, 1)[:33], **extra})
    torch.testing.assert_close(got[0], want[20], rtol=1e-5, atol=2.5e-6)
    assert got.isfinite().all()


@pytest.mark.parametrize("extra", [{}, {"sliding_window": 700}, {"softcap": 5.0}])
def test_one_long_sequence_is_split_and_merged(extra):
    torch.manual_seed(11)
    case = make_case([2500], [2], make_layout(heads=4, size=64, block=16))
    check({**case, **extra, "sinks": torch.randn(12)})


def test_many_tasks_over_threads():
    torch.manual_seed(12)
    lengths, queries = [1, 900, 300, 17, 512], [1, 3, 70, 17, 1]
    check(make_case(lengths, queries, make_layout(heads=4, size=64, block=16)))


def test_a_split_whose_keys_a_query_does_not_see():
    """The last keys of a long chunk are unseen by its first queries: their splits must merge to nothing."""
    torch.manual_seed(13)
    layout = make_layout(heads=1, size=256, block=16)
    check(make_case([1500], [1500], layout, group=1, window=300))


def test_large_scores_do_not_overflow():
    torch.manual_seed(14)
    case = make_case([40, 64], [1, 5], make_layout())
    check({**case, "scale": 1e4})
    check({**case, "scale": -1e4})
    check({**case, "scale": 0.0})


def test_infinite_values_of_unseen_tokens_stay_out():
    """Within a chunk, a token's key and value reach no query before it, be they infinite or NaN."""
    torch.manual_seed(15)
    case = make_case([40], [9], make_layout())
    want = ops.paged_attention(**case)
    key_cache, value_cache = split_kv(case["layout"], case["cache"])
    block = case["block_tables"][0, 39 // BLOCK]
    key_cache[block, 39 % BLOCK], value_cache[block, 39 % BLOCK] = NAN, float("inf")
    got = ops.paged_attention(**case)
    assert torch.equal(got[:8], want[:8]) and got[8].isnan().all()


def test_strided_queries_and_outputs():
    torch.manual_seed(16)
    case = make_case([40, 9], [1, 4], make_layout())
    fused = torch.randn(6, 5, 50)  # [heads, tokens, ...]: the head outside, as models hand it in
    query = fused[:, :, 5:25].transpose(0, 1)
    memory = torch.full((5, 8, 30), NAN)
    out = memory[:, 1:7, 2:22]
    got = ops.paged_attention(**{**case, "query": query}, out=out)
    want = expected({**case, "query": query})
    assert got is out
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)
    out.fill_(NAN)
    assert memory.isnan().all()


def test_lengths_may_be_lists_and_default_to_one_query():
    torch.manual_seed(17)
    case = make_case([40, 9], [1, 1], make_layout())
    want = check(case)
    del case["query_lens"]
    assert torch.equal(ops.paged_attention(**{**case, "seq_lens": [40, 9]}), want)
    assert torch.equal(ops.paged_attention(**{**case, "seq_lens": torch.tensor([40, 9], dtype=torch.int32)}), want)


def bad_calls():
    huge = torch.full((2, 11), 2**31 - 1, dtype=torch.int32)
    query = torch.zeros(5, 6, 20)
    yield "block_tables", {"block_tables": huge}
    yield "block_tables.1..3.", {"seq_lens": [9, 40]}  # the second table holds blocks for 9 tokens only
    yield "seq_lens must be in", {"seq_lens": [45, 9]}
    yield "seq_lens must be in", {"seq_lens": [-1, 9]}
    yield "query_lens must be in", {"query_lens": [6, 0]}
    yield r"query_lens.1. must be in .0, seq_lens = 2", {"seq_lens": [40, 2]}
    yield "sum up to the 5 rows", {"query_lens": [1, 3]}
    yield "one entry for each", {"query_lens": [5]}
    yield "on the host", {"seq_lens": torch.tensor([40, 9], device="meta")}
    yield "multiple of 2, got 5", {"query": query[:, :5]}
    yield "multiple of 2, got 0", {"query": query[:, :0]}
    yield "query.dtype", {"query": query.half()}
    yield "query must be", {"query": query[0]}
    yield "head size", {"query": torch.zeros(5, 6, 21)}
    yield "contiguous", {"query": torch.zeros(5, 6, 40)[..., ::2]}
    yield "must be on", {"query": query.to("meta")}
    yield "query must be .num_tokens, num_heads, size., got shape", {"query": torch.tensor(1.0)}
    for size in (21, 0, -1):
        yield f"value_size must be in .1, 20., got {size}", {"value_size": size}
    yield "out.shape", {"value_size": 19}
    yield "out.dtype", {"out": torch.zeros(5, 6, 20, dtype=torch.float64)}
    yield "contiguous", {"out": torch.zeros(5, 6, 40)[..., ::2]}
    yield "sliding_window", {"sliding_window": 0}
    yield "softcap", {"softcap": 0.0}
    for softcap in (NAN, float("inf"), -1.0, 5e-324, 1e-45, 1.17e-38, 3.5e38, 1e300, 2**2000):
        yield "softcap must be positive and a normal number of fp32, got", {"softcap": softcap}
    for scale in (NAN, float("inf"), -float("inf"), 3.5e38, -1e300, 2**2000):
        yield "scale must be a finite number of fp32, got", {"scale": scale}
    memory = torch.zeros(600)
    for strides in ((0, 20, 1), (120, 0, 1), (100, 20, 1), (120, 19, 1)):
        yield "out must have memory for each of its elements", {"out": memory.as_strided((5, 6, 20), strides)}
    yield "out must not be a view that torch negates", {"out": torch._neg_view(torch.zeros(5, 6, 20))}
    yield "sinks.shape", {"sinks": torch.zeros(2)}
    yield "sinks must be on", {"sinks": torch.zeros(6, device="meta")}
    yield "cache.shape", {"layout": make_layout(size=24)}
    positions = torch.tensor([39, 2, 3, 7, 8])
    for at, wrong in ((0, 40), (0, -1), (2, 2), (4, 9)):
        changed = positions.clone()
        changed[at] = wrong
        yield f"query_positions must ascend within .0, .*got {wrong}", {"query_positions": changed}
    yield "query_positions.dtype", {"query_positions": positions.int()}
    yield "query_positions.shape", {"query_positions": positions[:4]}


def odd_calls():
    for name in ("query", "cache", "block_tables", "sinks", "out"):
        yield f"{name} must be a torch.Tensor, got list", {name: [[1.0]]}
    for name in ("query", "cache", "block_tables"):
        yield f"{name} must be a torch.Tensor, got NoneType", {name: None}
    yield "layout must be a CacheLayout, got dict", {"layout": {}}
    yield "seq_lens must be integers, got 40", {"seq_lens": 40}
    yield "query_lens must be integers", {"query_lens": [1.0, 4.0]}
    for name in ("sliding_window", "value_size"):
        yield f"{name} must be an integer, got 2.0", {name: 2.0}
        yield f"{name} must be an integer, got '2'", {name: "2"}
    for name in ("scale", "softcap"):
        yield f"{name} must be a number, got '2'", {name: "2"}
        yield f"{name} must be a number, got 2j", {name: 2j}


@pytest.mark.parametrize("match, change", list(odd_calls()))
def test_what_is_of_another_type_is_named(match, change):
    case = make_case([40, 9], [1, 4], make_layout())
    out = torch.zeros(5, 6, 20)
    with pytest.raises(TypeError, match=match):
        ops.paged_attention(**{**case, "out": out, **change})
    assert not out.any()


def test_options_at_the_ends_of_their_ranges():
    case = make_case([40, 9], [1, 4], make_layout())
    fp32 = torch.finfo(torch.float32)
    for softcap in (fp32.tiny, 1e-30, 1e30):
        check({**case, "softcap": softcap})
    check({**case, "softcap": fp32.max, "scale": 1.0})
    plain = check(case)
    numbers = {"sliding_window": torch.tensor(1000), "value_size": torch.tensor(20), "softcap": None}
    assert torch.equal(ops.paged_attention(**case | numbers), plain)
    assert torch.equal(ops.paged_attention(**case, scale=np.float32(20**-0.5)), plain)


def test_views_that_torch_negates():
    torch.manual_seed(18)
    case = make_case([40, 9], [1, 4], make_layout())
    case["sinks"] = torch.randn(6)
    want = check(case)
    for name in ("query", "sinks", "block_tables", "seq_lens", "query_lens"):
        view = torch._neg_view(case[name].neg())
        assert view.is_neg()
        assert torch.equal(ops.paged_attention(**{**case, name: view}), want)
    with pytest.raises(ValueError, match="cache must not be a view that torch negates or conjugates"):
        ops.paged_attention(**case | {"cache": torch._neg_view(case["cache"])})


@pytest.mark.parametrize("match, change", list(bad_calls()))
def test_a_refused_call_writes_nothing(match, change):
    case = make_case([40, 9], [1, 4], make_layout())
    out = change.get("out", torch.zeros(5, 6, 20))
    with pytest.raises(ValueError, match=match):
        ops.paged_attention(**{**case, "out": out, **change})
    assert not out.any()


def test_other_dtypes_are_refused():
    layout = make_layout(dtype=torch.float64)
    cache = torch.zeros(layout.shape(1), dtype=torch.float64)
    with pytest.raises(ValueError, match="cache.dtype"):
        ops.paged_attention(torch.zeros(1, 2, 20), cache, torch.zeros(1, 1, dtype=torch.int32), [1], layout)


def test_an_unknown_kernel_is_refused(monkeypatch):
    case = make_case([4], [1], make_layout())
    monkeypatch.setattr(_C, "paged_attention", functools.partial(_C.paged_attention, kernel="none"))
    with pytest.raises(ValueError, match="kernel must be one that this machine has"):
        ops.paged_attention(**case)
