"""The s3 tier against moto's server on loopback."""

import http.server
import threading
from types import SimpleNamespace

import pytest
import torch
from support.store_records import get, key, put, record

boto3 = pytest.importorskip("boto3", reason="needs boto3: pip install 'kvpage[test-s3]'")
moto_server = pytest.importorskip("moto.server", reason="needs moto: pip install 'kvpage[test-s3]'")

from kvpage.store import KVStore, KVStoreConfig, KVStoreMetadata  # noqa: E402
from kvpage.store.remote.s3 import S3Backend, from_url  # noqa: E402
from kvpage.store.tiers.tier import TierError  # noqa: E402

K = [key(i) for i in range(10)]
DATA = {k: record(k, 1000 + i, seed=i) for i, k in enumerate(K)}
SOON = 120.0


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
            return b"read"

    class Client:
        def get_object(self, **_):
            return {"ContentLength": 5000, "Body": Body()}

    assert S3Backend(Client(), "mine", max_value_bytes=4999).get(K[:2], None) == [b"", b""]
    assert S3Backend(Client(), "mine", max_value_bytes=5000).get(K[:2], None) == [b"read", b"read"]


def test_a_missing_bucket(endpoint):
    tier = from_url(url(endpoint, "nowhere"))
    calls = [lambda: tier.open(K), lambda: put(tier, DATA), lambda: tier.remove(K), lambda: list(tier.infos())]
    for call in [*calls, tier.clear]:
        with pytest.raises(TierError, match="NoSuchBucket|Not Found"):
            call()
    assert tier.contains(K) == [False] * 10  # a 404 of a HEAD does not say of what


def test_threads_stop_when_nobody_answers():
    """As many items as there are threads tell that; each thread may have begun another one."""
    asked = []

    class Client:
        exceptions = SimpleNamespace(ClientError=KeyError)

        def head_object(self, Key, **_):  # noqa: N803, boto3's name
            asked.append(Key)
            raise OSError("gone")

    results = S3Backend(Client(), "mine", num_threads=2).contains(K, None)
    assert [str(result) for result in results] == ["OSError: gone"] * 10
    assert {result.kind for result in results} == {"broken"} and 2 <= len(asked) <= 3
    with pytest.raises(TimeoutError, match="0 of 10"):
        S3Backend(Client(), "mine").contains(K, -1.0)


class Bucket(http.server.ThreadingHTTPServer):
    """Objects by path, for a client without s3:ListBucket. refused: an error code and its status by call and path;
    the path "" stands for all."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.objects: dict[str, bytes] = {}
        self.refused: dict[tuple[str, str], tuple[str, int]] = {}
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def refuse(self, code: str, status: int, *calls: str, of: str = "") -> None:
        self.refused |= {(call, of): (code, status) for call in calls}


class Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        path = self.path.split("?")[0]
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        refused = self.server.refused.get((self.command, path)) or self.server.refused.get((self.command, ""))
        if refused is None and self.command == "PUT":
            self.server.objects[path] = body
        elif refused is None and path not in self.server.objects:
            refused = "AccessDenied", 403
        code, status = refused or ("", 200)
        error = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>".encode()
        data = error if refused else self.server.objects[path] * (self.command != "PUT")
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_HEAD = do_PUT = do_POST = do_GET


@pytest.fixture
def bucket():
    server = Bucket()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def strict(bucket):
    """A tier whose breaker stays open, once it is."""
    tier = from_url(url(f"http://127.0.0.1:{bucket.server_port}", options="cooldown=3600").replace("cooldown=0&", ""))
    yield tier
    tier.close()


def test_a_bucket_that_may_not_be_listed(strict):
    """It answers 403 for what is not there."""
    for _ in range(4):
        assert strict.contains(K) == [False] * 10 and get(strict, K) == [None] * 10
    assert put(strict, {k: DATA[k] for k in K[:4]}) == [True] * 4
    assert strict.contains(K) == [True] * 4 + [False] * 6
    assert get(strict, K) == [DATA[k] for k in K[:4]] + [None] * 6
    assert strict.stats().errors == 0


def test_a_prompt_is_found_up_to_the_object_that_fails(bucket):
    """By credentials that may not list the bucket, from the first look-up on."""
    tiers = f"s3://mine?endpoint_url=http://127.0.0.1:{bucket.server_port}&region=us-east-1&cooldown=3600"
    metadata = KVStoreMetadata("m", fmt="vllm", kv_dtype=torch.float32)
    tokens, kv = list(range(64)), torch.randn(1, 2, 64, 1, 4)
    with KVStore(KVStoreConfig(chunk_size=16, tiers=tiers), metadata) as store:
        keys = [one.hex() for one in store.keys_of(tokens)]
        store.store(tokens, kv)
        for num_found in (64, 32):
            for _ in range(4):
                found, mask = store.retrieve([*tokens, 7], return_tuple=False)
                assert int(mask.sum()) == num_found and torch.equal(found, kv[:, :, :num_found])
            bucket.refuse("SlowDown", 503, "HEAD", "GET", of=f"/mine/kvpage/{keys[2]}")
        assert store.stats().stored_chunks == 4 and store.stats().tier_errors == 0


def test_wrong_credentials_are_no_misses(strict, bucket):
    """A HEAD's 403 does not tell them from a missing object."""
    bucket.refuse("InvalidAccessKeyId", 403, "HEAD", "GET", "PUT")
    for call in (lambda: strict.contains(K), lambda: get(strict, K), lambda: put(strict, DATA)):
        with pytest.raises(TierError, match="InvalidAccessKeyId"):
            call()
    bucket.refused.clear()
    with pytest.raises(TierError, match="rests"):
        strict.contains(K)


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
