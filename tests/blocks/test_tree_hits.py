"""How many matches have found a block: PrefixTree.write_out copies those of `min_hits` early."""

import pytest

from kvpage import BlockPool, PrefixTree

B = 2
TOKENS = [1, 2, 3, 4, 5, 6]


def make_tree(num_blocks: int = 8) -> tuple[BlockPool, PrefixTree]:
    pool = BlockPool(num_blocks)
    return pool, PrefixTree(pool, B, BlockPool(num_blocks))


def find(tree: PrefixTree, tokens: list[int]) -> None:
    tree.release(tree.match([*tokens, 0]))


@pytest.mark.parametrize("num_hits", [0, 1, 2])
@pytest.mark.parametrize("num_split_off", [1, 2])
@pytest.mark.parametrize("min_hits", [0, 1, 2, 3, 4])
def test_both_halves_of_a_split_were_found_as_often_as_the_whole(num_hits, num_split_off, min_hits):
    pool, tree = make_tree()
    block_ids = pool.allocate(3)
    tree.release(tree.insert(TOKENS, block_ids))
    for _ in range(num_hits):
        find(tree, TOKENS)
    find(tree, TOKENS[: num_split_off * B])  # splits, and finds the upper half once more
    match = tree.insert(TOKENS, block_ids)  # pins without finding
    written = [block_id for block_id, _ in tree.write_out(match, min_hits).tolist()]
    found = [num_hits + 1] * num_split_off + [num_hits] * (3 - num_split_off)
    assert written == [block_id for block_id, hits in zip(block_ids.tolist(), found, strict=True) if hits >= min_hits]


def test_a_match_of_part_of_a_path_finds_all_above_its_end_and_nothing_below():
    pool, tree = make_tree()
    block_ids = pool.allocate(3)
    tree.release(tree.insert(TOKENS, block_ids))
    for num_blocks in (3, 2, 2, 1):
        find(tree, TOKENS[: num_blocks * B])
    match = tree.insert(TOKENS, block_ids)
    new_copies = [(min_hits, len(tree.write_out(match, min_hits))) for min_hits in (5, 4, 3, 2, 1)]
    assert new_copies == [(5, 0), (4, 1), (3, 1), (2, 0), (1, 1)]
