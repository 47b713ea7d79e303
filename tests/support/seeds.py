"""Seeds of random tests: other ones each day, which a failure names, and KVPAGE_TEST_SEED brings back."""

import os
from datetime import UTC, datetime

VARIABLE = "KVPAGE_TEST_SEED"


def todays_seed() -> int:
    """Return the number in KVPAGE_TEST_SEED; without it the date, such as 20251231, the same all over the world.

    Raises:
        ValueError: The variable holds no integer.
    """
    return int(os.environ.get(VARIABLE) or datetime.now(UTC).strftime("%Y%m%d"))


def seed_of(number: int) -> int:
    """Return today's seed of the life with this number, from 0 to 999."""
    return todays_seed() * 1000 + number


def replay() -> str:
    """Return how to repeat today's random tests."""
    return f"{VARIABLE}={todays_seed()}"
