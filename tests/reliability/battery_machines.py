"""State machines of pool, tree with two tiers, block manager, slots, store and scheduler, searched by hypothesis."""

import functools

import hypothesis
from battery import Advance, Battery, Figures
from hypothesis.stateful import run_state_machine_as_test
from machines import MACHINES, Machine

STEPS_AN_EXAMPLE = 60
SHORT = {"pool": 8_000, "tree": 13_000, "manager": 10_000, "slots": 8_000, "store": 5_000, "scheduler": 6_000}


def run(tested: type[Machine], seed: int, count: int, advance: Advance) -> Figures:
    """Rounds with seeds of their own, until all together have done so many steps."""
    num_rounds = num_done = 0
    while num_done < count:
        before = tested.num_done
        search(tested, (seed << 20) + num_rounds, max(count // STEPS_AN_EXAMPLE // 4, 1))
        advance(tested.num_done - before)
        num_done += tested.num_done - before
        num_rounds += 1
    return {"steps": num_done}


def search(tested: type[Machine], seed: int, num_examples: int, shrinks: bool = True) -> None:
    """Raises what an example, the smallest that is found, raises."""
    options = hypothesis.settings(
        max_examples=num_examples,
        stateful_step_count=STEPS_AN_EXAMPLE,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate, *([hypothesis.Phase.shrink] if shrinks else [])],
    )
    run_state_machine_as_test(hypothesis.seed(seed)(tested), settings=options)


BATTERIES = [
    Battery(f"machine {name}", "steps", count, 100 * count, functools.partial(run, MACHINES[name]))
    for name, count in SHORT.items()
]
