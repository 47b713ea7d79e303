"""HeldCheckpoints: slots and tails that are read beside steps stay as they are, whatever becomes of the checkpoints."""

import pytest
from support.managers import manager_of_states

from kvpage.blocks.manager import BlockManager
from kvpage.checks.errors import OutOfBlocks

B, NUM_BLOCKS = 4, 12
TOKENS = list(range(100, 112))


def manager_with(num_slots: int, *positions: int, **fields: int) -> BlockManager:
    """Checkpoints of TOKENS at these positions."""
    manager = manager_of_states(NUM_BLOCKS, B, num_slots=num_slots, **fields)
    for end in positions:
        end_at(manager, TOKENS[:end])
    return manager


def end_at(manager: BlockManager, tokens: list[int], namespace: bytes = b"") -> None:
    given = manager.allocate("seq", tokens, namespace, num_left_over=0)
    manager.do_moves(lambda move: None)
    manager.states.do_moves(lambda move: None)
    manager.commit("seq", tokens[given.num_cached_tokens :])
    manager.keep_end("seq")
    manager.release("seq")


def test_a_held_checkpoint_is_not_evicted() -> None:
    manager = manager_with(2, 5, 9)
    held = manager.states.hold(TOKENS[:6])
    (one,) = held.each
    for number in range(4):
        end_at(manager, [number, number])
        manager.check()
        assert manager.num_cached(TOKENS[:6]) == 5
    again = manager.states.hold(TOKENS[:6])
    held.release()
    manager.allocate("a", [7, 8, 9])  # the other slot
    with pytest.raises(OutOfBlocks):
        manager.allocate("b", [8, 9])
    with pytest.raises(OutOfBlocks):
        manager.allocate("b", TOKENS[:7])  # not even the request that would go on from it
    again.release()
    assert manager.allocate("b", TOKENS[:7]).num_cached_tokens == 5
    assert manager.states.slot_of("b") == one.slot
    manager.check()


@pytest.mark.parametrize("num_holds", [1, 2])
def test_the_slot_of_one_that_is_forgotten_is_free_after_the_last(num_holds: int) -> None:
    manager = manager_with(3, 5)
    holds = [manager.states.hold(TOKENS) for _ in range(num_holds)]
    slot, drop = holds[0].each[0].slot, manager.states.blocks_cleared
    drop()
    for held in holds:
        assert slot in manager.states.space.held_slots and manager.states.space.device.num_free == 2
        manager.check()
        held.release()
    assert manager.states.space.held_slots == [] and manager.states.space.device.num_free == 3
    assert manager.num_cached(TOKENS) == 0
    manager.check()


@pytest.mark.parametrize("position", [1, 4, 5, 8, 11])
def test_where_a_sequence_would_begin(position: int) -> None:
    manager = manager_with(2, position)
    before = manager.stats()
    for end in range(1, len(TOKENS) + 1):
        assert manager.num_cached(TOKENS[:end]) == (position if position < end else 0)
        assert manager.num_cached(TOKENS[:end], b"other") == 0
    assert manager.stats() == before
    manager.check()
