"""Sequences of tests on a BlockManager: computed at once, and looked for."""

from typing import Any

from kvpage import BlockManager
from kvpage.blocks.manager import Allocation

B = 4


def compute(manager: BlockManager, seq_id: object, tokens: list[int], num_cached: int = 0) -> None:
    """The moves count as made; the tokens after those that were cached are committed."""
    manager.take_moves()
    manager.commit(seq_id, tokens[num_cached:])


def computed(manager: BlockManager, seq_id: object, tokens: list[int], *arguments: Any, **options: Any) -> Allocation:
    """Begin a sequence and compute it. Return what it was given."""
    given = manager.allocate(seq_id, tokens, *arguments, **options)
    compute(manager, seq_id, tokens, given.num_cached_tokens)
    return given


def num_found(manager: BlockManager, tokens: list[int], namespace: bytes = b"") -> int:
    """How many of the tokens a new sequence would share in whole blocks."""
    match = manager.tree.match(tokens, namespace, num_left_over=0)
    manager.tree.release(match)
    return match.num_tokens
