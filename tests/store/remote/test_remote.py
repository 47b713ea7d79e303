"""RemoteTier over backends in memory: honest, lying, failing, slow."""

import threading
import time

import pytest
from support.store_records import get, key, put, record

from kvpage.store.remote.backend import Backend
from kvpage.store.remote.options import MIN_RECORD_BYTES, RemoteOptions
from kvpage.store.remote.remote_tier import RemoteTier
from kvpage.store.tiers.tier import RecordInfo, TierError

K = [key(i) for i in range(8)]
SOON = 120.0


class Plain(Backend):
    """A dict; counts round trips."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.calls: list[str] = []
        self.closed = 0

    def get(self, keys, timeout):
        self.calls.append("get")
        return [self.values.get(k) for k in keys]

    def put(self, items, timeout):
        self.calls.append("put")
        self.values |= {k: bytes(value) for k, value in items}
        return [True] * len(items)

    def contains(self, keys, timeout):
        self.calls.append("contains")
        return [k in self.values for k in keys]

    def remove(self, keys, timeout):
        self.calls.append("remove")
        return sum(self.values.pop(k, None) is not None for k in keys)

    def infos(self):
        yield from (RecordInfo(k, len(value)) for k, value in self.values.items())

    def close(self):
        self.closed += 1


@pytest.fixture(params=[None, b"m" * 32], ids=["plain", "mac"])
def options(request) -> RemoteOptions:
    if request.param:
        pytest.importorskip("blake3")
    return RemoteOptions(max_record_bytes=4096, max_batch_bytes=16384, mac_key=request.param)


@pytest.fixture
def backend() -> Plain:
    return Plain()


@pytest.fixture
def tier(backend, options):
    tier = RemoteTier(backend, "mine", options)
    yield tier
    tier.close()


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 3000])
def test_what_goes_in_comes_out(tier, backend, size):
    data = {k: record(k, size, seed=i) for i, k in enumerate(K[:3])}
    assert tier.contains(K) == [False] * 8 and get(tier, K[:2]) == [None, None]
    assert put(tier, data) == [True] * 3
    assert backend.calls.count("put") == 1
    assert tier.contains([K[3], K[1]]) == [False, True]
    assert get(tier, [K[2], K[3], K[0], K[0]]) == [data[K[2]], None, data[K[0]], data[K[0]]]
    assert {(info.key, info.num_bytes) for info in tier.infos()} == {(k, len(data[k])) for k in data}
    assert tier.remove([K[0], K[3]]) == 1
    assert tier.contains(K) == [False, True, True] + [False] * 5
    tier.clear()
    assert not backend.values
    assert tier.stats().corrupted == tier.stats().errors == 0


def test_nothing_asked_nothing_called(tier, backend):
    assert (tier.contains([]), tier.open([]), tier.commit([]), tier.remove([])) == ([], [], [], 0)
    assert not backend.calls


def test_a_reader_keeps_its_bounds(tier):
    data = record(K[0], 500)
    put(tier, {K[0]: data})
    [reader] = tier.open([K[0]])
    assert reader.num_bytes == len(data) and reader.piece(7, 7).nbytes == 0
    with pytest.raises(TypeError):
        reader.piece(0, 1)[0] = 1
    for begin, end in [(-1, 1), (2, 1), (0, len(data) + 1)]:
        with pytest.raises(ValueError, match="begin and end"):
            reader.piece(begin, end)
    reader.close()
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        reader.piece(0, 1)


def test_a_writer_that_is_not_whole_is_not_committed(tier, backend):
    data = record(K[0], 100)
    half, whole = tier.create(K[1], len(data)), tier.create(K[0], len(data))
    whole.piece(0, len(data))[:] = data
    half.piece(0, 10)
    for begin, end in [(0, 10), (11, 12), (10, 9), (10, len(data) + 1)]:
        with pytest.raises(ValueError, match="begin"):
            half.piece(begin, end)
    with pytest.raises(ValueError, match="filled"):
        tier.commit([whole, half])
    assert not backend.values
    assert tier.commit([whole]) == [True]  # as it was before the failed call
    for used in (whole, half):
        used.close()
        with pytest.raises(ValueError, match="open"):
            tier.commit([used])
        with pytest.raises(ValueError, match="closed"):
            used.piece(0, 1)
    assert get(tier, K[:2]) == [data, None]


def test_a_writer_of_another_tier_is_refused(tier, backend, options):
    other = RemoteTier(Plain(), "other", options)
    writer = other.create(K[0], 1)
    writer.piece(0, 1)
    with pytest.raises(ValueError, match="this tier"):
        tier.commit([writer])
    assert not backend.calls


def test_too_long_is_refused(tier):
    assert tier.create(K[0], 4097) is None and tier.create(K[0], 4096) is not None
    with pytest.raises(ValueError, match="num_bytes"):
        tier.create(K[0], 0)


def wrong_values(value: bytes) -> dict[str, object]:
    flipped = [bytes(b ^ (i == at) for i, b in enumerate(value)) for at in (0, 9, 20)]
    return {
        "empty": b"",
        "short": value[: MIN_RECORD_BYTES - 1],
        "truncated": value[:-1],
        "longer": value + b"\0",
        "too long": bytes(5000),
        "a list": [value],
        "text": "x" * len(value),
        "a number": 7,
        "strided": memoryview(value * 2)[::2],
        "magic": flipped[0],
        "version": flipped[1],
        "key": flipped[2],
    }


@pytest.mark.parametrize("kind", wrong_values(bytes(200)))
def test_a_wrong_value_is_a_miss_and_removed(tier, backend, kind):
    put(tier, {k: record(k, 100) for k in K[:2]})
    backend.values[K[0]] = wrong_values(backend.values[K[0]])[kind]
    assert get(tier, K[:2]) == [None, record(K[1], 100)]
    assert set(backend.values) == {K[1]}
    assert (tier.stats().corrupted, tier.stats().errors) == (1, 0)


def test_swapped_values_are_misses(tier, backend):
    put(tier, {k: record(k, 100) for k in K[:3]})
    backend.values[K[0]], backend.values[K[1]] = backend.values[K[1]], backend.values[K[0]]
    assert get(tier, K[:3]) == [None, None, record(K[2], 100)]
    assert tier.stats().corrupted == 2


class Liar(Plain):
    """Answers each question with what the test says."""

    answer: object = None

    def get(self, keys, timeout):
        return self.answer

    contains = get

    def put(self, items, timeout):
        return self.answer

    remove = get


@pytest.mark.parametrize("answer", [None, [], [True], [True] * 3, "yy", {K[0]: True}, 7, iter([True, True])])
def test_answers_that_are_none(answer):
    tier = RemoteTier(backend := Liar())
    backend.answer = answer
    assert tier.contains(K[:2]) == [False, False]
    assert tier.open(K[:2]) == [None, None]
    assert put(tier, {k: record(k) for k in K[:2]}) == [False, False]
    assert tier.remove(K[:2]) == (7 if answer == 7 else 0)
    assert tier.stats().errors == 3


def test_answers_in_another_order_are_misses(tier, backend):
    put(tier, {k: record(k, 100) for k in K[:2]})
    backend.get = lambda keys, timeout: [backend.values[k] for k in reversed(keys)]
    assert get(tier, K[:2]) == [None, None]


def test_a_batch_holds_no_more_than_it_may(backend):
    """Records of 1,160 bytes, at most 2,000 each: four fit, as the fifth might not have."""
    tier = RemoteTier(backend, options=RemoteOptions(max_record_bytes=2000, max_batch_bytes=6000))
    data = {k: record(k, 1000) for k in K}
    assert {len(value) for value in data.values()} == {1160}
    put(tier, data)
    got = get(tier, K)
    assert got == [data[k] for k in K[:4]] + [None] * 4
    assert tier.stats().corrupted == 0 and set(backend.values) == set(K)


def test_a_mac_tells_what_others_wrote(backend):
    pytest.importorskip("blake3")
    tier, forger = (RemoteTier(backend, options=RemoteOptions(mac_key=k * 32)) for k in (b"a", b"b"))
    plain = RemoteTier(Plain())
    data = record(K[0], 300)
    put(tier, {K[0]: data})
    assert get(tier, [K[0]]) == [data]
    sealed = backend.values[K[0]]
    assert sealed[:-32] == data
    import blake3

    assert sealed[-32:] == blake3.blake3(K[0] + data, key=b"a" * 32).digest()
    other = record(K[0], 300, seed=9)  # right in itself
    for value in (data, other + sealed[-32:], sealed[:-1] + bytes([sealed[-1] ^ 1]), other):
        backend.values[K[0]] = value
        assert get(tier, [K[0]]) == [None]
    put(forger, {K[0]: other})
    assert get(forger, [K[0]]) == [other] and get(tier, [K[0]]) == [None]
    plain._backend.values[K[0]] = sealed
    assert get(plain, [K[0]]) == [None]


class Failing(Plain):
    """Raises what the test says, from everything."""

    error: BaseException = OSError("gone")

    def get(self, keys, timeout):
        self.calls.append("get")
        raise self.error

    contains = remove = put = get

    def infos(self):
        raise self.error

    clear = infos


@pytest.mark.parametrize("error", [OSError("gone"), ValueError("bad"), KeyError(1), MemoryError(), TimeoutError()])
def test_whatever_a_backend_raises_is_a_tier_error(error):
    backend = Failing()
    backend.error = error
    tier = RemoteTier(backend, "mine", RemoteOptions(max_failures=100))
    calls = [
        lambda: tier.contains(K),
        lambda: tier.open(K),
        lambda: put(tier, {K[0]: record(K[0])}),
        lambda: tier.remove(K),
        lambda: list(tier.infos()),
        lambda: tier.clear(),
    ]
    for call in calls:
        with pytest.raises(TierError, match=f"mine: {type(error).__name__}"):
            call()
    assert tier.stats().errors == len(calls)


def test_a_failed_removal_costs_no_record(backend, options):
    tier = RemoteTier(backend, options=options)
    put(tier, {k: record(k) for k in K[:2]})
    backend.values[K[0]] = b"not a record"
    backend.remove = Failing().remove
    assert get(tier, K[:2]) == [None, record(K[1])]
    assert (tier.stats().corrupted, tier.stats().errors) == (1, 1)


def test_a_backend_that_cannot_list_is_not_one_that_failed():
    class Small(Plain):
        infos, clear = Backend.infos, Backend.clear

    tier = RemoteTier(Small(), options=RemoteOptions(max_failures=1))
    for call in (lambda: tier.infos(), lambda: tier.clear()):
        with pytest.raises(TierError, match="Small cannot list"):
            call()
    assert tier.contains(K[:1]) == [False]


class Slow(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.go, self.given_up = threading.Event(), threading.Event()
        self.timeouts: list[float] = []

    def get(self, keys, timeout):
        self.timeouts.append(timeout)
        self.go.wait(SOON)
        return super().get(keys, timeout)

    def put(self, items, timeout):
        self.go.wait(SOON)
        return super().put(items, timeout)

    def give_up(self, thread_id):
        self.given_up.set()


def test_a_deadline_holds_whatever_the_backend_does():
    tier = RemoteTier(backend := Slow(), options=RemoteOptions(max_failures=100, max_calls=4))
    data = record(K[0])
    for timeout in (0.0, 0.001, 0.1):
        with pytest.raises(TierError):  # the backend would answer after its twenty seconds
            tier.open(K, timeout)
    assert backend.given_up.wait(SOON) and all(0 <= left <= 0.1 for left in backend.timeouts)
    with pytest.raises(TierError):
        put(tier, {K[0]: data}, 0.05)
    with pytest.raises(TierError):
        put(tier, {K[1]: data}, 0.05)
    with pytest.raises(TierError, match="busy"):
        tier.contains(K, 0.05)  # the late ones hold all places
    backend.go.set()
    end = time.monotonic() + SOON
    while K[0] not in backend.values and time.monotonic() < end:  # the other put may come first
        time.sleep(0.001)
    assert backend.values[K[0]] == data  # a late put is whole, though its writer is closed
    assert tier.open(K[2:], SOON) == [None] * 6  # and the places are free


def test_no_time_left_is_no_failure_of_the_server(backend):
    tier = RemoteTier(backend, options=RemoteOptions(max_failures=1))
    for timeout in (0.0, -1.0):
        with pytest.raises(TierError, match="no time"):
            tier.contains(K, timeout)
    assert tier.contains(K[:1], SOON) == [False] and backend.calls == ["contains"]


def test_closed_is_closed(tier, backend):
    put(tier, {K[0]: record(K[0])})
    [reader], writer = tier.open([K[0]]), tier.create(K[1], 1)
    writer.piece(0, 1)
    tier.close()
    tier.close()
    assert backend.closed == 1
    assert reader.piece(0, 8) == b"kvpagerc"
    calls = [lambda: tier.contains(K), lambda: tier.open(K), lambda: tier.create(K[0], 1)]
    for call in [*calls, lambda: tier.commit([writer]), lambda: tier.remove(K), tier.infos, tier.clear]:
        with pytest.raises(TierError, match="closed"):
            call()


@pytest.mark.parametrize(
    "given",
    [
        {"max_record_bytes": MIN_RECORD_BYTES - 1},
        {"max_record_bytes": 1000, "max_batch_bytes": 999},
        {"mac_key": b"m" * 31},
        {"timeout": 0},
        {"timeout": float("inf")},
        {"max_calls": 0},
        {"max_failures": 0},
        {"cooldown": -1},
    ],
)
def test_options_that_cannot_be(given):
    with pytest.raises(ValueError, match=list(given)[-1] + " must be"):
        RemoteOptions(**given)


def test_options_of_a_url(tmp_path):
    (tmp_path / "secret").write_bytes(b"s" * 32)
    given = {"max_record_bytes": "64MiB", "max_batch_bytes": "1GiB", "timeout": "1.5", "max_calls": "2", "ttl": "3"}
    options, rest = RemoteOptions.take(given | {"mac_key_file": str(tmp_path / "secret")})
    assert options == RemoteOptions(64 << 20, 1 << 30, b"s" * 32, 1.5, 2) and rest == {"ttl": "3"}
    assert "sss" not in repr(options)
    for name, text in [("max_calls", "x"), ("timeout", "soon"), ("max_record_bytes", "1MB"), ("cooldown", "")]:
        with pytest.raises(ValueError, match=name):
            RemoteOptions.take({name: text})
