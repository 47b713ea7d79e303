"""What a tree remembers of evictions. Beside an oracle that remembers all of them: TreeLife."""

import pytest

from kvpage import BlockManager, BlockPool, PrefixTree
from kvpage.blocks.explain import Ending

B = 3


def filled(tokens: list[int], num_blocks: int = 8, num_host_blocks: int = 0) -> tuple[BlockPool, PrefixTree]:
    pool = BlockPool(num_blocks)
    tree = PrefixTree(pool, B, BlockPool(num_host_blocks) if num_host_blocks else None)
    tree.release(tree.insert(tokens, pool.allocate(len(tokens) // B)))
    return pool, tree


TOKENS = list(range(1, 4 * B + 1))


@pytest.mark.parametrize("num_evicted", range(1, 5))
def test_a_prompt_that_lacks_a_whole_block_is_told_apart(num_evicted):
    pool, tree = filled(TOKENS)
    tree.evict(num_evicted)
    start = (4 - num_evicted) * B
    assert tree.look(TOKENS)[3] and tree.look(TOKENS[: start + B])[3]
    assert not tree.look(TOKENS[: start + B - 1])[3]  # a part of a block may be another's
    assert not tree.look([*TOKENS[:start], *[9] * B])[3]
    assert not tree.look(TOKENS, b"tenant")[3]


def test_an_edge_that_is_split_or_grows_is_another():
    pool, tree = filled(TOKENS)
    tree.evict(1)
    tree.release(tree.match(TOKENS[: 2 * B]))  # splits: the end stays
    assert tree.look(TOKENS)[3]
    tree.release(tree.insert([*TOKENS[: 3 * B], *[9] * B], pool.allocate(4)))
    assert tree.look(TOKENS)[1:] == (3 * B, 9, False)  # inside of an edge nothing is known
    assert not tree.look([*TOKENS[: 3 * B], *[9] * B, *TOKENS[3 * B :]])[3]
    tree.check(owned_ids=[])


def test_what_is_on_the_host_or_was_dropped_is_not_evicted():
    pool, tree = filled(TOKENS, num_host_blocks=4)
    tree.demote(4)
    assert tree.look(TOKENS)[1:] == (4 * B, None, False)
    tree.evict_host(2)
    assert tree.look(TOKENS)[1:] == (2 * B, None, True)
    pool, tree = filled(TOKENS)
    tree.drop(TOKENS)
    assert not tree.look(TOKENS)[3]


def test_the_oldest_of_too_many_is_forgotten():
    pool, tree = filled([1] * B)
    tree.release(tree.insert([9] * B, pool.allocate(1), b"other"))
    for first in range(2, 4098):
        tree.evict(1)
        assert tree.look([1] * B)[3]
        tree.release(tree.insert([first] * B, pool.allocate(1), b"other"))
    tree.evict(1)
    assert not tree.look([1] * B)[3]


@pytest.mark.parametrize("share_parts", [True, False])
def test_explain_tells_evictions_and_a_reset_forgets_them(share_parts):
    manager = BlockManager(4, B, share_parts=share_parts)
    for seq_id, tokens in enumerate((TOKENS, [*TOKENS[:B], *range(50, 50 + 2 * B)])):
        manager.allocate(seq_id, tokens)
        manager.do_moves(lambda move: None)
        manager.commit(seq_id, tokens[manager.state(seq_id).num_written :])
        manager.release(seq_id)
    (group,) = manager.explain(TOKENS).groups
    assert (group.num_tokens, group.ending) == (2 * B, Ending.KV_EVICTED) and "cached, and evicted" in str(group)
    assert manager.explain([*TOKENS[:B], *[7] * (B + 1)]).groups[0].ending is Ending.DIFFERENT
    assert manager.explain(TOKENS[:B]).groups[0].ending is Ending.PROMPT
    manager.reset_prefix_cache()
    assert manager.explain(TOKENS).groups[0].ending is Ending.NOT_CACHED
