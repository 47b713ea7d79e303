"""Random lives of a HybridManager. Every state, block and tail holds the exact prefix that it stands for, and what
nobody owns is poisoned. The long form is the battery of hybrid managers."""

import pytest
from support.hybrid_worlds import WORLDS

NUM_OPERATIONS, CHECK_EVERY = 1_200, 4


@pytest.mark.parametrize("number", range(len(WORLDS)))
def test_states_and_blocks_are_those_of_the_exact_prefix(number):
    life = WORLDS[number].life(seed=number)
    life.live(NUM_OPERATIONS, CHECK_EVERY)
    figures, world = life.figures, WORLDS[number]
    assert (figures["restored"] > 5) == world.is_caching
    assert (figures["tails"] > 2) == (world.is_caching and world.block_size > 1)
    assert (figures["resumed"] > 0) == (world.num_host_slots > 0)


def test_every_operation_leaves_a_whole_manager():
    for number, world in enumerate(WORLDS):
        world.life(seed=100 + number).live(200)


def test_calls_without_room_change_nothing():
    life = WORLDS[8].life(seed=3)
    life.live(600, CHECK_EVERY)
    assert life.figures["refused"] > 50


def test_no_slot_is_lost_over_many_requests():
    life = WORLDS[1].life(seed=7)
    life.live(3_000, check_every=500)
    for seq_id in [*life.on_device, *life.swapped]:
        life.manager.release(seq_id)
    life.manager.reset_prefix_cache()
    slots = life.manager.stats().slots
    assert (slots.num_free_slots, slots.num_free_host_slots) == (slots.num_slots, slots.num_host_slots)
    assert life.manager.num_free_blocks == life.manager.num_blocks
