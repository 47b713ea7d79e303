"""KVStore against a dict of prefixes: store, retrieve, lookup, masks, pins, tiers in trouble, corrupted records."""

import random
import threading

import numpy as np
import pytest
import torch

from kvpage.store import KVStore, KVStoreBuilder, KVStoreConfig, KVStoreMetadata, Placed, TierError
from kvpage.store.tiers.memory_tier import MemoryTier

L, H, D, C = 3, 2, 4, 4
FMTS = ["vllm", "huggingface"]


def kv_of(
    tokens: list[int], fmt: str = "vllm", dtype: torch.dtype = torch.float32, namespace: bytes = b""
) -> torch.Tensor:
    """K and V that are a function of all tokens up to each: [L, 2, T, H, D] or [L, 2, H, T, D]."""
    rows = []
    for end in range(1, len(tokens) + 1):
        seed = hash((tuple(tokens[:end]), namespace)) % (1 << 31)
        rows.append(torch.randn(L, 2, H, D, generator=torch.Generator().manual_seed(seed)))
    whole = torch.stack(rows, dim=2) if rows else torch.empty(L, 2, 0, H, D)
    return (whole if fmt == "vllm" else whole.transpose(2, 3).contiguous()).to(dtype)


def make(fmt: str = "vllm", tiers=None, dtype: torch.dtype = torch.float32, chunk_size: int = C, **config) -> KVStore:
    config = KVStoreConfig(chunk_size=chunk_size, tiers=("memory://?size=4MiB",), num_threads=2, **config)
    return KVStore(config, KVStoreMetadata("m", fmt=fmt, kv_dtype=dtype), tiers)


def narrow(kv: torch.Tensor, fmt: str, begin: int, end: int) -> torch.Tensor:
    return kv.narrow(2 if fmt == "vllm" else 3, begin, end - begin)


def same(found, expected: torch.Tensor) -> bool:
    if expected.numel() == 0:
        return found == ()
    tensor = torch.stack([torch.stack(list(layer)) for layer in found]) if isinstance(found, tuple) else found
    return torch.equal(tensor.view(torch.uint8), expected.contiguous().view(torch.uint8))


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


def test_lossy_codecs_say_so_in_the_record() -> None:
    tokens = list(range(2 * C))
    kv = kv_of(tokens, dtype=torch.bfloat16)
    with make(dtype=torch.bfloat16, codec="fp8") as store:
        store.store(tokens, kv)
        found, _ = store.retrieve(tokens, return_tuple=False)
        assert not torch.equal(found, kv)
        torch.testing.assert_close(found, kv, rtol=0.1, atol=0.05)


@pytest.mark.parametrize("fmt", FMTS)
@pytest.mark.parametrize("seed", range(6))
def test_random_lives_against_prefixes(fmt: str, seed: int) -> None:
    """A model that knows which chunks are there: `tokens[:end]` of each."""
    rng = random.Random(seed)
    store, there = make(fmt), set()
    for _ in range(300):
        tokens = [int(rng.random() < 0.05) for _ in range(rng.randint(0, 4 * C))]
        namespace = rng.choice([b"", b"x"])
        ends = [min(begin + C, len(tokens)) for begin in range(0, len(tokens), C)]
        kv, action = kv_of(tokens, fmt, namespace=namespace), rng.random()
        if action < 0.4:
            skip = rng.randint(0, len(tokens) // C) * C
            mask = np.arange(len(tokens)) >= skip
            new = [end for end in ends if end > skip and (namespace, *tokens[:end]) not in there]
            given = narrow(kv, fmt, skip, len(tokens))
            handle = store.store(
                tokens,
                given,
                mask if skip or rng.random() < 0.5 else None,
                blocking=rng.random() < 0.5,
                namespace=namespace,
            )
            given.fill_(float("nan")) if not given.numel() else None
            assert handle.result() == len(new)
            there |= {(namespace, *tokens[:end]) for end in new}
        elif action < 0.5:
            keys = {(namespace, *tokens[:end]) for end in ends}
            assert store.remove(tokens, namespace) == len(keys & there)
            there -= keys
        else:
            found = 0
            skip = rng.randint(0, len(tokens)) if action < 0.8 else 0
            for end in ends:
                if (namespace, *tokens[:end]) not in there and end > skip // C * C:
                    break
                found = end
            mask = torch.arange(len(tokens)) >= skip
            kept, ret_mask = store.retrieve(tokens, mask if skip else None, namespace=namespace)
            count = max(found - skip, 0)
            assert same(kept, narrow(kv, fmt, skip, skip + count)), (tokens, skip, found)
            assert ret_mask.tolist() == [skip <= index < skip + count for index in range(len(tokens))]
            whole = 0
            for end in ends:
                if (namespace, *tokens[:end]) not in there:
                    break
                whole = end
            assert store.lookup(tokens, namespace) == whole
    store.clear()
    assert store.lookup([0] * C) == 0
    assert store.stats().hit_tokens > 100 and store.stats().corrupt_records == 0


@pytest.mark.parametrize("fmt", FMTS)
def test_the_first_implementations_cases(fmt: str) -> None:
    """Prefixes of 2000 of 3000 tokens in chunks of 128 and 256; 12000 tokens of which leading ones are skipped."""
    for chunk_size in (128, 256):
        with KVStore(
            KVStoreConfig(chunk_size, ("memory://?size=64MiB",)), KVStoreMetadata("m", fmt=fmt, kv_dtype=torch.float16)
        ) as store:
            tokens = torch.randint(0, 1000, (3000,))
            shape = (1, 2, 3000, 1, 4) if fmt == "vllm" else (1, 2, 1, 3000, 4)
            kv = torch.randn(shape).half()
            store.store(tokens[:2000], narrow(kv, fmt, 0, 2000))
            found, mask = store.retrieve(tokens)
            expected = 2000 // chunk_size * chunk_size
            assert int(mask.sum()) == expected and same(found, narrow(kv, fmt, 0, expected))
            found, mask = store.retrieve(tokens[:2000])
            assert int(mask.sum()) == 2000
            for skip in (1, 128, 200, 1999):
                found, mask = store.retrieve(tokens[:2000], torch.arange(2000) >= skip)
                assert same(found, narrow(kv, fmt, skip, 2000)) and int(mask.sum()) == 2000 - skip


def test_results_own_their_memory() -> None:
    store, tokens = make(), list(range(2 * C))
    kv = kv_of(tokens)
    store.store(tokens, kv)
    first, second = (store.retrieve(tokens, return_tuple=False)[0] for _ in range(2))
    first.zero_()
    store.clear()
    assert torch.equal(second, kv)


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


# --- arguments -------------------------------------------------------------------------------------------------------

TOKENS = list(range(2 * C + 1))
KV = kv_of(TOKENS)
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


def test_builder_keeps_one_store_an_instance() -> None:
    config, metadata = KVStoreConfig(tiers=("memory://?size=1MiB",)), KVStoreMetadata("m")
    assert KVStoreBuilder.get("x") is None
    store = KVStoreBuilder.get_or_create("x", config, metadata)
    assert KVStoreBuilder.get_or_create("x", config, metadata) is store is KVStoreBuilder.get("x")
    for other in ((KVStoreConfig(128, ("memory://?size=1MiB",)), metadata), (config, KVStoreMetadata("n"))):
        with pytest.raises(ValueError, match="instance 'x' must keep its configuration and metadata"):
            KVStoreBuilder.get_or_create("x", *other)
    KVStoreBuilder.destroy("x")
    assert KVStoreBuilder.get("x") is None
    KVStoreBuilder.destroy("x")
    KVStoreBuilder.destroy("never made")
    with pytest.raises(ValueError, match="closed"):
        store.lookup([1])


# --- several tiers ---------------------------------------------------------------------------------------------------


def two_tiers(**second) -> tuple[KVStore, MemoryTier, MemoryTier]:
    tiers = [MemoryTier(3 * 4096, pin_memory=False, name="small"), MemoryTier(1 << 20, pin_memory=False, name="large")]
    return make(tiers=[Placed(tiers[0]), Placed(tiers[1], **second)]), *tiers


@pytest.mark.parametrize("write_back", [False, True])
def test_tiers_are_written_and_hits_are_promoted(write_back: bool) -> None:
    store, small, large = two_tiers(is_written_back=write_back)
    tokens = list(range(3 * C))
    kv = kv_of(tokens)
    store.store(tokens, kv)
    store.flush()
    assert small.stats().num_records == large.stats().num_records == 3
    small.clear()
    assert store.lookup(tokens) == 3 * C and same(store.retrieve(tokens)[0], kv)
    assert small.stats().num_records == 3 and store.stats().promoted_chunks == 3
    large.clear()
    assert same(store.retrieve(tokens)[0], kv)


def test_a_prefix_may_be_spread_over_tiers() -> None:
    store, small, large = two_tiers()
    store._tiers.tiers[0] = Placed(small, promotes=False)
    tokens = list(range(6 * C))
    kv = kv_of(tokens)
    store.store(tokens, kv)
    assert small.stats().num_records == 3 and large.stats().num_records == 6
    large.remove(store.keys_of(tokens)[3:4])
    assert store.lookup(tokens) == (6 if small.contains(store.keys_of(tokens)[3:4])[0] else 3) * C
    assert same(store.retrieve(tokens)[0], kv[:, :, : store.lookup(tokens)])
    assert store.stats().promoted_chunks == 0


class Troubled(MemoryTier):
    """Fails whenever `fails(method)` says so."""

    def __init__(self, fails) -> None:
        super().__init__(1 << 20, pin_memory=False, name="troubled")
        self.fails = fails

    def _check_open(self) -> None:
        super()._check_open()
        if self.fails():
            raise TierError("gone")


class Between(MemoryTier):
    """CallGate `then` once, within the `number`th call of the method, after its work or before it."""

    def __init__(self, method: str, number: int = 1, after: bool = True) -> None:
        super().__init__(1 << 20, pin_memory=False, name="between")
        self.then = lambda: None
        works, calls = getattr(self, method), []

        def called(*args):
            calls.append(method)
            if len(calls) == number and not after:
                self.then()
            result = works(*args)
            if len(calls) == number and after:
                self.then()
            return result

        self.begin = lambda: setattr(self, method, called)


@pytest.mark.parametrize("order", [0, 1])
def test_a_tier_in_trouble_is_a_miss_and_the_other_goes_on(order: int) -> None:
    rng, failing = random.Random(1), [True]
    tiers = [Troubled(lambda: failing[0] and rng.random() < 0.5), MemoryTier(1 << 20, pin_memory=False)]
    store = make(tiers=tiers if order else tiers[::-1])
    for seed in range(20):
        tokens = [seed] * (3 * C)
        kv = kv_of(tokens)
        store.store(tokens, kv)
        found, mask = store.retrieve(tokens)
        assert same(found, kv[:, :, : int(mask.sum())])
        assert int(mask.sum()) == 3 * C, "the tier that works has it all"
    assert store.stats().tier_errors > 20
    failing[0] = False
    alone = make(tiers=[Troubled(lambda: True)])
    assert alone.store(TOKENS, KV).result() == 0 and alone.lookup(TOKENS) == 0
    assert alone.retrieve(TOKENS)[0] == () and alone.remove(TOKENS) == 0 and alone.pin(TOKENS).num_tokens == 0
    alone.clear(), alone.flush(), alone.stats(), alone.close()


# --- miss or exact ---------------------------------------------------------------------------------------------------


def corrupt(tier: MemoryTier, key: bytes, at: int) -> None:
    entry = tier._entries[key]
    tier._slab[entry.begin * 4096 + at] ^= 1 << (at % 8)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_every_flipped_bit_is_a_miss_and_the_record_is_dropped(codec: str) -> None:
    tier = MemoryTier(1 << 20, pin_memory=False)
    store, tokens = make(tiers=[tier], codec=codec), TOKENS[:C]
    kv = kv_of(tokens)
    store.store(tokens, kv)
    (key,) = store.keys_of(tokens)
    size = tier._entries[key].num_bytes
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
    tier._entries[keys[1]], tier._entries[foreign[0]] = tier._entries[foreign[0]], tier._entries[keys[1]]
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
    tier._entries[keys[1]] = tier._entries[keys[0]]
    tier._policy.add(keys[1])
    assert stores[1].lookup(TOKENS) == C and stores[1].retrieve(TOKENS)[0] == ()
    assert stores[1].stats().corrupt_records > 0


def test_threads_at_once() -> None:
    store = make(tiers=[MemoryTier(24 * 4096, pin_memory=False)])
    prompts = [[seed] * (3 * C) for seed in range(12)]
    expected = [kv_of(prompt) for prompt in prompts]
    errors: list[str] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(150):
            index = rng.randrange(len(prompts))
            if rng.random() < 0.4:
                store.store(prompts[index], expected[index])
            elif rng.random() < 0.1:
                store.remove(prompts[index])
            else:
                found, mask = store.retrieve(prompts[index])
                if not same(found, expected[index][:, :, : int(mask.sum())]):
                    errors.append(f"{index}: {int(mask.sum())}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and store.stats().corrupt_records == 0
    assert store.stats().hit_tokens > 100


@pytest.mark.parametrize("call", ["store", "retrieve", "remove", "lookup", "pin"])
def test_closing_waits_for_calls_and_refuses_others(call: str) -> None:
    method = {"store": "commit", "retrieve": "open", "remove": "remove", "lookup": "contains", "pin": "open"}[call]
    tier, tokens = Between(method, after=False), list(range(3 * C))
    store, kv = make(tiers=[tier]), kv_of(tokens)
    if call != "store":
        store.store(tokens, kv)
    calls = {
        "store": lambda: store.store(tokens, kv).result(),
        "retrieve": lambda: same(store.retrieve(tokens)[0], kv),
        "remove": lambda: store.remove(tokens),
        "lookup": lambda: store.lookup(tokens),
        "pin": lambda: store.pin(tokens).num_tokens,
    }
    closer, refused = threading.Thread(target=store.close), []

    def close() -> None:
        closer.start()
        closer.join(0.3)
        for other in calls.values():
            with pytest.raises(ValueError, match="the store is closed") as error:
                other()
            refused.append(error)

    tier.then = close
    tier.begin()
    assert calls[call]() == {"store": 3, "retrieve": True, "remove": 3, "lookup": 3 * C, "pin": 3 * C}[call]
    closer.join()
    assert len(refused) == len(calls)
    with pytest.raises(TierError, match="is closed"):
        tier.contains([])


def test_threads_that_call_while_it_is_closed() -> None:
    tokens, kv = list(range(4 * C)), kv_of(list(range(4 * C)))
    for _ in range(20):
        tiers = [Placed(MemoryTier(1 << 20, pin_memory=False)), Placed(MemoryTier(1 << 20), is_written_back=True)]
        store, started, errors = make(tiers=tiers), threading.Barrier(4), []

        def work(store: KVStore = store, started: threading.Barrier = started, errors: list = errors) -> None:
            started.wait()
            try:
                while True:
                    store.store(tokens, kv, blocking=False).result()
                    assert same(store.retrieve(tokens)[0], kv)
            except ValueError as error:
                errors.append(str(error))

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        started.wait()
        store.close()
        for thread in threads:
            thread.join()
        assert errors == ["the store is closed"] * 3


# --- writing back, and other codecs' records -------------------------------------------------------------------------


def written_back(small_records: int):
    """Two tiers, the second written back by a thread that waits until it is told to go on; the first is small."""
    kv = kv_of(list(range(C)))
    probe = MemoryTier(1 << 20, pin_memory=False)
    make(tiers=[probe]).store(list(range(C)), kv)
    units = -(-probe.stats().num_bytes // 4096)
    small = MemoryTier(small_records * units * 4096, pin_memory=False)
    large = MemoryTier(1 << 20, pin_memory=False, name="large")
    store = make(tiers=[Placed(small), Placed(large, is_written_back=True)])
    go = threading.Event()
    store._tiers.later(lambda: int(go.wait(20)))
    return store, small, large, go


def test_what_is_to_be_written_back_is_not_evicted_before() -> None:
    store, small, large, go = written_back(2)
    first, second = list(range(2 * C)), list(range(100, 100 + 3 * C))
    store.store(first, kv_of(first))
    assert (small.stats().num_records, large.stats().num_records) == (2, 0)
    store.store(second, kv_of(second))
    assert small.stats().evicted == 0
    assert large.stats().num_records == 3, "what the first tier has no room for is written at once"
    go.set()
    store.flush()
    assert large.stats().num_records == 5
    assert store.store(second, kv_of(second)).result() == 3  # now the first tier has room
    small.clear()
    for tokens in (first, second):
        assert same(store.retrieve(tokens)[0], kv_of(tokens))
    store.flush()
    assert store._tiers.copies.num_under_way == 0 and all(entry.num_readers == 0 for entry in small._entries.values())
    store.close()


@pytest.mark.parametrize("clear", [False, True])
def test_what_was_removed_meanwhile_is_not_written_back(clear: bool) -> None:
    store, small, large, go = written_back(4)
    tokens, kept = list(range(2 * C)), list(range(100, 100 + C))
    store.store(tokens, kv_of(tokens))
    store.store(kept, kv_of(kept))
    if clear:
        store.clear()
    else:
        assert store.remove(tokens) == 2
    go.set()
    store.flush()
    assert store.lookup(tokens) == 0 and store.lookup(kept) == (0 if clear else C)
    assert large.stats().num_records == (0 if clear else 1)
    small.check()
    store.close()


@pytest.mark.parametrize("change", ["remove", "clear", "store"])
@pytest.mark.parametrize("number", [1, 2])
def test_a_promotion_brings_nothing_back_that_was_removed_or_replaced(change: str, number: int) -> None:
    """Its reader was open before."""
    fast, slow = MemoryTier(1 << 20, pin_memory=False), Between("open", number)
    store, tokens, other = make(tiers=[fast, slow]), list(range(C)), kv_of(list(range(C)), namespace=b"other")
    store.store(tokens, kv_of(tokens))
    fast.clear()
    changes = {
        "remove": lambda: store.remove(tokens),
        "clear": store.clear,
        "store": lambda: store.store(tokens, other, skip_existing=False),
    }
    slow.then = changes[change]
    slow.begin()
    store.retrieve(tokens)
    assert store.lookup(tokens) == (C if change == "store" else 0)
    assert same(store.retrieve(tokens)[0], other if change == "store" else other[:, :, :0])
    fast.clear()
    assert same(store.retrieve(tokens)[0], other if change == "store" else other[:, :, :0])
    assert store._tiers.copies.num_under_way == 0


@pytest.mark.parametrize("write_back", [False, True])
@pytest.mark.parametrize("fails", ["create", "commit"])
@pytest.mark.parametrize("troubled", [0, 1])
def test_what_could_not_be_replaced_is_gone(write_back: bool, fails: str, troubled: int) -> None:
    """Else the older one would come back as soon as the newer is evicted from where it was written."""
    tiers = [MemoryTier(1 << 20, pin_memory=False) for _ in range(2)]
    store = make(tiers=[Placed(tiers[0]), Placed(tiers[1], is_written_back=write_back)])
    tokens, other = list(range(C)), kv_of(list(range(C)), namespace=b"other")
    store.store(tokens, kv_of(tokens))
    store.flush()
    works, no = getattr(tiers[troubled], fails), {"create": None, "commit": [False]}[fails]
    setattr(tiers[troubled], fails, lambda *args: no)
    assert store.store(tokens, other, skip_existing=False).result() == 1
    store.flush()
    setattr(tiers[troubled], fails, works)
    tiers[1 - troubled].clear()
    assert store.lookup(tokens) == 0 and store.retrieve(tokens)[0] == ()
    store.store(tokens, other, skip_existing=False)
    assert same(store.retrieve(tokens)[0], other)
    for tier in tiers:
        tier.check()


def test_of_replacements_at_once_all_tiers_have_the_same() -> None:
    """The second comes when the first tier has the first one's, and the second tier has not."""
    fast, slow = MemoryTier(1 << 20, pin_memory=False), Between("create", after=False)
    store, tokens = make(tiers=[fast, slow]), list(range(C))
    versions = [kv_of(tokens, namespace=b"%d" % number) for number in range(2)]
    second = threading.Thread(target=lambda: store.store(tokens, versions[1], skip_existing=False))
    slow.then = lambda: (second.start(), second.join(0.5))
    slow.begin()
    store.store(tokens, versions[0], skip_existing=False)
    second.join()
    assert same(store.retrieve(tokens)[0], versions[1])
    fast.clear()
    assert same(store.retrieve(tokens)[0], versions[1])


@pytest.mark.parametrize("change", ["remove", "clear"])
def test_what_is_removed_while_it_is_being_written_back_is_gone(change: str) -> None:
    fast, slow, at_work = MemoryTier(1 << 20, pin_memory=False), Between("commit", after=False), threading.Event()
    store, tokens = make(tiers=[Placed(fast), Placed(slow, is_written_back=True)]), list(range(C))
    remover = threading.Thread(target=(store.clear if change == "clear" else lambda: store.remove(tokens)))
    slow.then = lambda: (remover.start(), remover.join(0.5), at_work.set())
    slow.begin()
    store.store(tokens, kv_of(tokens))
    assert at_work.wait(20)
    remover.join()
    store.flush()
    assert store.lookup(tokens) == 0
    slow.check()


@pytest.mark.parametrize("call", ["store", "retrieve"])
def test_a_slow_tier_that_is_written_back_keeps_nobody_waiting(call: str) -> None:
    go, is_slow = threading.Event(), threading.Event()
    fast, middle = (MemoryTier(1 << 20, pin_memory=False) for _ in range(2))
    slow = Between("commit", after=False)
    slow.then = lambda: (is_slow.set(), go.wait(20))
    store = make(tiers=[Placed(fast), Placed(middle), Placed(slow, is_written_back=True)])
    tokens, others = list(range(C)), list(range(100, 100 + C))
    store.store(others, kv_of(others))
    store.flush()
    fast.clear()
    slow.begin()
    store.store(tokens, kv_of(tokens))
    assert is_slow.wait(20)
    done = []
    calls = {
        "store": lambda: done.append(store.store([7] * C, kv_of([7] * C)).result() == 1),
        "retrieve": lambda: done.append(same(store.retrieve(others)[0], kv_of(others))),
    }
    thread = threading.Thread(target=calls[call], daemon=True)
    thread.start()
    thread.join(10)
    assert done == [True]
    go.set()
    store.flush()
    assert slow.stats().num_records == 2 + (call == "store")
    assert fast.stats().num_records == 2


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
