"""How many tokens a match leaves over: one, or as many as it is told; and who asks for none."""

import numpy as np
import pytest

from kvpage import BlockManager, BlockPool, PrefixTree

B = 4
LEFT = [0, 1, 2, B - 1, B, B + 1, 3 * B, 2**62]
KINDS = [list, lambda tokens: np.array(tokens, np.int32), lambda tokens: np.array(tokens, np.int64)]


def tree_of(tokens: list[int], block_size: int = B) -> PrefixTree:
    pool = BlockPool(64)
    tree = PrefixTree(pool, block_size)
    tree.release(tree.insert(tokens, pool.allocate(len(tokens) // block_size)))
    return tree


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_left_over", LEFT)
@pytest.mark.parametrize("num_tokens", [0, 1, B - 1, B, B + 1, 2 * B, 3 * B, 3 * B + 1, 4 * B])
def test_as_many_tokens_are_left_over(num_tokens, num_left_over, kind):
    tree = tree_of(list(range(3 * B)))
    match = tree.match(kind(list(range(num_tokens))), num_left_over=num_left_over)
    assert match.num_blocks == min(3, max(num_tokens - num_left_over, 0) // B)
    tree.release(match)
    tree.check(owned_ids=[])


def test_one_is_left_over_unless_something_else_is_said():
    tree = tree_of(list(range(2 * B)))
    assert tree.match(list(range(2 * B))).num_blocks == 1
    assert tree.match(list(range(2 * B)), b"", 0, 0).num_blocks == 2


def test_a_number_below_zero_is_refused():
    tree = tree_of(list(range(B)))
    match = tree.match([0] * B)
    for call in (lambda: tree.match([1], num_left_over=-1), lambda: tree.match_part(match, [1], num_left_over=-1)):
        with pytest.raises(ValueError, match="num_left_over must not be negative, got -1"):
            call()
    assert tree.num_matches == 1


@pytest.mark.parametrize("num_left_over", [0, 1, 2, B, 2**62])
@pytest.mark.parametrize("num_shared", range(1, B + 1))
def test_a_part_leaves_as_many_over(num_shared, num_left_over):
    tree = tree_of(list(range(2 * B)))
    tokens = list(range(B + num_shared))
    match = tree.match(tokens[:B], num_left_over=0)
    part = tree.match_part(match, tokens, num_left_over)
    want = max(num_shared - num_left_over, 0)
    if 0 < want < B:
        assert part is not None and part.num_tokens == want
        tree.release(part.match)
    else:
        assert part is None
    tree.release(match)
    tree.check(owned_ids=[])


def written(manager: BlockManager, seq_id: str, tokens: list[int], **options: int) -> int:
    """Allocates and commits: how many tokens were found."""
    num_cached = manager.allocate(seq_id, tokens, **options).num_cached_tokens
    manager.take_moves()
    manager.commit(seq_id, tokens[num_cached:])
    return num_cached


@pytest.mark.parametrize("block_size", [1, 2, B])
@pytest.mark.parametrize("num_left_over", [0, 1, 2, B])
@pytest.mark.parametrize("most", [None, 0, 1, 3, 6, 8, 20])
def test_a_sequence_leaves_as_many_over(block_size, num_left_over, most):
    """Parts of blocks are shared too, but no whole block as a part."""
    manager = BlockManager(64, block_size)
    tokens = list(range(8))
    written(manager, "a", tokens)
    got = written(manager, "b", tokens, num_left_over=num_left_over, max_cached_tokens=most)
    assert got == min(8 - num_left_over, 8 if most is None else most)
    manager.release("a")
    manager.release("b")
    manager.check()


def test_no_sequence_finds_anything_without_prefix_caching():
    manager = BlockManager(64, B, enable_prefix_caching=False)
    written(manager, "a", list(range(8)))
    assert written(manager, "b", list(range(8)), num_left_over=0) == 0
    with pytest.raises(ValueError, match="num_left_over must not be negative, got -1"):
        manager.allocate("c", [1], num_left_over=-1)
    manager.check()
