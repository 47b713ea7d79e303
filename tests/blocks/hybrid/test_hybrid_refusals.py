"""What BlockManager refuses, by the argument's name, before anything is changed."""

import pytest
import torch
from support.hybrid_requests import B, begin, manager_of
from support.managers import manager_of_states

WRONG_MARKS = [
    ([0], ValueError, r"cache_at must be positions in \[1, 8\], got 0"),
    ([-1], ValueError, r"cache_at must be positions in \[1, 8\], got -1"),
    ([9], ValueError, r"cache_at must be positions in \[1, 8\], got 9"),
    ([3, 4, 3], ValueError, r"cache_at must be distinct positions, got \[3, 4, 3\]"),
    ([1.0], TypeError, "cache_at must be an integer, got 1.0"),
    ([True], TypeError, "cache_at must be integers, got True"),
    (["3"], TypeError, "cache_at must be an integer, got '3'"),
    ("3", TypeError, "cache_at must be a sequence of integers, got '3'"),
    (5, TypeError, "cache_at must be a sequence, got int"),
    (None, TypeError, "cache_at must be a sequence, got NoneType"),
    (torch.ones(2, dtype=torch.int32, device="meta"), TypeError, "cache_at must be an integer, got tensor"),
]


@pytest.mark.parametrize("cache_at, error, text", WRONG_MARKS)
def test_marks(cache_at, error, text):
    manager = manager_of()
    before = manager.stats()
    with pytest.raises(error, match=text):
        begin(manager, 0, range(2 * B), cache_at=cache_at)
    assert manager.stats() == before
    manager.check()


WRONG_OPTIONS = [
    ({"num_slots": 0}, "num_slots must be an integer of at least 1, got 0"),
    ({"num_slots": True}, "num_slots must be an integer of at least 1, got True"),
    ({"num_slots": 2.0}, "num_slots must be an integer of at least 1, got 2.0"),
    ({"num_slots": 1, "num_host_slots": -1}, "num_host_slots must be an integer of at least 0, got -1"),
    ({"num_slots": 2**31 - 8}, "num_blocks \\+ num_slots must be at most 2147483647, got 2147483648"),
    ({"num_slots": 1, "num_host_slots": 2**31}, "num_host_blocks \\+ num_host_slots must be at most 2147483647"),
    ({"num_slots": 1, "checkpoint_every": 0}, "checkpoint_every must be an integer of at least 1, got 0"),
]


@pytest.mark.parametrize("options, text", WRONG_OPTIONS)
def test_options(options, text):
    with pytest.raises(ValueError, match=text):
        manager_of_states(8, B, **options)


@pytest.mark.parametrize("num_tokens", [0, 9])
def test_one_more_mark(num_tokens):
    manager = manager_of()
    begin(manager, 0, range(2 * B))
    before = manager.stats()
    with pytest.raises(ValueError, match=rf"num_tokens must be in \[1, 8\], got {num_tokens}"):
        manager.mark(0, num_tokens)
    assert manager.stats() == before


@pytest.mark.parametrize("start, end", [(-1, 3), (3, 2), (0, 9)])
def test_portions(start, end):
    manager = manager_of()
    begin(manager, 0, range(8))
    with pytest.raises(ValueError, match=r"positions must be in \[0, 8\]"):
        manager.states.reserve(0, start, end)
