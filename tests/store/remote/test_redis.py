"""The redis tier against real servers on loopback: always a miss or exact, always within the deadline."""

import subprocess
import threading
import time

import pytest
from support.ports import free_port
from support.redis_server import RedisServer, needs_redis
from support.store_records import get, key, put, record

redis = pytest.importorskip("redis")

from kvpage.store.remote.redis import from_url  # noqa: E402
from kvpage.store.remote.redis_client import pack_commands  # noqa: E402
from kvpage.store.tiers.tier import TierError  # noqa: E402

pytestmark = needs_redis
K = [key(i) for i in range(12)]
DATA = {k: record(k, 1000 + i, seed=i) for i, k in enumerate(K)}
SOON = 120.0


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def server(shared):
    """Empty, and well again afterwards."""
    client(shared).flushall()
    yield shared
    shared.resume()
    if shared.process.poll() is not None:
        shared.start()
    client(shared).config_set("maxmemory", 0)


@pytest.fixture
def tier(server):
    tier = from_url(url(server, "cooldown=0"))
    yield tier
    tier.close()


def url(server: RedisServer, options: str = "") -> str:
    return f"redis://127.0.0.1:{server.port}/0?{options}"


def client(server: RedisServer):
    return redis.Redis(port=server.port)


def name(k: bytes) -> str:
    return "kvpage:" + k.hex()


def within(timeout: float, call):
    """Return what the call returned, None if it raised TierError. Without its deadline it would not end."""
    try:
        return call(timeout)
    except TierError:
        return None


def test_what_goes_in_comes_out(tier, server):
    assert tier.contains(K) == [False] * 12 and get(tier, K) == [None] * 12
    assert put(tier, {k: DATA[k] for k in K[:5]}) == [True] * 5
    assert tier.contains(K[3:7]) == [True, True, False, False]
    assert get(tier, [K[4], K[9], K[0], K[4]]) == [DATA[K[4]], None, DATA[K[0]], DATA[K[4]]]
    assert {(info.key, info.num_bytes) for info in tier.infos()} == {(k, len(DATA[k])) for k in K[:5]}
    assert client(server).get(name(K[0])) == DATA[K[0]]
    assert tier.remove([K[0], K[11]]) == 1 and get(tier, K[:2]) == [None, DATA[K[1]]]
    assert put(tier, {K[1]: DATA[K[0]][:300]}) == [True]  # whatever it is: what it says is for whoever reads
    assert client(server).strlen(name(K[1])) == 300


def test_clear_takes_records_alone(server):
    """Also with a prefix that a pattern would read otherwise."""
    odd = from_url(url(server, "prefix=k*[a]?\\:"))
    tier = from_url(url(server))
    put(tier, DATA), put(odd, DATA)
    others = {"other": b"1", "kvpage:note": b"2", "kvpage:" + "g" * 64: b"3", name(K[0]) + "0": b"4", "kxa1:": b"5"}
    client(server).mset(others)
    odd.clear()
    assert tier.contains(K) == [True] * 12 and odd.contains(K) == [False] * 12
    put(odd, DATA)
    tier.clear()
    assert tier.contains(K) == [False] * 12 and odd.contains(K) == [True] * 12
    assert client(server).mget(list(others)) == list(others.values())


def test_time_to_live(server):
    tier = from_url(url(server, "ttl=1000"))
    put(tier, {K[0]: DATA[K[0]]})
    assert 0 < client(server).ttl(name(K[0])) <= 1000
    put(from_url(url(server)), {K[0]: DATA[K[0]]})
    assert client(server).ttl(name(K[0])) == -1


def test_wrong_values_are_misses_and_replaced(tier, server):
    """A wrong length or type is not there for `contains` where it can know, and no longer there once it was read."""
    direct = client(server)
    put(tier, DATA)
    direct.set(name(K[0]), b"")
    direct.set(name(K[1]), DATA[K[1]][:100])
    direct.set(name(K[2]), DATA[K[2]][:-1])
    direct.append(name(K[3]), b"x")
    direct.delete(name(K[4]), name(K[5]))
    direct.lpush(name(K[4]), DATA[K[4]])
    direct.hset(name(K[5]), "field", DATA[K[5]])
    direct.set(name(K[6]), DATA[K[7]])  # swapped
    direct.set(name(K[7]), DATA[K[6]])
    direct.setrange(name(K[8]), 16, b"\0")  # another key in the header
    assert tier.contains(K) == [False, False, True, True, False, False, *[True] * 6]
    want = [None] * 9 + [DATA[k] for k in K[9:]]
    assert get(tier, K) == want and get(tier, K) == want
    assert tier.stats().corrupted == 8 and tier.stats().errors == 0
    assert put(tier, DATA) == [True] * 12 and get(tier, K) == [DATA[k] for k in K]


def test_a_value_beyond_the_limit_is_not_fetched(server):
    tier = from_url(url(server, "max_record_bytes=1MiB&max_batch_bytes=4MiB"))
    direct = client(server)
    direct.setrange(name(K[0]), 64 << 20, b"x")
    put(tier, {K[1]: DATA[K[1]]})
    before = direct.info("stats")["total_net_output_bytes"]
    assert tier.contains(K[:2]) == [False, True] and get(tier, K[:2]) == [None, DATA[K[1]]]
    assert direct.info("stats")["total_net_output_bytes"] - before < 2 << 20
    assert not direct.exists(name(K[0]))


def test_a_full_server_refuses_and_still_serves(tier, server):
    assert put(tier, {K[0]: DATA[K[0]]}) == [True]
    client(server).config_set("maxmemory", 1)  # noeviction
    assert put(tier, {k: DATA[k] for k in K[1:3]}) == [False, False]
    assert get(tier, K[:2]) == [DATA[K[0]], None] and tier.remove(K[:1]) == 1
    assert tier.stats().errors == 0
    client(server).config_set("maxmemory", 0)
    assert put(tier, {K[1]: DATA[K[1]]}) == [True]


def test_a_key_that_is_refused_is_its_miss(tier, server):
    """A user may reach all keys but one, and only read them."""
    put(tier, DATA)
    keys = [f"~{name(k)}" for k in K if k != K[3]]
    client(server).execute_command("ACL", "SETUSER", "half", "on", ">p", "+getrange", "+strlen", *keys)
    half = from_url(f"redis://half:p@127.0.0.1:{server.port}/0?cooldown=3600")
    for _ in range(4):
        assert half.contains(K) == [k != K[3] for k in K]
        assert get(half, K) == [None if k == K[3] else DATA[k] for k in K]
        for call in (lambda: put(half, {K[0]: DATA[K[0]]}), lambda: half.remove(K[:1]), lambda: half.contains([K[3]])):
            with pytest.raises(TierError, match="NoPermission"):
                call()
    assert half.stats().errors == 20
    half.close()


def test_down_at_start_killed_and_restarted(tmp_path):
    port = free_port()
    tier = from_url(f"redis://127.0.0.1:{port}?cooldown=0")
    assert within(5.0, lambda t: tier.contains(K, t)) is None
    server = RedisServer(tmp_path, port=port)
    for _ in range(2):
        assert put(tier, DATA, SOON) == [True] * 12 and get(tier, K, SOON) == [DATA[k] for k in K]
        server.kill()
        assert within(5.0, lambda t: get(tier, K, t)) is None
        assert within(5.0, lambda t: put(tier, DATA, t)) is None
        server.start()
        assert get(tier, K, 5.0) == [None] * 12  # empty, and it is found again at once
    server.kill()


def test_paused_it_keeps_the_deadline_and_recovers(tier, server):
    others = set(threading.enumerate())
    put(tier, DATA)
    server.pause()
    for timeout in (0.02, 0.3):
        assert within(timeout, lambda t: tier.contains(K, t)) is None
        assert within(timeout, lambda t: get(tier, K, t)) is None
        assert within(timeout, lambda t: put(tier, DATA, t)) is None
        assert within(timeout, lambda t: tier.remove(K, t)) is None
    threads = set(threading.enumerate()) - others
    end = time.monotonic() + SOON  # their connections are closed: they wait neither for the server nor for a timeout
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0.0))
    assert not any(thread.is_alive() for thread in threads)
    server.resume()
    again = get(tier, K, SOON)
    assert all(got in (None, DATA[k]) for k, got in zip(K, again, strict=True))  # the removal may have arrived
    assert put(tier, DATA, SOON) == [True] * 12 and get(tier, K, SOON) == [DATA[k] for k in K]


def test_a_password_and_a_database(tmp_path):
    server = RedisServer(tmp_path, "--requirepass", "p@ss/word")
    tier = from_url(f"redis://:p%40ss%2Fword@127.0.0.1:{server.port}/3")
    assert put(tier, DATA) == [True] * 12 and get(tier, K) == [DATA[k] for k in K]
    assert redis.Redis(port=server.port, password="p@ss/word", db=3).dbsize() == 12
    for wrong in ("", ":wrong@"):
        stranger = from_url(f"redis://{wrong}127.0.0.1:{server.port}/3?cooldown=0")
        for call in (lambda t: get(t, K), lambda t: put(t, DATA), lambda t: t.contains(K), lambda t: t.remove(K)):
            with pytest.raises(TierError, match="(?i)auth|password"):
                call(stranger)  # noqa: B023
    server.kill()


def test_a_unix_socket(tmp_path):
    server = RedisServer(tmp_path, "--unixsocket", "here")
    tier = from_url(f"unix://{tmp_path}/here")
    assert put(tier, DATA) == [True] * 12 and get(tier, K) == [DATA[k] for k in K]
    server.kill()


def certificate(path) -> None:
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-nodes", "-days", "2", "-keyout", "key.pem", "-out", "cert.pem"]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    subprocess.run(["openssl", "req", "-x509", *kind, *files, *subject], cwd=path, check=True, capture_output=True)


def test_tls(tmp_path):
    certificate(tmp_path)
    port, pem = free_port(), [f"{tmp_path}/cert.pem", f"{tmp_path}/key.pem"]
    tls = ["--tls-port", str(port), "--tls-cert-file", pem[0], "--tls-key-file", pem[1], "--tls-auth-clients", "no"]
    server = RedisServer(tmp_path, *tls)
    tier = from_url(f"rediss://127.0.0.1:{port}?ssl_ca_certs={pem[0]}&cooldown=0")
    assert put(tier, DATA) == [True] * 12 and get(tier, K) == [DATA[k] for k in K]
    big = {K[0]: record(K[0], 3 << 20)}
    assert put(tier, big) == [True] and get(tier, K[:1]) == [big[K[0]]]
    with pytest.raises(TierError, match="(?i)certificate"):
        from_url(f"rediss://127.0.0.1:{port}").contains(K)  # nobody vouches for it
    server.pause()
    assert within(0.1, lambda t: get(tier, K, t)) is None
    server.kill()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    path = tmp_path_factory.mktemp("cluster")
    options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--cluster-require-full-coverage", "no"]
    nodes = [RedisServer(path / str(i), *options, port=low_port()) for i in range(3)]
    cuts = [0, 5461, 10923, 16384]
    for i, node in enumerate(nodes):
        direct = client(node)
        direct.execute_command("CLUSTER", "ADDSLOTSRANGE", cuts[i], cuts[i + 1] - 1)
        direct.execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[0].port)
    for node in nodes:
        await_true(lambda: client(node).cluster("info")["cluster_known_nodes"] == "3")  # noqa: B023
        await_true(lambda: client(node).cluster("info")["cluster_slots_ok"] == "16384")  # noqa: B023
        await_true(lambda: client(node).cluster("info")["cluster_state"] == "ok")  # noqa: B023
    yield nodes
    for node in nodes:
        node.kill()


def low_port() -> int:
    """Return a port for a cluster, whose bus listens 10,000 above: below the ports of connections, too."""
    while (port := free_port()) > 22_000:
        pass
    return port


def await_true(condition) -> None:
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_cluster(cluster):
    hosts = ",".join(f"127.0.0.1:{node.port}" for node in cluster)
    tier = from_url(f"redis+cluster://{hosts}?cooldown=0")
    assert tier.contains(K) == [False] * 12
    assert put(tier, DATA) == [True] * 12 and get(tier, K) == [DATA[k] for k in K]
    sizes = [client(node).dbsize() for node in cluster]
    assert sum(sizes) == 12 and min(sizes) > 0
    assert {info.key for info in tier.infos()} == set(K)
    assert tier.remove(K[:5]) == 5 and tier.contains(K) == [False] * 5 + [True] * 7
    big = {k: record(k, 1 << 20, seed=i) for i, k in enumerate(K)}
    assert put(tier, big) == [True] * 12 and get(tier, K) == list(big.values())

    held = on(cluster[2])
    cluster[2].pause()
    assert within(0.2, lambda t: get(tier, K, t)) is None
    cluster[2].resume()
    await_true(lambda: within(5.0, lambda t: get(tier, K, t)) == list(big.values()))
    cluster[2].kill()
    got = within(SOON, lambda t: get(tier, K, t))
    assert got is None or got == [None if k in held else big[k] for k in K]
    cluster[2].start()
    await_true(lambda: within(5.0, lambda t: get(tier, K, t)) == [None if k in held else big[k] for k in K])
    await_true(lambda: within(5.0, lambda t: put(tier, big, t)) == [True] * 12)
    tier.clear()
    assert tier.contains(K) == [False] * 12 and not list(tier.infos())
    tier.close()


def on(node: RedisServer) -> set[bytes]:
    return {bytes.fromhex(found.decode().removeprefix("kvpage:")) for found in client(node).scan_iter()}


def test_sentinel(tmp_path):
    server = RedisServer(tmp_path / "master")
    (tmp_path / "watch").mkdir()
    (tmp_path / "watch" / "sentinel.conf").write_text(f"sentinel monitor mine 127.0.0.1 {server.port} 1\n")
    sentinel = RedisServer(tmp_path / "watch", is_sentinel=True)
    dead = free_port()
    tier = from_url(f"redis+sentinel://127.0.0.1:{dead},127.0.0.1:{sentinel.port}/mine/1?cooldown=0")
    assert put(tier, DATA) == [True] * 12 and get(tier, K) == [DATA[k] for k in K]
    assert redis.Redis(port=server.port, db=1).dbsize() == 12
    with pytest.raises(TierError, match="other"):
        from_url(f"redis+sentinel://127.0.0.1:{sentinel.port}/other").contains(K)
    server.kill()
    assert within(5.0, lambda t: get(tier, K, t)) is None
    server.start()
    assert put(tier, DATA) == [True] * 12
    sentinel.kill()
    server.kill()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("http://here", "scheme"),
        ("redis+other://here", "scheme"),
        ("redis://here?colour=red", "colour"),
        ("redis://here?ssl_ca_certs=x", "ssl_ca_certs"),
        ("rediss://here?ssl_check_hostname=maybe", "ssl_check_hostname"),
        ("redis://here?ttl=0", "ttl"),
        ("redis://here?ttl=soon", "ttl"),
        ("redis://here/x", "database"),
        ("redis://a,b", "one host"),
        ("redis://", "host"),
        ("redis+cluster://here/1", "database"),
        ("redis+sentinel://here", "master"),
        ("redis://here?max_record_bytes=1", "max_record_bytes"),
    ],
)
def test_urls_that_are_none(text, what):
    with pytest.raises(ValueError, match=what):
        from_url(text)


def test_commands_are_packed_as_redis_py_does():
    values = [b"", b"x", b"\r\n" * 3, bytes(range(256)) * 100]
    commands = [("SET", b"k", v, "EX", 7) for v in values] + [("GET", "k"), ("GETRANGE", b"k", 0, 12345678901)]
    views = [tuple(memoryview(a) if a in values else a for a in command) for command in commands]
    want = b"".join(b"".join(redis.Connection().pack_command(*command)) for command in commands)
    assert b"".join(pack_commands(commands)) == want == b"".join(pack_commands(views))
    assert any(piece is views[3][2] for piece in pack_commands(views))  # not copied
