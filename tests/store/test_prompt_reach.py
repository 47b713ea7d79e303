"""What a tier tells of a prompt, without a model: whole, missing, damaged, sealed, of another model or namespace."""

from dataclasses import replace

import numpy as np
import pytest
from support.store_kv import KV, TOKENS, C, corrupt, kv_of, make

from kvpage.store import ByteStore, ByteStoreConfig, KVStore, KVStoreMetadata, SealedTier, SealKeys
from kvpage.store.prompt_reach import PromptReach, tier_reach
from kvpage.store.records import keys as keys_module
from kvpage.store.records.keys import decode_meta
from kvpage.store.tiers.memory_tier import MemoryTier

NUM = len(TOKENS)


@pytest.fixture
def tier():
    return MemoryTier(4 << 20, pin_memory=False)


@pytest.fixture
def store(tier):
    store = make(tiers=[tier])
    store.store(TOKENS, KV)
    return store


@pytest.mark.parametrize("num_tokens", [1, C - 1, C, C + 1, 2 * C, NUM, NUM + 1, NUM + 3 * C])
def test_it_tells_what_the_store_finds(tier, store, num_tokens):
    tokens = [*TOKENS, *range(50, 50 + 3 * C)][:num_tokens]
    (reach,) = tier_reach(tier, tokens).reaches
    assert reach.num_tokens == store.lookup(tokens)
    is_whole = reach.num_tokens == num_tokens
    assert reach.ending == ("the prompt ends" if is_whole else store.explain(tokens).groups[0].ending.value)
    assert "model 'm'" in str(reach) and reach.refused == () and reach.num_further == 0


def test_a_gap_and_what_is_behind_it(tier, store):
    tier.remove(store.keys_of(TOKENS)[:1])
    (reach,) = tier_reach(tier, TOKENS).reaches
    assert (reach.num_tokens, reach.num_further) == (0, NUM - C)
    assert "missing before others" in reach.ending and f"{NUM - C} tokens further on" in str(reach)


def test_a_damaged_record_is_named_and_stays(tier, store):
    corrupt(tier, store.keys_of(TOKENS)[1], 500)
    (reach,) = tier_reach(tier, TOKENS).reaches
    assert (reach.num_tokens, reach.ending) == (C, "a record is refused")
    ((token, reason, message),) = reach.refused
    assert (token, reason) == (C, "damaged") and "wrong" in message and "refused at token" in str(reach)
    assert tier.stats().num_records == 3


def test_models_and_namespaces_are_told_apart(tier, store):
    store.store(TOKENS[:C], kv_of(TOKENS[:C], namespace=b"t"), namespace=b"t")
    other = KVStore(store.config, KVStoreMetadata("other", kv_dtype=store.metadata.kv_dtype), [tier])
    other.store(TOKENS[:2], KV[:, :, :2])
    reaches = tier_reach(tier, TOKENS).reaches
    assert [(r.facts["model_name"], r.facts["namespace"], r.num_tokens) for r in reaches] == [
        ("m", b"", NUM),
        ("m", b"t", C),
        ("other", b"", 0),
    ]
    assert [r.num_tokens for r in tier_reach(tier, TOKENS, model="m", namespace=b"t").reaches] == [C]
    assert tier_reach(tier, TOKENS, model="none").reaches == ()


def test_records_that_are_no_chunks_are_counted(tier):
    ByteStore(ByteStoreConfig(), {"engine": "vllm"}, [tier]).put([b"k", b"l"], [np.zeros(4), np.ones(4)])
    reach = tier_reach(tier, [1])
    assert reach.reaches == () and list(reach.others.values()) == [2] and "--door" in str(reach.others)


def test_sealed_records_need_their_keys():
    pytest.importorskip("cryptography")
    tier = MemoryTier(4 << 20, pin_memory=False)
    keys = [SealKeys(((name, name.encode() * 32),)) for name in "ab"]
    make(tiers=[SealedTier(tier, keys[0])]).store(TOKENS, KV)
    assert [r.num_tokens for r in tier_reach(SealedTier(tier, keys[0]), TOKENS).reaches] == [NUM]
    for blind, text in ((tier, "names no keys"), (SealedTier(tier, keys[1]), "key that is not here")):
        reach = tier_reach(blind, TOKENS)
        assert reach.reaches == () and text in str(reach.others) and sum(reach.others.values()) == 3


@pytest.mark.parametrize("size", [b"0", b"-1", b"x", b"", b"9" * 5000, None])
def test_facts_that_no_store_writes_are_of_another_version(tier, store, monkeypatch, size):
    """Anybody may write into a bucket."""
    fields = dict(keys_module._decode(store.metadata.encode(C, b"")[len(keys_module.ENCODING) :]))
    fields = {name: value for name, value in fields.items() if size is not None or name != b"model_name"}
    fields |= {} if size is None else {b"chunk_size": size}
    meta = keys_module.ENCODING + keys_module._encode(fields.items())
    monkeypatch.setattr(keys_module.ChunkKeys, "meta", lambda self, namespace: meta)
    store.store([7] * C, kv_of([7] * C))
    reach = tier_reach(tier, TOKENS)
    assert [r.num_tokens for r in reach.reaches] == [NUM] and reach.others == {"of another version": 1}


def test_no_fact_reaches_a_terminal_as_it_is(tier):
    metadata = replace(make(tiers=[tier]).metadata, model_name="\x1b[2Jm", row_layout="")
    facts = {**decode_meta(metadata.encode(C, b"")), "extra": b"\x1b[2J"}
    reach = PromptReach("model \x1b[2J", facts, 0, "the prompt ends", 0)
    assert "\x1b" not in str(reach)


@pytest.mark.parametrize("tokens", [[], [[1]], ["a"]])
def test_wrong_tokens_are_refused(tier, tokens):
    with pytest.raises((ValueError, TypeError)):
        tier_reach(tier, tokens)
