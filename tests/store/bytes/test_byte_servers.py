"""ByteStore over Redis and S3: exact or a miss, whatever the server does, and within the deadline."""

from collections.abc import Callable, Iterator
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
