"""Plans of shared prefixes against a naive search over all groups."""

import random

import numpy as np
import pytest
import torch

from kvpage import ops
from kvpage.layout.shared_prefixes import GRANULE, MAX_GROUPS, PlanRow, max_groups
from kvpage.ops.shared_prefixes import plan_into

HUGE = 2**31 - 1


def tables_of(parents, block_size):
    """Block tables and lengths. parents: of each sequence (an earlier one, tokens in the same blocks, its length)."""
    width = max(-(-length // block_size) for *_, length in parents) + 1
    tables = torch.full((len(parents), width), HUGE, dtype=torch.int32)
    number = 0
    for table, (parent, num_same, length) in zip(tables, parents, strict=True):
        first = min(num_same, length) // block_size
        table[:first] = tables[parent, :first]
        count = -(-length // block_size) - first
        table[first : first + count] = torch.arange(number, number + count)
        number += count
    return tables, [length for *_, length in parents]


def random_parents(chance, num_seqs):
    made = []
    for seq in range(num_seqs):
        parent = chance.randrange(seq) if seq else 0
        length = chance.choice([0, 1, 127, 128, 129, 257, 400, chance.randrange(900)])
        most = made[parent][2] if seq else 0
        made.append((parent, chance.choice([0, most, chance.randrange(most + 1)]), length))
    return made


def prefix(tables, seq, depth, block_size):
    return tuple(tables[seq, : -(-depth // block_size)].tolist())


def together(tables, lengths, members, depth, block_size):
    """Sets of two members or more that share `depth` keys."""
    found = {}
    for seq in members:
        if lengths[seq] > depth:
            found.setdefault(prefix(tables, seq, depth, block_size), []).append(seq)
    return [each for each in found.values() if len(each) > 1]


def most_saved(tables, lengths, block_size, least):
    def worth(num_keys, members):
        saved = num_keys * (len(members) - 1)
        return saved if saved >= least else 0

    def inner(members, begin, depth):
        sets = together(tables, lengths, members, depth + GRANULE, block_size)
        return max(worth(depth - begin, members), sum(inner(each, begin, depth + GRANULE) for each in sets))

    def outer(members, depth):
        sets = together(tables, lengths, members, depth + GRANULE, block_size)
        own = worth(depth, members)
        nested = own and own + sum(inner(each, depth, depth + GRANULE) for each in sets)
        return max(nested, sum(outer(each, depth + GRANULE) for each in sets))

    return outer(range(len(lengths)), 0)


def check_plan(plan, tables, lengths, block_size, least):
    """Each sequence's groups and own keys must make up its keys, by the same blocks; return the keys saved."""
    row = {each: plan[each].tolist() for each in PlanRow}
    num_seqs, saved = len(lengths), 0
    assert sorted(row[PlanRow.ORDER]) == list(range(num_seqs))
    members = {}
    for seq in range(num_seqs):
        assert row[PlanRow.ORDER][row[PlanRow.RANK][seq]] == seq
        begin = 0
        for level in (PlanRow.OUTER_GROUP, PlanRow.INNER_GROUP):
            group = row[level][seq]
            if group < 0:
                continue
            assert row[PlanRow.KEY_BEGIN][group] == begin and (level == PlanRow.OUTER_GROUP) == (begin == 0)
            begin = row[PlanRow.KEY_END][group]
            members.setdefault(group, []).append(seq)
        assert row[PlanRow.OWN_BEGIN][seq] == begin < max(lengths[seq], 1) and begin % GRANULE == 0
    for group in range(num_seqs):
        begin, end, first, count = (
            row[each][group] for each in (PlanRow.KEY_BEGIN, PlanRow.KEY_END, PlanRow.GROUP_FIRST, PlanRow.GROUP_COUNT)
        )
        if group not in members:
            assert begin == end == first == count == 0
            continue
        assert group < max_groups(num_seqs) and count > 1
        assert sorted(row[PlanRow.ORDER][first : first + count]) == members[group]
        assert len({prefix(tables, seq, end, block_size) for seq in members[group]}) == 1
        assert (end - begin) * (count - 1) >= least
        saved += (end - begin) * (count - 1)
    return saved


@pytest.mark.parametrize("block_size", [1, 3, 16, 128, 256])
@pytest.mark.parametrize("num_seqs", [0, 1, 2, 3, 8, 25])
def test_the_groups_that_save_the_most(block_size, num_seqs):
    chance = random.Random(100 * block_size + num_seqs)
    for least in (1, 300):
        tables, lengths = tables_of(random_parents(chance, num_seqs) or [(0, 0, 0)], block_size)
        tables, lengths = tables[:num_seqs], lengths[:num_seqs]
        plan = ops.shared_prefixes(tables, lengths, block_size, least_saved=least)
        most = most_saved(tables, lengths, block_size, least)
        if plan is None:
            assert most == 0
        else:
            saved = check_plan(plan, tables, lengths, block_size, least)
            assert saved == most or (plan[PlanRow.GROUP_COUNT] > 0).sum() == max_groups(num_seqs)


def test_a_system_prompt_and_chats():
    """Two levels; a third one is left out."""
    parents = [(0, 0, 700), *[(0, 256, 700)] * 3, (0, 512, 700), (1, 512, 700), (5, 640, 700)]
    tables, lengths = tables_of(parents, 16)
    plan = ops.shared_prefixes(tables, lengths, 16, least_saved=1)
    columns = [plan[each, :3].tolist() for each in (PlanRow.GROUP_COUNT, PlanRow.KEY_BEGIN, PlanRow.KEY_END)]
    groups = set(zip(*columns, strict=True))
    assert groups == {(7, 0, 256), (2, 256, 512), (3, 256, 512)}
    check_plan(plan, tables, lengths, 16, 1)


@pytest.mark.parametrize("length, shared", [(128, 0), (129, 128), (256, 128), (257, 256)])
def test_a_sequence_keeps_its_last_key(length, shared):
    tables, lengths = tables_of([(0, 0, 1000), (0, length, length)], 1)
    plan = ops.shared_prefixes(tables, lengths, 1, least_saved=1)
    assert (0 if plan is None else plan[PlanRow.OWN_BEGIN, 1].item()) == shared


def test_a_group_must_save_enough():
    tables, lengths = tables_of([(0, 0, 1100), *[(0, 1024, 1100)] * 2], 16)
    assert ops.shared_prefixes(tables, lengths, 16) is not None
    assert ops.shared_prefixes(tables[:2], lengths[:2], 16) is None
    assert ops.shared_prefixes(tables, lengths, 16, least_saved=2049) is None


def test_of_too_many_groups_the_best_are_left():
    """An inner group whose outer one is left out begins with the first key."""
    num_pairs = MAX_GROUPS + 20
    parents = [(0, 0, 300)]
    for pair in range(num_pairs):
        parents += [(0, 128, 1500), (len(parents), 256 + 16 * (pair % 9) * 8, 1500)]
    tables, lengths = tables_of(parents, 16)
    plan = ops.shared_prefixes(tables, lengths, 16, least_saved=1)
    assert (plan[PlanRow.GROUP_COUNT] > 0).sum() == MAX_GROUPS
    check_plan(plan, tables, lengths, 16, 1)
    tables, lengths = tables_of([(0, 0, 500), (0, 384, 500), (0, 128, 500)], 16)
    plan = ops.shared_prefixes(tables, lengths, 16, least_saved=1)  # room for one
    assert plan[PlanRow.OWN_BEGIN].tolist() in ([384, 384, 0], [128, 128, 128])
    check_plan(plan, tables, lengths, 16, 1)


def test_rows_of_padding_share_nothing():
    tables, lengths = tables_of([(0, 0, 400), (0, 384, 400)], 16)
    plan = np.full((len(PlanRow), 5), 77, np.int64)
    assert plan_into(plan, tables.numpy(), np.array(lengths), 16, 1) == 1
    check_plan(
        torch.from_numpy(plan),
        torch.cat([tables, tables[:0].new_zeros(3, tables.shape[1])]),
        [*lengths, 0, 0, 0],
        16,
        1,
    )
    assert plan_into(plan, tables[:0].numpy(), np.array(lengths[:0]), 16, 1) == 0
    check_plan(torch.from_numpy(plan), tables.new_zeros(5, 1), [0] * 5, 16, 1)


@pytest.mark.parametrize(
    "change, error, match",
    [
        ({"block_tables": torch.zeros(2, 3, dtype=torch.int64)}, ValueError, "block_tables must be int32"),
        ({"block_tables": torch.zeros(3, dtype=torch.int32)}, ValueError, "block_tables must be int32"),
        ({"block_tables": None}, TypeError, "block_tables"),
        ({"seq_lens": [1]}, ValueError, "seq_lens must have one entry for each of 2"),
        ({"seq_lens": [1, 49]}, ValueError, r"seq_lens must be in \[0, 48\]"),
        ({"block_size": 0}, ValueError, "block_size must be positive, got 0"),
        ({"least_saved": 0}, ValueError, "least_saved must be positive, got 0"),
        ({"least_saved": 1.5}, TypeError, "least_saved"),
    ],
)
def test_refusals(change, error, match):
    arguments = {"block_tables": torch.zeros(2, 3, dtype=torch.int32), "seq_lens": [1, 2], "block_size": 16}
    with pytest.raises(error, match=match):
        ops.shared_prefixes(**{**arguments, **change})


def test_too_few_rows_are_refused():
    with pytest.raises(ValueError, match="num_rows must be at least the 2 sequences, got 1"):
        plan_into(np.zeros((9, 1), np.int64), np.zeros((2, 1), np.int32), np.zeros(2, np.int64), 16)
