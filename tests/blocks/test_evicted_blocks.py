"""What a tree remembers of evictions. Beside an oracle that remembers all of them: TreeLife."""

import pytest

from kvpage import BlockManager, BlockPool, PrefixTree
from kvpage.blocks.explain import Ending

B = 3
TOKENS = list(range(1, 4 * B + 1))


def test_the_oldest_of_too_many_is_forgotten():
    pool = BlockPool(8)
    tree = PrefixTree(pool, B)
    tree.release(tree.insert([1] * B, pool.allocate(1)))
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
