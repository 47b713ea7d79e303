"""Calls pass through few functions and files: a reader follows a prompt, a step and a chat from end to end."""

from collections.abc import Callable

import pytest
from support.walks import Walk, hops_of_a_step, walk_of_a_chat, walk_of_a_prompt

MAX_HOPS = 8


@pytest.mark.parametrize("walk, most_functions, most_files", [(walk_of_a_prompt, 20, 11), (walk_of_a_chat, 204, 46)])
def test_a_walk_is_short(walk: Callable[[], Walk], most_functions: int, most_files: int) -> None:
    steps = walk()
    functions, files = steps.functions, steps.files
    assert 0 < len(functions) <= most_functions, "\n  ".join(["", *functions])
    assert len(files) <= most_files, "\n  ".join(["", *files])


@pytest.mark.parametrize("num_steps_before", [0, 3])
def test_a_step_reaches_the_model_in_few_calls(num_steps_before: int) -> None:
    """Of a prompt, and of a decode."""
    hops = hops_of_a_step(num_steps_before)
    assert hops[0] == "Engine.step" and len(hops) <= MAX_HOPS, hops
