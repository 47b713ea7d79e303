"""Random lives of sessions, edits and hints. `KVPAGE_SESSION_STEPS=200000` makes so many steps in each world."""

import os

from support.life import lived, total
from support.session_life import WORLDS

NUM_STEPS = int(os.environ.get("KVPAGE_SESSION_STEPS", "150"))
OFTEN = ("released", "exact", "erratum", "retained")
SELDOM = ("evicted first", "paused: host", "returned", "demoted")
MANY_STEPS = 10_000


def test_random_lives():
    figures = total(lived(WORLDS, NUM_STEPS))
    must_happen = OFTEN if NUM_STEPS < MANY_STEPS else OFTEN + SELDOM
    assert min(figures[name] for name in must_happen) > 0, figures
