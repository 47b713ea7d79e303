"""Where prompts part, also within a block that the earlier one has not filled: which positions later ones find."""

import random

import pytest
from support.hybrid_requests import B, begin, manager_of, prefill, serve
from support.managers import manager_of_states

from kvpage.blocks.groups.states.marks import MIN_SAVED

WIDE = {"num_slots": 512, "num_blocks": 4096}


class Naive:
    """All prefixes whose state is kept, and all that have K and V, as tuples."""

    def __init__(self, block_size: int) -> None:
        self._states: set[tuple[int, ...]] = set()
        self._cached: list[tuple[int, ...]] = []
        self._block_size = block_size

    def serve(self, prompt: list[int]) -> int:
        end = len(prompt) - 1
        found = max((n for n in range(1, end + 1) if tuple(prompt[:n]) in self._states), default=0)
        parts_at = min(max((common(prompt, other) for other in self._cached), default=0), end)
        middle = found + (parts_at - found) // 2 if parts_at - found >= 2 * MIN_SAVED else 0
        self._states |= {tuple(prompt[:n]) for n in (end, parts_at, middle) if n > found}
        whole = len(prompt) // self._block_size * self._block_size
        self._cached.append(tuple(prompt[: max(whole, end)]))
        return found


def common(some, others) -> int:
    return next((i for i, (a, b) in enumerate(zip(some, others, strict=False)) if a != b), min(len(some), len(others)))


@pytest.mark.parametrize("own", [1, 2, B - 1, B, B + 1])
@pytest.mark.parametrize("shared", [1, 2, B - 1, B, B + 1, 2 * B - 1, 2 * B, 3 * B - 2])
def test_the_third_prompt_begins_where_the_first_two_parted(shared, own):
    manager, naive = manager_of(num_slots=32), Naive(B)
    prompts = [[*range(1, shared + 1), *[100 * turn] * own] for turn in (1, 2, 3)]
    found = [serve(manager, prompt) for prompt in prompts]
    assert found == [naive.serve(prompt) for prompt in prompts]
    assert found[2] == shared


def test_a_long_block_that_no_prompt_fills():
    manager = manager_of_states(8, 528, num_slots=8)
    shared = list(range(500))
    assert [serve(manager, [*shared, *[1000 + turn] * 20]) for turn in range(3)] == [0, 0, 500]


def test_the_end_of_an_answer_takes_part():
    manager, prompt, answer = manager_of(), [1, 2, 3], [70, 71, 72]
    begin(manager, 0, prompt)
    prefill(manager, 0, prompt, 0)
    for token in answer:
        manager.append([0])
        manager.commit(0, [token])
    manager.keep_end(0)
    manager.release(0)
    edited = [*prompt, *answer[:2], 80, 81]
    assert [serve(manager, edited), serve(manager, [*edited[:-2], 90])] == [2, 5]


def test_prompts_that_part_earlier_and_earlier_compute_half_as_much_each_time():
    manager, naive, trunk = manager_of(**WIDE), Naive(B), list(range(1600))
    prompts = [[*trunk[:length], *[5000 + length] * 10] for length in range(1600, 0, -100)]
    found = [serve(manager, prompt) for prompt in prompts]
    assert found == [naive.serve(prompt) for prompt in prompts]
    assert found[:5] == [0, 0, 750, 1075, 1187]


def test_no_middle_is_kept_of_a_few_tokens():
    manager = manager_of(**WIDE)
    for length, marks in ((2 * MIN_SAVED, 3), (2 * MIN_SAVED - 1, 2)):
        manager.reset_prefix_cache()
        trunk = list(range(length))
        serve(manager, [*trunk, 5000, 5001])
        begin(manager, length, [*trunk, 6000, 6001])
        assert len(manager.states.reserve(length, 0, length + 2)) == marks
        manager.release(length)


@pytest.mark.parametrize("seed", range(4))
def test_random_families_find_what_the_naive_one_finds(seed):
    rng, manager, naive = random.Random(seed), manager_of(**WIDE), Naive(B)
    trunks = [[rng.randrange(9) for _ in range(400)] for _ in range(3)]
    for _ in range(25):
        trunk = rng.choice(trunks)[: rng.randrange(1, 400)]
        prompt = [*trunk, *[rng.randrange(9) for _ in range(rng.randrange(1, 9))]]
        assert serve(manager, prompt) == naive.serve(prompt)


@pytest.mark.parametrize("own", [2, B - 1])
@pytest.mark.parametrize("shared", [1, B - 2, B, B + 1, 2 * B + 1])
def test_an_explanation_knows_the_tail_of_a_checkpoint(shared, own):
    manager, prompt = manager_of(), list(range(1, shared + 1))
    serve(manager, [*prompt, *[100] * own])
    told = manager.explain([*prompt, 7, 7, 7])
    attention, state = told.groups
    assert (attention.num_tokens, attention.differs_at, attention.token, attention.cached_token) == (
        shared,
        shared,
        7,
        100,
    )
    assert str(attention).startswith(f"attention: {shared} tokens, then the prompt differs")
    assert state.num_tokens == told.num_cached_tokens == 0


def test_a_tail_that_ends_before_the_prompt_does():
    manager = manager_of()
    serve(manager, [1, 2, 3])
    assert str(manager.explain([1, 2, 9, 9]).groups[0]).startswith("attention: 2 tokens, then nothing more is cached")
    assert str(manager.explain([1, 2, 3]).groups[0]) == "attention: 2 tokens, then the prompt ends"
