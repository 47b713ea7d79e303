"""A query's result is that of itself alone, bit for bit: whatever is in the batch, which blocks are shared, and with
any number of threads. Its attention to shared blocks is compared with the reference."""

import functools

import pytest
import torch
from support.attention_cases import expected, make_case

from kvpage import _C, ops

BLOCK = 4
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
TILE, PART = 64, 512  # of keys, as csrc/attention/attention_kernel.h has them


@pytest.fixture(params=_C.attention_kernels(), autouse=True)
def kernel(request, monkeypatch):
    """Each test runs with each kernel; it sets its threads, and they are restored."""
    monkeypatch.setattr(_C, "paged_attention", functools.partial(_C.paged_attention, kernel=request.param))
    before = torch.get_num_threads()
    yield request.param
    torch.set_num_threads(before)


def share(case, common, groups=None):
    """Let each sequence begin with the blocks of its group's first one: whole blocks of `common` tokens."""
    count = common // case["layout"].block_size
    groups = [0] * len(case["block_tables"]) if groups is None else groups
    for seq, group in enumerate(groups):
        case["block_tables"][seq, :count] = case["block_tables"][groups.index(group), :count]
    return case


def attend(case, **changes):
    return ops.paged_attention(**{name: value for name, value in {**case, **changes}.items() if name != "clean"})


def some(case, seqs):
    """The case of some of its sequences, in this order, and the rows of its query."""
    counts = case["query_lens"].tolist()
    rows = [row for seq in seqs for row in range(sum(counts[:seq]), sum(counts[: seq + 1]))]
    fields = {name: case[name][seqs] for name in ("block_tables", "seq_lens", "query_lens")}
    return {**case, **fields, "query": case["query"][rows]}, rows


def check(case):
    """Compare with the reference, then each sequence alone, and a few in another order, over 1 to 3 threads."""
    torch.set_num_threads(2)
    got, want = attend(case), expected(case)
    tolerance = {FP32: 2e-5, BF16: 1.6e-2, FP16: 2e-3}[got.dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    seqs = list(range(len(case["seq_lens"])))
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert torch.equal(attend(case), got)
        for few in ([seq] for seq in seqs):
            part, rows = some(case, few)
            assert torch.equal(attend(part), got[rows])
        part, rows = some(case, seqs[::-2])
        assert torch.equal(attend(part), got[rows])
    return got


@pytest.mark.parametrize("common", [0, 1, TILE - BLOCK, TILE, TILE + BLOCK, PART + 2 * TILE])
def test_sequences_that_begin_with_the_same_blocks(common):
    torch.manual_seed(common)
    lengths = [common + own for own in (1, 3, BLOCK, BLOCK + 1, TILE + 9, 30, 2, 200)]
    check(share(make_case(lengths, [1] * 8, block=BLOCK), common))


@pytest.mark.parametrize("common", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * TILE + 1])
def test_portions_of_several_tokens_over_shared_blocks(common):
    torch.manual_seed(1)
    queries = [1, 17, 3, 40, 2]
    check(share(make_case([common + 8 + n for n in queries], queries, block=BLOCK), common))


def test_prefixes_within_prefixes_in_any_order():
    torch.manual_seed(2)
    case = make_case([300, 290, 301, 280, 299, 150], [1, 2, 1, 1, 5, 1], block=BLOCK)
    check(share(share(case, 140, [0, 1, 0, 1, 0, 1]), 260, [0, 1, 2, 1, 0, 3]))


@pytest.mark.parametrize("options", [
    {"window": 1}, {"window": 30}, {"window": 150}, {"softcap": 5.0}, {"sinks": True}, {"size": 64, "group": 8},
    {"group": 1, "size": 33}, {"key_size": 12, "value_size": 7}, {"dtype": BF16}, {"dtype": FP16},
    {"dtype": BF16, "query_dtype": FP32}, {"dtype": torch.int8}, {"dtype": torch.float8_e4m3fn, "scales": "head"},
    {"place": ("flash", "HND")}, {"place": ("paged", "NHD"), "size": 32}, {"place": ("mla", "NHD"), "value_size": 16},
], ids=str)  # fmt: skip
def test_options_over_shared_blocks(options):
    torch.manual_seed(3)
    case = make_case([200, 199, 140, 264, 131], [1, 2, 1, 9, 1], **{"block": BLOCK, **options})
    if "window" not in options:
        check(share(case, 128))
        return
    low = 200 - options["window"] - 9  # what lies before a window may name no block: share what all have
    for number in range(-(-max(low, 0) // BLOCK), 128 // BLOCK):
        if (case["block_tables"][:, number] < 2**31 - 1).all():
            case["block_tables"][:, number] = case["block_tables"][0, number]
    check(case)


def test_a_block_twice_in_a_table():
    torch.manual_seed(4)
    case = make_case([200, 198, 70], [1, 3, 1], block=BLOCK)
    case["block_tables"][:2, 20:36] = case["block_tables"][:2, :16]
    case["block_tables"][2, 5] = case["block_tables"][2, 4]
    check(share(case, 64))


def test_queries_at_positions_of_their_own():
    torch.manual_seed(5)
    lengths = [150, 149, 90]
    case = share(make_case(lengths, lengths, block=BLOCK), 64)
    whole = check(case)
    at = [[0, 3, 63, 64, 65, 149], [148], [62, 63, 89]]
    rows = [sum(lengths[:seq]) + position for seq, few in enumerate(at) for position in few]
    few = {"query": case["query"][rows], "query_lens": torch.tensor([6, 1, 3])}
    positions = torch.tensor([position for some in at for position in some])
    assert torch.equal(attend(case, **few, query_positions=positions), whole[rows])


@pytest.mark.parametrize("window", [None, 700])
def test_a_portion_has_the_results_of_its_tokens_one_by_one(window):
    """A token's result is the same from a whole prompt, from a portion and from decoding."""
    torch.manual_seed(6)
    length = PART + 2 * TILE + 5
    case = make_case([length], [length], size=32, block=16, window=window)
    torch.set_num_threads(2)
    whole = attend(case)
    for count in (1, 2, 7, 100):
        last = {"query": case["query"][-count:], "query_lens": [count]}
        assert torch.equal(attend(case, **last), whole[-count:])
    torch.testing.assert_close(whole, expected(case), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_long_sequences_are_split_where_their_keys_are(threads):
    """One sequence is cut into parts for the threads; beside many others it is not."""
    torch.manual_seed(7)
    case = make_case([2 * PART + 77, *[90] * 20], [1] * 21, heads=2, size=64, block=16)
    torch.set_num_threads(2)
    want = attend(case)
    torch.set_num_threads(threads)
    alone, _ = some(case, [0])
    assert torch.equal(attend(alone)[0], want[0]) and torch.equal(attend(case), want)
