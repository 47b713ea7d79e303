"""The s3 tier against moto's server on loopback."""

import contextlib
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from support.ports import free_port
from support.store_records import get, key, put, record

boto3 = pytest.importorskip("boto3", reason="needs boto3: pip install 'kvpage[test-s3]'")
moto_server = pytest.importorskip("moto.server", reason="needs moto: pip install 'kvpage[test-s3]'")

from kvpage.store.remote.s3 import S3Backend, from_url  # noqa: E402
from kvpage.store.tiers.tier import TierError  # noqa: E402

K = [key(i) for i in range(10)]
DATA = {k: record(k, 1000 + i, seed=i) for i, k in enumerate(K)}
SOON = 20.0


@pytest.fixture(scope="module")
def endpoint():
    server = moto_server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def direct(endpoint):
    """A client, and an empty bucket."""
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    client.create_bucket(Bucket="mine")
    for item in client.list_objects_v2(Bucket="mine").get("Contents", ()):
        client.delete_object(Bucket="mine", Key=item["Key"])
    return client


@pytest.fixture
def tier(endpoint, direct):
    tier = from_url(url(endpoint))
    yield tier
    tier.close()


def url(endpoint: str, bucket: str = "mine/some/where", options: str = "") -> str:
    return f"s3://{bucket}?endpoint_url={endpoint}&region=us-east-1&cooldown=0&{options}"


def name(k: bytes) -> str:
    return "some/where/" + k.hex()


def test_what_goes_in_comes_out(tier, direct):
    assert tier.contains(K) == [False] * 10 and get(tier, K) == [None] * 10
    assert put(tier, {k: DATA[k] for k in K[:5]}) == [True] * 5
    assert tier.contains(K[3:7]) == [True, True, False, False]
    assert get(tier, [K[4], K[9], K[0], K[4]]) == [DATA[K[4]], None, DATA[K[0]], DATA[K[4]]]
    assert direct.get_object(Bucket="mine", Key=name(K[0]))["Body"].read() == DATA[K[0]]
    assert {(info.key, info.num_bytes) for info in tier.infos()} == {(k, len(DATA[k])) for k in K[:5]}
    assert tier.remove([K[0], K[9]]) == 1 and get(tier, K[:2]) == [None, DATA[K[1]]]
    big = {k: record(k, 2 << 20, seed=i) for i, k in enumerate(K)}
    assert put(tier, big, SOON) == [True] * 10 and get(tier, K, SOON) == list(big.values())
    assert tier.stats().errors == tier.stats().corrupted == 0


def test_clear_takes_records_alone(tier, direct):
    others = ["other", "some/where/note", "some/where/" + "g" * 64, name(K[0]) + "0", "some/wherever/" + K[0].hex()]
    for other in others:
        direct.put_object(Bucket="mine", Key=other, Body=b"x")
    put(tier, DATA)
    tier.clear()
    assert tier.contains(K) == [False] * 10
    assert sorted(item["Key"] for item in direct.list_objects_v2(Bucket="mine")["Contents"]) == sorted(others)
    tier.clear()


def test_removals_are_as_long_as_s3_takes(tier, monkeypatch):
    monkeypatch.setattr("kvpage.store.remote.s3.MAX_REMOVED", 3)
    put(tier, DATA)
    assert tier.remove(K) == 10 and not list(tier.infos())


def test_wrong_objects_are_misses_and_removed(endpoint, direct):
    tier = from_url(url(endpoint, options="max_record_bytes=4KiB"))
    put(tier, DATA)
    wrong = [b"", DATA[K[1]][:100], DATA[K[2]][:-1], DATA[K[3]] + b"x", bytes(8 << 20), DATA[K[6]], DATA[K[5]]]
    for k, body in zip(K, wrong, strict=False):
        direct.put_object(Bucket="mine", Key=name(k), Body=body)
    assert tier.contains(K) == [False, False, True, True, False] + [True] * 5
    want = [None] * 7 + [DATA[k] for k in K[7:]]
    assert get(tier, K) == want == get(tier, K)
    assert tier.stats().corrupted == 7 and {info.key for info in tier.infos()} == set(K[7:])


def test_a_longer_object_is_not_read(direct):
    """Its body is closed with nothing taken from it."""

    class Body:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def read(self):
            raise AssertionError("read")

    class Client:
        def get_object(self, **_):
            return {"ContentLength": 5000, "Body": Body()}

    assert S3Backend(Client(), "mine", max_value_bytes=4999).get(K[:2], None) == [b"", b""]
    with pytest.raises(AssertionError, match="read"):
        S3Backend(Client(), "mine", max_value_bytes=5000).get(K[:2], None)


def test_a_missing_bucket(endpoint):
    tier = from_url(url(endpoint, "nowhere"))
    calls = [lambda: tier.open(K), lambda: put(tier, DATA), lambda: tier.remove(K), lambda: list(tier.infos())]
    for call in [*calls, tier.clear]:
        with pytest.raises(TierError, match="NoSuchBucket|Not Found"):
            call()
    assert tier.contains(K) == [False] * 10  # a 404 of a HEAD does not say of what


def late(tier, timeout: float) -> None:
    for call in (lambda: get(tier, K, timeout), lambda: put(tier, DATA, timeout), lambda: tier.contains(K, timeout)):
        with pytest.raises(TierError):
            call()


def test_nobody_there():
    late(from_url(url(f"http://127.0.0.1:{free_port()}")), 5.0)


def test_a_server_that_never_answers():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        late(from_url(url(f"http://127.0.0.1:{listener.getsockname()[1]}")), 0.2)


def test_a_dribbling_server():
    """Well within every timeout of a read, it would take an hour for an object."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=dribble, args=(listener.accept()[0],), daemon=True).start()

    def dribble(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
            while True:
                connection.sendall(b"x")
                time.sleep(0.03)

    threading.Thread(target=serve, daemon=True).start()
    tier = from_url(url(f"http://127.0.0.1:{listener.getsockname()[1]}"))
    with pytest.raises(TierError, match="no answer"):
        tier.open(K, 0.2)
    listener.close()


def test_threads_stop_when_one_has_failed():
    asked = []

    class Client:
        exceptions = SimpleNamespace(ClientError=KeyError)

        def head_object(self, Key, **_):  # noqa: N803, boto3's name
            asked.append(Key)
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        S3Backend(Client(), "mine", num_threads=2).contains(K, None)
    assert len(asked) <= 2
    with pytest.raises(TimeoutError, match="0 of 10"):
        S3Backend(Client(), "mine").contains(K, -1.0)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("http://bucket", "s3 URL"),
        ("s3:///prefix", "s3 URL"),
        ("s3://key:secret@bucket", "s3 URL"),
        ("s3://bucket?colour=red", "colour"),
        ("s3://bucket?num_threads=0", "num_threads"),
        ("s3://bucket?max_record_bytes=1", "max_record_bytes"),
    ],
)
def test_urls_that_are_none(text, what):
    with pytest.raises(ValueError, match=what) as raised:
        from_url(text + ("&" if "?" in text else "?") + "region=us-east-1")
    assert "secret" not in str(raised.value)
