"""A small part of each battery that is quick, with the seed of the day: every day other work."""

import pytest
from batteries import all_batteries

COUNTS = {  # of the battery's own unit; a second of CPU or less, but for the process that fuzzes
    "corrupted files of the disk tier": 300,
    "fuzzing of entry points": 1500,
    "kill -9 amid disk writes": 7,
    "power lost amid disk writes": 200,
    "machine manager": 500,
    "machine pool": 400,
    "machine scheduler": 300,
    "machine slots": 400,
    "machine store": 250,
    "machine tree": 650,
    "random hybrid managers": 2000,
    "random managers": 2500,
    "random requests of hybrids": 2,
    "random requests over windows": 4,
    "random trees": 22500,
    "transfers": 250,
}
BATTERIES = {battery.name: battery for battery in all_batteries()}


@pytest.mark.parametrize("name", COUNTS)
def test_work_of_the_day(name, seed_of_day):
    battery, done = BATTERIES[name], []
    if battery.needs:
        pytest.skip(battery.needs)
    print(f"battery {name}, seed {seed_of_day}")
    figures = battery.run(seed_of_day, COUNTS[name], lambda count: done.append(count) or True)
    assert sum(done) >= COUNTS[name], figures
