"""BlockManager with a host tier: checkpoints follow their blocks, and go to the host themselves."""

import pytest
from support.hybrid_requests import B, begin, make_moves, manager_of, prefill, serve

from kvpage.blocks.config import HostPolicy
from kvpage.blocks.load_or_compute import LoadOrCompute
from kvpage.checks.errors import OutOfSlots

TOKENS = list(range(1, 2 * B + 3))


def fill(manager, num_blocks, first=500):
    """Take that many blocks from the device for a moment."""
    manager.allocate("filler", range(first, first + num_blocks * B))
    make_moves(manager)
    manager.release("filler")


@pytest.mark.parametrize("after_hits", [None, 0, 1])
def test_a_checkpoint_is_found_when_its_blocks_are_on_the_host(after_hits):
    manager = manager_of(num_blocks=4, num_host_blocks=8, host_policy=HostPolicy(after_hits))
    serve(manager, TOKENS)
    fill(manager, 4)
    assert manager.tree.num_cached == 0 and manager.tree.num_host_cached >= 2
    assert begin(manager, 0, TOKENS) == len(TOKENS) - 1
    blocks, states = make_moves(manager)
    assert [move.kind for move in blocks] == ["swap_in", "copy"] and [move.kind for move in states] == ["copy"]
    manager.check()


def test_a_state_goes_to_the_host_and_back():
    manager = manager_of(num_slots=1, num_host_slots=1, num_host_blocks=8)
    begin(manager, 0, TOKENS)
    prefill(manager, 0, TOKENS, 0)
    manager.swap_out(0)
    assert make_moves(manager)[1][0].kind == "swap_out"
    begin(manager, 1, [7, 8])
    with pytest.raises(OutOfSlots):
        manager.swap_in(0, TOKENS)
    manager.check()
    manager.release(1)
    assert manager.swap_in(0, TOKENS).num_cached_tokens == len(TOKENS)
    assert make_moves(manager)[1][0].pairs.tolist() == [[0, 0]]
    manager.check()


def test_a_swap_without_room_changes_nothing():
    manager = manager_of(num_slots=2, num_host_slots=0, num_host_blocks=8)
    begin(manager, 0, TOKENS)
    prefill(manager, 0, TOKENS, 0)
    before = manager.stats()
    with pytest.raises(OutOfSlots):
        manager.swap_out(0)
    assert manager.stats() == before and not manager.is_swapped(0)
    manager.check()


def test_host_blocks_that_are_not_worth_loading_are_left():
    rule = LoadOrCompute(1000, B, bytes_per_second=1.0, tokens_per_second=1e9)
    manager = manager_of(num_blocks=4, num_host_blocks=8, rule=rule)
    rule.bytes_per_second, rule.tokens_per_second = None, None
    serve(manager, TOKENS, cache_at=[B - 1])
    fill(manager, 4)
    rule.bytes_per_second, rule.tokens_per_second = 1.0, 1e9
    reach = manager.explain(TOKENS).groups
    assert [str(group.ending) for group in reach] == [
        "the host has more, which is expected to be computed faster than loaded"
    ] * 2
    assert begin(manager, 0, TOKENS) == B - 1
    assert manager.stats().space.refused_tokens == 2 * B
