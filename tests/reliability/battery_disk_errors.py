"""A disk that fails: at every call of random work an error, once or from then on, short reads and writes, or the
directory deleted underneath. Nothing wrong comes out, nothing is lost to an error, and all goes on by itself.

    tests/support/disk_faults.py: fail_at, delete_at        one call of one work ─► one trial
"""

import errno
import functools
import itertools
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from battery import Advance, Battery, Figures
from support.disk_faults import SLOT_BYTES, Trial, delete_at, fail_at
from support.pwritev_hook import PWRITEV

ERRORS = (errno.ENOSPC, errno.EIO, errno.EMFILE, errno.EROFS, errno.EDQUOT, None)
NUM_DEEDS = 8
TrialAt = Callable[[Path, int, Callable[[Trial], None]], bool]


def run(seed: int, count: int, advance: Advance) -> Figures:
    """A work that is begun is tried at every call, so a few more trials than `count`."""
    figures: Figures = {"trials": 0, "works": 0, "max_kinds": len(_kinds()), "native_writes": -PWRITEV.num_calls}
    with tempfile.TemporaryDirectory() as place:
        for number in itertools.count():
            if figures["trials"] >= count:
                figures["native_writes"] += PWRITEV.num_calls
                return figures
            for name, trial in _kinds():
                for nth in _calls(Path(place) / "t", trial, seed, number, name):
                    figures["trials"] += 1
                    advance(1)
                    assert nth < 1000, "the work has no end"
            figures["works"] += 1
    raise AssertionError("unreachable")


def _kinds() -> list[tuple[str, TrialAt]]:
    kinds: list[tuple[str, TrialAt]] = [("directory deleted", delete_at)]
    for error, half, lasts in itertools.product(ERRORS, (False, True), (False, True)):
        if not (half and error is None):
            name = f"{errno.errorcode[error] if error else 'short'}{' half' * half}{' lasting' * lasts}"
            trial = functools.partial(_fail_at, error=error, half=half, lasts=lasts)
            kinds.append((name, trial))
    return kinds


def _fail_at(path: Path, nth: int, job: Callable[[Trial], None], error: int | None, half: bool, lasts: bool) -> bool:
    return fail_at(path, nth, error, half, lasts, job)


def _calls(path: Path, trial: TrialAt, seed: int, number: int, name: str) -> Iterator[int]:
    """Tries the calls of a work one by one, until it has no more."""
    for nth in itertools.count(1):
        try:
            has_more = trial(path, nth, lambda one: _work(one, random.Random(f"{seed} {number}")))
        except Exception as error:
            raise AssertionError(f"seed {seed}, work {number}, {name} at call {nth}: {error}") from error
        shutil.rmtree(path)
        if not has_more:
            return
        yield nth


def _work(trial: Trial, rng: random.Random) -> None:
    for _ in range(NUM_DEEDS):
        n = rng.randrange(11)
        deed = rng.choices(["put", "get", "remove", "flush"], [5, 2, 2, 1])[0]
        if deed == "put":
            trial.put(n, rng.choice([rng.randrange(4, 9000) * 4, 9 * SLOT_BYTES]))
        elif deed == "get":
            trial.get(n)
        elif deed == "remove":
            trial.remove(n)
        else:
            trial.flush()


BATTERIES = [Battery("a disk that fails", "failing calls", 500, 20_000, run)]
