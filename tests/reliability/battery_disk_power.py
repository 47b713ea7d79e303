"""Power lost at any moment: of what was not synchronised any sectors reach the disk, in any order, and files may be
short or without a name.

    work on a tier, its writes recorded ─► at random moments: the files as a disk may have kept them ─► opened, read

Whatever passes the check of a record is exactly what its key had at the last flush(sync=True), or was given since.
What that flush has seen and nobody has touched since is there.
"""

import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from battery import Advance, Battery, Figures
from stamps import difference, stamped
from support.disk_faults import SEGMENT_BYTES, PowerLog, replace_os
from support.pwritev_hook import PWRITEV
from support.store_records import get, is_record, key, put

from kvpage.store.disk.disk_tier import DiskTier

NUM_KEYS = 12
STATES_EACH = 25  # of one record of writes
PUT, REMOVE, SYNC = range(3)


@dataclass(frozen=True, slots=True)
class Deed:
    """begin, end: events of the log. there: after a sync, the generation by key. num_evicted: until its end."""

    kind: int
    n: int
    generation: int
    begin: int
    end: int
    there: dict[int, int]
    num_evicted: int


def run(seed: int, count: int, advance: Advance) -> Figures:
    rng, figures = random.Random(seed), dict.fromkeys(("states", "verified_reads", "found", "torn", "kept_by_sync"), 0)
    num_calls = PWRITEV.num_calls
    with tempfile.TemporaryDirectory() as place:
        for number in range(count):
            if number % STATES_EACH == 0:
                shutil.rmtree(Path(place) / "t", ignore_errors=True)
                log, deeds = _record(Path(place) / "t", rng)
            try:
                _lose_power(Path(place) / "t", log, deeds, rng, figures)
            except Exception as error:
                raise AssertionError(f"seed {seed}, state {number}: {error}") from error
            figures["states"] += 1
            advance(1)
    least = count if count >= 200 else 0  # a few states follow one or two records of writes, which may hold little
    assert figures["found"] > least and figures["torn"] > 0, "hardly anything was found or torn, which says nothing"
    return figures | {"native_writes": PWRITEV.num_calls - num_calls}


def _tier(path: Path) -> DiskTier:
    return DiskTier([path], 2 * SEGMENT_BYTES, segment_bytes=SEGMENT_BYTES, retry_seconds=0)


def _record(path: Path, rng: random.Random) -> tuple[PowerLog, list[Deed]]:
    """Random work on a tier that evicts now and then."""
    log, deeds, generations = PowerLog(), [], dict.fromkeys(range(NUM_KEYS), 0)
    with pytest.MonkeyPatch.context() as patch:
        replace_os(patch, log)
        tier = _tier(path)
        for _ in range(rng.randint(10, 60)):
            kind, n = rng.choices([PUT, REMOVE, SYNC], [6, 2, 1])[0], rng.randrange(NUM_KEYS)
            begin, there = len(log.events), {}
            if kind == PUT:
                generations[n] += 1
                assert put(tier, {key(n): stamped(n, generations[n])}) == [True]
            elif kind == REMOVE:
                tier.remove([key(n)])
            else:
                tier.flush(sync=True)
                is_there = tier.contains([key(n) for n in range(NUM_KEYS)])
                there = {n: generations[n] for n in range(NUM_KEYS) if is_there[n]}
            end, num_evicted = len(log.events), tier.stats().evicted
            deeds.append(Deed(kind, n, generations[n], begin, end, there, num_evicted))
        tier.close()
    return log, deeds


def _lose_power(path: Path, log: PowerLog, deeds: list[Deed], rng: random.Random, figures: Figures) -> None:
    at = rng.randint(0, len(log.events))
    shutil.rmtree(path)
    path.mkdir(mode=0o700)
    for name, data in log.files(at, path.name, rng).items():
        (path / name).write_bytes(data)
    tier = _tier(path)
    found = get(tier, [key(n) for n in range(NUM_KEYS)])
    for n, data in enumerate(found):
        _check(n, data if is_record(data, key(n)) else None, deeds, at, figures)
        figures["verified_reads"] += 1
        figures["torn"] += data is not None and not is_record(data, key(n))
    tier.check()
    assert put(tier, {key(0): stamped(0, 10**6)}) == [True]
    assert get(tier, [key(0)]) == [stamped(0, 10**6)], "what is stored afterwards does not count"
    tier.check()
    tier.close()


def _check(n: int, found: bytes | None, deeds: list[Deed], at: int, figures: Figures) -> None:
    """Of a key, when the power was lost after `at` events."""
    begun = [deed for deed in deeds if deed.begin < at or deed.end <= at]
    last = max((i for i, deed in enumerate(begun) if deed.kind == SYNC and deed.end <= at), default=-1)
    synced, since = begun[last].there if last >= 0 else {}, begun[last + 1 :]
    allowed = [deed.generation for deed in since if (deed.kind, deed.n) == (PUT, n)]
    allowed += [synced[n]] if n in synced else []
    is_untouched = not any(deed.n == n and deed.kind != SYNC for deed in since)
    has_room = not since or since[-1].num_evicted == begun[last].num_evicted
    if found is None:
        assert not (n in synced and is_untouched and has_room), (
            f"key {n}, generation {synced[n]}, was synced and is lost"
        )
        return
    figures["found"] += 1
    figures["kept_by_sync"] += n in synced and is_untouched
    if not any(found == stamped(n, generation) for generation in allowed):
        wanted = stamped(n, allowed[0]) if allowed else b""
        raise AssertionError(f"key {n} must be of a generation among {allowed}: {difference(found, wanted)}")


BATTERIES = [Battery("power lost amid disk writes", "states", 1_000, 100_000, run)]
