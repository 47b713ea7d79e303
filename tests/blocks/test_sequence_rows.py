"""Steps by rows: the same as the calls by id, all or nothing, and never somebody else's sequence."""

import numpy as np
import pytest
import torch
from support.block_requests import B, computed
from support.insides import sequences_of

from kvpage import BlockManager, OutOfBlocks
from kvpage.blocks.config import HostPolicy


def seen(manager: BlockManager) -> object:
    """All that a call could have changed."""
    manager.check()
    states = [[*state[:5], state[5].tolist(), *state[6:]] for state in map(sequences_of(manager).state, manager.ids())]
    return manager.stats(), states, [manager.block_ids(seq_id).tolist() for seq_id in manager.ids()]


class Manager(BlockManager):
    """One that tells its sequences."""

    def ids(self) -> list[object]:
        return list(self._sequences.on_device)


@pytest.mark.parametrize("num_tokens", [1, B - 1, B, B + 1, 3 * B])
def test_a_step_by_rows_is_a_step_by_ids(num_tokens):
    one, other = BlockManager(64, B), BlockManager(64, B)
    prompts = {i: [i] * num_tokens for i in range(3)} | {9: [0] * num_tokens + [7]}
    for manager in (one, other):
        for seq_id, tokens in prompts.items():
            computed(manager, seq_id, tokens)
    ids, rows = list(prompts), one.rows.of(list(prompts))
    lengths = {seq_id: len(tokens) for seq_id, tokens in prompts.items()}
    for token in range(3 * B):
        one.rows.append(rows)
        other.append(ids)
        slots, tables, seq_lens = one.rows.inputs(rows)
        starts, ends = list(lengths.values()), [length + 1 for length in lengths.values()]
        assert slots.tolist() == other.slot_mappings(ids, starts, ends).tolist() and slots.dtype == np.int64
        assert tables.tolist() == other.block_tables(ids).tolist() and tables.dtype == np.int32
        assert seq_lens.tolist() == ends and seq_lens.dtype == np.int64
        assert one.rows.slots(rows, starts, ends).tolist() == slots.tolist()
        assert one.rows.tables(rows).tolist() == tables.tolist()
        one.rows.commit(rows, [token] * len(ids))
        for seq_id in ids:
            other.commit(seq_id, [token])
        lengths = dict(zip(ids, ends, strict=True))
        one.check()
        assert one.stats() == other.stats()


def test_no_rows():
    manager = BlockManager(4, B)
    rows = manager.rows.of([])
    manager.rows.append(rows)
    manager.rows.commit(rows, [])
    slots, tables, lengths = manager.rows.inputs(rows)
    assert slots.shape == lengths.shape == (0,) and tables.shape == (0, 0)


@pytest.mark.parametrize("leave", ["release", "swap_out"])
def test_an_old_row_never_names_another_sequence(leave):
    manager = Manager(16, B, num_host_blocks=8)
    computed(manager, "old", [1])
    old = manager.rows.of(["old"])
    getattr(manager, leave)("old")
    manager.take_moves()
    computed(manager, "new", [2])
    assert manager.rows.of(["new"])[0] != old[0]
    before = seen(manager)
    for call in (
        lambda: manager.rows.append(old),
        lambda: manager.rows.inputs(old),
        lambda: manager.rows.tables(old),
        lambda: manager.rows.slots(old, [0], [1]),
        lambda: manager.rows.commit(old, [1]),
    ):
        with pytest.raises(KeyError):
            call()
        assert seen(manager) == before


@pytest.mark.parametrize("wrong", [-1, 0, 7, 1 << 32 | 7, 3 << 32, -(1 << 63), (1 << 63) - 1])
def test_numbers_that_are_no_rows_are_refused(wrong):
    manager = Manager(16, B)
    computed(manager, 0, [1])
    before = seen(manager)
    for call in (manager.rows.append, manager.rows.inputs):
        with pytest.raises(KeyError):
            call(np.array([*manager.rows.of([0]), wrong], np.int64))
    assert seen(manager) == before


BAD_CALLS = {
    "one twice to append": (lambda m, rows: m.rows.append(rows[[0, 1, 0]]), "rows must be distinct"),
    "one twice to commit": (lambda m, rows: m.rows.commit(rows[[1, 1]], [1, 1]), "rows must be distinct"),
    "negative": (lambda m, rows: m.rows.append(rows, -1), "must not be negative, got -1"),
    "one negative": (lambda m, rows: m.rows.append(rows, [1, -2]), "must not be negative, got -2"),
    "too few counts": (lambda m, rows: m.rows.append(rows, [1]), "one for each of 2 rows"),
    "too few tokens": (lambda m, rows: m.rows.commit(rows, [1]), "one for each of 2 rows, got 1"),
    "no room": (lambda m, rows: m.rows.commit(rows, [1, 1]), "must not exceed the 6 tokens"),
    "a position": (lambda m, rows: m.rows.slots(rows, [0, 0], [6, 7]), r"must be in \[0, 5\], got \[0, 7\]"),
    "a token": (lambda m, rows: m.rows.commit(rows[:1], [1 << 31]), "must fit into 32 bits"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls_change_nothing(case):
    call, text = BAD_CALLS[case]
    manager = Manager(16, B)
    computed(manager, 0, list(range(B + 2)))
    manager.allocate(1, [9] * (B + 1))  # room that is not written
    before = seen(manager)
    with pytest.raises(ValueError, match=text):
        call(manager, manager.rows.of([0, 1])[::-1].copy() if case == "no room" else manager.rows.of([0, 1]))
    assert seen(manager) == before


def test_without_blocks_nothing_has_grown():
    manager = Manager(3, B, pin_quota=0)
    for seq_id in range(3):
        computed(manager, seq_id, [seq_id] * B)
    before = seen(manager)
    for count in (1, 10**9, 10**30):
        with pytest.raises(OutOfBlocks):
            manager.rows.append(manager.rows.of([0, 1, 2]), count)
        with pytest.raises(OutOfBlocks):
            manager.append([0, 1, 2], count)
    assert seen(manager) == before


def test_forks_are_copied_before_a_step_and_its_inputs_wait_for_the_copies():
    manager = BlockManager(16, B)
    computed(manager, 0, list(range(B + 1)))
    for fork in (1, 2):
        manager.fork(0, fork)
    shared = int(manager.block_ids(0)[1])
    rows = manager.rows.of([0, 1, 2])
    manager.rows.append(rows)
    for call in (manager.rows.inputs, manager.rows.tables):
        with pytest.raises(RuntimeError, match="do_moves must be called before a step"):
            call(rows)
    ((kind, copies),) = manager.take_moves()
    assert kind == "copy" and copies[:, 0].tolist() == [shared, shared]
    tables = manager.rows.inputs(rows).block_tables
    assert tables[:, 1].tolist() == [*copies[:, 1].tolist(), shared]


def test_what_a_step_caches_is_copied_at_once_where_the_policy_says_so():
    manager = BlockManager(8, B, num_host_blocks=4, host_policy=HostPolicy(0))
    computed(manager, 0, [1] * (B - 1))
    computed(manager, 1, [2] * (B - 1))
    rows = manager.rows.of([0, 1])
    manager.rows.append(rows)
    manager.rows.commit(rows, [1, 2])
    assert manager.stats().space.written_blocks == 2
    assert [kind for kind, _ in manager.take_moves()] == ["swap_out"]


def test_rows_of_many_generations():
    manager, seen_rows = BlockManager(8, B), set()
    for seq_id in range(1000):
        computed(manager, seq_id, [seq_id])
        seen_rows.update(manager.rows.of([seq_id]).tolist())
        manager.release(seq_id)
    assert len(seen_rows) == 1000


@pytest.mark.parametrize("wrong", [[1, 2.5], [1, True, None], ["1"], [[1]], [2**31], [2**64], [1.0]])
def test_lists_of_other_things_are_refused(wrong):
    manager = BlockManager(16, B)
    with pytest.raises((ValueError, TypeError)):
        manager.allocate(0, wrong)
    assert manager.allocate(0, [2**31 - 1, -(2**31), True]).num_cached_tokens == 0


@pytest.mark.parametrize("num_tokens", [0, 1, B, 2 * B - 1])
def test_a_fork_must_not_end_before_the_blocks_that_are_left(num_tokens: int) -> None:
    """What it then wrote would be in a block that is somebody else's by now."""
    manager = Manager(64, B, enable_prefix_caching=False)
    computed(manager, "a", [1] * (4 * B))
    rows = sequences_of(manager).rows
    (row,) = manager.rows.of(["a"])
    assert rows.release_before(row, 2 * B) == 2
    before, names = seen(manager), dict[object, int]()
    with pytest.raises(ValueError, match=rf"num_tokens must be in \[{2 * B}, {4 * B}\], got {num_tokens}"):
        rows.fork(names, "b", row, num_tokens)
    assert seen(manager) == before and names == {}
    child = rows.fork(names, "b", row, 2 * B)
    assert rows.state(child)[3] == 2 and names == {"b": child}
    rows.remove(names, "b")
    assert names == {}
    manager.check()


def test_counts_that_no_memory_holds_are_refused_as_blocks_are() -> None:
    manager = Manager(64, B)
    computed(manager, "a", [1] * B)
    before, rows = seen(manager), manager.rows.of(["a"])
    for count in (1 << 40, 1 << 59):
        with pytest.raises(OutOfBlocks):
            sequences_of(manager).rows.append(rows, count, [], None)
    with pytest.raises((ValueError, TypeError)):
        manager.append(["a"], torch.tensor([0, 1, 2]))
    assert seen(manager) == before


def test_a_last_token_whose_block_was_given_back_has_no_slot() -> None:
    """Its entry in the table may be another sequence's block by now."""
    manager = Manager(64, B, enable_prefix_caching=False)
    computed(manager, "a", [1] * (2 * B))
    rows = manager.rows.of(["a"])
    assert manager.release_before("a", 2 * B - 1) == 1
    assert manager.rows.inputs(rows).seq_lens.tolist() == [2 * B]
    assert manager.release_before("a", 2 * B) == 1
    with pytest.raises(ValueError, match="must have the blocks of their last tokens, row .* has given its own back"):
        manager.rows.inputs(rows)
    manager.rows.append(rows)
    slots, tables, _ = manager.rows.inputs(rows)
    assert slots.tolist() == [tables[0, 2] * B]
    manager.check()


@pytest.mark.parametrize("num_spare", [-1, 0, 3, 4, 2**63 - 1])
def test_a_sequence_that_goes_on_after_a_match_leaves_spare_blocks(num_spare: int) -> None:
    """It has 2 blocks of the match and 3 of its own, of 8; 2 are given back."""
    manager = Manager(8, B)
    computed(manager, "a", [1] * (2 * B))
    sequences, tree = sequences_of(manager), manager.tree
    match = tree.match([1] * (2 * B), num_left_over=0)
    before, numbers = seen(manager), (2, num_spare, 6 * B + 1, 4 * B, b"", False, False)

    def resume() -> list[int]:
        arguments = ("b", match, [], [], *numbers, [], None)
        return sequences.rows.resume(sequences.on_device, *arguments).tolist()

    if num_spare == 0 or num_spare == 3:
        block_ids = resume()
        assert len(block_ids) == 7 and block_ids[:2] == manager.block_ids("a").tolist() and block_ids[2:4] == [0, 0]
        assert sequences.num_written("b") == sequences.state("b").num_written == 4 * B
        assert match.is_released
    else:
        with pytest.raises(OutOfBlocks if num_spare > 0 else ValueError):
            resume()
        assert seen(manager) == before and not match.is_released
        tree.release(match)
    with pytest.raises(TypeError, match="match must be a Match"):
        sequences.rows.resume({}, "c", None, [], [], *numbers, [], None)


@pytest.mark.parametrize("num_left", [-1, 8, 2**63 - 1])
def test_more_blocks_given_back_than_there_are(num_left: int) -> None:
    manager = Manager(8, B)
    computed(manager, "a", [1] * (2 * B))
    sequences, match = sequences_of(manager), manager.tree.match([1] * (2 * B), num_left_over=0)
    before, numbers = seen(manager), (num_left, 0, 6 * B + 1, 4 * B, b"", False, False)
    with pytest.raises(ValueError, match=rf"num_left must be in \[0, 7\], got {num_left}"):
        sequences.rows.resume(sequences.on_device, "b", match, [], [], *numbers, [], None)
    assert seen(manager) == before and not match.is_released
    manager.tree.release(match)


@pytest.mark.parametrize("num_spare", [2**62, 2**63 - 1])
def test_more_spare_blocks_than_numbers_can_add_up(num_spare: int) -> None:
    manager = Manager(8, B)
    with pytest.raises(OutOfBlocks, match=f"needed {num_spare + 2} blocks, 8 are free"):
        manager.allocate("a", [1] * (B + 1), num_spare=num_spare)
    assert manager.num_free_blocks == 8
