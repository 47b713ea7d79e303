"""What a random life of BlockManager does not ask: priorities, who may find what, and what a refusal leaves."""

import pytest

from kvpage.block_manager import BlockManager

B = 4
MINE, OTHERS = list(range(10, 10 + 2 * B)), list(range(50, 50 + 2 * B))


def num_found(manager: BlockManager, tokens: list[int], namespace: bytes = b"") -> int:
    """How many of the tokens a new sequence would share in whole blocks."""
    match = manager.tree.match([*tokens, 0], namespace)
    manager.tree.release(match)
    return match.num_tokens


def compute(manager: BlockManager, seq_id: int, tokens: list[int], num_cached: int = 0) -> None:
    manager.take_moves()
    manager.commit(seq_id, tokens[num_cached:])


@pytest.mark.parametrize("num_swaps", [1, 2])
@pytest.mark.parametrize("num_forks", [0, 1])
def test_a_sequence_keeps_its_priority(num_swaps, num_forks):
    """Off the device and back, and in a fork: what it caches afterwards is evicted after what others cached later."""
    manager = BlockManager(6, B, num_host_blocks=4, share_parts=False)
    manager.allocate(1, MINE[: B + 1], priority=5)
    compute(manager, 1, MINE[: B + 1])
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
    manager.allocate(3, OTHERS)
    compute(manager, 3, OTHERS)
    manager.release(3)
    assert num_found(manager, MINE) == num_found(manager, OTHERS) == 2 * B
    manager.tree.evict(2)
    assert num_found(manager, MINE) == 2 * B and num_found(manager, OTHERS) == 0
