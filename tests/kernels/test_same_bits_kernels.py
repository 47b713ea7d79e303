"""Kernels whose rows have the same bits in every batch: products, attention in fixed splits, logarithms of softmax."""

import random

import pytest
import torch
from support.attention_cases import BF16, E4M3, FP16, FP32, INT8, make_case, on_cuda
from support.kernel_calls import INTERPRETED, ON_KERNELS, device_of
from support.seeds import seed_of

pytest.importorskip("triton")

from kvpage import ops
from kvpage.kernels import attention_launch, attention_plan
from kvpage.kernels.linear import TILE_BYTES, TILE_ROWS
from kvpage.layout.row_norm import RowNorm
from kvpage.ops import reference
from kvpage.ops.cuda import attention as attention_ops_cuda
from kvpage.ops.cuda.layers import (
    device_add_norm,
    device_gate,
    device_linear,
    device_log_softmax,
    device_rms_norm,
    device_rope,
)

DTYPES = pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
ROUNDING = {FP32: 2e-5, BF16: 1.6e-2, FP16: 2e-3}
SPLIT = 64
LENGTH = 150
EDGES = [0, 1, 2, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT, LENGTH]


@pytest.fixture(autouse=True)
def device(cpu_as_device, monkeypatch):
    """The CPU stands in for one. Splits are short."""
    monkeypatch.setattr(attention_plan, "FIXED_KEYS", SPLIT)
    monkeypatch.setattr(attention_launch, "_plans", attention_launch.PreparedKinds())
    return cpu_as_device


def same(one, other):
    """Compares bits."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


# --- products ---------------------------------------------------------------------------------------------------------


def check_product(where, rows, weight, bias):
    """Against the reference, and each of some rows against itself in other batches."""
    rows, weight = rows.to(device_of(where)), weight.to(device_of(where))
    bias = None if bias is None else bias.to(device_of(where))
    got = device_linear(rows, weight, bias)
    want = torch.nn.functional.linear(rows.double(), weight.double(), None if bias is None else bias.double())
    tolerance = ROUNDING[rows.dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance * rows.shape[-1] ** 0.5)
    for index in {0, len(rows) // 2, len(rows) - 1} if len(rows) else ():
        assert same(device_linear(rows[index], weight, bias), got[index])
        assert same(device_linear(rows[index:], weight, bias), got[index:])
        assert same(device_linear(rows[: index + 1], weight, bias), got[: index + 1])


@ON_KERNELS
@pytest.mark.parametrize("num_rows", [0, 1, TILE_ROWS - 1, TILE_ROWS, TILE_ROWS + 1, 3 * TILE_ROWS + 5])
@DTYPES
def test_a_row_of_a_product_is_its_own(where, dtype, num_rows):
    rng = random.Random(seed_of(num_rows))
    size = rng.choice([1, 8, TILE_BYTES // dtype.itemsize - 1, TILE_BYTES // dtype.itemsize, rng.randint(1, 300)])
    num_columns = rng.choice([1, 63, 64, 65, 130])
    weight, bias = torch.randn(num_columns, size).to(dtype), torch.randn(num_columns).to(dtype)
    wide = torch.randn(num_rows, size + 3).to(dtype)
    check_product(where, wide[:, :size], weight, None if rng.random() < 0.5 else bias)


@ON_KERNELS
def test_weights_that_lie_turned_or_apart(where):
    rows, weight = torch.randn(5, 40), torch.randn(40, 70)
    check_product(where, rows, weight.T, None)
    check_product(where, rows.T.contiguous().T, torch.randn(70, 90)[:, 3:83:2], torch.randn(70))
    many = torch.randn(2, 3, 40, device=device_of(where))
    got = device_linear(many.transpose(0, 1), weight.T.to(many.device), None)
    assert got.shape == (3, 2, 70) and same(got[1, 0], device_linear(many[0, 1], weight.T.to(many.device), None))


@ON_KERNELS
def test_columns_side_by_side_are_those_of_each_layer(where):
    """Weights of queries, keys and values are multiplied together, or one by one."""
    rows, weights = torch.randn(3, 70).to(device_of(where)), torch.randn(100, 70).to(device_of(where))
    parts = [device_linear(rows, part, None) for part in weights.split([48, 16, 36])]
    assert same(torch.cat(parts, 1), device_linear(rows, weights, None))


@ON_KERNELS
def test_products_take_no_other_operands(where):
    rows, weight = torch.randn(2, 8).to(device_of(where)), torch.randn(5, 8).to(device_of(where))
    for others in ((weight.half(), None), (weight[0], None), (weight[:, :7], None), (None, None), (weight, weight[0])):
        assert device_linear(rows, *others) is None
    assert device_linear(rows, weight, torch.randn(10).to(rows.device)[::2]) is None
    assert device_linear(rows[:, :0], weight[:, :0], None) is None


# --- logarithms of softmax --------------------------------------------------------------------------------------------


@ON_KERNELS
@pytest.mark.parametrize("num_columns", [1, 4095, 4096, 4097])
def test_logarithms_of_softmax(where, num_columns):
    rows = (torch.randn(3, num_columns) * 9).to(device_of(where))
    rows[0, : num_columns // 2] = -torch.inf
    got = device_log_softmax(rows)
    torch.testing.assert_close(got, rows.log_softmax(-1), rtol=1e-5, atol=1e-5)
    assert all(same(device_log_softmax(rows[index : index + 1])[0], got[index]) for index in range(3))
    assert device_log_softmax(rows[:0]).shape == (0, num_columns)
    assert same(device_log_softmax(rows.t().contiguous().t()), got)  # whatever its strides
    assert device_log_softmax(rows.double()) is None and device_log_softmax(rows[0]) is None


# --- attention --------------------------------------------------------------------------------------------------------


def attend(where, case, seqs, bounds, **limits):
    """The rows [begin, end) of some sequences of a case whose queries are all tokens: one tensor each."""
    at = on_cuda(case) if where == "cuda" else case
    first = [0, *torch.as_tensor(case["seq_lens"]).cumsum(0).tolist()]
    cache = ops.BoundCache(at["cache"], case["layout"], at["scales"])
    cache.is_cuda = True
    query = torch.cat(
        [at["query"][first[seq] + begin : first[seq] + end] for seq, (begin, end) in zip(seqs, bounds, strict=True)]
    )
    lengths = torch.tensor([end for _, end in bounds], device=query.device)
    counts = torch.tensor([end - begin for begin, end in bounds], device=query.device)
    counts = None if (counts == 1).all() else counts
    tables = at["block_tables"][list(seqs)].contiguous()
    sequences = ops.Sequences(cache, len(query), tables, lengths, counts, **limits)
    sequences.num_decodes = next((i for i, (begin, end) in enumerate(bounds) if end - begin != 1), len(bounds))
    sequences.fix_order()
    attention = ops.Attention(
        query.shape[2] ** -0.5, case["sliding_window"], case["softcap"], at["sinks"], case["value_size"]
    )
    out = query.new_full((*query.shape[:2], case["value_size"]), float("nan"))
    attention_ops_cuda.attend(query, cache, sequences, attention, out)
    return [*torch.split(out, [end - begin for begin, end in bounds])]


def whole_case(lengths=(LENGTH, 70), **options):
    torch.manual_seed(seed_of(5))
    return make_case([*lengths], [*lengths], **{"heads": 1, "group": 2, "size": 16, "block": 16, **options})


OPTIONS = {
    "plain": {},
    "bf16": {"dtype": BF16, "size": 20},
    "fp16": {"dtype": FP16, "group": 5},
    "window": {"window": 40},
    "window, sinks, softcap": {"window": 70, "sinks": True, "softcap": 3.0},
    "sinks": {"sinks": True},
    "e4m3": {"dtype": E4M3, "query_dtype": BF16, "scales": "head"},
    "int8": {"dtype": INT8, "query_dtype": BF16},
    "blocks of 3": {"block": 3},
    "wide": {"size": 160, "heads": 2},
}
"""Options of cases."""


def portions(rng, length):
    """Bounds of portions of a sequence."""
    inner = sorted(rng.sample(range(1, length), min(length - 1, 3)))
    return [*zip([0, *inner], [*inner, length], strict=True)]


@ON_KERNELS
@pytest.mark.parametrize("name", OPTIONS)
def test_a_row_attends_alike_in_every_batch(where, name, device):
    """As a decode, alone or beside others, and in a portion with any border; with one program for all splits or
    several."""
    rng, case = random.Random(seed_of(len(name))), whole_case(**OPTIONS[name])
    if where != "cuda":
        device["facts"] = (1, *device["facts"][1:])  # one program for all of a tile's splits
    whole, other = attend(where, case, [0, 1], [(0, LENGTH), (0, 70)])
    want = reference.paged_attention(**{name: value for name, value in case.items() if name != "clean"} | clean(case))
    tolerance = ROUNDING[whole.dtype]
    torch.testing.assert_close(whole.cpu(), want[:LENGTH], rtol=tolerance, atol=tolerance)
    for multiprocessors in (1, 1000):
        if where != "cuda":
            device["facts"] = (multiprocessors, *device["facts"][1:])
        rows = [attend(where, case, [0], [bounds])[0] for bounds in portions(rng, LENGTH)]
        assert same(torch.cat(rows), whole)
        at = rng.choice(EDGES[:-1])
        decode, portion = attend(where, case, [0, 1], [(at, at + 1), (rng.randrange(60), 70)])
        assert same(decode[0], whole[at]) and same(portion, other[-len(portion) :])
        decodes = attend(where, case, [1, 0], [(69, 70), (LENGTH - 1, LENGTH)], max_seq_len=160)
        assert same(decodes[0][0], other[-1]) and same(decodes[1][0], whole[-1])


def clean(case):
    num_blocks = case["clean"].shape[case["layout"].block_dim]
    return {"cache": case["clean"], "block_tables": case["block_tables"].clamp(0, num_blocks - 1)}


@ON_KERNELS
def test_no_split_has_other_keys_where_more_is_computed(where, device):
    """Splits of many and of few sequences begin at the same keys: a plan's tiles and splits are of the sizes alone."""
    case = whole_case()
    query = case["query"]
    views = [attention_launch.Rows(view.rows, None) for view in case["layout"].views(case["cache"])]
    found = set()
    for num_seqs, longest, queries, num_sms in ((1, 150, 1, 1), (1, 99999, 1, 132), (64, 700, 1, 132), (3, 150, 50, 8)):
        lengths = torch.full((num_seqs,), longest)
        sequences = attention_launch.DeviceSequences(
            case["block_tables"], lengths, None, longest, queries, has_fixed_order=True
        )
        facts = attention_launch.Device(torch.zeros(1), num_sms, 90, 227 * 1024)
        rows = query[:1].expand(num_seqs * queries, -1, -1)
        plan = attention_launch.fixed_plan_of(rows, 16, *views, sequences, facts, False)
        options = ops.Attention(1.0, value_size=16)
        found.add((plan.tile, attention_launch.constants_of(plan, rows, *views, options, 90, "fixed")))
        assert plan.num_items in (plan.num_tiles, plan.num_tiles * -(-longest // SPLIT))
    assert len(found) == 1


# --- mutants ----------------------------------------------------------------------------------------------------------


def lengthened(plan_of, *args):
    """A plan whose tiles of keys follow from the number of queries, as those of a library do."""
    plan = plan_of(*args)
    return plan._replace(tile=plan.tile._replace(keys=16 if len(args[0]) < 10 else plan.tile.keys))


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter runs it")
def test_a_split_that_depends_on_the_batch_is_found(monkeypatch, device):
    plan_of = attention_launch.fixed_plan_of
    monkeypatch.setattr(attention_launch, "fixed_plan_of", lambda *args: lengthened(plan_of, *args))
    case = whole_case()
    (whole,) = attend("interpreter", case, [0], [(0, LENGTH)])
    rows = [attend("interpreter", case, [0], [(at, at + 1)])[0] for at in range(LENGTH - 9, LENGTH)]
    assert not same(torch.cat(rows), whole[-9:])


# --- rows of other kernels --------------------------------------------------------------------------------------------


def row_kernels():
    """Functions of rows, [n, 48] each."""
    weight, norm = torch.randn(48), RowNorm(torch.randn(48), 1e-6, 0.0, False)
    return {
        "norm": lambda x, y: [device_rms_norm(x, weight, 1e-6, 0.0, False)],
        "sum and norms": lambda x, y: device_add_norm(x, y, norm, norm),
        "gate": lambda x, y: [device_gate(x, y, "silu")],
        "rotation": lambda x, y: [
            part[0].transpose(0, 1) for part in device_rope(x[None, None], y[None, None], *turns(x))
        ],
    }


def turns(x):
    """Angles of tokens, as functions of their rows."""
    return x[None].cos(), x[None].sin()


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter runs them")
@pytest.mark.parametrize("name", ["norm", "sum and norms", "gate", "rotation"])
def test_other_kernels_of_layers_compute_each_row_by_itself(name):
    torch.manual_seed(seed_of(9))
    compute, (x, y) = row_kernels()[name], torch.randn(2, 9, 48)
    whole = compute(x, y)
    for begin, end in ((0, 1), (4, 5), (3, 9), (0, 8)):
        for part, of_all in zip(compute(x[begin:end].clone(), y[begin:end].clone()), whole, strict=True):
            assert same(part, of_all[begin:end])
