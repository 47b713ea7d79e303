"""kill -9 at any moment of opening, writing, replacing, removing and evicting on the disk, then opened again and read.

    parent ── fork ──► child: two threads write, each notes in shared memory what it begins and what is done
      │ ◄── SIGKILL after so many notes, and a moment
      └─► opens the directory, reads every key, and goes on from what it has found

What was committed is there, whole, in its last generation; what was removed is gone; of what was under way, before or
after. Only where records are evicted may one be missing.
"""

import mmap
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from battery import Advance, Battery, Figures
from stamps import difference, stamped
from support.disk_faults import SLOT_BYTES
from support.store_records import get, key, write

from kvpage.store.disk.disk_tier import DiskTier

NUM_KEYS, NUM_THREADS, NUM_NOTES = 60, 2, 2000
KILLS_EACH = 25  # of one directory
ROOMY, TIGHT = 1024 * SLOT_BYTES, 128 * SLOT_BYTES
PUT, REMOVE = 1, 2  # kinds of notes
BEGUN, DONE, REFUSED = 0, 1, 2  # how far they are


class Notes:
    """What the child does, in memory that outlives it: int64 [threads, notes, (kind, key, generation, progress)]."""

    def __init__(self) -> None:
        cells = NUM_THREADS * NUM_NOTES * 4
        memory = np.frombuffer(mmap.mmap(-1, 8 * (cells + 2)), np.int64)
        self.notes, self._head = memory[:cells].reshape(NUM_THREADS, NUM_NOTES, 4), memory[cells:]

    def clear(self) -> None:
        self.notes[:], self._head[:] = 0, 0

    def begin(self, thread: int, at: int, kind: int, n: int, generation: int) -> None:
        note = self.notes[thread, at]
        note[1], note[2] = n, generation
        note[0] = kind  # last: from now on it counts

    def saw(self, num_evicted: int) -> None:
        self._head[0], self._head[1] = 1, max(self._head[1], num_evicted)

    @property
    def num_begun(self) -> int:
        return int((self.notes[:, :, 0] != 0).sum())

    @property
    def was_opened(self) -> bool:
        return bool(self._head[0])

    @property
    def num_evicted(self) -> int:
        return int(self._head[1])


@dataclass(slots=True)
class Expected:
    """there: generation by key. tried: the last generation of each key. maybe: of what was under way, by key."""

    there: dict[int, int] = field(default_factory=dict)
    tried: dict[int, int] = field(default_factory=dict)
    maybe: dict[int, int | None] = field(default_factory=dict)

    def take(self, notes: Notes) -> None:
        self.maybe = {}
        for mine in notes.notes:
            for kind, n, generation, progress in mine[: int((mine[:, 0] != 0).sum())].tolist():
                if kind == PUT:
                    self.tried[n] = generation
                if progress == BEGUN:
                    self.maybe[n] = generation if kind == PUT else None
                elif progress == DONE and kind == PUT:
                    self.there[n] = generation
                elif progress == DONE:
                    self.there.pop(n, None)

    def check(self, n: int, found: bytes | None, may_lack: bool) -> None:
        """Of a key, and remembers what was found."""
        allowed = [self.there.get(n)] + ([self.maybe[n]] if n in self.maybe else []) + [None] * may_lack
        generation = next((g for g in allowed if found == (None if g is None else stamped(n, g))), -1)
        if generation == -1:
            wanted = next((stamped(n, g) for g in allowed if g is not None), b"")
            what = "is lost" if found is None else difference(found, wanted)
            raise AssertionError(f"key {n} must be of a generation among {allowed}: {what}")
        self.there.pop(n, None)
        if generation is not None:
            self.there[n] = generation


def run(seed: int, count: int, advance: Advance) -> Figures:
    rng, notes = random.Random(seed), Notes()
    figures: Figures = {"kills": 0, "verified_reads": 0, "found": 0, "kills_while_opening": 0}
    with tempfile.TemporaryDirectory() as place:
        for number in range(count):
            path, is_roomy = Path(place) / "t", number // KILLS_EACH % 2 == 0
            if number % KILLS_EACH == 0:
                shutil.rmtree(path, ignore_errors=True)
                expected = Expected()
            try:
                _kill_once(path, ROOMY if is_roomy else TIGHT, expected, notes, rng)
                num_found = _verify(path, ROOMY if is_roomy else TIGHT, expected, may_lack=not is_roomy)
            except Exception as error:
                raise AssertionError(f"seed {seed}, kill {number}: {error}") from error
            figures["kills"] += 1
            figures["verified_reads"] += NUM_KEYS
            figures["found"] += num_found
            figures["kills_while_opening"] += not notes.was_opened
            advance(1)
    # On a busy machine a few writers may all be killed before they have written.
    assert count < 100 or figures["found"] > count, "hardly anything was found, which says nothing"
    return figures


def _kill_once(path: Path, capacity: int, expected: Expected, notes: Notes, rng: random.Random) -> None:
    notes.clear()
    seed, delay = rng.getrandbits(32), rng.choice([0.0005, 0.005]) * rng.random()
    num_notes = rng.choice([0, rng.randrange(200)])  # 0: most likely while it opens
    child = os.fork()
    if child == 0:
        _write_until_killed(path, capacity, dict(expected.tried), notes, seed)
    end = time.monotonic() + 120.0
    while notes.num_begun < num_notes and time.monotonic() < end:
        time.sleep(0.0002)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status), f"the child ended by itself: {os.waitstatus_to_exitcode(status)}"
    expected.take(notes)
    assert capacity != ROOMY or notes.num_evicted == 0, "nothing had to be evicted"


def _verify(path: Path, capacity: int, expected: Expected, may_lack: bool) -> int:
    num_unfinished = sum(_is_unfinished(file) for file in path.glob("*.segment"))
    tier = _open(path, capacity)
    found = get(tier, [key(n) for n in range(NUM_KEYS)])
    for n, data in enumerate(found):
        expected.check(n, data, may_lack)
    assert tier.stats().corrupted == num_unfinished, "a header was torn, or the walk has lost its way"
    tier.check()
    tier.close()
    return sum(data is not None for data in found)


def _is_unfinished(file: Path) -> bool:
    """Whether its making was cut off: no record can be in it yet, since its header comes last."""
    with file.open("rb") as opened:
        return not any(opened.read(8))


def _open(path: Path, capacity: int) -> DiskTier:
    return DiskTier([path], capacity, segment_bytes=128 * SLOT_BYTES)


def _write_until_killed(path: Path, capacity: int, tried: dict[int, int], notes: Notes, seed: int) -> None:
    """In the child."""
    try:
        tier = _open(path, capacity)
        notes.saw(0)
        jobs = [(tier, tried, notes, thread, random.Random(seed + thread)) for thread in range(NUM_THREADS)]
        threads = [threading.Thread(target=_write, args=job) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        os._exit(1)


def _write(tier: DiskTier, tried: dict[int, int], notes: Notes, thread: int, rng: random.Random) -> None:
    for at in range(NUM_NOTES):
        n = rng.randrange(NUM_KEYS // NUM_THREADS) * NUM_THREADS + thread
        if rng.random() < 0.15:
            notes.begin(thread, at, REMOVE, n, 0)
            tier.remove([key(n)])
            is_done = True
        else:
            tried[n] = tried.get(n, 0) + 1
            notes.begin(thread, at, PUT, n, tried[n])
            is_done = _put(tier, n, tried[n], rng)
        notes.saw(tier.stats().evicted)
        notes.notes[thread, at, 3] = DONE if is_done else REFUSED
    time.sleep(60)  # there is no more room for notes: it is killed soon


def _put(tier: DiskTier, n: int, generation: int, rng: random.Random) -> bool:
    data = stamped(n, generation)
    writer = tier.create(key(n), len(data))
    if writer is None:
        return False
    with writer:
        cuts = [0, *sorted(rng.sample(range(1, len(data)), 2)), len(data)]
        write(writer, data, cuts, runs_at=rng.choice([None, 0, 1, 2]))
        return tier.commit([writer]) == [True]


BATTERIES = [Battery("kill -9 amid disk writes", "kills", 150, 10_000, run)]
