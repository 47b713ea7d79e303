"""Decodes that read shared keys once, against the reference: every grouping, dtype and option, poison all around.

They run on the device "interpreter" as test_attention_compile.py asks for.
"""

import itertools

import numpy as np
import pytest
import torch
from support.attention_cases import BF16, E4M3, E5M2, FP16, INT8, attend, check, expected, make_case
from support.kernel_calls import ON_KERNELS

from kvpage import ops
from kvpage.layout.shared_prefixes import PlanRow
from kvpage.ops.shared_prefixes import plan_into

BLOCK = 16
LENGTHS = [260, 257, 290, 130, 275, 1]
GROUPINGS = {  # {sequence: (an earlier one, tokens that are the same blocks)}
    "none": {},
    "one": {1: (0, 256)},
    "all": {1: (0, 256), 2: (0, 256), 3: (0, 128), 4: (0, 256)},
    "nested": {1: (0, 256), 2: (0, 128), 4: (2, 272)},
    "two groups": {2: (1, 128), 4: (0, 256)},
}
OPTIONS = {
    "plain": {},
    "all": {"window": 200, "softcap": 2.0, "sinks": True},
    "a window after the shared keys": {"window": 9},
    "a window that begins within them": {"window": 150},
    "sinks": {"sinks": True},
}
PAGED, MLA = ("paged", "NHD"), ("mla", "NHD")
KINDS = {
    "bf16": {"dtype": BF16, "size": 64},
    "fp16": {"dtype": FP16, "size": 46},
    "e4m3": {"dtype": E4M3, "query_dtype": BF16, "scales": "head"},
    "e5m2": {"dtype": E5M2, "query_dtype": FP16, "scales": "tensor"},
    "int8": {"dtype": INT8, "query_dtype": BF16},
    "int8, fp16": {"dtype": INT8, "query_dtype": FP16},
    "paged": {"place": PAGED, "heads": 2, "group": 3},
    "latents": {"place": MLA, "size": 40, "value_size": 32, "group": 4},
    "latents of many heads": {"place": MLA, "size": 40, "value_size": 32, "group": 40},  # a tile has one sequence
    "blocks of 3": {"block": 3},
    "blocks of 256": {"block": 256},
}
"""Options of cases."""


def shared_case(forks, lengths=LENGTHS, queries=None, **options):
    options = {"heads": 1, "group": 2, "size": 16, "block": BLOCK, **options}
    block = options["block"]
    forks = {seq: (parent, same // block * block) for seq, (parent, same) in forks.items()}
    case = make_case(lengths, queries, forks=forks, **options)
    count = len(lengths) if queries is None else next(seq for seq, each in enumerate(queries) if each != 1)
    tables, seq_lens = case["block_tables"][:count], case["seq_lens"][:count]
    case["shared"] = ops.shared_prefixes(tables, seq_lens, block, least_saved=1)
    return case


@ON_KERNELS
@pytest.mark.parametrize("grouping, options", [("none", "plain"), *itertools.product([*GROUPINGS][1:], OPTIONS)])
def test_every_grouping(where, grouping, options, cpu_as_device):
    case = shared_case(GROUPINGS[grouping], **OPTIONS[options])
    assert (case["shared"] is None) == (grouping == "none")
    check(where, case, state=cpu_as_device, multiprocessors=12)


@ON_KERNELS
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_cache(where, kind, cpu_as_device):
    case = shared_case(GROUPINGS["nested"], index=torch.int64, **KINDS[kind])
    assert case["shared"] is not None
    check(where, case, state=cpu_as_device, multiprocessors=1)


@ON_KERNELS
def test_groups_of_several_tiles_and_splits(where, cpu_as_device):
    """20 members of 2 heads, in tiles of 32 rows; their keys in splits of 256."""
    lengths = [700 + 3 * seq for seq in range(20)]
    forks = {seq: (0, 640) for seq in range(1, 20)} | {5: (4, 704)}
    case = shared_case(forks, lengths, window=680)
    check(where, case, state=cpu_as_device, multiprocessors=40)


@ON_KERNELS
def test_prompts_beside_decodes_that_share(where, cpu_as_device):
    case = shared_case({1: (0, 256), 2: (0, 256)}, [260, 257, 290, 40, 9], [1, 1, 1, 3, 9])
    assert case["shared"].shape == (9, 3)
    check(where, case, state=cpu_as_device)


@ON_KERNELS
def test_a_plan_of_a_graph(where, cpu_as_device):
    """Its rows lie apart. It may be of no group, and sequences may have no keys."""
    case = shared_case({1: (0, 256)}, [260, 257, 30, 0])
    room = torch.full((12, 9), -(2**40))
    nothing = torch.zeros(9, 4, dtype=torch.int64)
    plan_into(nothing.numpy(), np.zeros((0, 1), np.int32), np.zeros(0, np.int64), 1)
    for plan in (case["shared"], nothing):
        case["shared"] = room[2:11, :4].copy_(plan)
        case["max_seq_len"] = 5000
        check(where, case, state=cpu_as_device)


@ON_KERNELS
def test_positions_are_attended_from_apart(where, cpu_as_device):
    case = shared_case({1: (0, 256)}, [260, 257])
    case["query_positions"] = torch.tensor([259, 256])
    check(where, case, state=cpu_as_device)


@ON_KERNELS
def test_a_block_that_does_not_exist_is_reported(where, cpu_as_device):
    """Among shared keys, and among own ones."""
    for number in (3, 16):
        case = shared_case({1: (0, 256)}, [260, 257])
        case["block_tables"][:2, number] = 2**30
        assert attend(where, case, state=cpu_as_device)[1]


@ON_KERNELS
def test_members_read_by_the_table_of_the_first_one(where, cpu_as_device):
    """So the plan is in use: others' entries for shared keys are not looked at."""
    case = shared_case({1: (0, 256), 2: (0, 256)}, [260, 257, 290])
    want = expected(case)
    first = case["shared"][PlanRow.ORDER, 0].item()
    others = [seq for seq in range(3) if seq != first]
    case["block_tables"][others, : 256 // BLOCK] = 2**30
    got, reported = attend(where, case, state=cpu_as_device)
    assert not reported
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)
