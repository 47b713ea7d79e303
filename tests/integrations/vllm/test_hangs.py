"""KVPageTier over a place that never answers, and where no thread can be started: vLLM's scheduler goes on."""

import threading

import pytest
from support import fake_vllm
from support.fake_tiering import Tiering, held, make_model
from support.waiting import until

KEYS = [bytes([number]) * 36 for number in range(1, 9)]
MEMORY = "memory://?size=1MiB"


@pytest.fixture
def tiering(monkeypatch, tmp_path) -> Tiering:
    fake_vllm.installed(monkeypatch)
    made = Tiering(make_model(tmp_path / "model"), tiers=[MEMORY], num_threads=1)
    assert made.compute("first", KEYS).success
    return made


def give_patience(tiering: Tiering, seconds: float) -> None:
    """Let jobs that begin from now on have so much time."""
    tiering.tier._jobs._load_patience = tiering.tier._jobs._store_patience = tiering.tier._drain_seconds = seconds


@pytest.mark.parametrize("call", ["drain_jobs", "shutdown"])
def test_a_load_that_hangs_ends_waiting_with_an_error(tiering, monkeypatch, call):
    began, goes_on = held(monkeypatch, tiering, "read_each")
    give_patience(tiering, 0.1)
    load = tiering.submit(KEYS[:2], tiering.request("r"), is_load=True)
    assert began.wait(60)
    with pytest.raises(TimeoutError, match=r"jobs of the store must end within 0.1 s, 1 are under way: a place hangs"):
        getattr(tiering.tier, call)()
    goes_on.set()
    give_patience(tiering, 60)
    tiering.finish(load)
    tiering.close()


def test_a_place_that_does_not_close_ends_the_shutdown_with_an_error(tiering, monkeypatch):
    _, goes_on = held(monkeypatch, tiering, "close")
    give_patience(tiering, 0.1)
    with pytest.raises(TimeoutError, match=r"the store must close within 0.1 s: a place hangs"):
        tiering.tier.shutdown()
    goes_on.set()
    give_patience(tiering, 60)
    tiering.close()


def test_loads_behind_one_that_hangs_fail_and_nothing_is_looked_up_meanwhile(tiering, monkeypatch):
    _, goes_on = held(monkeypatch, tiering, "read_each")
    context, miss = tiering.request("r"), fake_vllm.LookupResult.MISS
    assert tiering.look_up(context, KEYS[5:6]) == [True]
    give_patience(tiering, 0.05)
    hanging = [tiering.submit([key], context, is_load=True) for key in KEYS[:2]]  # as many as read at once
    until(lambda: all(future.running() for future in tiering.tier._jobs._under_way))
    assert tiering.finish(tiering.submit(KEYS[2:4], context, is_load=True))[0] == [False, False]
    assert {tiering.tier.lookup(key, context) for key in KEYS} == {miss} and set(hanging) == set(tiering.jobs)
    goes_on.set()
    give_patience(tiering, 60)
    for job in hanging:
        tiering.finish(job)
    assert tiering.load("later", KEYS) == [True] * 8
    tiering.close()


def test_stores_behind_one_that_hangs_are_given_up(tiering, monkeypatch):
    began, goes_on = held(monkeypatch, tiering, "put")
    context = tiering.request("r")
    give_patience(tiering, 0.05)
    hanging = tiering.submit(KEYS[:1], context, is_load=False)
    assert began.wait(60)
    assert tiering.finish(tiering.submit(KEYS[1:3], context, is_load=False))[0] == [False, False]
    assert tiering.look_up(context, KEYS[:1]) == [True]  # what is stored slowly does not stand in the way of loads
    goes_on.set()
    give_patience(tiering, 60)
    tiering.finish(hanging)
    tiering.close()


def test_where_no_thread_can_be_started_a_job_fails(monkeypatch, tmp_path, caplog):
    fake_vllm.installed(monkeypatch)
    tiering = Tiering(make_model(tmp_path / "model"), tiers=[MEMORY])

    def broken(*_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        for module in ("kvpage.store.bytes.byte_store", "kvpage.integrations.vllm.metrics"):
            patch.setattr(f"{module}.started_pool", broken)
        assert not tiering.compute("first", KEYS[:2]).success
        context = tiering.request("second")
        assert tiering.look_up(context, KEYS[:2]) == [False, False]
        assert tiering.finish(tiering.submit(KEYS[:2], context, is_load=True))[0] == [False, False]
        tiering.tier.touch(KEYS, context)
        tiering.step()
        assert tiering.tier.get_stats() is None and tiering.tier.get_stats() is None
    assert "its chunks count as missing" in caplog.text and "statistics of the store could not be read" in caplog.text
    assert tiering.compute("third", KEYS).success and tiering.load("fourth", KEYS) == [True] * 8
    tiering.close()


def test_metrics_do_not_wait_for_the_store(tiering, monkeypatch):
    goes_on, read = threading.Event(), tiering.tier._stats._read
    monkeypatch.setattr(tiering.tier._stats, "_read", lambda: goes_on.wait(60) and read())
    monkeypatch.setattr("kvpage.integrations.vllm.tier.STATS_SECONDS", 0.0)
    assert [tiering.tier.get_stats() for _ in range(3)] == [None] * 3
    goes_on.set()
    until(lambda: tiering.tier.get_stats() is not None)
    tiering.close()
