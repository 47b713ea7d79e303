"""Attention in Triton of queries at some positions of their sequences."""

import pytest
import torch
from support.attention_cases import BF16, E4M3, FP32, HUGE, INT8, at_positions, attend, check, expected, make_case
from support.kernel_calls import ON_KERNELS


@ON_KERNELS
@pytest.mark.parametrize(
    "split, window, dtypes",
    [  # each pair of two of them
        ((1, 90), None, (FP32, FP32)),
        ((1000, 80), 7, (FP32, FP32)),
        ((1, 90), 64, (FP32, FP32)),
        ((1000, 80), None, (E4M3, BF16)),
        ((1, 90), 7, (E4M3, BF16)),
        ((1000, 80), 64, (E4M3, BF16)),
        ((1, 90), None, (INT8, BF16)),
        ((1000, 80), 7, (INT8, BF16)),
        ((1, 90), 64, (INT8, BF16)),
    ],
)
def test_queries_at_some_positions(where, cpu_as_device, split, window, dtypes):
    longest = 90 if dtypes[0] == FP32 and where == "interpreter" else 300  # small tiles: ten times as slow
    seq_lens = [70, 1, 33, 2, longest]
    at = [[0, 5, 6, 31, 32, 33, 69], [0], [], [0, 1], sorted(torch.randperm(longest)[: longest // 3].tolist())]
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
