"""BlockManager, one behaviour each: where sequences begin, which marks they have, and what happens to their slots."""

import pytest
from support.hybrid_requests import B, begin, make_moves, manager_of, prefill, serve

from kvpage import OutOfBlocks
from kvpage.checks.errors import OutOfSlots


def prompt(num_tokens, start=1):
    return list(range(start, start + num_tokens))


@pytest.mark.parametrize("num_tokens", [1, 2, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1])
def test_a_prompt_is_found_again_but_for_its_last_token(num_tokens):
    manager = manager_of()
    assert serve(manager, prompt(num_tokens)) == 0
    assert serve(manager, prompt(num_tokens)) == num_tokens - 1
    assert serve(manager, prompt(num_tokens), namespace=b"other") == 0


@pytest.mark.parametrize("num_tokens", [1, B - 1, B, B + 1, 2 * B])
def test_a_prompt_is_found_whole_where_no_token_is_to_be_left(num_tokens):
    manager = manager_of()
    assert serve(manager, prompt(num_tokens), num_left_over=0) == 0
    assert serve(manager, prompt(num_tokens), num_left_over=0) == num_tokens


@pytest.mark.parametrize("shared", range(1, 3 * B + 1))
def test_a_split_is_noticed_by_the_second_prompt_and_found_by_the_third(shared):
    manager = manager_of()
    common = prompt(shared)
    serve(manager, [*common, *[100] * (2 * B)])
    assert serve(manager, [*common, *[200] * (2 * B)]) == 0
    assert serve(manager, [*common, *[300] * (2 * B)]) == shared


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


def test_an_answer_is_found_by_the_next_turn():
    manager, turn = manager_of(), prompt(6)
    begin(manager, 0, turn)
    prefill(manager, 0, turn, 0)
    for token in (70, 71, 72):
        manager.append([0])
        make_moves(manager)
        manager.commit(0, [token])
    slot = manager.states.slot_of(0)
    assert manager.keep_end(0)
    with pytest.raises(ValueError, match="slot_of needs the state of 0, but a checkpoint has its slot"):
        manager.states.slot_of(0)
    manager.release(0)
    blocks, states = make_moves(manager)
    assert [(move.kind, move.pairs.tolist()) for move in blocks] == [("copy", [[2, 32 + slot]])] and not states
    assert begin(manager, 1, [*turn, 70, 71, 72, 80]) == 9
    blocks, states = make_moves(manager)
    assert states[0].pairs.tolist() == [[slot, manager.states.slot_of(1)]]
    assert blocks[0].pairs.tolist() == [[32 + slot, manager.block_ids(1)[2]]]


def test_a_portion_reserves_only_its_own_marks():
    manager, tokens = manager_of(), prompt(3 * B)
    begin(manager, 0, tokens, cache_at=[1, 5, 12])
    assert [position for position, _ in manager.states.reserve(0, 0, 5)] == [1, 5]
    assert manager.states.reserve(0, 0, 5) == manager.states.reserve(0, 0, 5)
    make_moves(manager)
    manager.commit(0, tokens[:5])
    manager.keep(0)
    assert [position for position, _ in manager.states.reserve(0, 5, 12)] == [11, 12]
    manager.release(0)
    assert manager.stats().slots.num_checkpoints == 2
    assert serve(manager, [*tokens[:5], 90]) == 5


def test_a_mark_that_was_not_reached_is_kept_for_the_next_portion():
    manager, tokens = manager_of(), prompt(3 * B)
    begin(manager, 0, tokens, cache_at=[2, 6])
    manager.states.reserve(0, 0, len(tokens))
    manager.commit(0, tokens[:4])
    manager.keep(0)
    assert manager.stats().slots.num_checkpoints == 1
    assert [position for position, _ in manager.states.reserve(0, 4, 12)] == [6, 11]
    manager.check()


def test_identical_prompts_at_once_keep_one_checkpoint():
    manager, tokens = manager_of(), prompt(2 * B + 2)
    for seq_id in range(3):
        begin(manager, seq_id, tokens)
    for seq_id in range(3):
        manager.states.reserve(seq_id, 0, len(tokens))
    make_moves(manager)
    for seq_id in range(3):
        manager.commit(seq_id, tokens)
        manager.keep(seq_id)
        manager.check()
    assert manager.stats().slots.num_checkpoints == 1
    assert begin(manager, 9, tokens) == len(tokens) - 1


def test_a_failed_step_leaves_no_checkpoint():
    manager, tokens = manager_of(), prompt(2 * B)
    begin(manager, 0, tokens)
    manager.states.reserve(0, 0, len(tokens))
    manager.give_up_marks(0)
    assert not manager.keep_end(0)
    for refused in (lambda: manager.states.slot_of(0), lambda: manager.swap_out(0)):
        with pytest.raises(ValueError, match="a failed step may have spoiled it"):
            refused()
    manager.release(0)
    manager.check()
    assert manager.stats().slots.num_free_slots == 8 and serve(manager, tokens) == 0


def test_a_private_sequence_leaves_no_checkpoint():
    manager, tokens = manager_of(), prompt(2 * B)
    begin(manager, 0, tokens)
    manager.make_private(0)
    prefill(manager, 0, tokens, 0)
    assert not manager.keep_end(0)
    manager.release(0)
    assert manager.stats().slots.num_checkpoints == 0


def test_without_prefix_caching_nothing_is_kept():
    manager, tokens = manager_of(enable_prefix_caching=False), prompt(2 * B)
    begin(manager, 0, tokens, cache_at=[3])
    assert prefill(manager, 0, tokens, 0) == []
    assert not manager.keep_end(0)


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


def test_without_a_slot_nothing_is_changed():
    manager = manager_of(num_slots=1)
    begin(manager, 0, prompt(B))
    before = manager.stats()
    with pytest.raises(OutOfBlocks, match="needed 1 state slots, 0 are free"):
        begin(manager, 1, prompt(B))
    assert manager.stats() == before and manager.states.reserve(0, 0, B) == []
    manager.check()


def test_the_only_slot_passes_from_the_checkpoint_to_the_sequence():
    manager, tokens = manager_of(num_slots=1), prompt(B + 2)
    begin(manager, 0, tokens)
    prefill(manager, 0, tokens, 0)
    assert manager.keep_end(0)
    manager.release(0)
    make_moves(manager)
    assert begin(manager, 1, [*tokens, 9]) == B + 2
    blocks, states = make_moves(manager)
    assert states == [] and blocks[0].pairs.tolist() == [[32, manager.block_ids(1)[1]]]
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


def test_max_cached_tokens_limits_the_checkpoint():
    manager, tokens = manager_of(), prompt(3 * B)
    serve(manager, tokens, cache_at=[2, 5, 7])
    found = [serve(manager, tokens, max_cached_tokens=most) for most in (0, 1, 2, 4, 5, 6, 7, 8)]
    assert found == [0, 0, 2, 2, 5, 5, 7, 7]


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


def test_reset_forgets_all_checkpoints():
    manager, tokens = manager_of(num_host_slots=2, num_host_blocks=8), prompt(B - 1)
    serve(manager, tokens)
    manager.reset_prefix_cache()
    assert serve(manager, tokens) == 0


def test_a_checkpoint_does_not_outlive_its_blocks():
    manager, tokens = manager_of(num_blocks=4, num_slots=6), prompt(2 * B)
    serve(manager, tokens)
    begin(manager, 0, prompt(4 * B, 1000))
    assert manager.stats().slots.num_checkpoints == 0 and manager.stats().slots.lost == 1
    manager.release(0)
    assert serve(manager, tokens) == 0


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


def test_pinned_prefixes_keep_their_checkpoints_longer():
    manager, tokens = manager_of(num_slots=3, num_blocks=64, pin_quota=4), prompt(2 * B)
    serve(manager, tokens)
    manager.space.pin(tokens)
    for start in range(100, 1000, 100):
        serve(manager, prompt(2 * B, start))
    assert serve(manager, tokens) == 2 * B - 1


def test_higher_priorities_are_evicted_later():
    manager, tokens = manager_of(num_slots=3, num_blocks=64), prompt(2 * B)
    serve(manager, tokens, priority=3)
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
