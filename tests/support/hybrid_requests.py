"""Requests of tests: a step at a time, or a whole one."""

from collections.abc import Sequence
from typing import Any

from support.managers import manager_of_states

from kvpage.blocks.manager import BlockManager
from kvpage.blocks.moves import BlockMove

B = 4


def manager_of(num_slots: int = 8, num_blocks: int = 32, **options: Any) -> BlockManager:
    return manager_of_states(num_blocks, B, num_slots=num_slots, **options)


def make_moves(manager: BlockManager) -> tuple[list[BlockMove], list[BlockMove]]:
    """Return the block moves and the state moves, which count as made."""
    blocks: list[BlockMove] = []
    states: list[BlockMove] = []
    manager.do_moves(blocks.append)
    manager.states.do_moves(states.append)
    return blocks, states


def begin(manager: BlockManager, seq_id: object, tokens: Sequence[int], **options: Any) -> int:
    return manager.allocate(seq_id, tokens, **options).num_cached_tokens


def prefill(manager: BlockManager, seq_id: object, tokens: Sequence[int], start: int) -> list[tuple[int, int]]:
    marks = manager.states.reserve(seq_id, start, len(tokens))
    make_moves(manager)
    manager.commit(seq_id, tokens[start:])
    manager.keep(seq_id)
    return marks


def serve(manager: BlockManager, tokens: Sequence[int], keeps_end: bool = False, **options: Any) -> int:
    """Return how many tokens were found."""
    found = begin(manager, "served", tokens, **options)
    prefill(manager, "served", tokens, found)
    if keeps_end:
        manager.keep_end("served")
    manager.release("served")
    make_moves(manager)
    manager.check()
    return found
