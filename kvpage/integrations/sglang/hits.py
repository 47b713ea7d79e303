"""Hits: which beginnings of a prompt can be loaded, where several pools must have their parts of it.

all pages        a beginning of n pages needs pages 0 .. n - 1
trailing pages   it needs pages n - window .. n - 1: states and windows of attention end somewhere
"""

from collections.abc import Sequence

ALL_PAGES, TRAILING_PAGES, BLOCK_GROUPS = "all_pages", "trailing_pages", "block_groups"


def leading(flags: Sequence[bool]) -> int:
    """Return how many flags are set before the first unset one.

    Args:
        flags: A flag for each page.
    """
    return next((index for index, flag in enumerate(flags) if not flag), len(flags))


def lengths(flags: Sequence[bool], policy: str, window: int) -> list[int]:
    """Return the lengths of beginnings that a pool can serve, in order.

    Args:
        flags: A flag for each page of the pool.
        policy: "all_pages" or "trailing_pages".
        window: Pages at the end that must be there, for trailing pages.

    Returns:
        Numbers of pages. Trailing pages may leave gaps between them.

    Raises:
        ValueError: The policy is another one.
    """
    if policy == ALL_PAGES:
        return list(range(1, leading(flags) + 1))
    if policy != TRAILING_PAGES:
        raise ValueError(f"a hit policy must be {ALL_PAGES} or {TRAILING_PAGES}, got {policy!r}")
    run, served = 0, []
    for length, flag in enumerate(flags, 1):
        run = run + 1 if flag else 0
        if run >= min(max(window, 1), length):
            served.append(length)
    return served
