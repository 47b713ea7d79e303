"""Faults: a key's error is its own miss, and few open the breaker. docs/notes/store_errors.md has the tables."""

from pathlib import Path

import pytest

pytest.importorskip("redis")

from support.fault_table import KINDS, errors_table, kinds_table  # noqa: E402
from support.store_records import get, key, put, record  # noqa: E402

from kvpage.store.remote.backend import Backend  # noqa: E402
from kvpage.store.remote.breaker import Breaker  # noqa: E402
from kvpage.store.remote.fault import Fault  # noqa: E402
from kvpage.store.remote.options import RemoteOptions  # noqa: E402
from kvpage.store.remote.remote_tier import RemoteTier  # noqa: E402
from kvpage.store.tiers.tier import TierError, TierRests  # noqa: E402

DOCUMENT = Path(__file__).parents[3] / "docs" / "notes" / "store_errors.md"
K = [key(i) for i in range(8)]


@pytest.mark.skipif(not DOCUMENT.is_file(), reason="needs the source tree")
@pytest.mark.parametrize("table", [kinds_table, errors_table])
def test_the_tables_of_the_document(table):
    """`python tests/support/fault_table.py` prints them."""
    assert table() in DOCUMENT.read_text()


class Sick(Backend):
    """Has a value for all keys, but a fault for some. refuses: what a removal raises."""

    def __init__(self, faults: dict[bytes, Fault]) -> None:
        self.faults = faults
        self.refuses: Fault | None = None

    def get(self, keys, timeout):
        return [self.faults.get(k, record(k)) for k in keys]

    def contains(self, keys, timeout):
        return [self.faults.get(k, True) for k in keys]

    def put(self, items, timeout):
        return [self.faults.get(k, True) for k, _ in items]

    def remove(self, keys, timeout):
        if self.refuses:
            raise self.refuses
        return len(keys)


def sick_tier(*sick: bytes, kind: str = "busy") -> RemoteTier:
    """All keys have a value, but the sick ones a fault. Its breaker stays open, once it is."""
    backend = Sick({k: Fault(kind, f"{kind} now") for k in sick})
    return RemoteTier(backend, options=RemoteOptions(cooldown=3600))


@pytest.mark.parametrize("kind", KINDS)
def test_a_keys_fault_is_its_miss_alone(kind):
    tier = sick_tier(K[1], K[4], kind=kind)
    for _ in range(4):
        assert tier.contains(K) == [k not in (K[1], K[4]) for k in K]
        assert get(tier, K) == [None if k in (K[1], K[4]) else record(k) for k in K]
        assert put(tier, {k: record(k) for k in K[:3]}) == [True, False, True]
    assert tier.stats().errors == (0 if kind in ("absent", "full") else 20) and tier.stats().corrupted == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_keys", [1, 2])
def test_calls_without_an_answer(kind, num_keys):
    """Three open the breaker, if the server is in trouble: not if it was busy for the same keys alone."""
    is_error, opens = kind not in ("absent", "full"), kind in ("busy", "broken")
    for calls in ([K[:num_keys]] * 3, [K[:num_keys], K[2 : 2 + num_keys], K[4 : 4 + num_keys]]):
        tier = sick_tier(*K[:6], kind=kind)
        for keys in calls:
            assert (
                (failed(tier, keys) == f"remote: {kind} now") if is_error else tier.contains(keys) == [False] * num_keys
            )
        assert tier.stats().errors == (3 if is_error else 0)
        if opens and (kind == "broken" or calls[0] != calls[1]):
            assert "rests" in failed(tier, K[6:])
        else:
            assert tier.contains(K[6:]) == [True, True]


def failed(tier: RemoteTier, keys: list[bytes]) -> str:
    with pytest.raises(TierError) as raised:
        tier.contains(keys)
    return str(raised.value)


def test_an_answer_between_forgets_faults():
    tier = sick_tier(*K[:6])
    for i in range(6):
        assert failed(tier, [K[i]]) == "remote: busy now"
        assert tier.contains(K[6:]) == [True, True]


def test_the_mildest_fault_decides():
    """A server that refuses one key and is busy for another one answers."""
    tier = sick_tier(K[0])
    tier._backend.faults[K[1]] = Fault("forbidden", "not you")
    for _ in range(4):
        assert failed(tier, K[:2]) == "remote: not you"
    assert tier.contains(K[2:3]) == [True]


def test_a_trial_that_finds_a_busy_key_opens_it_anew():
    now = [0.0]
    tier = sick_tier(*K[:4])
    tier._breaker = Breaker(3, 5.0, lambda: now[0])
    for k in K[:3]:
        failed(tier, [k])
    now[0] = 5.0
    assert failed(tier, [K[0]]) == "remote: busy now" and "rests" in failed(tier, [K[7]])
    now[0] = 10.0
    assert tier.contains([K[7]]) == [True] and tier.contains([K[6]]) == [True]


@pytest.mark.parametrize(
    ("fault", "opens"),
    [
        (Fault("forbidden", "no"), False),
        (Fault("busy", "no"), False),  # for one key, again and again
        (Fault("broken", "no"), True),
        (Fault("broken", "no", is_partial=True), False),
    ],
)
def test_a_removal_that_is_refused(fault, opens):
    tier = sick_tier()
    tier._backend.refuses = fault
    for i in range(3):
        with pytest.raises(TierError, match="no") as raised:
            tier.remove(K[:1])
        assert isinstance(raised.value, TierRests) == (opens and i == 2 or bool(i) and not fault.is_of_server)
    assert ("rests" in failed(tier, K)) if opens else tier.contains(K[:1]) == [True]


def test_a_refusal_is_told_once_until_it_ends():
    tier = sick_tier(K[0], kind="forbidden")
    kinds = []
    for faults in (True, True, False, True):
        tier._backend.faults = {K[0]: Fault("forbidden", "no")} if faults else {}
        try:
            put(tier, {K[0]: record(K[0])})
        except TierError as error:
            kinds.append(type(error))
        tier.contains(K[1:])  # another kind of call
    assert kinds == [TierError, TierRests, TierError]
