"""A small part of each battery, with the seed of the day: every day other work. test_batteries.py has more of it."""

import pytest
from batteries import all_batteries
from support.seeds import replay, todays_seed

PART = 20  # of the short form
DEAR = {  # batteries of which the smallest part takes seconds
    "a disk that fails": "it waits for tiers that do not answer",
    "compiled kernels": "test_compiled_*.py run such kernels",
    "end to end": "it begins live engines and servers",
    "native core": "it compiles the core with sanitizers",
    "native memory": "as above",
    "native numbers": "as above",
    "native threads": "as above",
    "redis in trouble": "it waits for a server that does not answer",
}
BATTERIES = {battery.name: battery for battery in all_batteries()}


@pytest.mark.parametrize("name", sorted(BATTERIES.keys() - DEAR))
def test_work_of_the_day(name):
    battery, done = BATTERIES[name], []
    if battery.needs:
        pytest.skip(battery.needs)
    print(f"battery {name}: {replay()}")
    count = max(1, battery.short // PART)
    figures = battery.run(todays_seed(), count, lambda num_more: done.append(num_more) or True)
    assert sum(done) >= count, figures


def test_what_is_left_out_is_a_battery():
    assert DEAR.keys() <= BATTERIES.keys()
