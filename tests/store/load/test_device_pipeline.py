"""Blocks of a device to records and back, by copies that land late: every byte, after errors too."""

import random

import pytest
import torch
from support.insides import entries_of, gathered_by, nobody_reads, num_lent, slab_of, stack_of
from support.late_lanes import POISON, LateLanes
from support.store_engines import TOKENS, B, C, all_bytes, make_engine
from support.store_kv import corrupt

from kvpage import CacheConfig, CacheEngine, DeviceConfig, ModelConfig
from kvpage.store import KVStore, KVStoreConfig, metadata_of
from kvpage.store.load import block_chunks
from kvpage.store.load.device import device_lanes
from kvpage.store.tiers.memory_tier import MemoryTier

TABLE, OTHER = [5, 0, 23, 7, 9, 2, 11, 3], [1, 22, 4, 17, 6, 8, 19, 10]
LAYOUTS = [{}, {"backend": "paged"}, {"backend": "mla"}, {"kv_layout": "HND", "layer_layout": "packed"}]
PINNED = pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])


@pytest.fixture(autouse=True)
def one_layer_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_chunks, "RUN_BYTES", 1)


def on_device(engine: CacheEngine) -> CacheEngine:
    """The same engine, as if its blocks were on a GPU."""
    engine.device = torch.device("cuda", 0)
    return engine


def make_store(engine: CacheEngine, lanes: LateLanes | None, fmt: str = "vllm", num_threads: int = 2) -> KVStore:
    tier = MemoryTier(1 << 16, pin_memory=False)
    slab_of(tier).fill_(POISON)
    store = KVStore(KVStoreConfig(C, num_threads=num_threads), metadata_of(engine, "m", fmt=fmt), [tier])
    if lanes is not None:
        gathered_by(store, lanes.pool)
    return store


def tier_of(store: KVStore) -> MemoryTier:
    return stack_of(store).tiers[0].tier


def slab(store: KVStore) -> list[bytes]:
    """Each record, and what no record has."""
    tier, left = tier_of(store), slab_of(tier_of(store)).clone()
    found = []
    for key in sorted(entries_of(tier)):
        entry = entries_of(tier)[key]
        place = slice(entry.begin * 4096, entry.begin * 4096 + entry.num_bytes)
        found.append(slab_of(tier)[place].numpy().tobytes())
        left[place] = POISON
    assert bool((left == POISON).all()), "bytes of no record were written"
    return found


def check_idle(store: KVStore, lanes: LateLanes) -> None:
    """No copy is under way, no record is held, and no lane is lent."""
    tier = tier_of(store)
    tier.check()
    assert lanes.is_idle() and num_lent(lanes.pool) == 0
    assert nobody_reads(tier)
    used = sum(-(-entry.num_bytes // 4096) for entry in entries_of(tier).values())
    assert tier._extents.num_free == tier._extents.num_units - used, "half a record is left"


@PINNED
@pytest.mark.parametrize("fmt", ["vllm", "huggingface"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(layout.values()) or "flash")
def test_records_and_blocks_are_those_of_a_cpu(layout: dict, fmt: str, pinned: bool) -> None:
    for seed in range(2):
        source, lanes = make_engine(seed=1, **layout), LateLanes(seed, pinned)
        plain = make_store(source, None, fmt)
        store = make_store(on_device(make_engine(seed=1, **layout)), lanes, fmt)
        assert plain.store_blocks(TOKENS, source, TABLE) == len(TOKENS)
        assert store.store_blocks(TOKENS, on_device(make_engine(seed=1, **layout)), TABLE) == len(TOKENS)
        check_idle(store, lanes)
        assert slab(store) == slab(plain)
        for start in (0, 5, C, 2 * C + 1):
            target, expected = on_device(make_engine(seed=2, **layout)), make_engine(seed=2, **layout)
            assert store.load_blocks(TOKENS, target, OTHER, start) == len(TOKENS)
            assert plain.load_blocks(TOKENS, expected, OTHER, start) == len(TOKENS)
            check_idle(store, lanes)
            for found, wanted in zip(all_bytes(target), all_bytes(expected), strict=True):
                assert torch.equal(found, wanted)
    assert store.stats().corrupt_records == 0


@PINNED
def test_lanes_begin_after_the_callers_work(pinned: bool) -> None:
    """Each lane of a call first waits for the point at which the call was made, in whatever thread it runs."""
    lanes, engine = LateLanes(4, pinned), on_device(make_engine(seed=1))
    store = make_store(engine, lanes)
    store.store_blocks(TOKENS, engine, TABLE)
    store.load_blocks(TOKENS, engine, OTHER)
    assert lanes.num_marks == 2 and lanes.streams
    for stream in lanes.streams:
        assert stream.log[0] == "ready"
    lent = sum(stream.log.count("ready") for stream in lanes.streams)
    assert lent == 2 * 3 * device_lanes.NUM_LANES, "of three chunks, stored and loaded"


def test_several_copies_are_under_way_while_one_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes, engine, under_way = LateLanes(5), on_device(make_engine(seed=1)), []
    store = make_store(engine, lanes, num_threads=1)
    digests_of = block_chunks.DevicePipeline._digest_stored

    def watch(self, *arguments):
        under_way.append(sum(stream.num_put > 0 for stream in lanes.streams))
        return digests_of(self, *arguments)

    monkeypatch.setattr(block_chunks.DevicePipeline, "_digest_stored", watch)
    store.store_blocks(TOKENS[:C], engine, TABLE)
    assert under_way[0] == device_lanes.NUM_LANES, "a copy begins only when the one before is hashed"


def num_works(pinned: bool, loads: bool) -> int:
    lanes, engine = LateLanes(0, pinned), on_device(make_engine(seed=1))
    store = make_store(engine, lanes)
    store.store_blocks(TOKENS, engine, TABLE)
    before = lanes.num_works
    if loads:
        store.load_blocks(TOKENS, engine, OTHER)
        return lanes.num_works - before
    return before


@PINNED
@pytest.mark.parametrize("num_threads", [1, 3])
def test_an_error_in_any_copy_leaves_nothing_behind(pinned: bool, num_threads: int) -> None:
    engine, expected = on_device(make_engine(seed=1)), make_engine(seed=2)
    plain = make_store(engine, LateLanes())
    plain.store_blocks(TOKENS, engine, TABLE)
    plain.load_blocks(TOKENS, expected, OTHER)
    for number in range(1, num_works(pinned, loads=False) + 1, 3):  # gathers and copies in turn
        lanes = LateLanes(number, pinned, failing_work=number)
        store = make_store(engine, lanes, num_threads=num_threads)
        with pytest.raises(RuntimeError, match=f"copy {number} has failed"):
            store.store_blocks(TOKENS, engine, TABLE)
        check_idle(store, lanes)
        assert store.store_blocks(TOKENS, engine, TABLE) == len(TOKENS)
        check_idle(store, lanes)
        again, lanes.failing_work = on_device(make_engine(seed=2)), lanes.num_works + number
        with pytest.raises(RuntimeError, match="has failed"):
            store.load_blocks(TOKENS, again, OTHER)
        check_idle(store, lanes)
        assert store.load_blocks(TOKENS, again, OTHER) == len(TOKENS)
        for found, wanted in zip(all_bytes(again), all_bytes(expected), strict=True):
            assert torch.equal(found, wanted)
        store.close()


@PINNED
@pytest.mark.parametrize("number", [1, 2, 3, 5, 6, 9])
def test_what_was_begun_is_waited_for_when_a_stream_takes_no_more(pinned: bool, number: int) -> None:
    engine, lanes = on_device(make_engine(seed=1)), LateLanes(number, pinned)
    store = make_store(engine, lanes, num_threads=1)
    lanes.failing_submit = number
    with pytest.raises(RuntimeError, match="takes no more work"):
        store.store_blocks(TOKENS, engine, TABLE)
    check_idle(store, lanes)
    store.close()


@PINNED
def test_an_interrupt_in_any_wait_leaves_nothing_behind(pinned: bool) -> None:
    engine = on_device(make_engine(seed=1))
    for number in range(1, 7):
        lanes = LateLanes(number, pinned, failing_wait=number)
        store = make_store(engine, lanes, num_threads=1)
        with pytest.raises(KeyboardInterrupt):
            store.store_blocks(TOKENS, engine, TABLE)
        check_idle(store, lanes)
        assert store.store_blocks(TOKENS, engine, TABLE) == len(TOKENS)
        lanes.failing_wait = lanes.num_waits + number
        with pytest.raises(KeyboardInterrupt):
            store.load_blocks(TOKENS, on_device(make_engine(seed=3)), OTHER)
        check_idle(store, lanes)


@PINNED
def test_a_digest_that_does_not_fit_is_a_miss(pinned: bool) -> None:
    rng = random.Random(0)
    for _ in range(6):
        lanes, engine = LateLanes(1, pinned), on_device(make_engine(seed=1))
        store = make_store(engine, lanes)
        store.store_blocks(TOKENS, engine, TABLE)
        tier, keys = tier_of(store), store.keys_of(TOKENS)
        chunk = rng.randrange(len(keys))
        corrupt(tier, keys[chunk], rng.randrange(entries_of(tier)[keys[chunk]].num_bytes))
        target = on_device(make_engine(seed=2))
        assert store.load_blocks(TOKENS, target, OTHER) == chunk * C
        check_idle(store, lanes)
        assert store.stats().corrupt_records == 1 and len(entries_of(tier)) == len(keys) - 1


def test_a_pool_keeps_few_sets() -> None:
    lanes = LateLanes()
    pool, places = lanes.pool, [torch.device("cuda", index) for index in range(3)]
    for size in (8, 16, 4):
        for place in places * 2:
            with pool.lanes(place, size) as lent:
                assert len(lent) == device_lanes.NUM_LANES and len(lent[0].on_device) >= size
    assert len(pool._free) <= device_lanes.MAX_SETS and num_lent(pool) == 0
    with pool.lanes(places[2], 16) as first, pool.lanes(places[2], 16) as second:
        assert first is not second
    before = [kept for _, kept in pool._free]
    with pytest.raises(RuntimeError, match="the device has failed"), pool.lanes(places[2], 16) as lent:
        raise RuntimeError("the device has failed")
    assert all(kept is not lent for _, kept in pool._free) and len(pool._free) == len(before) - 1
    assert num_lent(pool) == 0


@pytest.mark.gpu
@PINNED
@pytest.mark.parametrize("fmt", ["vllm", "huggingface"])
def test_blocks_of_a_gpu(fmt: str, pinned: bool) -> None:
    """Its records are those of the same blocks on a CPU, and come back into its blocks bit by bit."""
    config, shape = CacheConfig(B, 24), ModelConfig(10, 2, ("full_attention",) * 3, torch.bfloat16)
    sources = [make_engine(seed=seed) for seed in (1, 2)]
    engines = [CacheEngine(config, shape, None, DeviceConfig("cuda")) for _ in sources]
    for engine, source in zip(engines, sources, strict=True):
        for layer, plain in zip(engine.gpu_cache, source.gpu_cache, strict=True):
            layer.copy_(plain)
    store = KVStore(
        KVStoreConfig(C, num_threads=2), metadata_of(sources[0], "m", fmt=fmt), [MemoryTier(1 << 16, pin_memory=pinned)]
    )
    assert store.store_blocks(TOKENS, engines[0], TABLE) == len(TOKENS)
    assert store.load_blocks(TOKENS, sources[1], OTHER, 5) == len(TOKENS)
    assert store.load_blocks(TOKENS, engines[1], OTHER, 5) == len(TOKENS)
    for found, wanted in zip(all_bytes(engines[1]), all_bytes(sources[1]), strict=True):
        assert torch.equal(found.cpu(), wanted)
    store.close()
