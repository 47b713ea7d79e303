"""num_checkpoints: idle working slots hold no more checkpoints than their own budget."""

from types import SimpleNamespace

import pytest
from support.hybrid_requests import B, begin, make_moves, manager_of, serve

from kvpage.blocks.groups.states.checkpoint import MarkKind
from kvpage.blocks.groups.states.state_space import StateSpace

PROMPTS = [[100 * number + token for token in range(2 * B + 2)] for number in range(6)]


@pytest.mark.parametrize("most", [0, 1, 3])
@pytest.mark.parametrize("num_host_slots", [0, 2])
def test_idle_slots_hold_no_checkpoints_beyond_the_budget(most: int, num_host_slots: int) -> None:
    manager = manager_of(8, 64, num_checkpoints=most, num_host_slots=num_host_slots, num_host_blocks=8)
    for prompt in PROMPTS:
        assert serve(manager, prompt, keeps_end=True, cache_at=[3]) == 0
        slots = manager.stats().slots
        assert slots.num_checkpoints <= most and slots.num_free_slots == 8 - slots.num_checkpoints
    assert slots.num_checkpoints == most and slots.num_host_checkpoints == num_host_slots
    assert manager.states.keeps_checkpoints == (most + num_host_slots > 0)


def test_marks_of_running_sequences_are_in_the_budget() -> None:
    manager = manager_of(8, 64, num_checkpoints=2)
    for number, prompt in enumerate(PROMPTS[:4]):
        assert begin(manager, number, prompt) == 0
        assert len(manager.states.reserve(number, 0, len(prompt))) == (number < 2)
    manager.give_up_marks(0)
    assert len(manager.states.reserve(3, 0, len(PROMPTS[3]))) == 1
    manager.check()


def end_of(manager, tokens: list[int], **options) -> bool:
    """Return whether the state after all tokens was kept. No mark of the prompt is."""
    found = begin(manager, "ends", tokens)
    manager.commit("ends", tokens[found:])
    kept = manager.keep_end("ends", **options)
    manager.release("ends")
    make_moves(manager)
    manager.check()
    return kept


def test_checkpoints_whose_blocks_are_gone_leave_the_budget_first() -> None:
    manager = manager_of(8, 64, num_checkpoints=2)
    for prompt in PROMPTS[:2]:
        serve(manager, prompt)
    manager.tree.evict(manager.tree.num_evictable)
    assert end_of(manager, [1, 2, 3]) and manager.num_cached([1, 2, 3, 4]) == 3
    assert manager.stats().slots.lost == 2 and manager.stats().slots.evicted == 0


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("most", [0, 1])
def test_one_that_a_sequence_goes_on_from_is_evicted_last(most: int, goes_on: bool) -> None:
    manager = manager_of(8, 64, num_checkpoints=most)
    for _ in range(3):
        serve(manager, PROMPTS[0])
    assert end_of(manager, [1, 2, 3], goes_on=goes_on) == (goes_on and most > 0)
    assert manager.num_cached([1, 2, 3, 4]) == 3 * (goes_on and most > 0)


def test_a_sequence_goes_on_from_one_that_is_there() -> None:
    manager = manager_of(8, 64, num_checkpoints=1)
    for _ in range(3):
        serve(manager, PROMPTS[0])
    assert begin(manager, 0, [*PROMPTS[0], 1]) == len(PROMPTS[0]) - 1
    (warm,) = [one for one in manager.states.space.device.checkpoints if one is not None]
    manager.commit(0, [PROMPTS[0][-1], 1])
    assert not manager.keep_end(0)
    assert manager.states._states.running[0].last is warm and not warm.is_dropped


def test_a_position_where_prompts_part_is_no_regular_mark() -> None:
    manager = manager_of(checkpoint_every=3)
    begin(manager, 0, PROMPTS[0], cache_at=[6])
    for position in (3, 6, 7):
        manager.mark(0, position)
    kinds = {position: mark.kind for position, mark in manager.states._states.running[0].marks.items()}
    assert [kinds[position] for position in (3, 6, 7)] == [MarkKind.SPLIT, MarkKind.CALLER, MarkKind.SPLIT]


def test_no_count_of_lost_checkpoints_goes_down() -> None:
    manager = manager_of(8, 64)
    serve(manager, PROMPTS[0])
    manager.tree.evict(manager.tree.num_evictable)
    serve(manager, PROMPTS[1])
    assert manager.stats().slots.lost == 1
    manager.reset_prefix_cache()
    assert manager.stats().slots.lost == 1 and manager.stats().slots.num_checkpoints == 0


def test_numbers_that_are_read_while_slots_change_are_in_their_ranges() -> None:
    tier = SimpleNamespace(num_slots=2, num_free=2, num_checkpoints=0)
    tails = {tail: SimpleNamespace(is_on_host=tail == b"") for tail in (b"", b"abcd")}  # dropped since they were listed
    anchors = SimpleNamespace(of=lambda companions: [SimpleNamespace(tails=tails)])
    space = SimpleNamespace(tree=SimpleNamespace(dead_companions=lambda: [0]))
    counts = dict.fromkeys(("restored", "kept", "evicted", "demoted", "lost"), 0)
    states = SimpleNamespace(device=tier, host=tier, anchors=anchors, counts=counts, _space=space)
    slots = StateSpace.stats(states)
    assert (slots.num_free_slots, slots.num_checkpoints) == (2, 0)
    assert (slots.num_free_host_slots, slots.num_host_checkpoints) == (2, 0)
