"""BlockManager: what a sequence that comes back from the host has, and what it caches afterwards."""

import pytest
from support.block_requests import B, compute, computed, num_found

from kvpage import BlockManager

MINE, OTHERS = list(range(10, 10 + 2 * B)), list(range(50, 50 + 2 * B))


@pytest.mark.parametrize("num_evicted", [0, 1, 2])
def test_what_follows_an_evicted_prefix_is_computed_again(num_evicted):
    """Its own block comes back from the host only where all before it is still there."""
    manager = BlockManager(8, B, num_host_blocks=4, share_parts=False)
    tokens = [*MINE, 0]
    computed(manager, 1, tokens)
    manager.swap_out(1)
    assert len(manager.take_moves()) == 1 and manager.tree.evict(num_evicted) == num_evicted
    given = manager.swap_in(1, tokens)
    assert given.num_cached_tokens == ((2 - num_evicted) * B if num_evicted else len(tokens))
    assert len(given.block_ids) == 3 and len(manager.take_moves()) == (num_evicted == 0)
    compute(manager, 1, tokens[given.num_cached_tokens :])
    assert num_found(manager, tokens) == 2 * B
    manager.check()


@pytest.mark.parametrize("num_more", [0, 1, B - 1, 2 * B - 1])
def test_room_for_more_tokens_caches_none_of_them(num_more):
    """Only those that were written before are waiting for their block to be full."""
    manager = BlockManager(8, B, num_host_blocks=4, share_parts=False)
    tokens = MINE + OTHERS
    computed(manager, 1, tokens[: B + 1])
    manager.swap_out(1)
    given = manager.swap_in(1, tokens[: B + 1 + num_more])
    assert given.num_cached_tokens == B + 1 and num_found(manager, tokens) == B
    compute(manager, 1, tokens[B + 1 : B + 1 + num_more])
    manager.append([1], 3 * B - 1 - num_more)
    compute(manager, 1, tokens[B + 1 + num_more :])
    assert num_found(manager, tokens) == 4 * B and manager.tree.num_cached == 4
    manager.check()
