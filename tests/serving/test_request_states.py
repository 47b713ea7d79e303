"""Engine.request_states: the stage of each request, and what of its prompt was found, loaded and computed."""

import threading
from pathlib import Path

import pytest
from support.engines import make_engine
from support.models import make_prompts

from kvpage.serving import RequestState, SamplingParams
from kvpage.store import KVStore, KVStoreConfig, metadata_of
from kvpage.store.tiers.memory_tier import MemoryTier

B, C = 4, 8
PROMPT = make_prompts([5 * C + 3])[0]


def parts(state: RequestState) -> tuple[str, int, int, int, int]:
    return (
        state.stage, state.num_cached_tokens, state.num_loaded_tokens, state.num_computed_tokens,
        state.num_generated_tokens,
    )  # fmt: skip


def test_a_request_on_its_way():
    engine = make_engine(max_num_batched_tokens=16, max_num_seqs=1)
    engine.add_request(PROMPT, SamplingParams(max_tokens=3), "first", b"tenant")
    engine.add_request(PROMPT[:9], SamplingParams(max_tokens=2), "second")
    states = engine.request_states(9)
    assert [(one.request_id, one.namespace, parts(one)) for one in states] == [
        ("first", b"tenant", ("waiting", 0, 0, 0, 0)),
        ("second", b"", ("waiting", 0, 0, 0, 0)),
    ]
    seen = []
    while engine.has_unfinished:
        engine.step()
        seen.append([(one.request_id, *parts(one)) for one in engine.request_states(9)])
    waits = ("second", "waiting", 0, 0, 0, 0)
    assert seen == [
        [("first", "prefill", 0, 0, 16, 0), waits],
        [("first", "prefill", 0, 0, 32, 0), waits],
        [("first", "decode", 0, 0, 43, 1), waits],
        [("first", "decode", 0, 0, 44, 2), waits],
        [waits],
        [("second", "decode", 0, 0, 9, 1)],
        [],
    ]


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 4, 5])
def test_a_limit_keeps_those_that_run_first(limit):
    engine = make_engine(max_num_seqs=2)
    for name in "abcd":
        engine.add_request(PROMPT[:5], SamplingParams(max_tokens=9), name)
    engine.step()
    assert [one.request_id for one in engine.request_states(limit)] == list("abcd")[:limit]


def test_a_negative_limit_is_refused():
    with pytest.raises(ValueError, match="limit must be an integer of at least 0, got -1"):
        make_engine().request_states(-1)


def test_found_on_the_device():
    engine = make_engine()
    params = SamplingParams(max_tokens=2)
    assert engine.generate([PROMPT], params)[0].num_loaded_tokens == 0
    engine.add_request(PROMPT, params)
    engine.step()
    (state,) = engine.request_states(1)
    assert parts(state) == ("decode", len(PROMPT) - 1, 0, len(PROMPT), 1)
    assert state.num_prompt_tokens == len(PROMPT) and state.first_token_time >= state.arrival_time


def test_loaded_from_the_host_tier():
    engine = make_engine(12, num_host_blocks=40, load_or_compute=False)
    params = SamplingParams(max_tokens=2)
    others = make_prompts([44], seed=9)
    engine.generate([PROMPT], params)
    engine.generate(others, params)  # PROMPT's blocks leave the device
    engine.add_request(PROMPT, params)
    engine.step()
    (state,) = engine.request_states(1)
    num_found = len(PROMPT) // B * B
    stage, num_cached, num_loaded, num_computed, _ = parts(state)
    assert (stage, num_computed) == ("decode", len(PROMPT)) and num_loaded > B
    assert num_found <= num_cached + num_loaded < len(PROMPT)
    while engine.has_unfinished:
        outputs = engine.step()
    assert outputs[-1].output.num_loaded_tokens == num_loaded
    assert outputs[-1].output.num_cached_tokens == num_loaded + num_cached


def test_loaded_from_a_store(tmp_path: Path):
    params = SamplingParams(max_tokens=2)
    first, second = make_engine(), make_engine()
    held = threading.Event()
    with KVStore(KVStoreConfig(C), metadata_of(first.cache, "m"), [MemoryTier(1 << 22, pin_memory=False)]) as store:
        first.use_store(store)
        first.generate([PROMPT], params)
        first.close()
        lookup = store.lookup
        store.lookup = lambda *args, **kwargs: held.wait(120) and lookup(*args, **kwargs)
        second.use_store(store)
        second.add_request(PROMPT, params)
        second.add_request([1, 2, 3], SamplingParams(max_tokens=1))  # so that the step waits for nothing
        second.step()
        assert parts(second.request_states(1)[0]) == ("loading", 0, 0, 0, 0)
        held.set()
        while second.has_unfinished:
            outputs = second.step()
            if states := second.request_states(1):
                last = states[0]
        num_loaded = len(PROMPT) // C * C
        assert parts(last) == ("decode", 0, num_loaded, len(PROMPT), 1)
        output = outputs[-1].output
        assert (output.num_cached_tokens, output.num_loaded_tokens) == (num_loaded, num_loaded)
        second.close()
