"""Runs of a trace: by BlockManager, and by the policy that keeps states at block borders only."""

from collections import OrderedDict
from typing import NamedTuple

from kvpage.benchmarks.hybrid_traces import Request
from kvpage.blocks.groups.states.state_space import States
from kvpage.blocks.manager import BlockManager

BLOCK_SIZE = 16
PORTION = 2048  # most tokens of one prompt that the other policy computes at once


class Run(NamedTuple):
    """Figures of a trace.

    num_found: tokens of all prompts that need no computation. num_hits: requests with any of them. num_kept: states at
        the end.
    """

    num_found: int
    num_hits: int
    num_kept: int

    @classmethod
    def of(cls, found: list[int], num_kept: int) -> "Run":
        """found: tokens of each prompt that need no computation."""
        return cls(sum(found), sum(num > 0 for num in found), num_kept)


def run_manager(requests: list[Request], num_slots: int | None, is_marked: bool) -> Run:
    """Serve the trace, one request after the other. num_slots: for checkpoints; None keeps all."""
    most = 3 * len(requests) if num_slots is None else num_slots
    num_tokens = sum(len(request.computed) + BLOCK_SIZE for request in requests)
    manager = BlockManager(num_tokens // BLOCK_SIZE + 1, BLOCK_SIZE, groups=[States(most + 1)])
    found = [_serve(manager, number, request, is_marked) for number, request in enumerate(requests)]
    manager.check()
    stats = manager.stats().slots
    assert stats is not None and stats.num_checkpoints <= most + 1
    return Run.of(found, stats.num_checkpoints)


def _serve(manager: BlockManager, number: int, request: Request, is_marked: bool) -> int:
    prompt, rest = request.prompt, request.answer[:-1]
    cache_at = [request.system] if is_marked else []
    found = manager.allocate(number, prompt, cache_at=cache_at).num_cached_tokens
    assert manager.states is not None
    manager.states.reserve(number, found, len(prompt))
    _make_moves(manager)
    manager.commit(number, prompt[found:])
    manager.keep(number)
    manager.append([number], len(rest))
    _make_moves(manager)
    manager.commit(number, rest)
    manager.keep_end(number)
    manager.release(number)
    return found


def _make_moves(manager: BlockManager) -> None:
    manager.do_moves(lambda move: None)
    assert manager.states is not None
    manager.states.do_moves(lambda move: None)


def run_borders(requests: list[Request], num_slots: int | None, block_size: int, only_ends: bool) -> Run:
    """Serve the trace with states at block borders, the least recently used evicted first. num_slots: None keeps all.

    only_ends: whether a request leaves the states of its last border, and of those at which a portion of its prefill
    ends; otherwise that of each border.
    """
    kept: OrderedDict[bytes, None] = OrderedDict()
    all_found = []
    for request in requests:
        tokens = request.computed
        borders = range(block_size, len(request.prompt), block_size)
        found = next((end for end in reversed(borders) if tokens[:end].tobytes() in kept), 0)
        all_found.append(found)
        passed = range(found + block_size, len(tokens) + 1, block_size)
        for end in [found, *(_ends(found, passed) if only_ends else passed)]:
            if end:
                kept[tokens[:end].tobytes()] = None
                kept.move_to_end(tokens[:end].tobytes())
        while num_slots is not None and len(kept) > num_slots:
            kept.popitem(last=False)
    return Run.of(all_found, len(kept))


def _ends(start: int, borders: range) -> list[int]:
    """Return the borders at which portions end, each as long as it can be, and the last one."""
    ends = []
    while reached := [border for border in borders if start < border <= start + PORTION]:
        start = reached[-1]
        ends.append(start)
    return ends
