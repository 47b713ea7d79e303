"""BlockManager at its edges: what a call leaves alone, which of two checkpoints goes, what the counters say."""

from dataclasses import replace

import pytest
from support.hybrid_requests import B, begin, make_moves, manager_of, prefill, serve

from kvpage.blocks.config import HostPolicy
from kvpage.blocks.groups.states.state_space import States


def prompt(num_tokens, start=1):
    return list(range(start, start + num_tokens))


def checkpoints(manager, tier="device"):
    found = [one for one in getattr(manager.states.space, tier).checkpoints if one is not None]
    return sorted(found, key=lambda one: one.num_tokens)


# --- what options mean where they are left out ---


def test_what_options_are_where_they_are_left_out():
    manager = manager_of(num_host_blocks=4)
    serve(manager, prompt(B + 1))
    with pytest.raises(ValueError, match="pins must hold at most 0"):
        manager.space.pin(prompt(B + 1))
    assert manager.tree.num_host_cached == 0 and manager.states.space.host.num_slots == 0
    assert States(2).num_host_slots == 0 and States(2).most_kept == 2
    eager = manager_of(num_host_blocks=4, host_policy=HostPolicy(0))
    serve(eager, prompt(B + 1))
    assert eager.tree.num_host_cached == 1


# --- which sequences a call takes ---


@pytest.mark.parametrize("call", ["slot_of", "has_state", "keep", "give_up_marks"])
def test_a_sequence_off_the_device_is_not_there(call):
    manager, tokens = manager_of(num_host_slots=1, num_host_blocks=8), prompt(B + 1)
    begin(manager, 0, tokens)
    prefill(manager, 0, tokens, 0)
    manager.swap_out(0)
    for seq_id in (0, "nobody"):
        with pytest.raises(KeyError):
            getattr(manager.states if call in ("slot_of", "has_state") else manager, call)(seq_id)
    assert manager.swap_in(0, tokens).num_cached_tokens == len(tokens)
    assert not manager.states._states.running[0].is_spoiled
    manager.check()


@pytest.mark.parametrize("call", ["keep_end", "give_up_marks"])
def test_a_sequence_without_its_state(call):
    manager, tokens = manager_of(), prompt(B + 1)
    begin(manager, 0, tokens)
    assert manager.states.has_state(0)
    prefill(manager, 0, tokens, 0)
    assert manager.states.has_state(0)
    getattr(manager, call)(0)
    assert not manager.states.has_state(0)
    with pytest.raises(ValueError, match="slot_of needs the state of 0"):
        manager.states.slot_of(0)


# --- slots that were reserved ---


def test_a_portion_takes_no_slot_for_marks_outside_of_it():
    manager, tokens = manager_of(), prompt(3 * B)
    begin(manager, 0, tokens, cache_at=[1, 5, 12])
    manager.states.reserve(0, 0, 4)
    assert manager.states.space.device.num_free == 6
    manager.states.reserve(0, 1, 5)  # the first one is passed
    assert manager.states.space.device.num_free == 5
    assert [position for position, _ in manager.states.reserve(0, 0, 12)] == [1, 5, 11, 12]
    assert [position for position, _ in manager.states.reserve(0, 0, 5)] == [1, 5]
    assert [position for position, _ in manager.states.reserve(0, 5, 11)] == [11]


def test_a_mark_whose_token_was_committed_by_rows_is_given_up():
    manager, tokens = manager_of(), prompt(B + 1)
    begin(manager, 0, tokens, num_left_over=0)
    prefill(manager, 0, tokens[:B], 0)
    assert len(manager.states.reserve(0, B, B + 1)) == 1
    make_moves(manager)
    manager.rows.commit(manager.rows.of([0]), [tokens[-1]])
    manager.keep(0)
    assert manager.stats().slots.num_checkpoints == 0 and manager.states.space.device.num_free == 7
    manager.check()


def test_a_regular_mark_takes_the_slot_of_a_checkpoint_that_is_passed_by_and_of_no_other():
    manager = manager_of(num_slots=3, num_blocks=64)
    serve(manager, prompt(3), num_left_over=0)
    serve(manager, prompt(40))  # goes on from the first one's checkpoint
    assert [one.is_passed_by for one in checkpoints(manager)] == [True, False]
    manager.states.options = replace(manager.states.options, checkpoint_every=3)
    begin(manager, 0, prompt(30, 100))
    assert [position for position, _ in prefill(manager, 0, prompt(3, 100), 0)] == [3]
    assert [one.num_tokens for one in checkpoints(manager)] == [3, 39]
    assert prefill(manager, 0, prompt(6, 100), 3) == [], "both would still help"
    assert [one.num_tokens for one in checkpoints(manager)] == [3, 39]


def test_a_regular_mark_takes_the_slot_of_a_checkpoint_whose_blocks_are_gone():
    manager = manager_of(num_slots=2, num_blocks=8, checkpoint_every=3)
    serve(manager, prompt(B + 2))
    begin(manager, 0, prompt(8 * B, 100))
    assert manager.states.space.device.num_free == 0
    assert [position for position, _ in manager.states.reserve(0, 0, 3)] == [3]


# --- which checkpoint goes ---


def test_one_whose_blocks_are_gone_goes_before_one_that_helps():
    manager = manager_of(num_slots=2, num_blocks=8)
    serve(manager, prompt(7 * B), priority=7)
    manager.tree.evict(8)
    serve(manager, [1000, 1001])
    assert manager.num_cached([1000, 1001]) == 1
    begin(manager, 0, prompt(2, 300))
    begin(manager, 1, [1000, 1001])
    assert manager.stats().slots.lost == 1
    manager.check()


def test_what_is_not_used_ages():
    """A checkpoint that was used often goes in the end, when others are used as often after it."""
    manager = manager_of(num_slots=3, num_blocks=256)
    for _ in range(4):
        serve(manager, prompt(2 * B))
    for start in range(100, 4000, 50):
        serve(manager, prompt(2 * B, start))
        serve(manager, prompt(2 * B, start))
    assert manager.num_cached(prompt(2 * B)) == 0


# --- which tokens are forgotten ---


def test_drop_forgets_tails_of_its_own_namespace_alone():
    manager = manager_of()
    for namespace in (b"", b"tenant"):
        serve(manager, prompt(3), namespace=namespace)
        serve(manager, prompt(2 * B, 50), namespace=namespace, cache_at=[B + 2])
    manager.space.drop(prompt(3), b"tenant")
    assert [manager.num_cached(prompt(3), namespace) for namespace in (b"", b"tenant")] == [2, 0]


# --- tiers ---


def fill(manager, num_blocks, first=500):
    manager.allocate("filler", range(first, first + num_blocks * B))
    make_moves(manager)
    manager.release("filler")


def on_host(num_host_slots=2, num_tokens=B + 2):
    """A manager whose only checkpoint, of a prompt but for its last token, is on the host."""
    manager = manager_of(num_slots=2, num_blocks=16, num_host_slots=num_host_slots, num_host_blocks=8)
    serve(manager, prompt(num_tokens))
    begin(manager, "a", [700])
    begin(manager, "b", [800])
    manager.release("a")
    manager.release("b")
    make_moves(manager)
    assert len(checkpoints(manager, "host")) == 1 and not checkpoints(manager)
    return manager


def test_counters_count():
    manager = on_host()
    slots = manager.stats().slots
    assert (slots.kept, slots.evicted, slots.demoted, slots.lost, slots.restored) == (1, 1, 1, 0, 0)
    serve(manager, prompt(B + 2))
    slots = manager.stats().slots
    assert (slots.kept, slots.evicted, slots.demoted, slots.restored) == (1, 1, 1, 1)


def test_statistics_leave_out_what_is_gone_in_both_tiers():
    manager = on_host()
    begin(manager, 0, prompt(2 * B, 300))
    prefill(manager, 0, prompt(2 * B, 300), 0)
    manager.release(0)
    before = manager.stats().slots
    assert (before.num_checkpoints, before.num_host_checkpoints) == (1, 1)
    manager.tree.evict(16)
    manager.tree.evict_host(8)
    slots = manager.stats().slots
    assert (slots.num_free_slots, slots.num_checkpoints) == (2, 0)
    assert (slots.num_free_host_slots, slots.num_host_checkpoints, slots.lost) == (2, 0, 2)
    manager.states.space.drop_stale()
    assert manager.stats().slots == slots
    manager.check()


# --- the check itself ---


def test_one_that_is_worth_less_does_not_take_the_hosts_slot():
    manager = manager_of(num_slots=2, num_blocks=64, num_host_slots=1, num_host_blocks=32)
    serve(manager, prompt(4 * B), priority=7)
    serve(manager, prompt(2, 100))
    serve(manager, prompt(2, 200))
    slots = manager.stats().slots
    assert slots.demoted == 1 and [one.priority for one in checkpoints(manager, "host")] == [7]
    serve(manager, prompt(4 * B, 300), priority=7)
    serve(manager, prompt(4 * B, 400), priority=7)
    assert manager.stats().slots.demoted == 2
    manager.check()


def test_the_check_sees_a_slot_with_two_owners():
    manager = manager_of()
    begin(manager, 0, prompt(B))
    manager.states.space.device.release(manager.states.slot_of(0))
    with pytest.raises(RuntimeError, match="device slots: slot 0 has 0 references and 1 owners"):
        manager.check()


def test_asking_where_a_prompt_begins_is_no_use():
    """Of two prompts the one that was asked for is still the first to lose its blocks."""
    for question in ("num_cached", "explain"):
        manager = manager_of(num_blocks=6)
        serve(manager, prompt(2 * B + 1))
        serve(manager, prompt(2 * B + 1, 100))
        before = manager.stats()
        getattr(manager, question)(prompt(2 * B + 1))
        assert manager.stats() == before
        fill(manager, 3)
        assert [manager.num_cached(prompt(2 * B + 1, first)) for first in (0, 100)] == [0, 2 * B]
