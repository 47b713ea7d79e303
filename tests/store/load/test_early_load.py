"""Loads that tell what is verified before its bytes are there: every byte in time, and nothing that is not exact."""

import pytest
import torch
from support.insides import gathered_by, nobody_reads, num_lent
from support.late_lanes import LateLanes
from support.store_engines import TOKENS, B, C, L, all_bytes, make_engine
from support.store_kv import corrupt

from kvpage import CacheEngine
from kvpage.cache import layered_moves
from kvpage.store import KVStore, KVStoreConfig, metadata_of
from kvpage.store.load import block_chunks
from kvpage.store.tiers.memory_tier import MemoryTier
from kvpage.store.tiers.tier import Tier

TABLE, OTHER = [5, 0, 23, 7, 9, 2, 11, 3], [1, 22, 4, 17, 6, 8, 19, 10]
LAYOUTS = [{}, {"backend": "paged"}, {"backend": "mla"}, {"kv_layout": "HND", "layer_layout": "packed"}]


@pytest.fixture(autouse=True)
def one_layer_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_chunks, "RUN_BYTES", 1)
    monkeypatch.setattr(layered_moves, "MIN_PIECE_BYTES", 1)


def on_device(engine: CacheEngine) -> CacheEngine:
    engine.device = torch.device("cuda", 0)
    return engine


class Load:
    """A store with the tokens, and a load of them into an engine whose copies come late."""

    def __init__(self, seed: int = 0, pinned: bool = True, tiers: list[Tier] | None = None, **layout: object) -> None:
        self.lanes, self.told = LateLanes(seed, pinned), []
        self.layout, self.source = layout, make_engine(seed=1, **layout)
        self.tiers = tiers or [MemoryTier(1 << 16, pin_memory=False)]
        self.store = KVStore(KVStoreConfig(C, num_threads=2), metadata_of(self.source, "m"), self.tiers)
        gathered_by(self.store, self.lanes.pool)
        self.store.store_blocks(TOKENS, self.source, TABLE)
        self.target = on_device(make_engine(seed=2, **layout))

    def expected(self, start: int = 0, end: int = len(TOKENS)) -> list[torch.Tensor]:
        """What the target must hold: the tokens [start, end), and its own bytes elsewhere."""
        engine = make_engine(seed=2, **self.layout)
        assert self.store.load_blocks(TOKENS[:end], engine, OTHER, start) == end
        return all_bytes(engine)

    def run(self, verified=None, start: int = 0) -> int:
        def told(end: int, arrival: object) -> None:
            self.told.append(end)
            if verified is not None:
                verified(arrival)

        return self.store.load_early(TOKENS, self.target, OTHER, told, start)

    def damage(self, chunk: int, byte: int = 500) -> None:
        corrupt(self.tiers[0], self.store.keys_of(TOKENS)[chunk], byte)

    def check_idle(self) -> None:
        assert self.lanes.is_idle() and num_lent(self.lanes.pool) == 0
        assert nobody_reads(self.tiers[0])


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(layout.values()) or "flash")
@pytest.mark.parametrize("start", [0, 5, C, 2 * C + 1])
def test_each_layer_is_there_when_it_is_waited_for(layout: dict, start: int) -> None:
    for seed in range(3):
        load = Load(seed, **layout)
        expected, before, late = load.expected(start), all_bytes(load.target), []

        def check(arrival, load=load, expected=expected, late=late) -> None:
            for layer in range(L):
                late.append(not load.lanes.is_idle())
                arrival.wait_layer(layer)
                found = load.target.gpu_cache[layer].contiguous().view(torch.uint8)
                assert torch.equal(found, expected[layer]), "it waited for too little"
            assert arrival.is_over

        assert load.run(check, start) == len(TOKENS)
        assert load.told == [len(TOKENS)] and late[0] and not same(before, expected)
        assert same(all_bytes(load.target), expected)
        load.check_idle()


def test_verified_comes_after_every_digest_and_before_the_last_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpage.store.load import block_load

    load, hashed = Load(), []
    digests_of = block_load.digests_of
    monkeypatch.setattr(
        block_load, "digests_of", lambda data, *rest: hashed.append(len(data)) or digests_of(data, *rest)
    )

    def check(arrival) -> None:
        assert len(hashed) == 3 and not load.lanes.is_idle()
        arrival.wait_layer(0)
        assert not load.lanes.is_idle(), "the first layer waits for the last one"

    load.run(check)
    load.check_idle()


@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_a_wrong_digest_ends_the_load_before_its_chunk(chunk: int) -> None:
    load = Load(chunk)
    expected = load.expected(end=chunk * C) if chunk else None
    load.damage(chunk)
    assert load.run() == chunk * C
    assert load.told == ([chunk * C] if chunk else [])
    assert load.store.stats().corrupt_records == 1 and load.store.stats().hit_tokens == chunk * C * 2
    load.check_idle()
    if expected is not None:
        ids = OTHER[: chunk * C // B]
        for layer, wanted in zip(load.target.gpu_cache, expected, strict=True):
            dim = load.target.layout.block_dim
            found = layer.contiguous().view(torch.uint8).index_select(dim, torch.tensor(ids))
            assert torch.equal(found, wanted.index_select(dim, torch.tensor(ids)))


@pytest.mark.parametrize("byte", [80, 500])
@pytest.mark.parametrize("chunk", [0, 1])
def test_a_slower_tier_has_the_record_that_is_damaged(chunk: int, byte: int) -> None:
    """Its bytes go to the blocks that the damaged ones went to, and come last."""
    tiers = [MemoryTier(1 << 16, pin_memory=False), MemoryTier(1 << 16, pin_memory=False, name="slow")]
    for seed in range(4):
        load = Load(seed, tiers=tiers)
        expected = load.expected()
        load.damage(chunk, byte)
        assert load.run() == len(TOKENS) and load.told in ([], [len(TOKENS)])
        assert same(all_bytes(load.target), expected)
        assert load.store.stats().corrupt_records == 1
        load.check_idle()
        load.store.remove(TOKENS)


def test_what_is_in_no_memory_comes_whole_behind_it(tmp_path) -> None:
    from kvpage.store.disk.disk_tier import DiskTier

    disk = DiskTier([tmp_path], 1 << 24, segment_bytes=1 << 23)
    load = Load(tiers=[MemoryTier(1 << 16, pin_memory=False), disk])
    expected = load.expected()
    load.tiers[0].remove(load.store.keys_of(TOKENS)[1:])
    assert load.run(lambda arrival: arrival.wait()) == len(TOKENS)
    assert load.told == [len(TOKENS)] and same(all_bytes(load.target), expected)
    load.tiers[0].clear()
    assert load.run() == len(TOKENS) and load.told == [len(TOKENS)], "nothing is gained, so nothing is told"
    load.check_idle()
    load.store.close()


@pytest.mark.parametrize("pinned, is_there", [(False, True), (True, False)], ids=["pageable", "on a CPU"])
def test_where_nothing_is_gained_nothing_is_told(pinned: bool, is_there: bool) -> None:
    load = Load(pinned=pinned)
    if not is_there:
        load.target.device = torch.device("cpu")
    assert load.run() == len(TOKENS) and not load.told
    assert same(all_bytes(load.target), load.expected())
    load.check_idle()


def test_records_stay_as_they_are_while_they_are_copied() -> None:
    """Also if they are removed, and others come, once they are verified."""
    load = Load()
    expected, tier = load.expected(), load.tiers[0]

    def replace(arrival) -> None:
        load.store.clear()
        others = [list(range(1000 * number, 1000 * number + C)) for number in range(1, 12)]
        for tokens in others:
            load.store.store_blocks(tokens, make_engine(seed=3), TABLE)
        assert tier.stats().num_records == len(others)

    assert load.run(replace) == len(TOKENS)
    assert same(all_bytes(load.target), expected)
    load.check_idle()
    tier.check()


def num_works() -> int:
    load = Load()
    load.run()
    return load.lanes.num_works


def test_an_error_in_any_copy_leaves_nothing_behind() -> None:
    """It raises, also where `verified` was told before. Then nothing is written, no record and no lane is held."""
    expected, told = Load().expected(), set()
    for number in range(1, num_works() + 1):
        load = Load(number)
        load.lanes.failing_work = number

        def wait(arrival) -> None:
            arrival.wait()

        with pytest.raises(RuntimeError, match=f"copy {number} has failed"):
            load.run(wait if number % 2 else None)
        told.add(len(load.told))
        load.check_idle()
        assert load.run() == len(TOKENS) and same(all_bytes(load.target), expected)
        load.check_idle()
    assert told == {0, 1} or told == {1}


def test_an_error_of_the_caller_comes_through_when_all_is_done() -> None:
    load = Load()

    def fail(arrival) -> None:
        raise LookupError("no such request")

    with pytest.raises(LookupError, match="no such request"):
        load.run(fail)
    load.check_idle()
