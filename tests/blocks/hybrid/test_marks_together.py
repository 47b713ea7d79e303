"""Prompts that begin alike and come together: one slot for each position that they share."""

import pytest
from support.hybrid_requests import B, begin, make_moves, manager_of, serve

from kvpage.blocks.manager import BlockManager

COMMON = list(range(1, 2 * B + 3))
PROMPTS = [[*COMMON, first, 7, 9] for first in (50, 51, 52)]


def together(manager: BlockManager, *prompts: list[int], ids: str = "abc", **options) -> list[list[int]]:
    """Begin each, and return the positions that each keeps after the same step."""
    starts = [begin(manager, seq_id, prompt, **options) for seq_id, prompt in zip(ids, prompts, strict=False)]
    marks = [
        [position for position, _ in manager.states.reserve(seq_id, start, len(prompt))]
        for seq_id, prompt, start in zip(ids, prompts, starts, strict=False)
    ]
    make_moves(manager)
    for seq_id, prompt, start in zip(ids, prompts, starts, strict=False):
        manager.commit(seq_id, prompt[start:])
        manager.keep(seq_id)
        manager.release(seq_id)
    make_moves(manager)
    manager.check()
    return marks


def test_where_prompts_diverge_one_of_them_keeps_the_state():
    manager = manager_of(num_slots=12)
    serve(manager, [*COMMON, 99, 98])
    kept = together(manager, *PROMPTS)
    assert kept == [[len(COMMON), len(COMMON) + 2], [len(COMMON) + 2], [len(COMMON) + 2]]
    assert serve(manager, [*COMMON, 60, 61]) == len(COMMON)


def test_a_prompt_that_comes_twice_is_kept_once():
    manager = manager_of()
    assert together(manager, COMMON, COMMON, COMMON, cache_at=[3]) == [[3, len(COMMON) - 1], [], []]
    assert serve(manager, COMMON) == len(COMMON) - 1


def test_few_slots_are_left_to_older_checkpoints():
    """Three prompts have three working slots and one for what they share: the older checkpoints keep theirs."""
    manager = manager_of(num_slots=6)
    others = [[*range(start, start + 6)] for start in (200, 300)]
    for other in others:
        serve(manager, other)
    together(manager, COMMON, COMMON, COMMON)
    assert [serve(manager, other) for other in others] == [5, 5]


@pytest.mark.parametrize("which", ["other tokens", "namespace", "private", "priority"])
def test_a_state_that_the_prompt_could_not_use_is_no_reason(which):
    manager = manager_of(num_slots=12)
    first = [9, *COMMON[1:]] if which == "other tokens" else COMMON
    manager.allocate("a", first, namespace=b"tenant" if which == "namespace" else b"")
    if which == "private":
        manager.make_private("a")
    assert len(manager.states.reserve("a", 0, len(first))) == 1
    manager.allocate("b", COMMON, priority=int(which == "priority"))
    assert [position for position, _ in manager.states.reserve("b", 0, len(COMMON))] == [len(COMMON) - 1]


def test_the_second_keeps_it_where_the_first_has_gone():
    manager = manager_of()
    for seq_id in "ab":
        manager.allocate(seq_id, COMMON)
    assert len(manager.states.reserve("a", 0, len(COMMON))) == 1
    manager.release("a")
    assert len(manager.states.reserve("b", 0, len(COMMON))) == 1
    make_moves(manager)
    manager.commit("b", COMMON)
    manager.keep("b")
    manager.release("b")
    assert serve(manager, COMMON) == len(COMMON) - 1


def test_other_tokens_than_were_announced_share_nothing():
    """The first commits other tokens; what it keeps stands for these. The second has lost a mark, and no more."""
    manager = manager_of()
    for seq_id in "ab":
        manager.allocate(seq_id, COMMON)
        manager.states.reserve(seq_id, 0, len(COMMON))
    make_moves(manager)
    for seq_id, tokens in (("a", [8, *COMMON[1:]]), ("b", COMMON)):
        manager.commit(seq_id, tokens)
        manager.keep(seq_id)
        manager.release(seq_id)
    assert serve(manager, COMMON) == 0
    assert serve(manager, [8, *COMMON[1:]]) == len(COMMON) - 1
    manager.check()
