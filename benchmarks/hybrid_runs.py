"""Runs of a trace: by BlockManager, by vLLM's scheduler, and by a policy that keeps states at all block borders."""

from collections import OrderedDict
from typing import NamedTuple

from kvpage.benchmarks.hybrid_traces import Request
from kvpage.benchmarks.peer_process import PeerProcess
from kvpage.blocks.groups.states.state_space import States
from kvpage.blocks.manager import BlockManager
from kvpage.serving import StateConfig

BLOCK_SIZE = 16


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


def run_manager(
    requests: list[Request], num_slots: int | None, is_marked: bool, every: int | None = StateConfig().checkpoint_every
) -> Run:
    """Serve the trace, one request after the other.

    num_slots: for checkpoints; None keeps all. every: tokens from one regular checkpoint to the next; None for none.
    """
    num_tokens = sum(len(request.computed) + BLOCK_SIZE for request in requests)
    most = 3 * len(requests) + (num_tokens // every if every else 0) if num_slots is None else num_slots
    states = States(most + 1, checkpoint_every=every)
    manager = BlockManager(num_tokens // BLOCK_SIZE + 1, BLOCK_SIZE, groups=[states])
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


def run_borders(requests: list[Request], num_slots: int | None, block_size: int) -> Run:
    """Serve the trace with states at all block borders, the least recently used evicted first. None keeps all."""
    kept: OrderedDict[bytes, None] = OrderedDict()
    all_found = []
    for request in requests:
        tokens = request.computed
        borders = range(block_size, len(request.prompt), block_size)
        found = next((end for end in reversed(borders) if tokens[:end].tobytes() in kept), 0)
        all_found.append(found)
        for end in [found, *range(found + block_size, len(tokens) + 1, block_size)]:
            if end:
                kept[tokens[:end].tobytes()] = None
                kept.move_to_end(tokens[:end].tobytes())
        while num_slots is not None and len(kept) > num_slots:
            kept.popitem(last=False)
    return Run.of(all_found, len(kept))


def run_vllm(peer: PeerProcess, requests: list[Request], block_size: int) -> Run:
    """Serve the trace by vLLM's own scheduler, in memory for all. The better of hashes of blocks, and of 16 tokens."""
    prompts, answers = (
        [part.tolist() for part in parts] for parts in ([r.prompt for r in requests], [r.answer for r in requests])
    )
    runs = [
        Run.of(peer.ask(prompts=prompts, answers=answers, block_size=block_size, unit=unit)["found"], 0)
        for unit in (None, BLOCK_SIZE)
    ]
    return max(runs, key=lambda run: run.num_found)
