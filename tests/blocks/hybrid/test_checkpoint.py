"""Checkpoints alone: their kinds, uses, families and worth, and which of an anchor's tails a prompt goes on with."""

import numpy as np
import pytest

from kvpage.blocks.groups.states.checkpoint import PER_USE, Anchor, Checkpoint, MarkKind, UseRate

B = 4


def tail_of(tokens: list[int]) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def checkpoint_at(num_tokens: int, kind: MarkKind = MarkKind.END, tail: bytes = b"", **fields) -> Checkpoint:
    return Checkpoint(Anchor(0, b"", 0), tail, num_tokens, 0, kind, 0, **fields)


def test_a_rate_begins_as_one_use_of_two() -> None:
    rate, naive = UseRate(), [1, 0]
    for is_used in (False, False, True, True, False, True):
        naive.append(0)
        assert rate.count_one() == PER_USE * sum(naive) // len(naive)
        if is_used:
            rate.count_use()
            naive[-1] = 1
    assert (rate.num, rate.num_uses) == (len(naive), sum(naive))


@pytest.mark.parametrize("num_blocks", [0, 2])
@pytest.mark.parametrize("num_after", [0, 1, 2, 3, B, B + 1])
@pytest.mark.parametrize("most_after", [0, 1, 2, 3, B, 3 * B])
def test_the_longest_tail_that_the_tokens_go_on_with(num_blocks: int, num_after: int, most_after: int) -> None:
    """Beside the naive way: all tails, each compared token by token."""
    tokens = np.arange(100, 100 + num_blocks * B + num_after, dtype=np.int32)
    rest = tokens[num_blocks * B :].tolist()
    most = num_blocks * B + most_after
    right = [list(range(100 + num_blocks * B, 100 + num_blocks * B + size)) for size in (0, 1, 3)]
    wrong = [[7], [*right[1], 7], [7, *right[2][1:]]]
    for kept in (right, [*right, *wrong], right[1:], wrong, [], right[:1], [right[2]]):
        anchor = Anchor(5, b"", num_blocks)
        for tail in kept:
            anchor.tails[tail_of(tail)] = checkpoint_at(num_blocks * B + len(tail), tail=tail_of(tail))
        fits = [tail for tail in kept if tail == rest[: len(tail)] and num_blocks * B + len(tail) <= most]
        found = anchor.longest(tokens, B, most)
        assert (None if found is None else found.tail) == (tail_of(max(fits, key=len)) if fits else None)


def test_a_tail_of_a_whole_block_is_of_the_next_anchor() -> None:
    """Only tokens up to the next block are compared, even if a tail is as long as one."""
    anchor = Anchor(0, b"", 1)
    anchor.tails[tail_of([1, 2, 3, 4])] = whole = checkpoint_at(2 * B)
    anchor.tails[tail_of([1, 2, 3, 4, 5])] = checkpoint_at(2 * B + 1)
    assert anchor.longest(np.array([0, 0, 0, 0, 1, 2, 3, 4, 5], np.int32), B, 9) is whole


def test_a_family() -> None:
    first, second, third, other = (checkpoint_at(num) for num in (10, 30, 31, 50))
    first.go_on_from(None)
    assert first.parent is None and first.num_saved == 10
    for child in (second, other):
        child.go_on_from(first)
    third.go_on_from(second)
    assert list(first.children) == [second, other] and list(second.children) == [third]
    assert [one.num_saved for one in (second, third, other)] == [20, 1, 40]
    second.leave()
    assert (second.parent, second.children) == (None, {})
    assert set(first.children) == {third, other} and third.parent is first and third.num_saved == 21
    first.leave()
    assert third.parent is None and other.parent is None
    assert (first.num_saved, third.num_saved, other.num_saved) == (10, 31, 50)
    other.leave()
    assert other.parent is None


@pytest.mark.parametrize("kind", MarkKind)
@pytest.mark.parametrize("num_children", [0, 1, 2])
def test_one_checkpoint_that_goes_on_passes_another_by(kind: MarkKind, num_children: int) -> None:
    before = checkpoint_at(10, kind)
    for num_tokens in range(20, 20 + num_children):
        checkpoint_at(num_tokens).go_on_from(before)
    assert before.is_passed_by == (num_children == 1 and kind not in (MarkKind.CALLER, MarkKind.SPLIT))


@pytest.mark.parametrize(("floor", "num_uses"), [(0, 0), (0, PER_USE), (1_000, 0), (1_000, 3 * PER_USE // 2)])
def test_worth_is_what_is_saved_as_often_as_it_is_used(floor: int, num_uses: int) -> None:
    before, after = checkpoint_at(16), checkpoint_at(21, floor=floor, num_uses=num_uses)
    assert after.worth == floor + num_uses * 21
    after.go_on_from(before)
    assert after.worth == floor + num_uses * 5
