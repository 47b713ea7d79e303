"""ByteStore over Redis and S3: exact or a miss, whatever the server does, and within the deadline."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.byte_stores import data_of, key_of, opened, room
from support.redis_server import Proxy, RedisServer, needs_redis

from kvpage.store import ByteStore
from kvpage.store.bytes.pieces import STRETCH_BYTES

SIZES = [0, 1, 4095, 4096, 4097, STRETCH_BYTES - 1, STRETCH_BYTES, STRETCH_BYTES + 1, 1 << 20]
KEYS = [key_of(number) for number in range(len(SIZES))]
RECORDS = [data_of(number, size) for number, size in enumerate(SIZES)]
FOREVER = 60.0


class Server:
    """A server of either kind. url: of a tier there. values: names and bytes that it has. put: changes one."""

    def __init__(self, url: str, values: Callable[[], dict[str, bytes]], put: Callable[[str, bytes], Any]) -> None:
        self.url, self.values, self.put = url, values, put


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    moto = pytest.importorskip("moto.server", reason="needs moto: pip install 'kvpage[test-s3]'")
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


def in_redis(server: RedisServer) -> Server:
    client = pytest.importorskip("redis").Redis(port=server.port)
    client.flushall()
    url = f"redis://127.0.0.1:{server.port}/0?cooldown=0&deadline={FOREVER}"
    return Server(url, lambda: {name.decode(): client.get(name) for name in client.scan_iter()}, client.set)


def in_s3(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Server:
    boto3 = pytest.importorskip("boto3", reason="needs boto3: pip install 'kvpage[test-s3]'")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    bucket = boto3.resource("s3", endpoint_url=endpoint, region_name="us-east-1").Bucket("bytes")
    bucket.create()
    bucket.objects.all().delete()
    return Server(
        f"s3://bytes/kv?endpoint_url={endpoint}&region=us-east-1&cooldown=0&deadline={FOREVER}",
        lambda: {one.key: one.get()["Body"].read() for one in bucket.objects.all()},
        lambda name, data: bucket.Object(name).put(Body=data),
    )


@pytest.fixture(params=[pytest.param("redis", marks=needs_redis), "s3"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Server:
    if request.param == "redis":
        return in_redis(request.getfixturevalue("redis_server"))
    return in_s3(request.getfixturevalue("s3_endpoint"), monkeypatch)


def read(store: ByteStore, keys: list[bytes], sizes: list[int]) -> tuple[list[bool], list[bytes]]:
    """Read into the middle of larger memory, whose edges must stay."""
    rooms = [room(size + 2) for size in sizes]
    flags = store.get_into(keys, [memoryview(one)[1:-1] for one in rooms], deadline=FOREVER)
    assert all(one[:1] + one[-1:] == room(2) for one in rooms), "only the buffer is written"
    return flags, [bytes(one[1:-1]) for one in rooms]


def test_what_was_put_is_there_for_the_next_process(server: Server) -> None:
    with opened(server.url) as store:
        assert store.contains(KEYS) == store.get_into(KEYS, [room(size) for size in SIZES]) == [False] * len(KEYS)
        assert store.put(KEYS, RECORDS) == [True] * len(KEYS)
    with opened(server.url) as store:
        assert store.contains([b"none", *KEYS]) == [False, *[True] * len(KEYS)]
        assert read(store, KEYS, SIZES) == ([True] * len(KEYS), RECORDS)
        assert store.get_into(KEYS[:1], [None]) == [False]
        assert store.stats().tier_errors == store.stats().corrupt_records == 0


def test_what_is_removed_or_replaced_is_so_for_others(server: Server) -> None:
    with opened(server.url) as store, opened(server.url) as other:
        store.put(KEYS, RECORDS)
        assert store.remove([KEYS[1], b"none"]) == [True, False]
        assert store.put([KEYS[2]], [RECORDS[3]]) == [True], "it is there, whatever its bytes"
        assert store.put([KEYS[3]], [b"new"], skip_existing=False) == [True]
        assert other.contains(KEYS[:4]) == [True, False, True, True]
        assert read(other, KEYS[2:4], [SIZES[2], 3]) == ([True, True], [RECORDS[2], b"new"])
        assert other.clear() == [] and store.contains(KEYS) == [False] * len(KEYS)
        assert server.values() == {}


def test_other_headers_find_nothing(server: Server) -> None:
    with opened(server.url) as store, opened(server.url, header={"model": "m@2", "version": 1}) as other:
        store.put(KEYS, RECORDS)
        assert other.contains(KEYS) == [False] * len(KEYS)
        assert other.put(KEYS[:1], [b"other"]) == [True]
        assert read(store, KEYS[:1], SIZES[:1]) == ([True], RECORDS[:1])


def test_any_changed_byte_is_a_miss_and_no_other_record(server: Server) -> None:
    with opened(server.url) as store:
        for turn in range(6):
            store.put(KEYS, RECORDS)
            name, data = sorted(server.values().items())[turn]
            at = [0, 40, len(data) // 2, len(data) - 1, 111, len(data) - 17][turn]
            server.put(name, data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :])
            flags, found = read(store, KEYS, SIZES)
            assert sum(flags) == len(KEYS) - 1
            assert all(one == record for flag, one, record in zip(flags, found, RECORDS, strict=True) if flag)
            assert name not in server.values(), "a wrong record is dropped"


def test_a_record_cut_short_or_of_another_key_is_a_miss(server: Server) -> None:
    with opened(server.url) as store:
        store.put(KEYS[1:3], RECORDS[1:3])
        (one, first), (other, second) = sorted(server.values().items())
        server.put(one, second)
        server.put(other, first[:-1])
        assert store.get_into(KEYS[1:3], [room(size) for size in SIZES[1:3]]) == [False, False]


def test_behind_memory_it_fills_memory(server: Server) -> None:
    with opened("memory://?size=8MiB", server.url) as store:
        store.put(KEYS, RECORDS)
    with opened("memory://?size=8MiB", server.url) as store:
        for turn in range(2):
            assert read(store, KEYS, SIZES) == ([True] * len(KEYS), RECORDS)
            assert [tier.hits for tier in store.stats().tiers] == [turn * len(KEYS), len(KEYS)]


@needs_redis
def test_a_server_that_stops_is_a_miss_until_it_goes_on(redis_server: RedisServer) -> None:
    url = in_redis(redis_server).url
    with opened(url.replace(f"deadline={FOREVER}", "deadline=0.2")) as hasty, opened(url) as patient:
        assert patient.put(KEYS, RECORDS) == [True] * len(KEYS)
        redis_server.pause()
        try:
            assert hasty.contains(KEYS) == [False] * len(KEYS)
            assert hasty.get_into(KEYS, [room(size) for size in SIZES]) == [False] * len(KEYS)
            assert hasty.put([b"new"], [b"x"]) == [False] and hasty.remove(KEYS[:1]) == [False]
            assert hasty.later.contains(KEYS[:1]).result(FOREVER) == [False]
            assert hasty.stats().tier_errors >= 5
        finally:
            redis_server.resume()
        assert read(patient, KEYS[3:], SIZES[3:]) == ([True] * (len(KEYS) - 3), RECORDS[3:])


@needs_redis
def test_a_call_ends_by_its_own_deadline_too(redis_server: RedisServer) -> None:
    with opened(in_redis(redis_server).url) as store:
        store.put(KEYS, RECORDS)
        redis_server.pause()
        try:
            assert store.get_into(KEYS, [room(size) for size in SIZES], deadline=0.2) == [False] * len(KEYS)
            assert store.put([b"new"], [b"x"], deadline=0.2) == [False]
        finally:
            redis_server.resume()
        assert read(store, KEYS, SIZES) == ([True] * len(KEYS), RECORDS)


@needs_redis
def test_an_answer_that_comes_too_late_writes_nothing(redis_server: RedisServer) -> None:
    """The server sends a byte at a time. Memory belongs to the caller again when the call is over."""
    url, proxy = in_redis(redis_server).url, Proxy(redis_server.port)
    with opened(url) as store:
        store.put(KEYS, RECORDS)
    slow = url.replace(str(redis_server.port), str(proxy.port)).replace(f"deadline={FOREVER}", "deadline=0.3")
    with opened(slow) as store:
        proxy.delay, memory = 0.02, room(SIZES[-1])
        assert store.get_into(KEYS[-1:], [memory]) == [False]
        memory[:] = room(len(memory))
        proxy.delay = 0.0
    proxy.close()
    assert memory == room(len(memory))


@needs_redis
def test_a_server_that_is_lost_and_comes_back_empty(redis_server: RedisServer, tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "lost")
    with opened("memory://?size=64KiB", f"redis://127.0.0.1:{server.port}/0?cooldown=0&deadline={FOREVER}") as store:
        assert store.put(KEYS[:5], RECORDS[:5]) == [True] * 5
        server.kill()
        assert read(store, KEYS[:5], SIZES[:5]) == ([True] * 5, RECORDS[:5]), "memory has it"
        assert store.put(KEYS[5:6], [b"x"]) == [True] and store.remove(KEYS[:1]) == [True]
        server.start()
        assert store.put(KEYS[:6], [*RECORDS[:5], b"x"]) == [True] * 6, "into the server, which lacks it"
    with opened(f"redis://127.0.0.1:{server.port}/0?cooldown=0&deadline={FOREVER}") as store:
        assert store.contains(KEYS) == [True] * 6 + [False] * (len(KEYS) - 6)
    server.kill()
