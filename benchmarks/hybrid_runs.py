"""Runs of a trace: by HybridManager, and by the policy that keeps states at block borders only."""

from collections import OrderedDict
from dataclasses import dataclass

from kvpage.benchmarks.hybrid_traces import Request
from kvpage.blocks.hybrid.manager import HybridManager

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Run:
    """num_found: tokens of all prompts that need no computation. num_kept: states that it had at the end."""

    num_found: int
    num_kept: int


def run_manager(requests: list[Request], num_slots: int | None, is_marked: bool) -> Run:
    """Serve the trace, one request after the other. num_slots: for checkpoints; None keeps all."""
    most = 3 * len(requests) if num_slots is None else num_slots
    num_tokens = sum(len(request.computed) + BLOCK_SIZE for request in requests)
    manager = HybridManager(num_tokens // BLOCK_SIZE + 1, BLOCK_SIZE, num_slots=most + 1)
    num_found = sum(_serve(manager, number, request, is_marked) for number, request in enumerate(requests))
    manager.check()
    stats = manager.stats().slots
    assert stats is not None and stats.num_checkpoints <= most + 1
    return Run(num_found, stats.num_checkpoints)


def _serve(manager: HybridManager, number: int, request: Request, is_marked: bool) -> int:
    prompt, rest = request.prompt, request.answer[:-1]
    cache_at = [request.system] if is_marked else []
    found = manager.allocate(number, prompt, cache_at=cache_at).num_cached_tokens
    manager.marks_of(number, found, len(prompt))
    _make_moves(manager)
    manager.commit(number, prompt[found:])
    manager.keep(number)
    manager.append([number], len(rest))
    _make_moves(manager)
    manager.commit(number, rest)
    manager.keep_end(number)
    manager.release(number)
    return found


def _make_moves(manager: HybridManager) -> None:
    manager.do_moves(lambda move: None)
    manager.do_state_moves(lambda move: None)


def run_borders(requests: list[Request], num_slots: int | None, block_size: int, only_last: bool) -> Run:
    """Serve the trace with states at block borders, the least recently used evicted first.

    Args:
        requests: The trace.
        num_slots: States that are kept; None keeps all.
        block_size: Tokens between two borders.
        only_last: Whether a request leaves the state of its last border alone; otherwise that of each.
    """
    kept: OrderedDict[bytes, None] = OrderedDict()
    num_found = 0
    for request in requests:
        tokens = request.computed
        borders = range(block_size, len(request.prompt), block_size)
        found = next((end for end in reversed(borders) if tokens[:end].tobytes() in kept), 0)
        num_found += found
        last = len(tokens) // block_size * block_size
        passed = [end for end in range(block_size, len(tokens) + 1, block_size) if end > found]
        for end in [found, *([last] if only_last and last > found else [] if only_last else passed)]:
            if end:
                kept[tokens[:end].tobytes()] = None
                kept.move_to_end(tokens[:end].tobytes())
        while num_slots is not None and len(kept) > num_slots:
            kept.popitem(last=False)
    return Run(num_found, len(kept))
