"""How near does the redis tier come to redis-py itself with the same values, and does it keep its deadlines?

The bound is redis-py's own SET and GET of ready bytes, with hiredis and its defaults, on the same server over loopback,
in turns with the tier: create, fill, commit; open, one view of all. Beside them a pipeline that asks
whether 64 keys are there. Server and client share the machine, so that medians of turns mean more than times. What goes
in is compared with what comes out before anything is timed.

The deadline: how much later than asked calls return from a server that is stopped (SIGSTOP), worst of several.
Targets: at least 0.8 of redis-py; at most 50 ms late.

It needs redis-server.
"""

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import redis
import xxhash

from kvpage.benchmarks.cells import Row, shown
from kvpage.benchmarks.figure import Figure, in_turns
from kvpage.benchmarks.pictures import bars
from kvpage.benchmarks.script import finish, parse, skip
from kvpage.store.records.record import RecordHead
from kvpage.store.remote.redis import from_url
from kvpage.store.tiers.tier import Tier, TierError

SIZES = (1 << 16, 1 << 20, 32 << 20)
BATCH = {1 << 16: 64, 1 << 20: 16, 32 << 20: 1}  # records a call
COLUMNS = "{operation:<10} {records:>8} {MiB:>8.2f} {ms:>20.2f} {redis-py ms:>20.2f} {GB/s:>19.2f} {of redis-py:>19.2f}"
NUM_KEYS = 64
TIMEOUTS = (0.005, 0.05, 0.5)  # seconds


@contextmanager
def redis_server() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    with tempfile.TemporaryDirectory() as place:
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", place, "--save", ""]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            while not _answers(port):
                time.sleep(0.01)
            yield process, port
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


def _answers(port: int) -> bool:
    with suppress(redis.exceptions.ConnectionError):
        return bool(redis.Redis(port=port).ping())
    return False


def records(size: int, count: int) -> dict[bytes, bytes]:
    made = {}
    for i in range(count):
        key = hashlib.sha256(b"%d %d" % (size, i)).digest()
        payload = os.urandom(size)
        header = RecordHead(key, b"", "bfloat16", (1, 2, 1, 1, size // 4), size, size, stretch_bytes=size).pack()
        digest = xxhash.xxh3_128_digest(payload)
        made[key] = header + payload + digest + xxhash.xxh3_128_digest(header + digest)
    return made


def put(tier: Tier, made: dict[bytes, bytes]) -> None:
    writers = []
    for key, data in made.items():
        writer = tier.create(key, len(data))
        assert writer is not None
        writer.piece(0, len(data))[:] = data
        writers.append(writer)
    assert all(tier.commit(writers))


def get(tier: Tier, keys: list[bytes]) -> list[memoryview]:
    return [reader.piece(0, reader.num_bytes) for reader in tier.open(keys) if reader is not None]


def pipelined(peer: redis.Redis, command: str, each: Iterable[tuple[Any, ...]]) -> Callable[[], object]:
    """Return a call of redis-py that sends a command with each of these arguments at once."""
    given = list(each)

    def call() -> None:
        pipeline = peer.pipeline(transaction=False)
        for arguments in given:
            getattr(pipeline, command)(*arguments)
        pipeline.execute()

    return call


def measure(tier: Tier, peer: redis.Redis, size: int, rounds: int) -> Iterator[Row]:
    made = records(size, BATCH[size])
    keys = list(made)
    put(tier, made)
    assert get(tier, keys) == list(made.values()), "what came out is not what went in"
    own = {f"peer:{key.hex()}": data for key, data in made.items()}
    peer_put = pipelined(peer, "set", own.items())
    peer_get = pipelined(peer, "get", ((name,) for name in own))
    calls = {"put": (lambda: put(tier, made), peer_put), "get": (lambda: get(tier, keys), peer_get)}
    for operation, (ours, theirs) in calls.items():
        times = in_turns({"tier": ours, "redis-py": theirs}, rounds)
        yield row(operation, size, len(keys), times)


def row(operation: str, size: int, count: int, times: dict[str, list[float]]) -> Row:
    return {
        "operation": operation,
        "MiB": size / 2**20,
        "records": count,
        "ms": Figure.of(times["tier"], 1e3),
        "redis-py ms": Figure.of(times["redis-py"], 1e3),
        "GB/s": Figure.rate(size * count / 1e9, times["tier"]),
        "of redis-py": Figure.ratio(times["redis-py"], times["tier"]),
    }


def results_of(tier: Tier, peer: redis.Redis, rounds: int) -> Iterator[Row]:
    for size in SIZES:
        yield from measure(tier, peer, size, rounds)
    keys = [hashlib.sha256(b"%d" % i).digest() for i in range(NUM_KEYS)]
    peer_exists = pipelined(peer, "exists", (("kvpage:" + key.hex(),) for key in keys))
    times = in_turns({"tier": lambda: tier.contains(keys), "redis-py": peer_exists}, 20 * rounds)
    yield row("contains", 0, NUM_KEYS, times)


def lateness(url: str, server: subprocess.Popen[bytes], rounds: int) -> dict[str, float]:
    """Milliseconds beyond the timeout, the worst of `rounds`, by timeout in ms."""
    server.send_signal(signal.SIGSTOP)
    tier, worst = from_url(url + "?max_failures=1000000&max_calls=64"), {}
    for timeout in TIMEOUTS:
        late = []
        for _ in range(rounds):
            before = time.perf_counter()
            try:
                tier.open([bytes(32)], timeout)
                raise AssertionError("a stopped server has answered")
            except TierError:
                late.append(time.perf_counter() - before - timeout)
        worst[f"{timeout * 1e3:g}"] = max(late) * 1e3
    server.send_signal(signal.SIGCONT)
    tier.close()
    return worst


def main() -> None:
    options = parse("store_redis", __doc__, rounds=15)
    if shutil.which("redis-server") is None:
        skip("needs redis-server")
    with redis_server() as (server, port):
        url = f"redis://127.0.0.1:{port}/0"
        tier, peer = from_url(url), redis.Redis(port=port)
        results = shown(COLUMNS, results_of(tier, peer, options.rounds))
        tier.close()
        late = lateness(url, server, 5)
    print("late by, ms, at a timeout of: " + ", ".join(f"{t} ms: {ms:.1f}" for t, ms in late.items()))
    shares = {f"{r['operation']}, {r['records']} x {r['MiB']:g} MiB": r["of redis-py"] for r in results}
    found = {"redis-py": redis.__version__, "results": results, "late ms": late}
    finish(options, lambda path: bars(path, shares, "speed, in redis-py's own", [1.0]), **found)


if __name__ == "__main__":
    main()
