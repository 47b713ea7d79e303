"""What a random life of BlockManager does not ask: priorities, who may find what, and what a refusal leaves."""

import tracemalloc

import pytest
from support.block_requests import B, compute, computed, num_found

from kvpage.blocks.manager import BlockManager

MINE, OTHERS = list(range(10, 10 + 2 * B)), list(range(50, 50 + 2 * B))


@pytest.mark.parametrize("num_swaps", [1, 2])
@pytest.mark.parametrize("num_forks", [0, 1])
def test_a_sequence_keeps_its_priority(num_swaps, num_forks):
    """Off the device and back, and in a fork: what it caches afterwards is evicted after what others cached later."""
    manager = BlockManager(6, B, num_host_blocks=4, share_parts=False)
    computed(manager, 1, MINE[: B + 1], priority=5)
    seq_id, num_cached = 1, B + 1
    for _ in range(num_forks):
        manager.fork(1, 2)
        manager.release(1)
        seq_id = 2
    for _ in range(num_swaps):
        manager.swap_out(seq_id)
        manager.tree.clear()  # nothing of it is left in the tree, with whatever priority
        num_cached = manager.swap_in(seq_id, MINE[: B + 1]).num_cached_tokens
        compute(manager, seq_id, MINE[: B + 1], num_cached)
    manager.append([seq_id], B - 1)
    compute(manager, seq_id, MINE, B + 1)
    manager.release(seq_id)
    computed(manager, 3, OTHERS)
    manager.release(3)
    assert num_found(manager, MINE) == num_found(manager, OTHERS) == 2 * B
    manager.tree.evict(2)
    assert num_found(manager, MINE) == 2 * B and num_found(manager, OTHERS) == 0


@pytest.mark.parametrize("first, second, stays", [({}, {"priority": 0}, 2), ({"priority": 1}, {}, 1), ({}, {}, 2)])
def test_priority_comes_before_the_last_use(first, second, stays):
    """Without a word it is the lowest."""
    manager = BlockManager(4, B)
    for seq_id, tokens, options in ((1, MINE[:B], first), (2, OTHERS[:B], second)):
        computed(manager, seq_id, tokens, **options)
        manager.release(seq_id)
    manager.tree.evict(1)
    assert [num_found(manager, tokens) > 0 for tokens in (MINE[:B], OTHERS[:B])] == [stays == 1, stays == 2]


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("share_parts", [True, False])
def test_parts_of_blocks_are_shared_where_both_flags_say_so(enable_prefix_caching, share_parts):
    manager = BlockManager(8, B, enable_prefix_caching, share_parts=share_parts)
    computed(manager, 1, MINE)
    num_cached = manager.allocate(2, MINE[: 2 * B - 1] + [0]).num_cached_tokens
    assert num_cached == (2 * B - 1 if enable_prefix_caching and share_parts else B if enable_prefix_caching else 0)
    assert len(manager.take_moves()) == (num_cached == 2 * B - 1)
    assert manager.share_parts == (enable_prefix_caching and share_parts)


@pytest.mark.parametrize("name", ["enable_prefix_caching", "share_parts"])
@pytest.mark.parametrize("value", [1, None, "no"])
def test_flags_are_true_or_false(name, value):
    with pytest.raises((TypeError, ValueError), match=f"{name} must be True or False, got"):
        BlockManager(4, B, **{name: value})


def test_a_part_whose_block_is_needed_is_not_shared():
    """All four blocks are needed: that of the part, too, which is evicted instead of copied."""
    manager = BlockManager(4, B)
    computed(manager, 1, MINE[:B])
    manager.release(1)
    given = manager.allocate(2, MINE[: B - 1] + [0] * (3 * B + 1))
    assert given.num_cached_tokens == 0 and len(manager.take_moves()) == 0 and len(set(given.block_ids.tolist())) == 4
    assert manager.stats().hit_tokens == 0 and manager.tree.num_matches == 1
    manager.check()


def test_a_query_is_counted_with_what_it_found():
    manager = BlockManager(8, B)
    computed(manager, 1, MINE)
    manager.allocate(2, MINE[: 2 * B - 1] + [0, 0])
    stats = manager.stats()
    assert (stats.query_tokens, stats.hit_tokens) == (4 * B + 1, 2 * B - 1)
    assert (stats.space.device_hit_tokens, stats.space.part_hit_tokens) == (B, B - 1)
    assert (stats.num_sequences, stats.num_blocks, stats.num_free_blocks) == (2, 8, 4)


def test_a_fork_begins_at_one_token_and_not_before_what_was_given_back():
    manager = BlockManager(8, B, enable_prefix_caching=False)
    computed(manager, 1, MINE)
    with pytest.raises(ValueError, match=r"num_tokens must be in \[1, 8\], got 0"):
        manager.fork(1, 2, 0)
    assert manager.first_forkable(1) == 1
    manager.fork(1, 2, 1)
    manager.release(2)
    assert manager.release_before(1, B) == 1 and manager.first_forkable(1) == B
    with pytest.raises(ValueError, match=r"num_tokens must be in \[4, 8\], got 3"):
        manager.fork(1, 2, B - 1)
    manager.fork(1, 2, B)
    manager.check()


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("num_written", [0, 1, B, B + 1, 2 * B, 3 * B - 1])
@pytest.mark.parametrize("num_left", [0, 1])
def test_only_what_was_written_goes_to_the_host(enable_prefix_caching, num_written, num_left):
    """Not what the tree has, not what a window has left, and not the room for what is yet to come."""
    manager = BlockManager(8, B, enable_prefix_caching, num_host_blocks=8, share_parts=False)
    tokens = list(range(3 * B))
    block_ids = manager.allocate(1, tokens).block_ids.tolist()
    compute(manager, 1, tokens[:num_written])
    num_left = manager.release_before(1, min(num_left * B, num_written))
    assert num_left == 0 or not enable_prefix_caching
    begin = num_written // B if enable_prefix_caching else num_left
    own = block_ids[begin : -(-num_written // B)]
    manager.swap_out(1)
    moved = [pair for move in manager.take_moves() for pair in move.pairs.tolist()]
    assert [device for device, _ in moved] == own and manager.space.host_pool.num_free == 8 - len(own)
    manager.check()
    given = manager.swap_in(1, tokens)
    assert given.num_cached_tokens == num_written and len(given.block_ids) == 3
    back = [pair for move in manager.take_moves() for pair in move.pairs.tolist()]
    assert [host for host, _ in back] == [host for _, host in moved]
    assert [device for _, device in back] == given.block_ids.tolist()[begin : begin + len(own)]
    manager.check()


def test_sequences_that_have_ended_leave_no_memory():
    manager = BlockManager(4, B, num_host_blocks=4)

    def live(count: int) -> None:
        for seq_id in range(count):
            given = manager.allocate(seq_id, MINE[: B + 1])
            compute(manager, seq_id, MINE[: B + 1], given.num_cached_tokens)
            if seq_id % 2:
                manager.swap_out(seq_id)
                manager.swap_in(seq_id, MINE[: B + 1])
            if seq_id % 3 == 0:
                manager.swap_out(seq_id)
            manager.release(seq_id)
            manager.take_moves()

    live(50)
    tracemalloc.start()
    live(50)
    before, _ = tracemalloc.get_traced_memory()
    live(500)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 32 << 10


@pytest.mark.parametrize("num_more", [0, 1])
def test_whole_blocks_come_back_to_their_last_token(num_more):
    manager = BlockManager(6, B, num_host_blocks=4, share_parts=False)
    computed(manager, 1, MINE)
    manager.swap_out(1)
    assert manager.swap_in(1, MINE + [0] * num_more).num_cached_tokens == 2 * B
    manager.check()


def test_a_sequence_that_comes_back_computes_a_token_of_what_others_have_cached():
    manager = BlockManager(6, B, num_host_blocks=4, share_parts=False)
    computed(manager, 1, MINE[: B + 1])
    manager.swap_out(1)
    computed(manager, 2, MINE)
    assert manager.swap_in(1, MINE).num_cached_tokens == B + 1
    manager.check()


def test_a_sequence_that_comes_back_finds_what_others_have_cached():
    """More than it had: nothing of its own is copied back then."""
    manager = BlockManager(8, B, num_host_blocks=4, share_parts=False)
    computed(manager, 1, MINE[: B + 1])
    manager.swap_out(1)
    computed(manager, 2, MINE)
    given = manager.swap_in(1, MINE + [0])
    assert given.num_cached_tokens == 2 * B and len(given.block_ids) == 3 and len(manager.take_moves()) == 0
    manager.check()


def test_hits_of_both_tiers_are_counted():
    manager = BlockManager(4, B, num_host_blocks=4, share_parts=False)
    computed(manager, 1, MINE)
    manager.release(1)
    manager.tree.demote(1)
    manager.allocate(2, MINE + [0])
    space = manager.stats().space
    assert (space.device_hit_tokens, space.host_hit_tokens) == (B, B) and manager.stats().hit_tokens == 2 * B


@pytest.mark.parametrize("leak", ["device", "host", "reference"])
def test_check_finds_blocks_that_nobody_has(leak):
    manager = BlockManager(4, B, num_host_blocks=4)
    manager.allocate(1, MINE[:1])
    manager.check()
    if leak == "reference":
        manager.pool.share(manager.block_ids(1))
    else:
        (manager.pool if leak == "device" else manager.space.host_pool).allocate(1)
    with pytest.raises(RuntimeError):
        manager.check()


def test_the_name_of_a_sequence_that_is_off_the_device_is_in_use():
    manager = BlockManager(8, B, num_host_blocks=4)
    for seq_id in (1, 2):
        manager.allocate(seq_id, MINE[: B + seq_id])
        compute(manager, seq_id, MINE[: B + seq_id], B * (seq_id > 1) + 1 * (seq_id > 1))
    manager.swap_out(1)
    for call in (lambda: manager.allocate(1, OTHERS), lambda: manager.fork(2, 1)):
        with pytest.raises(ValueError, match="seq_id must not be in use, 1 is"):
            call()
    assert [seq_id in manager for seq_id in (1, 2, 3)] == [True, True, False]
    manager.check()


@pytest.mark.parametrize("num_tokens", [1, B - 1, B, B + 1, 2 * B - 1, 2 * B])
def test_only_a_block_that_was_begun_is_copied_for_a_fork(num_tokens):
    manager = BlockManager(12, B, share_parts=False)
    computed(manager, 1, MINE[:num_tokens])
    before = manager.block_ids(1).tolist()
    manager.append([1])
    assert len(manager.take_moves()) == 0
    manager.give_back_room(1)
    manager.fork(1, 2)
    for seq_id in (1, 2):
        manager.append([seq_id])
    moves = [pair for move in manager.take_moves() for pair in move.pairs.tolist()]
    assert len(moves) == (num_tokens % B > 0) and all(src == before[-1] for src, _ in moves)
    assert manager.block_ids(2).tolist()[: num_tokens // B] == before[: num_tokens // B]
    assert manager.block_ids(1)[-1] != manager.block_ids(2)[-1]
    manager.check()
    for seq_id in (1, 2):
        manager.append([seq_id], 2 * B)
    assert len(manager.take_moves()) == 0
    manager.check()


def test_how_much_is_in_use():
    assert BlockManager(0, B).usage == 0.0
    manager = BlockManager(4, B)
    assert manager.usage == 0.0 and manager.has_room(4) is True and manager.has_room(5) is False
    manager.allocate(1, MINE[:B])
    assert manager.usage == 0.25 and manager.has_room(3) and not manager.has_room(4)
    compute(manager, 1, MINE[:B])
    manager.release(1)
    assert manager.usage == 0.0 and manager.has_room(4), "what is cached can be handed out"


def test_a_sequence_without_a_block_gets_its_first():
    manager = BlockManager(4, B)
    manager.allocate(1, MINE[:1])
    manager.give_back_room(1)
    assert len(manager.block_ids(1)) == 0
    manager.append([1])
    assert len(manager.slot_mapping(1, 0, 1)) == 1 and manager.num_free_blocks == 3
    manager.check()
