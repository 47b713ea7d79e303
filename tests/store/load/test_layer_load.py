"""Layers of a prompt one after the other: what each wait tells of is there, and nothing else is touched."""

import threading

import pytest
import torch
from support.insides import nobody_reads
from support.store_engines import TOKENS, B, C, L, all_bytes, make_engine, tokens_of

from kvpage.store import KVStore, KVStoreConfig, TierError, metadata_of
from kvpage.store.disk.disk_tier import DiskTier
from kvpage.store.tiers.memory_tier import MemoryTier

IDS, TARGET_IDS = [3, 9, 1, 14, 7, 20, 2, 11], [5, 0, 22, 8, 13, 4, 17, 6]


def make(engine, tier=None, codec: str = "raw") -> KVStore:
    tier = tier or MemoryTier(1 << 20, pin_memory=False)
    return KVStore(KVStoreConfig(C, num_threads=2, codec=codec), metadata_of(engine, "m"), [tier])


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.fixture(params=["memory", "disk"])
def tier(request, tmp_path):
    return MemoryTier(1 << 20, pin_memory=False) if request.param == "memory" else DiskTier([tmp_path], 1 << 20)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("start", [0, 1, C - 1, C, C + 1, len(TOKENS)])
def test_each_layer_is_there_when_it_is_told(tier, codec: str, start: int) -> None:
    source, target = make_engine(seed=1), make_engine(seed=2)
    with make(source, tier, codec) as store:
        store.store_blocks(TOKENS, source, IDS)
        with store.load_layers(TOKENS, target, TARGET_IDS, start) as load:
            assert (load.start, load.num_tokens, load.num_layers) == (start, len(TOKENS), L)
            for layer in range(L):
                assert load.wait(layer) == len(TOKENS)
                got = tokens_of(target, TARGET_IDS, start, len(TOKENS))[layer]
                assert torch.equal(got, tokens_of(source, IDS, start, len(TOKENS))[layer])
            assert load.result() == len(TOKENS)
        if start:
            kept = make_engine(seed=2)
            assert torch.equal(tokens_of(target, TARGET_IDS, 0, start), tokens_of(kept, TARGET_IDS, 0, start))
        others = torch.tensor([block for block in range(24) if block not in TARGET_IDS])
        for now, then in zip(target.gpu_cache, make_engine(seed=2).gpu_cache, strict=True):
            dim = target.layout.block_dim
            assert torch.equal(raw(now.index_select(dim, others)), raw(then.index_select(dim, others)))
        stats = store.stats()
        assert (stats.query_tokens, stats.hit_tokens) == (len(TOKENS) - start, len(TOKENS) - start)
        assert stats.read_chunks == (-(-len(TOKENS) // C) - start // C,)
        tier.check()


@pytest.mark.parametrize("chunk", [0, 1, 2])
@pytest.mark.parametrize("layer", range(L))
def test_a_corrupt_layer_ends_the_tokens_from_there_on_and_the_record_is_dropped(chunk: int, layer: int) -> None:
    engine, target = make_engine(seed=1), make_engine(seed=2)
    tier = MemoryTier(1 << 20, pin_memory=False)
    with make(engine, tier) as store:
        store.store_blocks(TOKENS, engine, IDS)
        key = store.keys_of(TOKENS)[chunk]
        with tier.open([key])[0] as reader:
            head = len(reader.piece(0, reader.num_bytes))
            num_tokens = min(C, len(TOKENS) - chunk * C)
            layer_bytes = 2 * num_tokens * 2 * 10 * 2
            begin = head - 16 - 16 * L - (L - layer) * layer_bytes
            reader.piece(begin, begin + 1)[0] ^= 1
        with store.load_layers(TOKENS, target, TARGET_IDS) as load:
            assert load.num_tokens == len(TOKENS)
            found = [load.wait(one) for one in range(L)]
        assert found == [len(TOKENS)] * layer + [chunk * C] * (L - layer)
        got, want = tokens_of(target, TARGET_IDS, 0, chunk * C), tokens_of(engine, IDS, 0, chunk * C)
        assert torch.equal(got, want)
        assert store.lookup(TOKENS) == chunk * C and store.stats().corrupt_records == 1


class Slow(MemoryTier):
    """Readers wait from the second layer on until they may go on, or fail."""

    def __init__(self) -> None:
        super().__init__(1 << 20, pin_memory=False)
        self.go, self.fails, self.is_slow = threading.Event(), False, False

    def _bytes(self, entry, begin, end):
        if self.is_slow and begin > 700 and end - begin > 200:
            self.go.wait(120)
            if self.fails:
                raise TierError("gone")
        return super()._bytes(entry, begin, end)


def slow_load():
    engine, tier = make_engine(seed=1), Slow()
    store = make(engine, tier)
    store.store_blocks(TOKENS[:C], engine, IDS)
    tier.is_slow = True
    return store, tier, store.load_layers(TOKENS[:C], make_engine(), TARGET_IDS)


def test_the_first_layer_is_there_before_the_second() -> None:
    store, tier, load = slow_load()
    with store, load:
        assert load.wait(0, timeout=120) == C
        with pytest.raises(TimeoutError, match="layer 1 has not come within 0.05 s"):
            load.wait(1, timeout=0.05)
        tier.go.set()
        assert load.result(timeout=120) == C


def test_closing_ends_it() -> None:
    store, tier, load = slow_load()
    with store:
        assert load.wait(0, timeout=120) == C
        closer = threading.Thread(target=load.close)
        closer.start()
        tier.go.set()
        closer.join(120)
        assert not closer.is_alive() and nobody_reads(tier)
        with pytest.raises(ValueError, match="the load is closed"):
            load.wait(L - 1)
        load.close()


def test_a_store_is_closed_when_its_loads_are_over() -> None:
    """What comes after it writes into nobody's blocks."""
    store, tier, load = slow_load()
    closer = threading.Thread(target=store.close)
    closer.start()
    closer.join(0.3)
    assert load.wait(0, timeout=120) == C and closer.is_alive()
    tier.go.set()
    closer.join(120)
    assert load.result(timeout=120) == C and not closer.is_alive()
    assert nobody_reads(tier)


def test_without_a_thread_nothing_stays_open(monkeypatch) -> None:
    engine, tier = make_engine(seed=1), MemoryTier(1 << 20, pin_memory=False)
    with make(engine, tier) as store:
        store.store_blocks(TOKENS, engine, IDS)
        starts = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            if thread.name == "kvpage-layers":
                raise RuntimeError("can't start new thread")
            starts(thread)

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                store.load_layers(TOKENS, make_engine(), TARGET_IDS)
        assert nobody_reads(tier)
        with store.load_layers(TOKENS, make_engine(), TARGET_IDS) as load:
            assert load.result() == len(TOKENS)


def test_arguments() -> None:
    engine = make_engine()
    before = all_bytes(engine)
    with make(engine) as store:
        store.store_blocks(TOKENS, engine, IDS)
        with pytest.raises(ValueError, match=f"start must be in .0, {len(TOKENS)}., got 99"):
            store.load_layers(TOKENS, engine, IDS, 99)
        with pytest.raises(ValueError, match="block_table must name a block once"):
            store.load_layers(TOKENS, engine, [1] * 8)
        with pytest.raises(ValueError, match=r"block_table must be in \[0, 24\), got 1 to 24"):
            store.load_layers(TOKENS, engine, [*IDS[:-1], 24])
        with (
            store.load_layers(TOKENS[:0], engine, []) as load,
            pytest.raises(ValueError, match=f"layer must be in .0, {L}.*, got {L}"),
        ):
            load.wait(L)
    assert all(map(torch.equal, all_bytes(engine), before))
    assert len(IDS) * B >= len(TOKENS)
