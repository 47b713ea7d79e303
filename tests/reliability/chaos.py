"""Chaos: what happens to the tiers of a store while it is used: a disk that fails, is changed and deleted, a Redis that
is paused, killed, emptied and full. Everything at random, by one seed.
"""

import errno
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.disk_faults import SEGMENT_BYTES, FaultyOS, replace_os
from support.redis_server import MISSING, RedisServer

from kvpage.store.disk.disk_tier import DiskTier
from kvpage.store.stack.placed import Placed
from kvpage.store.tiers.memory_tier import MemoryTier

ERRORS = (errno.ENOSPC, errno.EIO, errno.EMFILE, errno.EROFS, None)
RATES = (0.0, 0.0, 0.0, 0.01, 0.1, 1.0)  # of the disk's calls that fail
MEMORY_BYTES, DISK_BYTES = 1 << 17, 24 * SEGMENT_BYTES
REDIS_SECONDS = 0.05  # of a call


class Chaos:
    """path: the disk tier's directory. with_redis: whether there is one. num_events: what has happened."""

    def __init__(self, place: Path, rng: random.Random, with_redis: bool = not MISSING) -> None:
        self.path, self._rng = place / "disk", rng
        self._rate, self.num_events = 0.0, 0
        self.os = FaultyOS(lambda name, arguments: rng.random() < self._rate, None)
        self.redis = RedisServer(place / "redis") if with_redis else None
        self._events = [self._change_disk, self._calm_disk, self._overwrite, self._delete]
        self._events += [self._trouble_redis] * 2 if with_redis else []

    @contextmanager
    def tiers(self) -> Iterator[list[Placed]]:
        """New ones, on the same disk and Redis; whoever takes them closes them."""
        with pytest.MonkeyPatch.context() as patch:
            replace_os(patch, self.os)
            self._calm_disk()  # a disk that cannot be opened is told to whoever opens it
            disk = DiskTier([self.path], DISK_BYTES, segment_bytes=SEGMENT_BYTES, retry_seconds=0.1)
            placed = [Placed(MemoryTier(MEMORY_BYTES)), Placed(disk, deadline=1.0)]
            if self.redis:
                from kvpage.store.remote.redis import from_url

                tier = from_url(f"redis://127.0.0.1:{self.redis.port}/0?cooldown=0.2")
                placed.append(Placed(tier, deadline=REDIS_SECONDS))
            yield placed

    def happen(self) -> None:
        self._rng.choice(self._events)()
        self.num_events += 1

    def check_budgets(self, placed: list[Placed]) -> None:
        """AssertionError if a tier holds more than it may."""
        memory, disk, *_ = placed
        assert memory.tier.stats().num_bytes <= MEMORY_BYTES
        assert disk.tier.stats().num_bytes <= DISK_BYTES
        try:
            on_disk = sum(file.stat().st_size for file in self.path.glob("*.segment"))
        except FileNotFoundError:  # deleted right now
            return
        assert on_disk <= DISK_BYTES, f"{on_disk} bytes on the disk, {DISK_BYTES} are allowed"

    def close(self) -> None:
        self._calm_disk()
        if self.redis:
            self.redis.kill()

    # --- events ---

    def _change_disk(self) -> None:
        self.os.error, self.os.half = self._rng.choice(ERRORS), self._rng.random() < 0.5
        self._rate = self._rng.choice(RATES)

    def _calm_disk(self) -> None:
        self._rate = 0.0

    def _overwrite(self) -> None:
        """Some bytes of a file, as a failing disk or somebody else does. It does not get longer."""
        for file in list(self.path.glob("*.segment"))[:1]:
            with file.open("r+b") as opened:
                for _ in range(self._rng.randint(1, 40)):
                    place, data = self._rng.randrange(SEGMENT_BYTES), self._rng.randbytes(self._rng.choice([1, 16]))
                    opened.seek(place)
                    opened.write(data[: SEGMENT_BYTES - place])

    def _delete(self) -> None:
        if self._rng.random() < 0.2:
            shutil.rmtree(self.path, ignore_errors=True)

    def _trouble_redis(self) -> None:
        assert self.redis
        self.redis.resume()
        if self.redis.process.poll() is not None:
            self.redis.start()
        trouble = self._rng.choice(["pause", "kill", "flush", "full", "none"])
        if trouble == "pause":
            self.redis.pause()
        elif trouble == "kill":
            self.redis.kill()
        else:
            self._tell_redis(trouble)

    def _tell_redis(self, trouble: str) -> None:
        import redis

        with redis.Redis(port=self.redis.port) as client:
            if trouble == "flush":
                client.flushall()
            else:
                client.config_set("maxmemory", 1 if trouble == "full" else 0)
