"""BlockManager: its promises one by one, and random lives beside a model of its slots."""

import numpy as np
import pytest
import torch
from support.block_requests import B, computed
from support.group_worlds import ALONE
from support.life import lived, total

from kvpage.blocks.manager import BlockManager


def test_random_lives_read_what_they_wrote():
    """Blocks are scarce. The long form is a battery."""
    figures = total(lived(ALONE, 500))
    expected = ("refused", "parts", "forked amid", "left_blocks", "decoded", "resumed", "swapped", "restored")
    assert min(figures[name] for name in (*expected, "host_hits", "written_out")) > 0, figures


@pytest.mark.parametrize("num_tokens", [1, B - 1, B, B + 1, 3 * B, 3 * B + 1])
def test_a_second_prompt_computes_at_least_one_token(num_tokens):
    manager, tokens = BlockManager(16, B), list(range(num_tokens))
    assert manager.allocate("first", tokens).num_cached_tokens == 0
    manager.commit("first", tokens)
    cached = manager.allocate("second", tokens).num_cached_tokens
    assert cached == (num_tokens - 1 if num_tokens % B == 0 else num_tokens // B * B)  # a part of the last block, too
    assert manager.block_ids("second")[: cached // B].tolist() == manager.block_ids("first")[: cached // B].tolist()
    assert [kind for kind, _ in manager.take_moves()] == ["copy"] * (num_tokens % B == 0)
    manager.check()


def test_nothing_uncommitted_is_found():
    manager, tokens = BlockManager(16, B), list(range(3 * B))
    manager.allocate("writer", tokens)
    assert manager.allocate("a", tokens).num_cached_tokens == 0
    manager.commit("writer", tokens[: 2 * B - 1])
    assert manager.allocate("b", tokens).num_cached_tokens == B
    manager.commit("writer", tokens[2 * B - 1 :])
    assert manager.allocate("c", tokens + [1]).num_cached_tokens == 3 * B


def test_fork_copies_the_shared_block_once_per_writer_but_one():
    manager, tokens = BlockManager(16, B), list(range(B + 1))
    computed(manager, 0, tokens)
    manager.fork(0, 1)
    manager.fork(0, 2)
    assert manager.stats().num_used_blocks == 2
    shared = int(manager.block_ids(0)[1])
    manager.append([0, 1, 2])
    ((kind, copies),) = manager.take_moves()
    assert kind == "copy" and copies.dtype == np.int64 and copies[:, 0].tolist() == [shared, shared]
    own = [int(manager.block_ids(seq_id)[1]) for seq_id in (0, 1, 2)]
    assert own == [*copies[:, 1].tolist(), shared] and len(set(own)) == 3
    manager.append([0, 1, 2])
    assert len(manager.take_moves()) == 0
    manager.check()


@pytest.mark.parametrize("count", [2, np.int64(2), np.int32(2), [np.int64(2)], np.array([2]), (2,)])
def test_append_takes_any_integers(count):
    manager = BlockManager(16, B)
    manager.allocate(0, [1] * B)
    manager.append([0], count)
    manager.append([0], 0)
    assert len(manager.block_ids(0)) == 2
    assert len(manager.slot_mapping(0, np.int32(B), np.int64(B + 2))) == 2
    with pytest.raises(ValueError, match="positions"):
        manager.slot_mapping(0, 0, B + 3)


def test_block_tables_and_slots_of_several():
    manager = BlockManager(64, B)
    for seq_id, num_tokens in enumerate((1, 3 * B + 1, B)):
        manager.allocate(seq_id, [seq_id] * num_tokens)
    tables = manager.block_tables([1, 0])
    assert tables.dtype == np.int32 and tables.shape == (2, 4)
    assert tables[0].tolist() == manager.block_ids(1).tolist() and tables[1, 0] == manager.block_ids(0)[0]
    slots = manager.slot_mappings([2, 0, 1], [1, 0, B - 1], [3, 0, B + 1])
    first, (a, b, *_) = int(manager.block_ids(2)[0]), manager.block_ids(1).tolist()
    assert slots.dtype == np.int64 and slots.tolist() == [first * B + 1, first * B + 2, a * B + B - 1, b * B]
    assert manager.block_tables([]).shape == (0, 0) and len(manager.slot_mappings([], [], [])) == 0


@pytest.mark.parametrize("num_tokens", [B - 1, B + 1])
def test_a_fork_ends_where_the_last_block_is_its_own(num_tokens):
    manager = BlockManager(16, B)
    computed(manager, 0, list(range(B)))
    before = manager.stats()
    with pytest.raises(ValueError, match=rf"num_tokens must be in \[4, 4\], got {num_tokens}"):
        manager.fork(0, 1, num_tokens)
    assert manager.stats() == before
    manager.check()


@pytest.mark.parametrize("ttl", ["1", [1.0], torch.tensor([1.0, 2.0])])
def test_a_pin_with_a_ttl_that_is_no_number_leaves_no_match(ttl):
    manager = BlockManager(8, 4, pin_quota=4)
    with pytest.raises(TypeError, match="ttl must be a number"):
        manager.space.pin([1, 2, 3, 4], ttl=ttl)
    assert manager.tree.num_matches == 0 and len(manager.space.pins) == 0


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("num_tokens", [1, B - 1, B, B + 1, 3 * B, 3 * B + 1])
def test_whole_blocks_that_are_cached_are_told_and_held_without_counting_as_hits(num_tokens, enable_prefix_caching):
    manager, tokens = BlockManager(16, B, enable_prefix_caching), list(range(num_tokens))
    computed(manager, 0, tokens)
    before, num_whole = manager.stats(), num_tokens // B * enable_prefix_caching
    assert manager.num_cached(tokens) == (num_tokens - 1) // B * B * enable_prefix_caching
    assert manager.num_cached([*tokens, 7]) == num_whole * B
    assert manager.num_cached([*tokens, 7], b"other") == 0
    held = manager.hold_cached(tokens)
    assert held.block_ids.tolist() == manager.block_ids(0)[:num_whole].tolist()
    manager.release(0)
    assert manager.stats().num_used_blocks == num_whole
    held.release()
    after = manager.stats()
    assert (after.query_tokens, after.space) == (before.query_tokens, before.space)
    assert after.num_used_blocks == 0
    manager.check()


def test_what_is_held_has_not_been_found_by_that():
    """Blocks that were found are written out to the host early."""
    manager, tokens = BlockManager(16, B, num_host_blocks=16), list(range(2 * B))
    computed(manager, 0, tokens)
    manager.hold_cached(tokens).release()
    for num_found, written in enumerate((0, 2)):
        match = manager.tree.match([*tokens, 7], is_hit=num_found > 0)
        assert len(manager.tree.write_out(match, 1)) == written
