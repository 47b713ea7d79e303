"""KVPageTier against a naive tiering: every byte compared, every trouble a miss, nothing asked for ever."""

import logging
import shutil
from concurrent.futures import Future
from pathlib import Path

import pytest
from support import fake_vllm
from support.fake_tiering import NUM_BYTES, Tiering, config_of, disk, flip, held, make_model
from support.insides import stack_of, store_of
from support.redis_server import RedisServer, needs_redis
from support.waiting import until

KEYS = [bytes([number]) * 36 for number in range(1, 9)]
MEMORY = "memory://?size=1MiB"


@pytest.fixture(autouse=True)
def _vllm(monkeypatch):
    fake_vllm.installed(monkeypatch)


@pytest.fixture
def model(tmp_path) -> Path:
    return make_model(tmp_path / "model", b"weights")


# --- what is stored is found ---


@pytest.mark.parametrize("count", [1, 7, 8])
def test_what_was_stored_is_loaded_by_the_next_process(tmp_path, model, count):
    for turn in range(2):
        tiering = Tiering(model, tiers=[disk(tmp_path)])
        if turn == 0:
            result = tiering.compute("first", KEYS[:count])
            assert result.success and result.transfer_bytes == count * NUM_BYTES and result.transfer_time > 0
        assert tiering.load("second", KEYS) == [number < count for number in range(8)]
        tiering.close()


def test_a_row_is_loaded_into_the_row_that_was_asked_for(model):
    tiering = Tiering(model, tiers=[MEMORY])
    assert tiering.compute("first", KEYS[:4]).success
    tiering.free.reverse()
    assert tiering.load("second", list(reversed(KEYS[:4]))) == [True] * 4
    tiering.close()


def test_a_chunk_that_was_stored_meanwhile_is_found_by_who_asked_before(model):
    tiering = Tiering(model, tiers=[MEMORY])
    context = tiering.request("waits")
    assert tiering.look_up(context, KEYS[:1]) == [False]
    tiering.compute("other", KEYS[:1])
    assert tiering.look_up(context, KEYS[:1]) == [True]
    tiering.close()


@needs_redis
def test_redis_keeps_chunks_for_another_process(tmp_path, model):
    server = RedisServer(tmp_path / "redis")
    tiers = [MEMORY, f"redis://127.0.0.1:{server.port}/0?deadline=5"]
    for turn in range(2):
        tiering = Tiering(model, tiers=tiers)
        if turn == 0:
            assert tiering.compute("first", KEYS).success
        assert tiering.load("second", KEYS) == [True] * 8
        tiering.close()
    server.kill()


# --- other engines ---

OTHERS = [
    {"dtype": "bfloat16"}, {"worker_kv_bytes_per_block": 32}, {"kv_cache_layout": "HND"}, {"canonical_layout": True},
    {"replicated_layout": True}, {"groups": ()}, {"cache": (8, 1)}, {"cache": (16, 2)}, {"parallel": (2, 2, 1, 1, 1)},
    {"parallel": (2, 1, 2, 1, 1)},
]  # fmt: skip


@pytest.mark.parametrize("fields", OTHERS, ids=str)
def test_another_layout_finds_nothing(tmp_path, model, fields):
    tiering = Tiering(model, tiers=[disk(tmp_path)])
    tiering.compute("first", KEYS)
    tiering.close()
    kinds = {"cache": fake_vllm.OffloadingCacheConfig, "parallel": fake_vllm.OffloadingParallelConfig}
    fields = {name: kinds[name](*value) if name in kinds else value for name, value in fields.items()}
    other = Tiering(model, config=config_of(model, **fields), tiers=[disk(tmp_path)])
    assert other.load("second", KEYS) == [False] * 8
    other.close()


@pytest.mark.parametrize("change", ["bytes", "version", "weights", "named", "device"])
def test_another_page_version_or_model_finds_nothing(tmp_path, model, monkeypatch, change):
    settings = {"weights": "m@1"} if change == "named" else {}
    tiering = Tiering(model, tiers=[disk(tmp_path)], **settings)
    tiering.compute("first", KEYS)
    tiering.close()
    num_bytes = NUM_BYTES * 2 if change == "bytes" else NUM_BYTES
    if change == "version":
        fake_vllm.installed(monkeypatch, "0.33.0")
    elif change == "weights":
        (model / "model.safetensors").write_bytes(b"weightz")
    elif change == "named":
        settings = {"weights": "m@2"}
    elif change == "device":
        monkeypatch.setattr(fake_vllm.current_platform, "device_type", "cuda")
    other = Tiering(model, num_bytes=num_bytes, tiers=[disk(tmp_path)], **settings)
    assert other.load("second", KEYS) == [False] * 8
    other.close()


def test_a_copy_of_the_model_elsewhere_finds_everything(tmp_path, model):
    tiering = Tiering(model, tiers=[disk(tmp_path)])
    tiering.compute("first", KEYS)
    tiering.close()
    other = Tiering(make_model(tmp_path / "copy", b"weights"), tiers=[disk(tmp_path)])
    assert other.load("second", KEYS) == [True] * 8
    other.close()


# --- trouble ---


def test_flipped_bits_are_misses_of_their_chunks_alone(tmp_path, model, caplog):
    tiering = Tiering(model, tiers=[disk(tmp_path)])
    tiering.compute("first", KEYS)
    for key in KEYS[2:4]:
        flip(tmp_path / "kv", key)
    expected = [number not in (2, 3) for number in range(8)]
    with caplog.at_level(logging.WARNING):
        assert tiering.load("second", KEYS) == expected
    assert "a record was dropped" in caplog.text
    assert tiering.load("third", KEYS) == expected
    assert tiering.tier.counts().failed_loads == 2
    tiering.compute("fourth", KEYS[2:4])
    assert tiering.load("fifth", KEYS) == [True] * 8
    tiering.close()


def test_a_store_that_promises_and_does_not_give_is_asked_once_a_request(model, monkeypatch):
    tiering = Tiering(model, tiers=[MEMORY])
    monkeypatch.setattr(stack_of(store_of(tiering.tier)), "locate", lambda keys, *_: [0] * len(keys))
    for number in range(3):
        assert tiering.load(f"request {number}", KEYS) == [False] * 8
        assert tiering.num_loads == number + 1
    tiering.close()


def test_a_call_that_fails_is_a_miss(model, monkeypatch, caplog):
    tiering = Tiering(model, tiers=[MEMORY])
    tiering.compute("first", KEYS)

    def broken(*_):
        raise RuntimeError("out of order")

    monkeypatch.setattr(stack_of(store_of(tiering.tier)), "read_each", broken)
    monkeypatch.setattr(stack_of(store_of(tiering.tier)), "put", broken)
    assert tiering.load("second", KEYS) == [False] * 8
    assert not tiering.compute("third", KEYS[:1]).success
    monkeypatch.setattr(stack_of(store_of(tiering.tier)), "locate", broken)
    assert tiering.load("fourth", KEYS) == [False] * 8
    assert "its chunks count as missing" in caplog.text
    tiering.close()


def test_a_full_place_keeps_what_fits(model):
    tiering = Tiering(model, num_bytes=40_000, tiers=["memory://?size=128KiB"])
    for turn, key in enumerate(KEYS):
        assert tiering.compute(f"turn {turn}", [key]).success
    found = tiering.load("last", KEYS)
    assert found[-1] and 0 < sum(found) < 4
    assert store_of(tiering.tier).stats().tiers[0].evicted >= 5
    tiering.close()


def test_a_chunk_that_fits_nowhere_is_not_stored(model):
    tiering = Tiering(model, num_bytes=40_000, tiers=["memory://?size=16KiB"])
    result = tiering.compute("first", KEYS)
    assert not result.success and result.transfer_bytes == 0
    assert tiering.load("second", KEYS) == [False] * 8
    assert tiering.tier.counts().failed_stores == 8
    tiering.close()


@needs_redis
@pytest.mark.parametrize("trouble", ["pause", "kill"])
def test_a_server_that_is_slow_or_gone_is_a_miss(tmp_path, model, trouble):
    server = RedisServer(tmp_path / "redis")
    tiering = Tiering(model, tiers=[f"redis://127.0.0.1:{server.port}/0?deadline=0.2"])
    assert tiering.compute("first", KEYS[:4]).success
    getattr(server, trouble)()
    assert tiering.load("second", KEYS) == [False] * 8
    assert not tiering.compute("third", KEYS[4:]).success
    tiering.close()
    server.kill()


def test_a_folder_that_vanishes_is_a_miss(tmp_path, model):
    tiering = Tiering(model, tiers=[disk(tmp_path)])
    tiering.compute("first", KEYS[:4])
    shutil.rmtree(tmp_path / "kv")
    tiering.load("second", KEYS)  # what is found is compared
    tiering.compute("third", KEYS[4:])
    tiering.close()


# --- never waiting ---


def test_a_lookup_does_not_wait_for_the_store(model, monkeypatch):
    tiering = Tiering(model, tiers=[MEMORY], lookup_patience=60)
    tiering.compute("first", KEYS)
    began, goes_on = held(monkeypatch, tiering, "locate")
    context, retry = tiering.request("r"), fake_vllm.LookupResult.RETRY
    assert {tiering.tier.lookup(key, context) for key in KEYS} == {retry}
    tiering.step()
    assert began.wait(60)
    assert {tiering.tier.lookup(key, context) for key in KEYS} == {retry}
    goes_on.set()
    assert tiering.look_up(context, KEYS) == [True] * 8
    tiering.close()


def test_a_lookup_without_an_answer_becomes_a_miss(model, monkeypatch):
    tiering = Tiering(model, tiers=[MEMORY], lookup_patience=0.01)
    tiering.compute("first", KEYS)
    _, goes_on = held(monkeypatch, tiering, "locate")
    assert tiering.load("second", KEYS) == [False] * 8
    assert tiering.tier.counts().unanswered_lookups == 8
    goes_on.set()
    assert tiering.look_up(tiering.request("third"), KEYS[:1]) in ([True], [False])
    tiering.close()


def test_stores_beyond_the_limit_are_dropped_at_once(model, monkeypatch):
    tiering = Tiering(model, tiers=[MEMORY], max_pending=3 * NUM_BYTES)
    began, goes_on = held(monkeypatch, tiering, "put")
    context = tiering.request("r")
    first = tiering.submit(KEYS[:2], context, is_load=False)
    second = tiering.submit(KEYS[2:4], context, is_load=False)
    flags, result = tiering.finish(second)
    assert flags == [False, False] and not result.success and first in tiering.jobs
    third = tiering.submit(KEYS[4:5], context, is_load=False)
    goes_on.set()
    assert tiering.finish(first)[1].success and tiering.finish(third)[1].success
    assert tiering.compute("next", KEYS).success  # alone, a job may be larger than the limit
    assert tiering.tier.counts().dropped_stores == 2 and tiering.tier.counts().failed_stores == 0
    tiering.close()


def test_draining_waits_for_all_jobs_and_keeps_their_results(model):
    tiering = Tiering(model, tiers=[MEMORY])
    jobs = [tiering.submit([key], tiering.request("r"), is_load=False) for key in KEYS]
    tiering.tier.drain_jobs()
    tiering.step()
    assert sorted(tiering.results) == jobs
    tiering.close()


def test_shutdown_stores_what_waits(tmp_path, model):
    tiering = Tiering(model, tiers=[disk(tmp_path)])
    for key in KEYS:
        tiering.submit([key], tiering.request("r"), is_load=False)
    tiering.close()
    other = Tiering(model, tiers=[disk(tmp_path)])
    assert other.load("second", KEYS) == [True] * 8
    other.close()


def test_nothing_is_remembered_of_requests_that_ended(model):
    tiering = Tiering(model, tiers=[MEMORY])
    for number in range(20):
        tiering.load(f"request {number}", KEYS)
    assert len(tiering.tier._lookups) == 0
    tiering.close()


# --- uses ---


def test_chunks_that_the_device_has_stay_longer(model):
    tiering = Tiering(model, tiers=["memory://?size=16KiB"])  # of four chunks
    tiering.compute("first", KEYS[:4])
    context = tiering.request("second")
    tiering.tier.touch(KEYS[:2], context)
    tiering.step()
    until(lambda: tiering.tier._touches._sent.done())
    tiering.compute("third", KEYS[4:6])
    assert tiering.load("fourth", KEYS[:6]) == [True, True, False, False, True, True]
    tiering.close()


def test_a_store_that_is_slow_is_told_of_the_last_uses_alone(monkeypatch):
    from kvpage.integrations.vllm import touches

    monkeypatch.setattr(touches, "MAX_KEYS", 3)
    told, futures = [], []

    def touch(keys):
        told.append(list(keys))
        futures.append(Future())
        return futures[-1]

    uses = touches.Touches(touch)
    uses.send()
    uses.add(KEYS[:1])
    uses.send()
    for key in (*KEYS[1:5], KEYS[2]):
        uses.add([key])
        uses.send()
    assert told == [KEYS[:1]]
    futures[0].set_result([True])
    uses.send()
    uses.send()
    assert told == [KEYS[:1], [KEYS[3], KEYS[4], KEYS[2]]]


# --- events ---


def taken(tiering: Tiering) -> list[tuple[bool, bytes]]:
    """vLLM's events since the last call, a key each."""
    store_of(tiering.tier).flush()
    events = list(tiering.tier.take_events())
    assert all(event.medium is tiering.tier.medium and event.locality is tiering.tier.locality for event in events)
    return [(event.removed, key) for event in events for key in event.keys]


@pytest.mark.parametrize("kind", ["memory", "disk", "both"])
def test_events_tell_what_comes_and_what_leaves_the_last_place(kind, tmp_path, model):
    places = {"memory": ["memory://?size=16KiB"], "disk": [disk(tmp_path)]}
    places["both"] = places["memory"] + places["disk"]
    events = {"publishes": True, "enable_kv_events": True, "locality": "LOCAL"}
    tiering = Tiering(model, tiers=places[kind], **events)
    assert taken(tiering) == []
    tiering.compute("first", KEYS[:4])
    assert sorted(taken(tiering)) == [(False, key) for key in KEYS[:4]] and taken(tiering) == []
    tiering.compute("second", KEYS[:4])
    tiering.compute("third", KEYS[4:6])
    later = taken(tiering)
    assert sorted(key for removed, key in later if not removed) == KEYS[4:6]
    assert len([key for removed, key in later if removed]) == (2 if kind == "memory" else 0)
    store_of(tiering.tier).remove([tiering.tier._prefix + KEYS[5]])
    assert taken(tiering) == [(True, KEYS[5])]
    tiering.close()


@needs_redis
def test_of_a_server_only_what_a_job_has_stored_is_told(tmp_path, model):
    server = RedisServer(tmp_path / "redis")
    url = f"redis://127.0.0.1:{server.port}/0?cooldown=0&deadline=60"
    tiering = Tiering(model, tiers=["memory://?size=16KiB", url], publishes=True, enable_kv_events=True)
    tiering.compute("first", KEYS)
    assert sorted(taken(tiering)) == [(False, key) for key in KEYS]
    server.kill()
    tiering.close()


@pytest.mark.parametrize(("publishes", "is_asked"), [(False, False), (True, False), (False, True)])
def test_events_need_both_switches(publishes, is_asked, model, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        tiering = Tiering(model, tiers=[MEMORY], publishes=publishes, enable_kv_events=is_asked)
    tiering.compute("first", KEYS[:2])
    assert taken(tiering) == [] and not tiering.tier._store._feed._tiers[0].tier._note
    assert ("enable_kv_events tells nothing" in caplog.text) == is_asked
    tiering.close()


def test_events_that_vllm_does_not_take_are_summed_up(model):
    tiering = Tiering(model, tiers=["memory://?size=16KiB"], publishes=True, enable_kv_events=True)  # of four chunks
    for key in (*KEYS[:6], KEYS[0]):
        tiering.compute("r", [key])
    assert sorted(taken(tiering)) == [(False, key) for key in sorted([KEYS[0], *KEYS[3:6]])]
    for key in (KEYS[6], KEYS[7], *KEYS[3:5]):
        tiering.compute("r", [key])
    tiering.compute("r", KEYS[5:6])
    changes = taken(tiering)
    there = {KEYS[0], *KEYS[3:6]} | {key for removed, key in changes if not removed}
    there -= {key for removed, key in changes if removed}
    assert tiering.load("last", KEYS) == [key in there for key in KEYS] and tiering.tier.counts().lost_events == 0
    tiering.close()


# --- metrics ---


def stats_of(tiering: Tiering) -> fake_vllm.OffloadingConnectorStats:
    """The next metrics, which a thread of the tier reads."""
    found: list[fake_vllm.OffloadingConnectorStats] = []
    until(lambda: found.append(tiering.tier.get_stats()) or found[-1] is not None)
    return found[-1]


def test_metrics_say_what_the_store_did(model):
    from kvpage.integrations.vllm import KVPageTier

    tiering = Tiering(model, tiers=[MEMORY])
    tiering.compute("first", KEYS[:4])
    assert tiering.load("second", KEYS[:4]) == [True] * 4
    definitions = KVPageTier.build_metric_definitions({})
    values = stats_of(tiering).values
    assert {name for name, _ in values} <= set(definitions)
    assert all(len(labels) == len(definitions[name].labelnames) for name, labels in values)
    (place,) = {labels[0] for _, labels in values if labels}
    assert values["vllm:kvpage_place_hits", (place,)] == values["vllm:kvpage_place_records", (place,)] == 4
    assert values["vllm:kvpage_place_read_bytes", (place,)] >= 4 * NUM_BYTES
    assert tiering.tier.get_stats() is None  # once a second
    tiering.close()


def test_metrics_tell_only_growth(model):
    from kvpage.integrations.vllm.metrics import MetricsWriter, TierCounts

    tiering, writer = Tiering(model, tiers=[MEMORY]), MetricsWriter()
    stats = store_of(tiering.tier).stats()
    for failed, told in ((2, 2), (2, None), (5, 3)):
        written = writer.write(fake_vllm.OffloadingConnectorStats(), TierCounts(failed_loads=failed), stats).values
        assert written.get(("vllm:kvpage_failed_loads", ())) == told
    tiering.close()


# --- what a request is told ---


@pytest.mark.parametrize("is_asked_for", [True, False])
def test_the_log_tells_of_each_request_if_it_is_asked_for(tmp_path, model, monkeypatch, caplog, is_asked_for):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)  # vLLM's own lines end there
    tiering = Tiering(model, tiers=[disk(tmp_path)], log_requests=is_asked_for)
    tiering.compute("first", KEYS[:2])
    flip(tmp_path, KEYS[1])
    with caplog.at_level(logging.INFO, "vllm.kvpage"):
        tiering.load("second", KEYS[:3])
    lines = [message for message in caplog.messages if message.startswith("request second")]
    assert len(lines) == is_asked_for
    for line in lines:
        assert "the store had 1 of the 3 chunks" in line and "1 could not be loaded" in line
        assert line.endswith("{'damaged': 1}")
    tiering.close()
