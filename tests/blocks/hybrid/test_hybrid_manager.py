"""BlockManager, one behaviour each: where sequences begin, which marks they have, and what happens to their slots."""

import pytest
from support.hybrid_requests import B, begin, make_moves, manager_of, prefill, serve

from kvpage.checks.errors import OutOfSlots


def prompt(num_tokens, start=1):
    return list(range(start, start + num_tokens))


@pytest.mark.parametrize("position", range(1, 3 * B + 1))
def test_a_callers_mark_is_found_by_the_second_prompt(position):
    manager, common = manager_of(), prompt(3 * B)
    serve(manager, [*common, 100], cache_at=[position])
    assert serve(manager, [*common[:position], 200, 201]) == position


def test_marks_every_so_many_tokens_take_free_slots_only():
    manager = manager_of(num_slots=5, checkpoint_every=3)
    begin(manager, 0, prompt(14))
    assert [position for position, _ in manager.states.reserve(0, 0, 14)] == [6, 9, 12, 13]
    wide = manager_of(num_slots=16, checkpoint_every=3)
    serve(wide, prompt(14))
    assert serve(wide, [*prompt(7), 50, 51]) == 6


def test_a_mark_that_was_not_reached_is_kept_for_the_next_portion():
    manager, tokens = manager_of(), prompt(3 * B)
    begin(manager, 0, tokens, cache_at=[2, 6])
    manager.states.reserve(0, 0, len(tokens))
    manager.commit(0, tokens[:4])
    manager.keep(0)
    assert manager.stats().slots.num_checkpoints == 1
    assert [position for position, _ in manager.states.reserve(0, 4, 12)] == [6, 11]
    manager.check()


def test_a_fork_gets_a_copy_of_the_state():
    manager, tokens = manager_of(num_slots=3), prompt(B + 1)
    begin(manager, 0, tokens)
    with pytest.raises(ValueError, match="all 5 tokens to be committed"):
        manager.fork(0, 1)
    prefill(manager, 0, tokens, 0)
    with pytest.raises(ValueError, match="num_tokens must be in \\[5, 5\\], got 4"):
        manager.fork(0, 1, 4)
    manager.fork(0, 1, 5)
    assert make_moves(manager)[1][0].pairs.tolist() == [[manager.states.slot_of(0), manager.states.slot_of(1)]]
    manager.fork(1, 2)
    with pytest.raises(OutOfSlots, match="needed 1 state slots, 0 are free"):
        manager.fork(1, 3)
    manager.check()


def test_a_checkpoint_that_is_read_is_not_taken_over():
    manager, tokens = manager_of(num_slots=1), prompt(B + 2)
    begin(manager, 0, tokens)
    prefill(manager, 0, tokens, 0)
    assert manager.keep_end(0)
    manager.release(0)
    make_moves(manager)
    held = manager.states.hold([*tokens, 9])
    with pytest.raises(OutOfSlots):
        begin(manager, 1, [*tokens, 9])
    manager.check()
    held.release()
    assert begin(manager, 1, [*tokens, 9]) == B + 2
    manager.check()


def test_drop_forgets_the_tokens_states_too():
    manager, tokens = manager_of(), prompt(2 * B + 3)
    serve(manager, tokens, cache_at=[3, 2 * B])
    serve(manager, [*tokens[:B], 90, 91, 92, 93, 94])
    assert manager.space.drop(tokens) == B
    assert manager.explain(tokens).num_cached_tokens == B  # where the other prompt has split off
    serve(manager, prompt(3, 50))
    assert manager.explain(prompt(3, 50)).num_cached_tokens == 2
    manager.space.drop(prompt(2, 50))
    assert manager.explain(prompt(2, 50)).num_cached_tokens == 0
    manager.check()


def test_statistics_change_nothing():
    """A thread of its own may ask for them."""
    manager, tokens = manager_of(num_blocks=4, num_slots=6), prompt(2 * B)
    serve(manager, tokens)
    begin(manager, 0, prompt(4 * B, 1000))
    before = manager.states.space.device.free_slots, dict(manager.states.space.counts)
    assert manager.stats().slots.num_free_slots == 5
    assert before == (manager.states.space.device.free_slots, manager.states.space.counts)
    manager.states.space.drop_stale()
    assert manager.stats().slots.lost == manager.states.space.counts["lost"] == 1


@pytest.mark.parametrize("is_pinned", [True, False])
def test_pins_and_priorities_keep_checkpoints_longer(is_pinned):
    manager, tokens = manager_of(num_slots=3, num_blocks=64, pin_quota=4), prompt(2 * B)
    serve(manager, tokens, priority=0 if is_pinned else 3)
    if is_pinned:
        manager.space.pin(tokens)
    for start in range(100, 1000, 100):
        serve(manager, prompt(2 * B, start))
    assert serve(manager, tokens) == 2 * B - 1


@pytest.mark.parametrize("num_tokens", [B - 1, B, B + 1, B + 2, 2 * B + 3])
@pytest.mark.parametrize("portion", [1, B - 1, B, 3 * B])
def test_a_checkpoint_stands_for_what_was_committed(num_tokens, portion):
    """A state is of the tokens that were computed, whatever prompt was announced."""
    manager, announced = manager_of(num_slots=16), prompt(num_tokens)
    committed = [*announced[: num_tokens - 2], 70, 71]
    begin(manager, 0, announced, cache_at=range(1, num_tokens + 1))
    for start in range(0, num_tokens, portion):
        manager.states.reserve(0, start, min(start + portion, num_tokens))
        make_moves(manager)
        manager.commit(0, committed[start : start + portion])
        manager.keep(0)
    manager.release(0)
    make_moves(manager)
    manager.check()
    assert manager.num_cached([*announced, 5]) == num_tokens - 2
    assert manager.num_cached([*committed, 5]) == num_tokens
