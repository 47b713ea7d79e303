"""Moves of blocks in the serving loop: on a short way, counted by kind, and kept until they are made."""

import numpy as np
import pytest
import torch

from kvpage import CacheConfig, CacheEngine, ModelConfig
from kvpage.blocks.manager import BlockManager
from kvpage.serving.loop.moves.block_transfers import BlockTransfers

B = 4


def make_cache(num_blocks: int = 4, num_host_blocks: int = 4) -> CacheEngine:
    return CacheEngine(CacheConfig(B, num_blocks, num_host_blocks), ModelConfig(8, 2, ("full_attention",) * 2))


def manager_with_moves() -> BlockManager:
    """Two blocks are due to the host, one is due to come back."""
    manager = BlockManager(4, B, num_host_blocks=4)
    for name in ("a", "b"):
        tokens = np.arange(B, dtype=np.int32) + ord(name)
        manager.allocate(name, tokens)
        manager.commit(name, tokens[: B - 1])
        manager.swap_out(name)
    manager.swap_in("a", np.arange(B, dtype=np.int32) + ord("a"))
    return manager


def test_moves_are_counted_by_kind() -> None:
    cache = make_cache()
    transfers = BlockTransfers(cache, manager_with_moves())
    transfers.run()
    transfers.run()  # nothing is due
    block_bytes = sum(layer[0].numel() * layer.element_size() for layer in cache.cpu_cache)
    counts = {kind: (one.num_blocks, one.num_bytes) for kind, one in transfers.stats().items()}
    assert counts["swap_out"][0] == 2 and counts["swap_in"][0] == 1 and counts["copy"][0] == 0
    assert transfers.stats()["swap_out"].num_bytes == 2 * transfers.stats()["swap_in"].num_bytes
    assert counts["swap_in"][1] > 0 and block_bytes > 0


@pytest.mark.parametrize("num_before", [0, 1])
def test_a_move_that_raises_stays_due_with_those_after_it(num_before: int) -> None:
    manager, cache, made = manager_with_moves(), make_cache(), []
    transfers = BlockTransfers(cache, manager)
    works = {kind: getattr(cache, kind) for kind in ("swap_out", "swap_in")}

    def moved(kind: str, pairs: torch.Tensor) -> None:
        made.append((kind, pairs.tolist()))
        if len(made) == num_before + 1:
            raise MemoryError
        works[kind](pairs)

    for kind in works:
        setattr(cache, kind, lambda pairs, kind=kind: moved(kind, pairs))
    with pytest.raises(MemoryError):
        transfers.run()
    transfers.run()
    assert made[num_before] == made[num_before + 1] and len(made) == 3
    assert [kind for kind, _ in manager.take_moves()] == []
    assert transfers.stats()["swap_out"].num_blocks == 2 and transfers.stats()["swap_in"].num_blocks == 1
