"""Schedulers without an engine, step by step: the tokens of each step count as computed."""

from collections.abc import Callable, Sequence

import numpy as np

from kvpage.blocks.manager import BlockManager
from kvpage.serving.loop.batch.batch import Batch
from kvpage.serving.loop.moves.loads.turns import Turns
from kvpage.serving.loop.request import Request
from kvpage.serving.loop.scheduler import Scheduler
from kvpage.serving.params.sampling import SamplingParams

B = 4


def request_of(number: int, num_tokens: int, max_tokens: int = 8, n: int = 1, first: int = 0, **fields) -> Request:
    """Return a request of the tokens first, first + 1, ...; by default none that another request has."""
    begin = first or 1000 * (number + 1)
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, n=n, **fields)
    return Request(f"r{number}", np.arange(begin, begin + num_tokens, dtype=np.int32), params, number)


class HeldTurns(Turns):
    """Something comes for some requests, as long as `is_held` says so."""

    def __init__(self, is_held: Callable[[Request], bool]) -> None:
        self.holds = is_held


def scheduler_of(
    num_blocks: int = 64,
    max_num_seqs: int = 8,
    budget: int = 64,
    window: int | None = None,
    is_held: Callable[[Request], bool] = lambda request: False,
    explains: bool = False,
    **options,
) -> Scheduler:
    manager, turns = BlockManager(num_blocks, B, **options), HeldTurns(is_held)
    return Scheduler(manager, max_num_seqs, budget, window, turns=turns, explains=explains)


def plan(batch: Batch) -> list[tuple[str, int, int]]:
    return [(portion.request.request_id, portion.start, portion.end) for portion in batch.portions]


def step(scheduler: Scheduler, tried: Sequence[Request] = ()) -> list[tuple[str, int, int]]:
    batch = scheduler.schedule(tried)
    scheduler.manager.take_moves()
    scheduler.complete(batch)
    for portion in batch.portions:
        if portion.is_last and portion.request.append(7, now=0.0):
            scheduler.finish(portion.request)
    scheduler.manager.check()
    return plan(batch)


def counters(scheduler: Scheduler) -> tuple[int, int, int, int]:
    return *scheduler.preemptions, scheduler.num_prompt_tokens, scheduler.num_cached_tokens
