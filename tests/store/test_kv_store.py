"""KVStore against a dict of prefixes: store, retrieve, lookup, masks, pins, tiers in trouble, corrupted records."""

import threading

import numpy as np
import pytest
import torch
from support.insides import entries_of
from support.store_kv import (
    FMTS,
    KV,
    TOKENS,
    C,
    D,
    H,
    L,
    corrupt,
    kv_of,
    make,
    same,
)

from kvpage.store import KVStore, KVStoreConfig, KVStoreMetadata
from kvpage.store.disk import segment as disk_segment
from kvpage.store.tiers.memory_tier import MemoryTier

# --- store and retrieve ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FMTS)
@pytest.mark.parametrize("num_tokens", [0, 1, C - 1, C, C + 1, 3 * C, 3 * C + 2])
def test_what_is_stored_comes_back_bit_by_bit(fmt: str, num_tokens: int) -> None:
    tokens = list(range(num_tokens))
    kv = kv_of(tokens, fmt)
    for given in (kv, tuple((layer[0], layer[1]) for layer in kv)):
        with make(fmt) as store:
            assert store.store(tokens, given).result() == -(-num_tokens // C)
            assert store.lookup(tokens) == num_tokens
            for as_tuple in (True, False):
                found, mask = store.retrieve(tokens, return_tuple=as_tuple)
                assert same(found, kv) and mask.tolist() == [True] * num_tokens
                assert isinstance(found, tuple) == (as_tuple or num_tokens == 0)
            assert store.store(tokens, given).result() == 0, "what is there was written again"
            assert store.store(tokens, given, skip_existing=False).result() == -(-num_tokens // C)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.float64])
@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_dtypes_and_strides(dtype: torch.dtype, codec: str) -> None:
    tokens = list(range(2 * C + 1))
    kv = torch.randint(-100, 100, (L, 2, len(tokens), H, D)).to(torch.int8).view(torch.int8).to(dtype)
    strided = kv.transpose(2, 3).contiguous().transpose(2, 3)
    with make(dtype=dtype, codec=codec) as store:
        store.store(tokens, strided)
        assert same(store.retrieve(tokens)[0], kv)


def test_what_is_not_blocking_copies_first_and_gives_its_errors_to_the_handle() -> None:
    gate = threading.Event()

    class Slow(MemoryTier):
        def create(self, key, num_bytes):
            gate.wait()
            return super().create(key, num_bytes)

    store, tokens = make(tiers=[Slow(1 << 20, pin_memory=False)]), list(range(C))
    kv = kv_of(tokens)
    given = kv.clone()
    handle = store.store(tokens, given, blocking=False)
    given.fill_(float("nan"))
    assert not handle.done()
    gate.set()
    store.flush()
    assert handle.done() and same(store.retrieve(tokens)[0], kv)

    class Broken(MemoryTier):
        def create(self, key, num_bytes):
            raise RuntimeError("a bug")

    store = make(tiers=[Broken(1 << 20, pin_memory=False)])
    handle = store.store(tokens, kv, blocking=False)
    with pytest.raises(RuntimeError, match="a bug"):
        handle.result()
    store.flush()


def test_a_call_has_as_many_threads_as_configured(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    write, num_threads = disk_segment.write_stretches, []

    def written(*arguments):
        num_threads.append(arguments[-1])
        return write(*arguments)

    monkeypatch.setattr(disk_segment, "write_stretches", written)
    tokens = list(range(C))
    config = KVStoreConfig(C, tiers=(f"disk://{tmp_path}?size=1MiB",), num_threads=3)
    with KVStore(config, KVStoreMetadata("m", kv_dtype=torch.float32)) as store:
        store.store(tokens, kv_of(tokens))  # one chunk, which all threads share
    assert num_threads == [3]


# --- arguments -------------------------------------------------------------------------------------------------------

SUFFIX = np.arange(9) >= 5
BAD_STORES = {
    "tokens of two dimensions": (lambda s: s.store([TOKENS], KV), ValueError, "one-dimensional"),
    "too few": (lambda s: s.store(TOKENS, KV[:, :, 1:]), ValueError, "kv_tensors must be of 9 tokens, got 8"),
    "another dtype": (lambda s: s.store(TOKENS, KV.half()), ValueError, "must be of torch.float32, got torch.float16"),
    "no layers": (lambda s: s.store(TOKENS, ()), ValueError, "at least one layer"),
    "no tensors": (lambda s: s.store(TOKENS, ((1, 2),)), TypeError, "must be of tensors, got int"),
    "four dimensions": (lambda s: s.store(TOKENS, KV[0]), ValueError, "must have 5 dimensions"),
    "two shapes": (lambda s: s.store(TOKENS, [(KV[0, 0], KV[0, 1, 1:])]), ValueError, "one shape of 3 dimensions"),
    "part of a chunk masked": (lambda s: s.store(TOKENS, KV[:, :, 5:], SUFFIX), ValueError, "whole chunks of 4, got 5"),
    "no suffix": (lambda s: s.store(TOKENS, KV, np.arange(9) != 3), ValueError, "False for leading tokens only"),
    "a mask too short": (lambda s: s.store(TOKENS, KV, [True]), ValueError, r"must be 9 bools, got bool \[1\]"),
    "a mask of floats": (lambda s: s.store(TOKENS, KV, [1.0] * 9), ValueError, "must be 9 bools"),
    "a namespace of text": (lambda s: s.store(TOKENS, KV, namespace="x"), TypeError, "namespace must be bytes"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_STORES)
def test_bad_stores_write_nothing(case: str) -> None:
    call, error, message = BAD_STORES[case]
    with make() as store:
        with pytest.raises(error, match=message):
            call(store)
        assert store.stats().tiers[0].num_records == 0


def test_bad_retrievals() -> None:
    with make() as store:
        for mask in ([True, False] + [True] * 7, [True]):
            with pytest.raises(ValueError, match="mask must be"):
                store.retrieve(TOKENS, mask)
        with pytest.raises(TypeError, match="namespace must be bytes"):
            store.lookup(TOKENS, "x")
    for call in (store.retrieve, store.lookup, store.remove, store.pin):
        with pytest.raises(ValueError, match="the store is closed"):
            call(TOKENS)
    store.close()
    with pytest.raises(ValueError, match="tiers must be at least one"):
        make(tiers=[])


# --- pins, builder ---------------------------------------------------------------------------------------------------


def test_pinned_chunks_stay() -> None:
    store = make(tiers=[MemoryTier(4 * 4096, pin_memory=False)])
    store.store(TOKENS, KV)
    with store.pin([*TOKENS[: 2 * C], 99]) as pin:
        assert pin.num_tokens == 2 * C
        for seed in range(5):
            other = [seed + 100] * (2 * C)
            store.store(other, kv_of(other))
        assert store.lookup(TOKENS) >= 2 * C
        assert same(store.retrieve(TOKENS[: 2 * C])[0], KV[:, :, : 2 * C])
    store.unpin(pin)
    other = [7] * (4 * C)
    store.store(other, kv_of(other))
    assert store.lookup(TOKENS) == 0
    assert store.pin([1, 2]).num_tokens == 0


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_every_flipped_bit_is_a_miss_and_the_record_is_dropped(codec: str) -> None:
    tier = MemoryTier(1 << 20, pin_memory=False)
    store, tokens = make(tiers=[tier], codec=codec), TOKENS[:C]
    kv = kv_of(tokens)
    store.store(tokens, kv)
    (key,) = store.keys_of(tokens)
    size = entries_of(tier)[key].num_bytes
    for at in range(size):
        assert same(store.retrieve(tokens)[0], kv)
        corrupt(tier, key, at)
        assert store.lookup(tokens) == C
        found, mask = store.retrieve(tokens)
        assert found == () and not mask.any(), f"byte {at} of {size}"
        assert store.lookup(tokens) == 0
        store.store(tokens, kv)
    assert store.stats().corrupt_records == size


def test_records_under_foreign_keys_and_of_other_shapes_are_misses() -> None:
    tier = MemoryTier(1 << 20, pin_memory=False)
    store = make(tiers=[tier])
    tokens, other = [1] * (2 * C), [2] * (2 * C)
    kv = kv_of(tokens)
    store.store(tokens, kv)
    store.store(other, kv_of(other))
    keys, foreign = store.keys_of(tokens), store.keys_of(other)
    entries_of(tier)[keys[1]], entries_of(tier)[foreign[0]] = entries_of(tier)[foreign[0]], entries_of(tier)[keys[1]]
    found, mask = store.retrieve(tokens)
    assert int(mask.sum()) == C and same(found, kv[:, :, :C])
    small = KVStore(KVStoreConfig(C), store.metadata, [tier])
    small.store([3] * C, kv_of([3] * C)[:2])  # fewer layers under the same metadata
    mixed = [3] * C + [4] * C
    store.store(mixed, kv_of(mixed))
    found, mask = store.retrieve(mixed)
    assert int(mask.sum()) in (C, 2 * C) and not any(torch.isnan(part).any() for layer in found for part in layer)


def test_records_of_another_model_are_never_seen() -> None:
    tier = MemoryTier(1 << 20, pin_memory=False)
    stores = [KVStore(KVStoreConfig(C), KVStoreMetadata(name, kv_dtype=torch.float32), [tier]) for name in "ab"]
    stores[0].store(TOKENS, KV)
    assert stores[1].retrieve(TOKENS)[0] == ()
    keys = [store.keys_of(TOKENS)[0] for store in stores]
    entries_of(tier)[keys[1]] = entries_of(tier)[keys[0]]
    tier._order.add(keys[1])
    assert stores[1].lookup(TOKENS) == C and stores[1].retrieve(TOKENS)[0] == ()
    assert stores[1].stats().corrupt_records == stores[1].stats().refused["foreign"] == 1
    assert stores[0].stats().refused == {}


# --- writing back, and other codecs' records -------------------------------------------------------------------------


@pytest.mark.parametrize("written, read", [("raw", "zstd"), ("zstd", "raw")])
def test_lossless_codecs_read_each_others_records(written: str, read: str) -> None:
    tokens, tier = list(range(2 * C + 1)), MemoryTier(1 << 20, pin_memory=False)
    kv = kv_of(tokens)
    make(tiers=[tier], codec=written).store(tokens, kv)
    reader = make(tiers=[tier], codec=read)
    assert reader.lookup(tokens) == len(tokens) and reader.store(tokens, kv).result() == 0
    assert same(reader.retrieve(tokens)[0], kv) and reader.stats().corrupt_records == 0


def test_a_lossy_codecs_records_are_nobody_elses() -> None:
    tokens, tier = list(range(2 * C)), MemoryTier(1 << 20, pin_memory=False)
    kv = kv_of(tokens, dtype=torch.bfloat16)
    raw, fp8 = (make(tiers=[tier], codec=codec, dtype=torch.bfloat16) for codec in ("raw", "fp8"))
    fp8.store(tokens, kv)
    assert raw.lookup(tokens) == 0 and raw.retrieve(tokens)[0] == ()
    raw.store(tokens, kv)
    assert same(raw.retrieve(tokens)[0], kv)
    assert not same(fp8.retrieve(tokens)[0], kv)
    assert tier.stats().num_records == 4 and raw.stats().corrupt_records == fp8.stats().corrupt_records == 0


def test_a_codec_that_is_not_installed_is_a_miss_and_the_record_stays() -> None:
    tokens, tier = list(range(2 * C)), MemoryTier(1 << 20, pin_memory=False)
    kv = kv_of(tokens)
    make(tiers=[tier], codec="zstd").store(tokens, kv)
    without = make(tiers=[tier])
    del without._dtype.kinds._codecs["float32:zstd"]  # as where the package is not there
    assert without.retrieve(tokens)[0] == () and without.stats().corrupt_records == 0
    assert same(make(tiers=[tier], codec="zstd").retrieve(tokens)[0], kv)
