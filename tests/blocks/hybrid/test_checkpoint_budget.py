"""num_checkpoints: idle working slots hold no more checkpoints than their own budget."""

import pytest
from support.hybrid_requests import B, begin, make_moves, manager_of, prefill, serve

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
    assert manager.keeps_checkpoints == (most + num_host_slots > 0)


def test_marks_of_running_sequences_are_in_the_budget() -> None:
    manager = manager_of(8, 64, num_checkpoints=2)
    for number, prompt in enumerate(PROMPTS[:4]):
        assert begin(manager, number, prompt) == 0
        assert len(manager.marks_of(number, 0, len(prompt))) == (number < 2)
    manager.give_up_marks(0)
    assert len(manager.marks_of(3, 0, len(PROMPTS[3]))) == 1
    manager.check()


def test_sequences_take_the_slots_of_checkpoints_where_they_need_them() -> None:
    manager = manager_of(3, 64, num_checkpoints=2)
    for prompt in PROMPTS[:2]:
        serve(manager, prompt)
    for number in range(3):
        begin(manager, number, PROMPTS[number])
    assert manager.stats().slots.num_checkpoints == 0
    manager.check()


def test_the_last_mark_replaces_what_is_worth_less() -> None:
    manager = manager_of(4, 64, num_checkpoints=1)
    serve(manager, PROMPTS[0])
    assert prefill_alone(manager, PROMPTS[1]) == 1
    assert manager.num_cached(PROMPTS[1]) == len(PROMPTS[1]) - 1 and manager.num_cached(PROMPTS[0]) == 0


def prefill_alone(manager, prompt: list[int]) -> int:
    begin(manager, "alone", prompt)
    marks = prefill(manager, "alone", prompt, 0)
    manager.release("alone")
    make_moves(manager)
    manager.check()
    return len(marks)


@pytest.mark.parametrize("value", [-1, True, 1.5])
def test_a_budget_that_is_none(value: object) -> None:
    with pytest.raises(ValueError, match="num_checkpoints must be an integer of at least 0, got"):
        manager_of(num_checkpoints=value)
