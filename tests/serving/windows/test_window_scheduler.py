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


def test_where_windows_let_nothing_run_the_last_one_is_preempted() -> None:
    """Each of the two has half of the window's blocks, and needs a third. The preempted one is not admitted at once."""
    manager = BlockManager(64, B, groups=[Window(NUM_TOKENS, 4)])
    scheduler = Scheduler(manager, 8, 2 * B)
    scheduler.add(request_of("low", 0, range(17), priority=1))
    assert step(scheduler) == [("low", 0, 8)]
    scheduler.add(request_of("urgent", 1, range(100, 117)))
    assert step(scheduler) == [("urgent", 0, 8)]
    assert step(scheduler) == [("urgent", 8, 16)] and scheduler.preemptions.num == 1
    assert [request.request_id for request in scheduler.waiting] == ["low"]
    assert step(scheduler) == [("urgent", 16, 17), ("low", 0, 4)]
