"""Marks: the positions of a prompt at which its state is to be kept."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvpage.blocks.groups.states.checkpoint import MarkKind
from kvpage.checks.values import as_integer, as_list

MIN_SAVED = 64  # tokens that a checkpoint saves, where no caller has named it: taking it costs as much as some 40


class Mark(NamedTuple):
    """A position of a prompt, at least 1.

    Attributes:
        num_tokens: The position: how many tokens the state has seen.
        kind: Why it is marked.
        tail: The tokens after the last whole block, int32 as bytes; None until they are committed.
    """

    num_tokens: int
    kind: MarkKind
    tail: bytes | None = None


def as_cache_at(cache_at: Sequence[int], num_tokens: int) -> list[int]:
    """Return a caller's marks in order.

    Raises:
        ValueError: A position is not in [1, num_tokens], or named twice.
        TypeError: They are no integers.
    """
    if isinstance(cache_at, (str, bytes)):
        raise TypeError(f"cache_at must be a sequence of integers, got {cache_at!r}")
    positions = []
    for value in as_list("cache_at", cache_at):
        if isinstance(value, bool):
            raise TypeError(f"cache_at must be integers, got {value!r}")
        position = as_integer("cache_at", value)
        if not 1 <= position <= num_tokens:
            raise ValueError(f"cache_at must be positions in [1, {num_tokens}], got {position}")
        positions.append(position)
    if len(set(positions)) != len(positions):
        raise ValueError(f"cache_at must be distinct positions, got {positions}")
    return sorted(positions)


def marks_of_prompt(
    num_tokens: int, wanted: Iterable[tuple[int, MarkKind]], num_cached: int, every: int | None
) -> dict[int, Mark]:
    """Return the marks of a prompt by position. Of several kinds at one position, the first counts.

    Args:
        num_tokens: Tokens of the prompt.
        wanted: Positions and kinds. Those up to `num_cached` are left out: their state is not passed any more.
        num_cached: Tokens that are not computed again.
        every: Tokens from one regular mark to the next; None for no regular marks.
    """
    marks: dict[int, Mark] = {}
    positions = range((num_cached // every + 1) * every, num_tokens + 1, every) if every else ()
    for position, kind in [*wanted, *((position, MarkKind.REGULAR) for position in positions)]:
        if num_cached < position <= num_tokens and position not in marks:
            marks[position] = Mark(position, kind)
    return marks
