"""The small parts around pools and tree: moves, pins, hints."""

import numpy as np
import pytest
import torch
from support.block_requests import B, computed, num_found

from kvpage import BlockManager, CacheConfig, CacheEngine, ModelConfig, OutOfBlocks
from kvpage.blocks.config import BlockConfig, HostPolicy
from kvpage.blocks.moves import BlockMoves
from kvpage.blocks.pins import UserPins
from kvpage.blocks.space import BlockSpace


def listed(moves):
    return [(kind, pairs.tolist()) for kind, pairs in moves]


def test_neighbouring_moves_are_one_unless_they_depend_on_each_other():
    moves = BlockMoves()
    moves.add("copy", [])
    moves.add("copy", [(1, 2)])
    moves.add("copy", [(1, 3)])
    moves.add("copy", [(2, 4)])  # reads what was written
    moves.add("copy", [(5, 2)])  # overwrites what was read
    moves.add("copy", [(6, 2)])  # and what was written
    moves.add("swap_out", np.array([[1, 1]]))
    moves.add("swap_out", [(2, 2)])
    moves.add("swap_out", [(3, 2)])
    moves.add("swap_in", [(2, 2)])
    assert listed(moves) == [
        ("copy", [[1, 2], [1, 3]]),
        ("copy", [[2, 4]]),
        ("copy", [[5, 2]]),
        ("copy", [[6, 2]]),
        ("swap_out", [[1, 1], [2, 2]]),
        ("swap_out", [[3, 2]]),
        ("swap_in", [[2, 2]]),
    ]
    assert moves.num_blocks("swap_out") == 3 and len(moves) == 7


def test_a_move_that_fails_stays_with_those_behind_it():
    moves, done, fails = BlockMoves(), [], [True]
    for kind, pair in (("copy", (1, 2)), ("copy", (3, 4)), ("copy", (2, 5)), ("swap_out", (5, 0))):
        moves.add(kind, [pair])

    def each(move):
        done.append((move.kind, move.pairs.tolist()))
        if move.pairs.tolist() == [[2, 5]] and fails.pop():
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        moves.do(each)
    assert done == [("copy", [[1, 2], [3, 4]]), ("copy", [[2, 5]])]
    assert listed(moves) == [("copy", [[2, 5]]), ("swap_out", [[5, 0]])]
    moves.add("swap_out", [(6, 1)])
    fails.append(False)
    del done[:]
    moves.do(each)
    assert done == [("copy", [[2, 5]]), ("swap_out", [[5, 0], [6, 1]])]
    assert not moves and len(moves) == 0


def test_the_engine_carries_moves_out_in_order():
    config = CacheConfig(block_size=2, num_gpu_blocks=4, num_cpu_blocks=3)
    engine = CacheEngine(config, ModelConfig(2, 1, ("full_attention",) * 2, torch.float32))
    for layer in engine.gpu_cache:
        layer.copy_(torch.arange(4.0)[None, :, None, None, None].expand_as(layer))
    moves = BlockMoves()
    moves.add("swap_out", [(3, 0)])
    moves.add("copy", [(1, 3)])
    moves.add("swap_in", [(0, 1)])
    engine.do_moves(moves)
    assert [engine.gpu_cache[1][0, block, 0, 0, 0].item() for block in range(4)] == [0, 3, 2, 1]
    moves = BlockMoves()
    moves.add("swap_out", [(1, 2)])
    moves.add("copy", [(0, 1)])
    moves.add("swap_in", [(2, 0)])
    moves.do(engine.do_move)
    assert [engine.gpu_cache[1][0, block, 0, 0, 0].item() for block in range(4)] == [3, 0, 2, 1]


# --- pins and hints ---


def filled(num_blocks=8, **options):
    """A manager with one cached prompt of four blocks."""
    manager = BlockManager(num_blocks, B, **options)
    tokens = list(range(4 * B))
    computed(manager, 0, tokens)
    manager.release(0)
    return manager, tokens


def fill(manager, seq_id, num_blocks):
    tokens = [1000 + seq_id] * (num_blocks * B)
    computed(manager, seq_id, tokens)
    manager.release(seq_id)


def test_a_pinned_prefix_stays_until_it_is_unpinned():
    manager, tokens = filled(pin_quota=4)
    handle = manager.space.pin(tokens)
    fill(manager, 1, 4)
    fill(manager, 2, 4)
    assert num_found(manager, tokens) == 4 * B and manager.stats().space.num_pinned_blocks == 4
    manager.space.unpin(handle)
    manager.space.unpin(handle)
    fill(manager, 3, 8)
    assert num_found(manager, tokens) == 0
    with pytest.raises(KeyError):
        manager.space.unpin(99)


def test_pins_end_before_a_request_lacks_blocks():
    manager, tokens = filled(pin_quota=8)
    manager.space.pin(tokens[: 2 * B])
    manager.space.pin(tokens)
    fill(manager, 1, 6)
    assert len(manager.space.pins) == 0 and num_found(manager, tokens) == 2 * B
    with pytest.raises(OutOfBlocks):
        manager.allocate(2, [5] * (9 * B))
    manager.check()


def test_no_pin_ends_for_a_request_that_does_not_fit():
    """Also one that shares its blocks with a request, whose end would give nothing back."""
    manager, tokens = filled(pin_quota=12)
    handles = [manager.space.pin(tokens[: n * B]) for n in (2, 4)]
    manager.allocate("running", [7] * (3 * B))
    manager.allocate("reader", tokens[: 3 * B])
    for num_blocks in (2, 5, 8, 9):  # one is free, one is evictable without the second pin
        before = manager.stats(), manager.tree.num_matches
        if num_blocks > 2:
            with pytest.raises(OutOfBlocks):
                manager.allocate("new", [5] * (num_blocks * B))
            assert (manager.stats(), manager.tree.num_matches) == before and len(manager.space.pins) == 2
    manager.allocate("new", [5] * (2 * B))
    assert len(manager.space.pins) == 0 and num_found(manager, tokens) == 2 * B
    for handle in handles:
        manager.space.unpin(handle)
    manager.check()


def test_pins_have_a_quota_and_an_end():
    now = [0.0]
    space = BlockSpace(BlockConfig(8, B, pin_quota=3))
    space.pins = UserPins(space.tree, 3, clock=lambda: now[0])
    match = space.tree.insert(list(range(2 * B)), space.take(2))
    space.tree.release(match)
    handle = space.pin(list(range(2 * B)), ttl=10.0)
    with pytest.raises(ValueError, match=r"at most 3 blocks, got 2 \+ 2"):
        space.pin(list(range(2 * B)))
    assert space.tree.num_matches == 1
    with pytest.raises(ValueError, match="ttl must be positive, got 0"):
        space.pin([1], ttl=0)
    now[0] = 10.0
    assert space.pin(list(range(2 * B))) != handle and len(space.pins) == 1
    for wrong in (-1, 1.5, True):
        with pytest.raises(ValueError, match="quota"):
            UserPins(space.tree, wrong)


def test_prefetch_brings_a_prefix_back_if_there_is_room():
    manager, tokens = filled(num_host_blocks=16)
    fill(manager, 1, 8)
    assert manager.space.prefetch(tokens) == 4 * B
    assert [kind for kind, _ in manager.take_moves()] == ["swap_out", "swap_in"]
    assert manager.space.prefetch(tokens) == 0 and manager.stats().space.promoted_blocks == 4
    allocation = manager.allocate(5, [*tokens, 7])
    assert allocation.num_cached_tokens == 4 * B
    assert [kind for kind, _ in manager.take_moves()] == ["swap_out"]  # for the block of its last token
    manager.allocate(6, [9] * (2 * B))
    manager.take_moves()
    assert manager.space.prefetch([1001] * (8 * B)) == 0  # no room for all of it
    manager.check()


def test_drop_forgets_what_nobody_else_uses():
    manager, tokens = filled()
    other = [*tokens[: 2 * B], *[77] * B]
    computed(manager, 1, other)
    assert manager.space.drop(tokens) == 2 * B
    assert num_found(manager, tokens) == 2 * B and num_found(manager, other) == 3 * B
    assert manager.space.drop(other) == 0  # in use
    manager.release(1)
    assert manager.space.drop([1, 2]) == manager.space.drop(other, b"tenant") == 0
    assert manager.space.drop(other) == 3 * B and manager.pool.num_free == 8


def test_moves_must_be_taken_before_a_step():
    manager, tokens = filled()
    manager.allocate(1, tokens)  # its last block shares three tokens with a cached one
    with pytest.raises(RuntimeError, match="do_moves must be called before a step"):
        manager.slot_mapping(1, 0, 1)
    with pytest.raises(RuntimeError, match="do_moves must be called before a step"):
        manager.block_tables([1])
    assert listed(manager.take_moves())[0][0] == "copy"
    assert len(manager.slot_mapping(1, 0, 1)) == 1


def test_policies_are_checked():
    for wrong in (-1, 1.5, True):
        with pytest.raises(ValueError, match="after_hits"):
            HostPolicy(wrong)
