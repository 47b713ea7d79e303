"""Attention in Triton by lengths, bounds and block ids that may be wrong."""

import pytest
import torch
from support.attention_cases import HUGE, attend, attend_as_on_a_device, check, expected, make_case
from support.kernel_calls import ON_KERNELS

from kvpage.ops import reference


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


@ON_KERNELS
@pytest.mark.parametrize("multiprocessors", [1, 1000])
def test_rows_of_padding_read_nothing(where, multiprocessors, cpu_as_device):
    """A graph's bucket has a row for each sequence that it may hold: those without one have length 0."""
    case = make_case([300, 1, 40, 5], None, block=4, heads=1, group=2)
    want = expected(case)
    case |= {"max_seq_len": 300, "max_query_len": 1}
    case["seq_lens"] = torch.tensor([300, 1, 0, 0])
    case["block_tables"][2:] = HUGE
    got, reported = attend(where, case, multiprocessors=multiprocessors, state=cpu_as_device)
    assert not reported and (got[2:] == 0).all()
    torch.testing.assert_close(got[:2], want[:2], rtol=2e-4, atol=2e-4)
