"""Attention in Triton over extreme numbers: scores, 8-bit floats, scales, infinities and NaNs."""

import pytest
import torch
from support.attention_cases import BF16, E4M3, E5M2, FP16, FP32, INT8, attend, check, expected, make_case
from support.kernel_calls import ON_KERNELS

from kvpage import CacheLayout


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
