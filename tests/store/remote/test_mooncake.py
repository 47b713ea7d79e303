"""The mooncake tier: against a fake with the binding's codes, and, where it is installed, a real master over TCP."""

import contextlib
import re
import threading
import time

import pytest
from support.mooncake_master import running_master
from support.store_records import get, key, put, record

from kvpage.store.remote import mooncake
from kvpage.store.remote.mooncake import MooncakeBackend, from_url
from kvpage.store.remote.options import RemoteOptions
from kvpage.store.remote.remote_tier import RemoteTier
from kvpage.store.tiers.tier import TierError

K = [key(i) for i in range(8)]
DATA = {k: record(k, 1000 + i, seed=i) for i, k in enumerate(K)}
SOON = 120.0


class Fake:
    """The methods that are used, with what the binding of 0.3.13 returns."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.calls: list[str] = []
        self.failure = 0  # the code of everything, while the master is gone
        self.room = 1 << 30
        self.is_closed = False

    def get_batch(self, names):
        self.calls.append(f"get {len(names)}")
        found = {name: self.values.get(name, b"") for name in names}
        return [b"" if self.failure else found.pop(name, b"") for name in names]

    def is_exist(self, name):
        return self.failure or int(name in self.values)

    def batch_is_exist(self, names):
        return [self.is_exist(name) for name in names]

    def upsert(self, name, value):
        if self.failure or len(value) > self.room:
            return self.failure or -200
        self.room -= len(value)
        self.values[name] = bytes(value)
        return 0

    def upsert_batch(self, names, values):
        self.calls.append(f"put {len(names)}")
        if self.failure or sum(map(len, values)) > self.room:
            return self.failure or -600
        return max(self.upsert(name, value) for name, value in zip(names, values, strict=True))

    def batch_remove(self, names, force):
        assert force
        return [self.failure or (0 if self.values.pop(name, None) is not None else -704) for name in names]

    def remove_by_regex(self, pattern, force):
        assert force
        found = [name for name in self.values if not self.failure and re.search(pattern, name)]
        for name in found:
            del self.values[name]
        return self.failure or len(found)

    def close(self):
        self.is_closed = True
        return 0


def fake_tier(fake: Fake, **given) -> RemoteTier:
    options = RemoteOptions(max_record_bytes=1 << 16, cooldown=0)
    return RemoteTier(MooncakeBackend(lambda: fake, max_value_bytes=1 << 16, **given), "mooncake", options)


def check_round_trips(tier: RemoteTier) -> None:
    assert tier.contains(K) == [False] * 8 and get(tier, K) == [None] * 8
    assert put(tier, {k: DATA[k] for k in K[:4]}) == [True] * 4
    assert tier.contains(K[2:6]) == [True, True, False, False]
    assert get(tier, [K[3], K[7], K[0], K[3]]) == [DATA[K[3]], None, DATA[K[0]], DATA[K[3]]]
    other = record(K[1], 2000, seed=99)
    assert put(tier, {K[1]: other}) == [True] and get(tier, [K[1]]) == [other]  # replaced
    assert tier.remove([K[0], K[7]]) == 1 and get(tier, K[:2]) == [None, other]
    with pytest.raises(TierError, match="cannot list"):
        tier.infos()
    tier.clear()
    assert tier.contains(K) == [False] * 8
    assert tier.stats().errors == tier.stats().corrupted == 0


def test_what_goes_in_comes_out():
    tier = fake_tier(fake := Fake())
    fake.values |= {"other": b"1", "kvpage:note": b"2", "kvpage:" + K[0].hex() + "0": b"3"}
    check_round_trips(tier)
    assert set(fake.values.values()) == {b"1", b"2", b"3"}
    tier.close()
    assert fake.is_closed


def test_a_batch_fits_the_buffer():
    tier = fake_tier(fake := Fake(), buffer_bytes=3 << 16)
    put(tier, DATA)
    fake.calls.clear()
    assert get(tier, K) == list(DATA.values()) and fake.calls == ["get 3", "get 3", "get 2"]


def test_a_full_fleet_takes_what_it_can():
    tier = fake_tier(fake := Fake())
    fake.room = len(DATA[K[0]]) + len(DATA[K[1]])
    assert put(tier, {k: DATA[k] for k in K[:4]}) == [True, True, False, False]
    assert get(tier, K[:3]) == [DATA[K[0]], DATA[K[1]], None] and tier.stats().errors == 0


def test_a_master_that_is_gone_is_no_miss():
    tier = fake_tier(fake := Fake())
    put(tier, DATA)
    fake.failure = -900
    calls = [lambda: get(tier, K), lambda: put(tier, DATA), lambda: tier.contains(K), lambda: tier.remove(K)]
    for call in [*calls, tier.clear]:
        with pytest.raises(TierError, match="-900"):
            call()
    fake.failure = 0
    assert get(tier, K) == list(DATA.values())


def test_an_error_of_one_key_is_its_miss():
    """-800: the machine that has its value is not reached. -706: it is in use."""
    tier = fake_tier(fake := Fake())
    put(tier, DATA)
    sick, is_exist, upsert = "kvpage:" + K[1].hex(), fake.is_exist, fake.upsert
    fake.is_exist = lambda name: -800 if name == sick else is_exist(name)
    fake.upsert = lambda name, value: -800 if name == sick else upsert(name, value)
    fake.upsert_batch = lambda names, values: -800
    fake.batch_remove = lambda names, force: [-706 if name == sick else 0 for name in names]
    fake.values[sick] = b""  # a get does not tell
    for _ in range(4):
        assert tier.contains(K[:3]) == [True, False, True]
        assert get(tier, K[:3]) == [DATA[K[0]], None, DATA[K[2]]]
        assert put(tier, {k: DATA[k] for k in K[:3]}) == [True, False, True]
        with pytest.raises(TierError, match="-706"):
            tier.remove(K[:3])  # one may be there still
    assert tier.stats().errors == 12


def test_it_connects_once_and_again_after_a_failure():
    made, fake = [], Fake()

    def connect() -> Fake:
        made.append(threading.get_ident())
        time.sleep(0.02)
        if len(made) == 1:
            raise OSError("setup")
        return fake

    tier = RemoteTier(MooncakeBackend(connect), options=RemoteOptions(cooldown=0))
    assert not made
    with pytest.raises(TierError, match="setup"):
        tier.contains(K)
    threads = [threading.Thread(target=tier.contains, args=(K,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 2


def test_a_client_is_not_closed_under_a_call(monkeypatch):
    monkeypatch.setattr("kvpage.store.remote.remote_tier.CLOSE_SECONDS", 0.05)
    asked, answer, closed = threading.Event(), threading.Event(), threading.Event()
    fake = Fake()

    def batch_is_exist(names: list[str]) -> list[int]:
        asked.set()
        answer.wait()
        return [0] * len(names)

    fake.batch_is_exist, fake.close = batch_is_exist, closed.set
    tier, found = fake_tier(fake), []
    caller = threading.Thread(target=lambda: found.extend(tier.contains(K, SOON)))
    caller.start()
    try:
        assert asked.wait(SOON)
        with pytest.raises(TierError, match="no answer"):
            tier.close()
        assert not closed.is_set()
    finally:
        answer.set()
    assert closed.wait(SOON)
    caller.join()
    assert found == [False] * len(K)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("http://master", "mooncake URL"),
        ("mooncake://", "mooncake URL"),
        ("mooncake://master?colour=red", "colour"),
        ("mooncake://master?segment_size=much", "segment_size"),
        ("mooncake://master?protocol=ftp", "protocol"),
        ("mooncake://master?max_record_bytes=2GiB&max_batch_bytes=2GiB", "max_value_bytes"),
    ],
)
def test_urls_that_are_none(text, what, monkeypatch):
    monkeypatch.setattr(mooncake, "_client_class", lambda: Fake)
    with pytest.raises(ValueError, match=what):
        from_url(text)


master = pytest.fixture(running_master)


def eventually(call) -> None:
    """Until it returns True: a client finds its master again within seconds."""
    end = time.monotonic() + SOON
    while True:
        with contextlib.suppress(TierError):
            if call():
                return
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_real_master(master):
    tier = from_url(master.url())
    eventually(lambda: tier.contains(K[:1]) == [False])
    check_round_trips(tier)
    big = {k: record(k, 4 << 20, seed=i) for i, k in enumerate(K)}
    assert put(tier, big, SOON) == [True] * 8 and get(tier, K, SOON) == list(big.values())
    assert tier.create(K[0], (8 << 20) + 1) is None

    master.kill()
    for timeout in (0.05, 0.3):
        for call in (lambda t: get(tier, K, t), lambda t: put(tier, DATA, t), lambda t: tier.contains(K, t)):
            before = time.monotonic()
            with pytest.raises(TierError):
                call(timeout)  # noqa: B023
            assert time.monotonic() - before < timeout + 2.0
    master.start()
    eventually(lambda: put(tier, DATA, 5.0) == [True] * 8 and get(tier, K, 5.0) == list(DATA.values()))
    tier.close()
