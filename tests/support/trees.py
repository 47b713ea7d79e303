"""A pool with a prefix tree, and calls that the trees' tests share."""

from kvpage import BlockPool, PrefixTree

B = 4


def made(num_blocks: int = 64, block_size: int = B, **hidden: int) -> tuple[BlockPool, PrefixTree]:
    pool = BlockPool(num_blocks)
    return pool, PrefixTree(pool, block_size, **hidden)


def cached(tree: PrefixTree, pool: BlockPool, tokens: list[int], namespace: bytes = b"") -> list[int]:
    """Caches the tokens in new blocks and returns the path's ids; nothing stays pinned."""
    match = tree.insert(tokens, pool.allocate(len(tokens) // tree.block_size), namespace)
    ids = match.block_ids.tolist()
    tree.release(match)
    return ids


def matched(tree: PrefixTree, tokens: list[int], namespace: bytes = b"") -> list[int]:
    match = tree.match(tokens, namespace)
    ids = match.block_ids.tolist()
    assert match.num_blocks == len(ids) and match.num_tokens == len(ids) * tree.block_size
    tree.release(match)
    return ids
