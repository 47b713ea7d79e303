"""Sessions of an engine: pauses that end by its steps, records in a store, a store as the tier, limits."""

import hashlib
import random
import time
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from support.block_requests import computed
from support.seeds import seed_of
from support.server_app import make_engine
from support.waiting import until

from kvpage import BlockManager
from kvpage.serving import AsyncEngine, Engine, SamplingParams, SessionConfig
from kvpage.serving.sessions.record import SessionRecord
from kvpage.serving.sessions.retention import Retention
from kvpage.serving.sessions.session import Session
from kvpage.serving.sessions.session_blocks import SessionBlocks
from kvpage.serving.sessions.sessions import Sessions
from kvpage.serving.sessions.stored_records import StoredRecords
from kvpage.store import KVStore, KVStoreConfig, metadata_of

B = 4
PROMPT = list(range(20, 53))


def run(engine: Engine, tokens: list[int]) -> tuple[list[int], int]:
    """Return a prompt with its answer, and how many of its tokens were found."""
    [output] = engine.generate([tokens], SamplingParams(max_tokens=4, ignore_eos=True))
    return [*tokens, *output.samples[0].token_ids], output.num_cached_tokens


def on_host(engine: Engine, tokens: list[int]) -> int:
    return int((engine.manager.tree.look(tokens)[0][0] < 0).sum())


@pytest.fixture
def engine():
    made = make_engine(num_cpu_blocks=32, pin_quota=64, sessions=SessionConfig(return_lead=0.02))
    yield made
    made.close()


def test_a_pause_goes_to_the_host_and_comes_back_by_steps_without_requests(engine):
    path, _ = run(engine, PROMPT)
    session = engine.session("a")
    session.supersede(path)
    assert session.pause(0.3) == "host" and on_host(engine, path) == 9
    assert engine.step() == [] and on_host(engine, path) == 9
    time.sleep(0.29)
    assert engine.step() == [] and on_host(engine, path) == 0
    assert session.state().paused_in == "host" and session.return_at is None
    again, num_found = run(engine, path + [1])
    assert num_found == 9 * B and session.supersede(again) == 0 and session.state().paused_in is None
    assert again == run(make_engine(), path + [1])[0], "the bytes came back"


def test_an_idle_thread_wakes_to_bring_blocks_back(engine):
    path, _ = run(engine, PROMPT)
    with AsyncEngine(engine) as live:
        live.in_session("a", lambda session: session.supersede(path)).result()
        assert live.in_session("a", lambda session: session.pause(0.2)).result() == "host"
        until(lambda: live.call(lambda engine: on_host(engine, path)).result() == 0)


def make_store(engine: Engine, folder, name: str = "model") -> KVStore:
    config = KVStoreConfig(tiers=(f"disk:{folder}?size=64MiB",), chunk_size=B)
    return KVStore(config, metadata_of(engine.cache, name))


@pytest.mark.parametrize("damage", [None, "head", "body"])
def test_a_session_survives_a_restart_and_a_damaged_record_is_a_new_session(tmp_path, damage):
    first = make_engine(pin_quota=64)
    with make_store(first, tmp_path) as store:
        first.use_store(store)
        path, _ = run(first, PROMPT)
        session = first.session("a", b"")
        session.supersede(path)
        session.branch("try", num_tokens=10)
        assert session.retain(50.0, "store", priority=3) == 0, "nothing is kept here"
        first.close()
        if damage is not None:
            records = store.byte_records({"what": "sessions of kvpage", "version": 1, "model": "model"})
            key = b"head" + session_key("a")
            head = bytearray(40)
            assert records.get_into([key], [head]) == [True]
            if damage == "head":
                records.put([key], [b"\xff" * 40], skip_existing=False)
            else:
                records.put([b"body" + session_key("a") + bytes(head)], [b"{}"], skip_existing=False)
    second = make_engine(pin_quota=64)
    with make_store(second, tmp_path) as store:
        second.use_store(store)
        restored = second.session("a", b"")
        state = restored.state()
        if damage is None:
            assert restored.branches == {"main": len(path), "try": 10} and restored.retention == Retention(
                50.0, "store", 3
            )
            assert restored.tokens().tolist() == path and state.num_turns == 1
            assert run(second, [*restored.tokens(), 1])[1] == len(path) // B * B, "K and V are found by the tokens"
        else:
            assert restored.branches == {"main": 0} and state.num_turns == 0
        assert second.sessions.stats().num_restored == (damage is None)
        second.close()
    with make_store(make_engine(), tmp_path, "another") as store:
        assert StoredRecords(store, 1.0).read(b"", "a") is None, "another model's tokens are others'"
    third = make_engine()
    with make_store(third, tmp_path) as store:
        third.use_store(store)
        third.session("a").close()
        third.close()
    with make_store(third, tmp_path) as store:
        assert StoredRecords(store, 1.0).read(b"", "a") is None, "a closed session is gone for good"


def test_reads_of_records_are_few_and_a_closed_store_has_none(tmp_path):
    now, pace, reads = [0.0], [0.0], []
    with make_store(make_engine(), tmp_path) as store:
        records = StoredRecords(store, 1.0, lambda: now[0])
        look = records._records.get_into

        def get_into(keys, buffers, deadline):
            reads.append(keys)
            now[0] += pace[0]
            return look(keys, buffers, deadline)

        records._records.get_into = get_into
        for session_id, pace[0], wait, num_reads in (
            ("a", 0.1, 0, 1), ("a", 0.1, 9, 1), ("b", 0.6, 2, 2), ("c", 0.1, 5, 2), ("c", 0.1, 2, 3), ("a", 0.1, 0, 4),
        ):  # fmt: skip
            assert records.read(b"", session_id) is None and len(reads) == num_reads, session_id
            now[0] += wait
        written = SessionRecord({"main": np.arange(3, dtype=np.int32)}, None, 1)
        records.write(b"", "a", written)
        assert records.read(b"", "a").num_turns == 1, "it waits, or is written"
        until(lambda: not records._waiting)
        assert records.read(b"", "a").num_turns == 1
    assert records.read(b"", "new") is None
    records.remove(b"", "a")
    until(lambda: not records._waiting)
    records.close()


def session_key(session_id: str) -> bytes:
    return hashlib.sha256(bytes(8) + session_id.encode()).digest()


@pytest.mark.parametrize(
    "data",
    [b"", b"\x00", b"\xff" * 8, b"\x02" + bytes(7) + b"{}", b"\x04" + bytes(7) + b"null", b"\x02" + bytes(7) + b"[]x"],
)
def test_bytes_that_are_no_record_are_none(data):
    assert SessionRecord.decoded(data) is None


@pytest.mark.parametrize("count", [0, 1, B - 1, B, B + 1])
def test_a_record_is_read_as_it_was_written(count):
    branches = {"main": np.arange(count, dtype=np.int32), "ß": np.full(3, -7, np.int32)}
    record = SessionRecord(branches, Retention(None, "host", 2), 5)
    read = SessionRecord.decoded(record.encoded())
    assert read is not None and (read.retention, read.num_turns) == (record.retention, 5)
    assert {name: tokens.tolist() for name, tokens in read.branches.items()} == {
        name: tokens.tolist() for name, tokens in branches.items()
    }
    for wrong in (record.encoded()[:-1], record.encoded() + b"1234"):
        assert SessionRecord.decoded(wrong) is None


def test_sessions_stand_on_a_manager_alone_and_make_room_for_others():
    manager = BlockManager(16, B, pin_quota=16)
    sessions = Sessions(SessionBlocks(manager), SessionConfig(max_sessions=2))
    first = sessions.open("a")
    sessions.open("b")
    assert sessions.open("a") is first and sessions.find("nobody") is None
    sessions.open("c")
    assert len(sessions) == 2 and sessions.find("b") is None and sessions.stats().num_forgotten == 1
    for wrong in ("", "x" * 257):
        with pytest.raises(ValueError, match="session_id must have 1 to 256 characters"):
            sessions.open(wrong)


def test_who_has_most_makes_room_for_others():
    sessions = Sessions(SessionBlocks(BlockManager(16, B)), SessionConfig(max_sessions=4, max_tokens=40))
    ann = sessions.open("a", owner=b"ann")
    ann.supersede(range(10))
    bobs = [sessions.open(str(number), owner=b"bob") for number in range(3)]
    bobs[0].supersede(range(10))
    sessions.open("3", owner=b"bob")
    assert [one.is_open for one in (ann, *bobs)] == [True, True, False, True], "a call by handle is a use"
    bobs[0].supersede(range(30))
    with pytest.raises(ValueError, match="tokens of an owner must be at most"):
        bobs[0].supersede(range(31))
    assert ann.is_open and bobs[0].branches == {"main": 30} and bobs[0].num_turns == 2
    ann.supersede(range(11))
    assert ann.is_open and not bobs[0].is_open


def naive_victims(sessions: list, limits: SessionConfig, session, num_tokens: int) -> list | None:
    """Return which of the sessions, the last used at the end, go for one that grows; None where it must not."""
    counts = {other: other.num_tokens for other in sessions}
    counts[session] = counts.get(session, 0) + num_tokens
    victims = []
    while len(counts) > limits.max_sessions or sum(counts.values()) > limits.max_tokens:
        weights = dict.fromkeys(counts, 1) if len(counts) > limits.max_sessions else counts
        shares = {one.owner: sum(weights[o] for o in counts if o.owner == one.owner) for one in counts}
        others = [one for one in weights if one is not session and weights[one]]
        victim = max(others, key=lambda one: (shares[one.owner], one.owner == session.owner, not one.keeps))
        if shares[victim.owner] < shares[session.owner]:
            return None
        victims.append(victim)
        del counts[victim]
    return victims


def test_random_owners_make_room_as_in_a_naive_list():
    rng, limits = random.Random(seed_of(3)), SessionConfig(max_sessions=6, max_tokens=60)
    sessions, used, figures = Sessions(SessionBlocks(BlockManager(16, B, pin_quota=4)), limits), [], Counter()
    for number in range(400):
        is_new = not used or rng.random() < 0.3
        num_tokens, owner = rng.randint(0, 40), rng.choice([b"ann", b"bob", b"cid"])
        session = None if is_new else rng.choice(used)
        made = Session(str(number), b"", owner, None, None) if session is None else session
        grown = 0 if session is None else num_tokens - session.num_tokens
        expected = naive_victims(used, limits, made, grown)
        before = list(used)
        try:
            session = sessions.open(str(number), owner=owner) if session is None else session
            if not is_new:
                session.supersede(range(num_tokens))
        except ValueError:
            assert expected is None and all(one.is_open for one in before)
            figures["refused"] += 1
            continue
        assert [one for one in before if not one.is_open] == [one for one in before if one in (expected or [])]
        figures["gone"] += len(expected or [])
        used = [one for one in before if one.is_open and one is not session] + [session]
        if rng.random() < 0.3:
            session.retain() if rng.random() < 0.5 else session.pause(3.0)
        if rng.random() < 0.05:
            used.remove(session)
            session.close()
        assert len(sessions) == len(used) and sessions.stats().num_tokens == sum(one.num_tokens for one in used)
    assert figures["gone"] > 20 and figures["refused"] > 0, figures


def test_of_an_owner_those_that_keep_no_blocks_make_room_first():
    sessions = Sessions(SessionBlocks(BlockManager(16, B)), SessionConfig(max_sessions=3))
    retained, paused, plain, last = (sessions.open(name) for name in ("retained", "paused", "plain", "plain"))
    retained.retain()
    paused.pause(3.0)
    assert plain is last and not plain.keeps
    fourth = sessions.open("fourth")
    assert [one.is_open for one in (retained, paused, plain, fourth)] == [True, True, False, True]
    fourth.retain()
    sessions.open("fifth")
    assert [one.is_open for one in (retained, paused, fourth)] == [False, True, True], "where all do, the oldest"


def test_a_session_without_a_record_asks_the_store_nothing():
    class Records:
        def __getattr__(self, name):
            raise AssertionError(f"{name} was called")

    sessions = Sessions(SessionBlocks(BlockManager(16, B)), records=Records)
    assert sessions.find("a", has_record=False) is None
    session = sessions.open("a", has_record=False)
    session.supersede([1, 2, 3])
    session.branch("b")
    assert sessions.open("a") is session and session.close() == 0 and sessions.find("a", has_record=False) is None


def test_calls_come_between_steps_and_a_refused_one_changes_nothing():
    names: list[str] = []

    def named(namespace: bytes, digest: str) -> bytes:
        if refuses:
            raise ValueError("namespace must be shorter")
        return namespace

    manager, refuses = BlockManager(16, B, pin_quota=2), False
    session = Sessions(SessionBlocks(manager, named=named, check_between_steps=names.append)).open("a")
    computed(manager, 0, [1] * 12)
    manager.release(0)
    session.supersede([1] * 12)
    assert session.retain() == 0, "beyond the quota"
    with pytest.raises(ValueError, match="without a host tier"):
        session.retain(tier="host")
    before, refuses = session.state(), True
    calls = (
        lambda: session.supersede([2]), lambda: session.edit(0, 1, [2]), lambda: session.pause(3.0),
        lambda: session.branch("b"), session.retain, session.close, lambda: session.release("main"),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(ValueError, match="namespace must be shorter"):
            call()
        assert session.state() == before and session.tokens().tolist() == [1] * 12
    assert {"session", "supersede", "retain", "edit", "pause", "branch", "release"} <= set(names)
    engine = make_engine()
    with AsyncEngine(engine), pytest.raises(RuntimeError, match="AsyncEngine"):
        engine.session("a")


@pytest.mark.parametrize("ttl", [np.float32(2.5), Fraction(5, 2)])
def test_terms_are_plain_numbers(ttl):
    terms = Retention(ttl, "host", np.int64(3))
    assert (type(terms.ttl), terms.ttl, type(terms.priority), terms.priority) == (float, 2.5, int, 3)


def test_a_pause_says_where_its_blocks_are(engine):
    path, _ = run(engine, PROMPT)
    session = engine.session("a")
    session.supersede(path)
    assert session.pause(30.0) == "host" and on_host(engine, path) == 9
    assert session.pause(0.03) == "device" and on_host(engine, path) == 0
    session.retain(60.0, "host")
    assert session.pause(0.03) == "device" and on_host(engine, path) == 0
    without = make_engine(num_cpu_blocks=32)  # a quota of 0
    path, _ = run(without, PROMPT)
    session = without.session("a")
    session.supersede(path)
    assert session.pause(30.0) == "device" == session.state().paused_in and on_host(without, path) == 0
    assert session.return_at is None


def test_running_requests_take_retained_blocks_the_lowest_priority_first():
    manager = BlockManager(16, B, pin_quota=16)
    sessions = Sessions(SessionBlocks(manager))
    for number, priority in enumerate((1, 0, 2)):
        computed(manager, number, [number] * 4 * B)
        manager.release(number)
        session = sessions.open(str(number))
        session.supersede([number] * 4 * B)
        assert session.retain(priority=priority) == 4
    for num_blocks, left in ((4, [4, 4, 4]), (5, [4, 0, 4]), (8, [4, 0, 4]), (9, [0, 0, 4]), (16, [0, 0, 0])):
        manager.allocate("new", [9] * num_blocks * B)
        assert [sessions.open(str(number)).num_retained_blocks for number in range(3)] == left
        manager.release("new")


def test_a_session_goes_on_with_new_weights_and_keeps_what_they_compute(engine):
    path, _ = run(engine, PROMPT)
    session = engine.session("a")
    session.supersede(path)
    assert session.retain() == 9
    engine.update_weights("v2")
    longer, num_found = run(engine, [*path, 1])
    assert num_found == 0, "K and V of older weights are others'"
    session.supersede(longer)
    [retained] = session.state().branches
    assert retained.num_retained_blocks == len(longer) // B - (len(longer) % B == 0)
    assert engine.explain([*longer, 2]).num_cached_tokens == retained.num_retained_blocks * B
    assert session.pause(50.0) == "host" and on_host(engine, longer) == 0, "these are of the first weights"
    name = engine.kv_namespace()
    assert int((engine.manager.tree.look(longer, name)[0][0] < 0).sum()) == retained.num_retained_blocks
    cost = session.edit(8, 9, [7])
    explanation = engine.explain(session.tokens())
    assert explanation.edits == (cost,) and explanation.num_cached_tokens == 8
