"""Hits: which beginnings of a prompt can be loaded, where several pools must have their parts of it.

all pages        a beginning of n pages needs pages 0 .. n - 1
trailing pages   it needs pages n - window .. n - 1: states and windows of attention end somewhere
"""

from collections.abc import Sequence

ALL_PAGES, TRAILING_PAGES, BLOCK_GROUPS = "all_pages", "trailing_pages", "block_groups"


def leading(found: Sequence[bool]) -> int:
    """Return how many are found before the first one that is not.

    Args:
        found: A flag for each page.
    """
    return next((index for index, flag in enumerate(found) if not flag), len(found))


def lengths(found: Sequence[bool], policy: str, window: int) -> list[int]:
    """Return the lengths of beginnings that a pool can serve, in order.

    Args:
        found: A flag for each page of the pool.
        policy: "all_pages" or "trailing_pages".
        window: Pages at the end that must be there, for trailing pages.

    Returns:
        Numbers of pages. Trailing pages may leave gaps between them.

    Raises:
        ValueError: The policy is another one.
    """
    if policy == ALL_PAGES:
        return list(range(1, leading(found) + 1))
    if policy != TRAILING_PAGES:
        raise ValueError(f"a hit policy must be {ALL_PAGES} or {TRAILING_PAGES}, got {policy!r}")
    run, served = 0, []
    for length, flag in enumerate(found, 1):
        run = run + 1 if flag else 0
        if run >= min(max(window, 1), length):
            served.append(length)
    return served
