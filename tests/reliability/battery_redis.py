"""A Redis in trouble under a KVStore that is used as a serving loop does: never an exception, a miss or every bit as it
was stored, every call of the tier over by its deadline, and all well again by itself.

    KVStore ─► Timed (how late is each call?) ─► the redis tier ─► Proxy (may hold replies) ─► redis-server, a process
"""

import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from battery import Advance, Battery, Figures
from stamps import STAMP_BYTES, difference, stamps
from support.redis_server import MISSING, Proxy, RedisServer

from kvpage.store import KVStore, KVStoreConfig, KVStoreMetadata
from kvpage.store.stack.placed import Placed

DEADLINE = 0.25  # seconds of a call
GENEROUS = 10.0  # what a busy machine may add in the test run; the long form judges `max_excess_ms`
SLEEPER = """
import select, sys, time
worst = 0.0
while not select.select([sys.stdin], [], [], 0)[0]:
    before = time.monotonic()
    time.sleep(0.01)
    worst = max(worst, time.monotonic() - before - 0.01)
print(worst)
"""
CHUNK, LAYERS, SIZE = 64, 2, 16
BIG = 512  # times CHUNK: a record of 8 MiB
NUM_PROMPTS = 8


@dataclass(slots=True)
class Timed:
    """A tier, whose calls that have a deadline are timed."""

    tier: object
    lates: list[float] = field(default_factory=list)

    def __getattr__(self, name: str):
        real = getattr(self.tier, name)
        if name not in ("contains", "open", "commit", "remove"):
            return real

        def call(things: object, timeout: float | None = None):
            before = time.monotonic()
            try:
                return real(things, timeout)
            finally:
                self.lates.append(time.monotonic() - before - (timeout or 0.0))

        return call


@contextmanager
def sleeper(figures: Figures) -> Iterator[None]:
    """How late a process that only sleeps wakes up meanwhile: that is the machine's lateness, and not the tier's."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", SLEEPER], **pipes) as process:
        try:
            yield
        finally:
            answer, _ = process.communicate(b"\n")
    figures["max_machine_late_ms"] = round(1000 * float(answer), 1)
    figures["max_excess_ms"] = round(max(figures["max_late_ms"] - figures["max_machine_late_ms"], 0.0), 1)


class Scene:
    """A server, and a store on it. big: records of 8 MiB instead of 16 KiB."""

    def __init__(self, place: Path, rng: random.Random, big: bool = False) -> None:
        from kvpage.store.remote.redis import from_url

        self.rng, self.scale = rng, BIG if big else 1
        self.server = RedisServer(place)
        self.proxy = Proxy(self.server.port)
        self.timed = Timed(from_url(f"redis://127.0.0.1:{self.proxy.port}/0?cooldown=0"))
        metadata = KVStoreMetadata("a model", kv_dtype=torch.float32)
        self.store = KVStore(KVStoreConfig(CHUNK * self.scale), metadata, [Placed(self.timed, deadline=DEADLINE)])
        self.num_hits = 0

    def prompt(self, n: int) -> list[int]:
        return [n + 1] * (CHUNK * self.scale)

    def content(self, n: int) -> torch.Tensor:
        words = stamps(n, 1, LAYERS, 2 * CHUNK * self.scale * SIZE * 4 // STAMP_BYTES)
        return torch.from_numpy(words.view("float32").reshape(LAYERS, 2, CHUNK * self.scale, 1, SIZE))

    def put(self, n: int) -> bool:
        return self.store.store(self.prompt(n), self.content(n)).result() == 1

    def get(self, n: int) -> bool:
        kv, mask = self.store.retrieve(self.prompt(n), return_tuple=False)
        if not mask.any():
            return False
        found, wanted = kv.numpy().tobytes(), self.content(n).numpy().tobytes()
        assert found == wanted, f"prompt {n}: {difference(found, wanted, payload_begin=0)}"
        self.num_hits += 1
        return True

    def serve(self, num_calls: int) -> None:
        """As a loop of requests would."""
        for _ in range(num_calls):
            n = self.rng.randrange(NUM_PROMPTS)
            call = self.rng.choice([self.put, self.get, self.get, self._look_up, self._remove])
            call(n)

    def fill(self) -> None:
        for n in range(NUM_PROMPTS):
            self.put(n)

    def await_well(self) -> None:
        """Until what is stored is found again."""
        end = time.monotonic() + 60.0
        while time.monotonic() < end:
            for n in range(NUM_PROMPTS):
                self.put(n)
            if all([self.get(n) for n in range(NUM_PROMPTS)]):
                return
        raise AssertionError("the tier did not recover within a minute")

    def close(self) -> None:
        self.server.kill()
        self.proxy.close()
        self.store.close()

    def _look_up(self, n: int) -> None:
        assert self.store.lookup(self.prompt(n)) in (0, CHUNK * self.scale)

    def _remove(self, n: int) -> None:
        assert self.store.remove(self.prompt(n)) in (0, 1)


# --- troubles ---


def down_at_start(scene: Scene) -> None:
    scene.server.kill()
    scene.serve(10)
    assert scene.num_hits == 0
    scene.server.start()


def paused(scene: Scene) -> None:
    scene.fill()
    scene.server.pause()
    scene.serve(6)
    scene.server.resume()


def killed(scene: Scene) -> None:
    """Some milliseconds into what goes on, a few times."""
    for _ in range(3):
        scene.fill()
        delay = scene.rng.uniform(0.0, 0.03)
        thread = threading.Thread(target=lambda delay=delay: (time.sleep(delay), scene.server.kill()))
        thread.start()
        while thread.is_alive():
            scene.serve(1)
        scene.serve(4)
        scene.server.start()


def restarted_empty(scene: Scene) -> None:
    scene.fill()
    scene.server.kill()
    scene.server.start()
    hits = scene.num_hits
    assert not any([scene.get(n) for n in range(NUM_PROMPTS)]) and scene.num_hits == hits


def out_of_memory(scene: Scene) -> None:
    scene.put(0)
    _client(scene).config_set("maxmemory", 1)
    scene.serve(20)
    assert not scene.put(NUM_PROMPTS)
    _client(scene).config_set("maxmemory", 0)


def wrong_values(scene: Scene) -> None:
    """Of another size or type, swapped, or with a byte that is another."""
    scene.fill()
    direct, rng = _client(scene), scene.rng
    stored = {name: direct.get(name) for name in direct.keys("*")}
    for name, data in stored.items():
        at = rng.randrange(len(data))
        flipped = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        foreign = [value for other, value in stored.items() if other != name]
        direct.set(name, rng.choice([b"", data[:at], data + b"x", flipped, bytes(len(data)), *foreign[:1]]))
        if rng.random() < 0.2:
            direct.delete(name)
            direct.lpush(name, data)
    assert not any([scene.get(n) for n in range(NUM_PROMPTS)]), "a wrong value was taken"


def slow(scene: Scene) -> None:
    """The first byte of each reply comes after ten seconds."""
    scene.fill()
    scene.proxy.delay = 10.0
    scene.serve(6)
    scene.proxy.delay = 0.0


def dribbling(scene: Scene) -> None:
    """A byte each 20 ms: no read on its own is late."""
    scene.fill()
    scene.proxy.delay = 0.02
    scene.serve(6)
    scene.proxy.delay = 0.0


TROUBLES: list[tuple[Callable[[Scene], None], bool]] = [
    (down_at_start, False),
    (paused, False),
    (killed, False),
    (killed, True),
    (paused, True),
    (restarted_empty, False),
    (out_of_memory, False),
    (wrong_values, False),
    (slow, False),
    (dribbling, False),
]


def _client(scene: Scene):
    import redis

    return redis.Redis(port=scene.server.port)


def run(seed: int, count: int, advance: Advance) -> Figures:
    figures: Figures = {"troubles": 0, "calls": 0, "hits": 0, "tier_errors": 0, "max_late_ms": 0.0}
    with sleeper(figures):
        for number in range(count):
            trouble, is_big = TROUBLES[number % len(TROUBLES)]
            try:
                _pass_through(trouble, is_big, random.Random(f"{seed} {number}"), figures)
            except Exception as error:
                raise AssertionError(f"seed {seed}, trouble {number}, {trouble.__name__}: {error}") from error
            advance(1)
    return figures


def _pass_through(trouble: Callable[[Scene], None], is_big: bool, rng: random.Random, figures: Figures) -> None:
    with tempfile.TemporaryDirectory() as place, closing(Scene(Path(place), rng, is_big)) as scene:
        trouble(scene)
        scene.await_well()
        late = max(scene.timed.lates)
        assert late < GENEROUS, f"{late:.3f} s late"
        figures["troubles"] += 1
        figures["calls"] += len(scene.timed.lates)
        figures["hits"] += scene.num_hits
        figures["tier_errors"] += scene.store.stats().tier_errors
        figures["max_late_ms"] = max(figures["max_late_ms"], round(1000 * late, 1))


def _needs() -> str | None:
    if MISSING:
        return "needs redis-server (Debian's package redis-server)"
    try:
        import redis  # noqa: F401
    except ImportError:
        return "needs the package redis"
    return None


BATTERIES = [Battery("redis in trouble", "troubles", len(TROUBLES), 500, run, _needs(), {"max_excess_ms": 50})]
