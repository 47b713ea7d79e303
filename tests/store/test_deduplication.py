"""Equal tokens are stored once within a namespace, and once for each namespace: tenants share no record."""

import pytest
from support.store_kv import KV, TOKENS, C, make, same

from kvpage.store import ByteStore, ByteStoreConfig
from kvpage.store.tiers.memory_tier import MemoryTier

NAMES = [b"", b"a", b"b", b"ab"]
NUM_CHUNKS = -(-len(TOKENS) // C)


@pytest.fixture
def tier():
    return MemoryTier(4 << 20, pin_memory=False)


def test_a_namespace_has_each_chunk_once(tier):
    """A second store, a prompt with the same beginning, and the same prompt again add nothing."""
    first, second = make(tiers=[tier]), make(tiers=[tier])
    assert first.store(TOKENS, KV, namespace=b"a").result() == NUM_CHUNKS
    for store in (first, second):
        assert store.store(TOKENS, KV, namespace=b"a").result() == 0
    assert second.store(TOKENS[:C], KV[:, :, :C], namespace=b"a").result() == 0
    assert tier.stats().num_records == NUM_CHUNKS


def test_no_two_namespaces_share_a_record(tier):
    store = make(tiers=[tier])
    for number, name in enumerate(NAMES, 1):
        assert store.lookup(TOKENS, name) == 0
        assert store.store(TOKENS, KV, namespace=name).result() == NUM_CHUNKS
        assert tier.stats().num_records == number * NUM_CHUNKS
    keys = [key for name in NAMES for key in store.keys_of(TOKENS, name)]
    assert len(set(keys)) == len(keys)
    assert {record.namespace for record in store.records()} == set(NAMES)
    assert store.remove(TOKENS, b"a") == NUM_CHUNKS
    assert [store.lookup(TOKENS, name) for name in NAMES] == [len(TOKENS), 0, len(TOKENS), len(TOKENS)]
    assert same(store.retrieve(TOKENS, namespace=b"b")[0], KV)


def test_a_changed_header_of_bytes_shares_no_record(tier):
    """A ByteStore's tenants are part of its header, or of its keys."""
    stores = [ByteStore(ByteStoreConfig(), {"model": "m", "salt": salt}, [tier]) for salt in ("a", "b")]
    for number, store in enumerate(stores, 1):
        assert store.contains([b"k"]) == [False] and store.put([b"k"], [b"the same bytes"]) == [True]
        assert tier.stats().num_records == number
    assert stores[0].put([b"k"], [b"the same bytes"]) == [True] and tier.stats().num_records == 2
