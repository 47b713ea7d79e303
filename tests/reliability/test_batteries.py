"""Each battery in its short form."""

import pytest
from batteries import all_batteries


@pytest.mark.parametrize("battery", all_batteries(), ids=lambda battery: battery.name.replace(" ", "-"))
def test_battery(battery):
    if battery.needs:
        pytest.skip(battery.needs)
    done = []
    figures = battery.run(0, battery.short, done.append)
    assert sum(done) >= battery.short, figures
