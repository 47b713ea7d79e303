"""StateIndex: entries of all tiers together, of bounded number; one that is lost or stale is a miss."""

import pytest
from support.store_states import found, state_of, store_and_states

from kvpage.store.states import state_index
from kvpage.store.tiers.memory_tier import MemoryTier

PROMPTS = [[7, number] for number in range(10)]


def memory_tier() -> MemoryTier:
    return MemoryTier(1 << 20, pin_memory=False)


def test_what_another_process_adds_is_seen_beyond_a_fast_tier() -> None:
    shared = memory_tier()
    (_, mine), (_, theirs) = (store_and_states(tiers=[memory_tier(), shared]) for _ in range(2))
    for number, tokens in enumerate(PROMPTS):
        assert (mine, theirs)[number % 2].put(tokens, state_of(tokens))
    for tokens in PROMPTS:
        for states in (mine, theirs):
            assert states.positions(tokens) == [2] and found(states, tokens)


@pytest.mark.parametrize("most", [1, 2, 5, 9])
def test_a_full_index_drops_the_oldest(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(state_index, "MAX_ENTRIES", most)
    monkeypatch.setattr(state_index, "NUM_DROPPED", 1)
    store, states = store_and_states()
    with store:
        for number, tokens in enumerate(PROMPTS):
            assert states.put(tokens, state_of(tokens))
            listed = [bool(states.positions(one)) for one in PROMPTS]
            assert listed == [number - most < at <= number for at in range(len(PROMPTS))]
        assert all(found(states, tokens) for tokens in PROMPTS)


@pytest.mark.parametrize("is_put_again", [False, True])
def test_a_full_index_keeps_what_others_go_on_from(monkeypatch: pytest.MonkeyPatch, is_put_again: bool) -> None:
    """A system prompt's entry is the oldest. Others are added after it, or it is put again with them."""
    for name, value in (("MAX_ENTRIES", 4), ("NUM_DROPPED", 1), ("NUM_FRESH", 2)):
        monkeypatch.setattr(state_index, name, value)
    store, states = store_and_states()
    with store:
        system = [1] if is_put_again else [7]
        states.put(system, state_of(system))
        for tokens in PROMPTS:
            states.put(tokens, state_of(tokens))
            if is_put_again:
                states.put(system, state_of(system))
        assert states.positions(system) == [1]
        assert sum(2 in states.positions(tokens) for tokens in PROMPTS) == 3


def test_a_full_index_drops_those_without_a_state_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_index, "MAX_ENTRIES", 4)
    store, states = store_and_states()
    with store:
        for tokens in PROMPTS[:4]:
            states.put(tokens, state_of(tokens))
        assert states.remove(PROMPTS[2]) == 1
        states.put(PROMPTS[4], state_of(PROMPTS[4]))
        assert [bool(states.positions(one)) for one in PROMPTS[:5]] == [True, True, False, True, True]
