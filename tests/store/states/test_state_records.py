"""StateRecords: exactly the bytes that were put after these tokens, or a miss."""

import numpy as np
import pytest
import torch
from support.store_kv import C, Troubled, corrupt, kv_of, make
from support.store_states import (
    KV_DTYPE,
    LAYOUT,
    OTHER_LAYOUT,
    found,
    put_all,
    state_of,
    store_and_states,
)

from kvpage.blocks.explain import Ending
from kvpage.store import KVStore, KVStoreConfig, KVStoreMetadata
from kvpage.store.tiers.memory_tier import MemoryTier

TOKENS = list(range(3 * C + 2))
POSITIONS = [1, C - 1, C, C + 1, 2 * C, 3 * C + 1, 3 * C + 2]


def memory_tier() -> MemoryTier:
    return MemoryTier(1 << 20, pin_memory=False)


@pytest.mark.parametrize("position", POSITIONS)
def test_a_state_is_found_after_its_tokens_alone(position: int) -> None:
    store, states = store_and_states()
    with store:
        assert states.put(TOKENS[:position], state_of(TOKENS[:position]))
        assert [at for at in range(1, len(TOKENS) + 1) if found(states, TOKENS[:at])] == [position]
        for place in range(position):
            others = [*TOKENS[:place], 99, *TOKENS[place + 1 :]]
            assert not found(states, others[:position])
            assert states.positions(others) == []
        assert states.positions(TOKENS) == states.positions(TOKENS[:position]) == [position]
        assert states.positions(TOKENS[: position - 1] or [7]) == []
        assert store.stats().corrupt_records == 0


def test_others_never_meet() -> None:
    tier, prefix = memory_tier(), TOKENS[: C + 1]
    store, states = store_and_states(tiers=[tier])
    assert OTHER_LAYOUT.slot_bytes == LAYOUT.slot_bytes
    states.put(prefix, state_of(prefix, b"mine"), b"mine")
    strangers = [
        (states, b""),
        (store.states(OTHER_LAYOUT, KV_DTYPE), b"mine"),
        (store.states(LAYOUT), b"mine"),
        (make(tiers=[tier], dtype=torch.bfloat16).states(LAYOUT, torch.bfloat16), b"mine"),
        (make(tiers=[tier], chunk_size=2 * C).states(LAYOUT, KV_DTYPE), b"mine"),
        (KVStore(KVStoreConfig(C), KVStoreMetadata("n", kv_dtype=KV_DTYPE), [tier]).states(LAYOUT, KV_DTYPE), b"mine"),
    ]
    for other, namespace in strangers:
        assert not other.get_into(prefix, bytearray(LAYOUT.slot_bytes), namespace)
        assert other.positions(prefix, namespace) == [] and other.longest(prefix, namespace) == 0
    assert found(states, prefix, b"mine")


def test_a_chunk_that_is_missing_before_others() -> None:
    tier = memory_tier()
    store, states = store_and_states(tiers=[tier])
    with store:
        store.store(TOKENS, kv_of(TOKENS))
        states.put(TOKENS[: C + 1], state_of(TOKENS[: C + 1]))
        for missing in (1, 0):
            tier.remove([store._dtype.keys(np.array(TOKENS, np.int32), b"")[missing]])
            for asked in (store, states):
                reach = asked.explain(TOKENS).groups[0]
                assert (reach.num_tokens, reach.ending, reach.above) == (missing * C, Ending.GAP, 2 * C)
        assert f"(at token {2 * C} on)" in str(reach)


def test_a_run_of_chunks_without_a_state() -> None:
    store, states = store_and_states()
    with store:
        store.store(TOKENS, kv_of(TOKENS))
        assert store.lookup(TOKENS) == len(TOKENS)
        assert store.explain(TOKENS).num_cached_tokens == len(TOKENS) - 1  # the last one is computed
        assert states.longest(TOKENS) == 0
        text = str(states.explain(TOKENS))
        assert "0 of 14 tokens are cached" in text and "attention: 14 tokens, then the prompt ends" in text
        assert "state: 0 tokens, then no usable checkpoint is kept further on" in text
        assert str(store.explain([*TOKENS, 5])) == (
            "12 of 15 tokens are cached\n  attention: 12 tokens, then nothing more is cached: it was never computed, "
            "or evicted"
        )


def test_states_without_their_chunks() -> None:
    store, states = store_and_states()
    with store:
        put_all(store, states, TOKENS, C + 1)
        states.put(TOKENS[: 2 * C + 1], state_of(TOKENS[: 2 * C + 1]))
        assert states.positions(TOKENS) == [2 * C + 1, C + 1]
        assert states.longest(TOKENS) == C + 1
        explained = states.explain(TOKENS)
        assert explained.num_cached_tokens == explained.groups[1].below == C + 1
        assert explained.groups[1].above == 2 * C + 1
        assert "a checkpoint further on lacks K and V before it" in str(explained)
        store.store(TOKENS[: 2 * C], kv_of(TOKENS[: 2 * C]))
        assert states.longest(TOKENS) == C + 1  # the shorter chunk is missing still
        store.store(TOKENS[: 2 * C + 1], kv_of(TOKENS[: 2 * C + 1]))
        assert states.longest(TOKENS) == 2 * C + 1
        assert states.longest(TOKENS, most=2 * C) == C + 1 and states.longest(TOKENS, most=C) == 0
        assert "the prompt ends" in str(states.explain(TOKENS[: 2 * C + 2]).groups[1])


def test_a_model_without_k_and_v_needs_states_alone() -> None:
    store, states = store_and_states(kv_dtype=None)
    with store:
        for position in POSITIONS:
            assert states.put(TOKENS[:position], state_of(TOKENS[:position]))
            assert states.longest(TOKENS) == position
        explained = states.explain([*TOKENS, 1])
        assert [group.group for group in explained.groups] == ["state"]
        assert explained.num_cached_tokens == len(TOKENS)


@pytest.mark.parametrize("seed", range(3))
def test_random_prompts_against_an_oracle(seed: int) -> None:
    """Prompts of two tokens share prefixes everywhere."""
    random = np.random.default_rng(seed)
    store, states = store_and_states()
    chunks: set[tuple[int, ...]] = set()
    kept: set[tuple[int, ...]] = set()

    def longest(tokens: list[int], most: int) -> int:
        for at in range(most, 0, -1):
            ends = [*range(C, at + 1, C), *([at] if at % C else [])]
            if tuple(tokens[:at]) in kept and all(tuple(tokens[:end]) in chunks for end in ends):
                return at
        return 0

    with store:
        for _ in range(150):
            tokens = random.integers(0, 2, random.integers(1, 3 * C + 2)).tolist()
            verb = random.integers(0, 4)
            if verb == 0:
                store.store(tokens, kv_of(tokens))
                chunks |= {tuple(tokens[:end]) for end in [*range(C, len(tokens) + 1, C), len(tokens)]}
            elif verb == 1:
                assert states.put(tokens, state_of(tokens))
                kept.add(tuple(tokens))
            elif verb == 2 and random.integers(0, 4) == 0:
                states.remove(tokens)
                kept -= {tuple(tokens[:end]) for end in range(len(tokens) + 1)}
            most = int(random.integers(0, len(tokens) + 1))
            assert states.longest(tokens, most=most) == longest(tokens, most)
            assert states.positions(tokens) == [at for at in range(len(tokens), 0, -1) if tuple(tokens[:at]) in kept]
            assert states.explain(tokens).num_cached_tokens == longest(tokens, len(tokens) - 1)
        assert store.stats().corrupt_records == 0
        assert all(found(states, list(one)) for one in kept)


def damage(store: KVStore, tier: MemoryTier, codec: str) -> None:
    (record,) = [one for one in store.records() if one.codec == codec]
    corrupt(tier, bytes.fromhex(record.key), record.num_bytes - 40)


def test_damage_is_a_miss() -> None:
    tier = memory_tier()
    store, states = store_and_states(tiers=[tier])
    with store:
        states.put(TOKENS, state_of(TOKENS))
        state_key, index_key = (
            next(record.key for record in store.records() if record.codec == codec)
            for codec in ("state", "state-index")
        )
        corrupt(tier, bytes.fromhex(state_key), 700)
        assert not found(states, TOKENS) and store.stats().corrupt_records == 1
        assert states.positions(TOKENS) == []  # the index has it still
        assert states.put(TOKENS, state_of(TOKENS)) and found(states, TOKENS)
        damage(store, tier, "state-index")
        assert states.positions(TOKENS) == [] and store.stats().corrupt_records == 2
        assert found(states, TOKENS)
        assert states.put(TOKENS, state_of(TOKENS)) and states.positions(TOKENS) == [len(TOKENS)]


@pytest.mark.parametrize("number", range(0, 900, 37))
def test_every_byte_of_both_records_is_checked(number: int) -> None:
    tier = memory_tier()
    store, states = store_and_states(tiers=[tier])
    with store:
        states.put(TOKENS, state_of(TOKENS))
        for record in store.records():
            corrupt(tier, bytes.fromhex(record.key), number % record.num_bytes)
        assert states.positions(TOKENS) == [] or not found(states, TOKENS)
        assert store.stats().corrupt_records >= 1


def test_a_tier_in_trouble_is_a_miss() -> None:
    fails = [False]
    store, states = store_and_states(tiers=[Troubled(lambda: fails[0])])
    assert states.put(TOKENS, state_of(TOKENS))
    fails[0] = True
    assert not states.put(TOKENS, state_of(TOKENS)) and not found(states, TOKENS)
    assert states.positions(TOKENS) == [] and states.longest(TOKENS) == 0 and states.remove(TOKENS) == 0
    assert states.explain(TOKENS).num_cached_tokens == 0
    fails[0] = False
    assert found(states, TOKENS)
    store.close()


def test_what_records_tell() -> None:
    store, states = store_and_states()
    with store:
        put_all(store, states, TOKENS, C + 2, b"name")
        assert store.stats().stored_chunks == 2
        about = sorted((one.codec, one.num_tokens, one.model, one.namespace) for one in store.records())
        assert about == [
            ("float32", 2, "m", b"name"),
            ("float32", C, "m", b"name"),
            ("state", C + 2, "m", b"name"),
            ("state-index", C, "m", b"name"),
        ]
        assert states.put(TOKENS[: C + 2], state_of(TOKENS[: C + 2], b"name"), b"name", skip_existing=False)
        assert len(store.records()) == 4
        assert states.remove(TOKENS, b"name") == 1 and states.longest(TOKENS, b"name") == 0
        assert store.remove(TOKENS[: C + 2], b"name") == 2


def test_no_time_is_a_miss() -> None:
    store, states = store_and_states()
    with store:
        assert not states.put(TOKENS, state_of(TOKENS), deadline=0)
        assert store.records() == []
        states.put(TOKENS, state_of(TOKENS))
        assert not states.get_into(TOKENS, bytearray(LAYOUT.slot_bytes), deadline=0)
        assert states.get_into(TOKENS, bytearray(LAYOUT.slot_bytes), deadline=60.0)


SLOT = bytes(LAYOUT.slot_bytes)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda states: states.put([], SLOT), ValueError, "tokens must be at least one"),
        (lambda states: states.put([1], SLOT[1:]), ValueError, "state must have the .* bytes of a slot, got"),
        (lambda states: states.put([1], "text"), TypeError, "buffers must be bytes"),
        (lambda states: states.put([1], SLOT, "name"), TypeError, "namespace must be bytes"),
        (lambda states: states.put([1], SLOT, skip_existing=1), TypeError, "skip_existing must be True or False"),
        (lambda states: states.put([1], SLOT, deadline=-1), ValueError, "deadline must be finite seconds"),
        (lambda states: states.get_into([1], SLOT), ValueError, "buffers must be writable"),
        (lambda states: states.get_into("abc", bytearray(SLOT)), TypeError, "tokens must"),
        (lambda states: states.longest([1, 2], most=3), ValueError, r"most must be in \[0, 2\], got 3"),
        (lambda states: states.longest([1, 2], most=1.5), TypeError, "most must be an integer"),
        (lambda states: states.explain([]), ValueError, "tokens must be at least one"),
    ],
)
def test_wrong_arguments(call, error: type[Exception], words: str) -> None:
    store, states = store_and_states()
    with store:
        with pytest.raises(error, match=words):
            call(states)
        assert store.records() == []


def test_states_tell_the_dtype_of_their_k_and_v() -> None:
    """Of a store that knows none."""
    with KVStore(KVStoreConfig(C), KVStoreMetadata("m", kv_dtype=None), [memory_tier()]) as store:
        with pytest.raises(TypeError, match="layout must be a StateLayout"):
            store.states("layout", KV_DTYPE)
        store.states(LAYOUT)
        assert store.metadata.kv_dtype is None
        store.states(LAYOUT, KV_DTYPE)
        assert store.metadata.kv_dtype == KV_DTYPE


def test_wrong_layouts() -> None:
    with make() as store:
        for call, error, words in (
            (lambda: store.states("layout"), TypeError, "layout must be a StateLayout, got str"),
            (lambda: store.states(LAYOUT, "float32"), TypeError, "kv_dtype must be a torch.dtype or None, got str"),
            (lambda: store.states(LAYOUT, torch.float16), ValueError, "K and V must be of torch.float32"),
            (lambda: store.explain([]), ValueError, "tokens must be at least one"),
        ):
            with pytest.raises(error, match=words):
                call()
        states = store.states(LAYOUT, KV_DTYPE)
    with pytest.raises(ValueError, match="the store is closed"):
        states.put([1], SLOT)
    with pytest.raises(ValueError, match="the store is closed"):
        store.states(LAYOUT)
