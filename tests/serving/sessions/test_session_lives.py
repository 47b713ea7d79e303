"""Random lives of sessions, edits and hints. `KVPAGE_SESSION_STEPS=200000` makes so many steps in each world."""

import os

from support.life import lived, total
from support.session_life import WORLDS

NUM_STEPS = int(os.environ.get("KVPAGE_SESSION_STEPS", "150"))
HAPPEN = ("released", "evicted first", "exact", "erratum", "retained", "paused: host", "returned", "demoted")


def test_random_lives():
    figures = total(lived(WORLDS, NUM_STEPS))
    assert min(figures[name] for name in HAPPEN) > 0, figures
