"""Scheduler over windows that are short, step by step."""

import numpy as np
from support.scheduler_steps import B, HeldTurns, step

from kvpage import BlockManager, Window
from kvpage.serving.loop.request import Request
from kvpage.serving.loop.scheduler import Scheduler
from kvpage.serving.params.sampling import SamplingParams

NUM_TOKENS = 6  # of the window: two blocks at the border of one, and three within


def scheduler_of(num_window_blocks: int, held: set[str]) -> Scheduler:
    manager = BlockManager(64, B, groups=[Window(NUM_TOKENS, num_window_blocks)])
    return Scheduler(manager, 8, B, turns=HeldTurns(lambda request: request.request_id in held))


def request_of(name: str, number: int, tokens: range, priority: int = 0) -> Request:
    params = SamplingParams(max_tokens=1, temperature=1.0)
    return Request(name, np.array(tokens, np.int32), params, number, priority=priority)


def test_a_newcomer_whose_prefix_takes_all_of_a_window_waits() -> None:
    """An urgent request is held, so the running one comes after newcomers. The prefix of one would take all there is.

    The newcomer waits for a block besides, and the running one goes on.
    """
    held: set[str] = {"urgent"}
    scheduler = scheduler_of(4, held)
    scheduler.add(request_of("first", 0, range(9)))
    while scheduler.running or scheduler.waiting:
        step(scheduler)
    scheduler.add(request_of("running", 1, range(100, 117), priority=1))
    assert step(scheduler) == [("running", 0, 4)]
    assert step(scheduler) == [("running", 4, 8)]
    scheduler.add(request_of("newcomer", 2, range(13), priority=1))
    scheduler.add(request_of("urgent", 3, range(200, 203)))
    assert step(scheduler) == [("running", 8, 12)]
    assert scheduler.preemptions.num == 0
    held.clear()
    done = [portion for _ in range(9) for portion in step(scheduler)]
    assert not scheduler.running and not scheduler.waiting
    assert done[0] == ("urgent", 0, 3)
    assert {name: end for name, _, end in done} == {"urgent": 3, "running": 17, "newcomer": 13}
