"""KVStore: flags, masks, counts, namespaces and pins where a random life hardly looks."""

import os

import pytest
import torch
from support.store_engines import B, make_engine
from support.store_states import LAYOUT, state_of

from kvpage.store import ByteStore, ByteStoreConfig, KVStore, KVStoreConfig, KVStoreMetadata, metadata_of
from kvpage.store.tiers.memory_tier import MemoryTier

L, H, D, C = 2, 2, 4, 4
TOKENS = list(range(2 * C + 3))


def make(size: int = 1 << 20) -> KVStore:
    return KVStore(KVStoreConfig(C, num_threads=2), KVStoreMetadata("m", kv_dtype=torch.float32), [memory(size)])


def memory(size: int = 1 << 20) -> MemoryTier:
    return MemoryTier(size, pin_memory=False)


def kv_of(num_tokens: int) -> torch.Tensor:
    return torch.arange(L * 2 * num_tokens * H * D, dtype=torch.float32).view(L, 2, num_tokens, H, D)


def leading_false(num_false: int, num_tokens: int) -> torch.Tensor:
    return torch.arange(num_tokens) >= num_false


@pytest.mark.parametrize("value", [1, 0, None, "yes"])
def test_flags_are_true_or_false(value):
    engine = make_engine()
    with make() as store, KVStore(KVStoreConfig(C), metadata_of(engine, "m"), [memory()]) as blocks:
        calls = {
            "skip_existing": [
                lambda: store.store(TOKENS, kv_of(len(TOKENS)), skip_existing=value),
                lambda: blocks.store_blocks(TOKENS[:B], engine, [0], skip_existing=value),
            ],
            "blocking": [lambda: store.store(TOKENS, kv_of(len(TOKENS)), blocking=value)],
            "return_tuple": [lambda: store.retrieve(TOKENS, return_tuple=value)],
            "sync": [lambda: store.flush(value)],
        }
        for name, each in calls.items():
            for call in each:
                with pytest.raises((TypeError, ValueError), match=f"{name} must be True or False, got"):
                    call()
        assert store.lookup(TOKENS) == blocks.lookup(TOKENS[:B]) == 0


@pytest.mark.parametrize("num_skipped", [0, 1, C, C + 1])
def test_what_was_wanted_and_what_was_found_is_counted(num_skipped):
    with make() as store:
        store.store(TOKENS[: 2 * C], kv_of(2 * C))
        store.retrieve(TOKENS, leading_false(num_skipped, len(TOKENS)))
        stats = store.stats()
        assert (stats.query_tokens, stats.hit_tokens) == (len(TOKENS) - num_skipped, 2 * C - num_skipped)
        store.retrieve([99] * C)
        again = store.stats()
        assert (again.query_tokens, again.hit_tokens) == (stats.query_tokens + C, stats.hit_tokens)


@pytest.mark.parametrize("start", [0, 1, C])
def test_what_was_wanted_and_loaded_into_blocks_is_counted(start):
    engine = make_engine()
    tokens = list(range(2 * B))
    with KVStore(KVStoreConfig(B), metadata_of(engine, "m"), [memory()]) as store:
        assert store.store_blocks(tokens[:B], engine, [0, 1]) == B
        assert store.load_blocks(tokens, engine, [2, 3], start) == max(B, start)
        stats = store.stats()
        assert (stats.query_tokens, stats.hit_tokens) == (2 * B - start, max(B - start, 0))


def test_namespaces_do_not_meet_in_any_call():
    kv = kv_of(len(TOKENS))
    with make() as store:
        store.store(TOKENS, kv, namespace=b"one")
        store.store(TOKENS, kv + 1)
        for namespace, found in ((b"one", kv), (b"", kv + 1)):
            assert store.lookup(TOKENS, namespace) == len(TOKENS)
            assert torch.equal(store.retrieve(TOKENS, return_tuple=False, namespace=namespace)[0], found)
        assert store.retrieve(TOKENS, namespace=b"two")[0] == () and store.lookup(TOKENS, b"two") == 0
        assert store.pin(TOKENS, b"two").num_tokens == 0
        assert store.remove(TOKENS, b"two") == 0 and store.remove(TOKENS, b"one") == 3
        assert store.lookup(TOKENS, b"one") == 0 and store.lookup(TOKENS) == len(TOKENS)
        for call in (store.lookup, store.retrieve, store.pin, store.remove):
            with pytest.raises(TypeError, match="namespace must be bytes, got str"):
                call(TOKENS, namespace="one")


@pytest.mark.parametrize("call", ["lookup", "stats", "clear", "flush"])
def test_a_forked_process_needs_a_store_of_its_own(call):
    with make() as store:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                getattr(store, call)(*[TOKENS] * (call == "lookup"))
            except RuntimeError:
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_tier_that_was_made_already_has_the_deadline_too():
    seen = []

    class Asked(MemoryTier):
        def contains(self, keys, timeout=None):
            seen.append(timeout)
            return super().contains(keys, timeout)

    tier, metadata = Asked(1 << 20, pin_memory=False), KVStoreMetadata("m", kv_dtype=torch.float32)
    with KVStore(KVStoreConfig(C, deadline=0.5), metadata, [tier]) as store:
        assert store.lookup(TOKENS) == 0
    assert seen and all(timeout is not None and 0 < timeout <= 0.5 for timeout in seen)


def test_what_is_meant_where_nothing_is_said():
    """Tuples, no second copy of what is there, no waiting for the disk."""
    asked = []

    class Asked(MemoryTier):
        def create(self, key, num_bytes):
            asked.append("create")
            return super().create(key, num_bytes)

        def flush(self, sync=False):
            asked.append(sync)
            super().flush(sync)

    engine = make_engine()
    with KVStore(KVStoreConfig(B), metadata_of(engine, "m"), [Asked(1 << 20, pin_memory=False)]) as store:
        for _ in range(2):
            assert store.store_blocks(list(range(B)), engine, [0]) == B
        assert asked == ["create"]
        store.flush()
        assert asked == ["create", False]
        found, _ = store.retrieve(list(range(B)))
        assert isinstance(found, tuple) and isinstance(found[0], tuple)
        store.store(list(range(B)), found)
        assert asked == ["create", False]


def test_records_of_bytes_stand_beside_chunks():
    memory = bytearray(5)
    with make() as store:
        records = store.byte_records({"of": "this"})
        assert records.put([b"k"], [b"bytes"]) == [True]
        assert store.byte_records({"of": "others"}).get_into([b"k"], [memory]) == [False]
        assert records.get_into([b"k"], [memory]) == [True] and memory == b"bytes"
        with pytest.raises(TypeError, match="header must be a mapping or bytes, got int"):
            store.byte_records(1)
        store.clear()
        assert records.get_into([b"k"], [memory]) == [False]


def test_latents_have_one_part():
    kv = kv_of(C)[:, :1].clone()
    with make() as store:
        assert store.store(TOKENS[:C], kv).result() == 1
        assert torch.equal(store.retrieve(TOKENS[:C], return_tuple=False)[0], kv)


def test_records_of_a_namespace_are_removed_of_this_model_alone():
    """Chunks and states of it; other models and records of bytes stay, which have the namespace b""."""
    tier = memory()
    store, other = (KVStore(KVStoreConfig(C), KVStoreMetadata(m, kv_dtype=torch.float32), [tier]) for m in ("m", "n"))
    names = [b"", b"one", b"two"]
    for each in (store, other):
        for name in names:
            each.store(TOKENS, kv_of(len(TOKENS)), namespace=name)
    states = store.states(LAYOUT, torch.float32)
    assert states.put(TOKENS, state_of(TOKENS), b"one")
    ByteStore(ByteStoreConfig(), {"model": "m"}, [tier]).put([b"k"], [b"bytes"])
    num_records, asked = len(store.records()), set()
    assert store.remove_namespaces(lambda name: asked.add(name) or name == b"one") == 5  # a state, and its index
    assert asked == {*names} and len(store.records()) == num_records - 5
    assert not states.positions(TOKENS, b"one")
    assert [store.lookup(TOKENS, name) for name in names] == [len(TOKENS), 0, len(TOKENS)]
    assert store.remove_namespaces(lambda name: name == b"") == 3
    assert [store.lookup(TOKENS, name) for name in names] == [0, 0, len(TOKENS)]
    assert [other.lookup(TOKENS, name) for name in names] == [len(TOKENS)] * 3
    assert store.remove_namespaces(lambda name: False) == 0
    assert len(store.records()) == num_records - 8
