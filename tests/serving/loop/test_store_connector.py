"""An engine with a store of chunks: what one computed, another loads; whatever the store does, tokens are right."""

import threading

import numpy as np
import pytest
from support.dict_store import CHUNK, B, DictStore
from support.engines import make_engine
from support.models import generate_each, make_model, make_prompts

from kvpage.blocks.load_or_compute import LoadOrCompute
from kvpage.serving import Engine, SamplingParams

MAX_TOKENS = 6
PARAMS = SamplingParams(max_tokens=MAX_TOKENS)
PROMPTS = make_prompts([5 * CHUNK + 3, 3 * CHUNK, CHUNK + 1, 3])


class SlowStore(LoadOrCompute):
    def saw_prefill(self, num_tokens: int, seconds: float) -> None:
        """What is measured here is not to change it."""


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return generate_each(make_model("llama"), PROMPTS, MAX_TOKENS)


def serve(engine: Engine, expected: list[list[int]]) -> list[int]:
    """The tokens must be right; how many of each prompt were cached."""
    outputs = engine.generate(PROMPTS, PARAMS)
    assert [output.token_ids for output in outputs] == expected
    engine.close()
    engine.manager.check()
    assert engine.stats().num_used_blocks == 0
    return [output.num_cached_tokens for output in outputs]


@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 7}, {"num_blocks": 14}, {"num_blocks": 14, "num_host_blocks": 20}]
)
def test_a_second_engine_loads_what_the_first_computed(expected, options: dict) -> None:
    store = DictStore()
    assert serve(make_engine(store=store, **options), expected) == [0, 0, 0, 0]
    assert len(store.chunks) == 5 + 3 + 1
    engine = make_engine(store=store, load_or_compute=False, **options)
    found = serve(engine, expected)
    if not options.get("num_blocks"):
        assert found == [5 * CHUNK, 3 * CHUNK - B, CHUNK, 0]
        assert engine.stats().num_computed_tokens == 3 + B + 1 + 3 + 4 * (MAX_TOKENS - 1)
    assert sum(found) >= CHUNK  # of few blocks, those that are loaded early may be taken before they are used


def test_stats_tell_what_happened(expected) -> None:
    store = DictStore()
    engine = make_engine(store=store)
    engine.generate(PROMPTS, PARAMS)
    engine.debug.store.drain()
    stats = engine.stats().store
    assert (stats.num_lookups, stats.num_found_tokens, stats.num_stores) == (3, 0, 3)  # one prompt has no whole block
    assert stats.num_stored_tokens == (5 + 3 + 1) * CHUNK
    engine = make_engine(store=store, load_or_compute=False)
    engine.generate(PROMPTS, PARAMS)
    stats = engine.stats().store
    assert (stats.num_lookups, stats.num_loads) == (3, 3)
    assert stats.num_loaded_tokens == stats.num_found_tokens == 5 * CHUNK + 3 * CHUNK - B + CHUNK
    assert (stats.num_errors, stats.num_late, stats.num_refused_tokens) == (0, 0, 0)
    engine.close()
    assert engine.stats().store is None
    assert make_engine(store=None).stats().store is None


def test_namespaces_reach_the_store(expected) -> None:
    store = DictStore()
    for _ in range(2):
        engine = make_engine(store=store)
        for namespace in (b"one", b"two"):
            engine.add_request(PROMPTS[0], PARAMS, namespace=namespace)
        outputs = []
        while engine.has_unfinished:
            outputs += [one.output for one in engine.step() if one.output]
        engine.close()
        assert [output.token_ids for output in outputs] == [expected[0]] * 2
    assert {key[0] for key in store.chunks} == {b"one", b"two"}
    assert [output.num_cached_tokens for output in outputs] == [5 * CHUNK] * 2


def test_what_was_generated_is_kept_if_asked_for(expected) -> None:
    store = DictStore()
    serve(make_engine(store=store, save_generated=True), expected)
    conversation = PROMPTS[0] + expected[0]
    engine = make_engine(store=store, load_or_compute=False)
    (output,) = engine.generate([[*conversation, 5]], PARAMS)
    assert output.num_cached_tokens == (len(conversation) - 1) // CHUNK * CHUNK == 6 * CHUNK


def test_others_compute_while_one_loads(expected) -> None:
    store = DictStore()
    serve(make_engine(store=store), expected)
    gate = threading.Event()
    store.trouble = lambda name: gate.wait() if name == "load" else None
    engine = make_engine(store=store, load_or_compute=False, store_deadline=60)
    engine.add_request(PROMPTS[0], PARAMS, "loads")
    engine.add_request(PROMPTS[3], PARAMS, "computes")
    finished = {}
    while "computes" not in finished:
        finished |= {one.request_id: one.output for one in engine.step() if one.output}
    assert "loads" not in finished
    gate.set()
    while engine.has_unfinished:
        finished |= {one.request_id: one.output for one in engine.step() if one.output}
    assert [finished[name].token_ids for name in ("loads", "computes")] == [expected[0], expected[3]]
    assert finished["loads"].num_cached_tokens == 5 * CHUNK


@pytest.mark.parametrize("slow", ["lookup", "load"])
def test_a_late_store_is_not_waited_for_and_writes_into_blocks_of_its_own(expected, slow: str) -> None:
    store = DictStore()
    serve(make_engine(store=store), expected)
    gate = threading.Event()
    store.trouble = lambda name: gate.wait() if name == slow else None
    engine = make_engine(store=store, load_or_compute=False, store_deadline=0.05)
    outputs = engine.generate(PROMPTS, PARAMS)  # it would wait for ever: the gate is closed
    assert [output.token_ids for output in outputs] == expected
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0, 0]
    assert engine.stats().store.num_late == 3
    gate.set()
    engine.close()
    engine.manager.check()
    assert engine.stats().num_used_blocks == 0


@pytest.mark.parametrize("name", ["lookup", "load", "store"])
def test_a_store_that_raises_costs_a_miss(expected, name: str) -> None:
    store = DictStore()
    serve(make_engine(store=store), expected)

    def fail(call: str) -> None:
        if call == name:
            raise OSError("gone")

    store.trouble = fail
    engine = make_engine(store=store, load_or_compute=False)
    outputs = engine.generate(PROMPTS, PARAMS)
    assert [output.token_ids for output in outputs] == expected
    engine.debug.store.drain()
    assert engine.stats().store.num_errors == 3
    engine.close()
    engine.manager.check()


@pytest.mark.parametrize("answer", [None, "8", -8, 2.5, True, 1 << 70])
@pytest.mark.parametrize("name", ["lookup", "load_blocks", "store_blocks"])
def test_answers_that_are_no_counts_cost_a_miss(expected, name: str, answer: object) -> None:
    store = DictStore()
    serve(make_engine(store=store), expected)
    answered = getattr(store, name)
    engine = make_engine(store=store)
    connector = engine.debug.store
    setattr(store, name, lambda *args, **named: (answered(*args, **named), answer)[1])
    cached = serve(engine, expected)
    if name != "store_blocks" and answer != 1 << 70:
        assert cached == [0] * len(PROMPTS)
    assert (connector.stats.num_errors > 0) == (answer != 1 << 70)


def test_a_count_may_be_a_numpy_integer(expected) -> None:
    store = DictStore()
    serve(make_engine(store=store), expected)
    answered = store.lookup
    store.lookup = lambda *args, **named: np.int64(answered(*args, **named))
    assert serve(make_engine(store=store), expected)[0] == 5 * CHUNK


@pytest.mark.parametrize("num_before", [0, 1, 2, 3])
@pytest.mark.parametrize("where", ["_loaders", "saves", "_transfers"])
def test_what_fails_between_engine_and_store_leaves_nothing_behind(expected, where: str, num_before: int) -> None:
    """The step raises; then all goes on, no block and no pin is lost, and closing comes to its end."""
    store = DictStore()
    serve(make_engine(store=store), expected)
    engine = make_engine(store=store if where != "saves" else DictStore())
    connector, calls = engine.debug.store, []
    owner = connector.saves._thread if where == "saves" else getattr(connector.loads, where)
    name = "run" if where == "_transfers" else "submit"
    works = getattr(owner, name)

    def fails(*args: object) -> object:
        calls.append(args)
        if len(calls) == num_before + 1:
            raise RuntimeError("boom")
        return works(*args)

    setattr(owner, name, fails)
    for prompt in PROMPTS:
        engine.add_request(prompt, PARAMS)
    outputs, num_raised = {}, 0
    for _ in range(100):
        try:
            outputs |= {one.request_id: one.output.token_ids for one in engine.step() if one.output}
        except RuntimeError:
            num_raised += 1
    assert num_raised == int(len(calls) > num_before)
    assert list(dict(sorted(outputs.items())).values()) == expected and not engine.has_unfinished
    engine.close()
    engine.manager.check()
    assert engine.stats().num_used_blocks == 0


def test_threads_that_cannot_be_had_are_missed_at_once(monkeypatch) -> None:
    """Not amid serving, where the job of a thread that could not start would stay queued, and run one day."""
    starts, threads = threading.Thread.start, threading.active_count()

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("kvpage-load_1"):
            raise RuntimeError("can't start new thread")
        starts(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        make_engine(store=DictStore())
    assert threading.active_count() == threads


def test_half_a_load_is_used(expected) -> None:
    store = DictStore()
    serve(make_engine(store=store), expected)

    def lose(name: str) -> None:
        if name == "load":
            store.chunks.pop((b"", *PROMPTS[0][: 4 * CHUNK]), None)

    store.trouble = lose
    engine = make_engine(store=store, load_or_compute=False)
    (output,) = engine.generate(PROMPTS[:1], PARAMS)
    assert (output.token_ids, output.num_cached_tokens) == (expected[0], 3 * CHUNK)
    engine.close()
    engine.manager.check()


def test_what_is_computed_faster_is_computed(expected) -> None:
    store = DictStore()
    serve(make_engine(store=store), expected)
    engine = make_engine(store=None)
    engine.use_store(store, rule=SlowStore(1000, B, bytes_per_second=1.0, tokens_per_second=1e9))
    assert serve(engine, expected) == [0, 0, 0, 0]
    assert "load" not in store.calls


def test_aborted_requests_leave_nothing(expected) -> None:
    store = DictStore()
    serve(make_engine(store=store), expected)
    gate = threading.Event()
    store.trouble = lambda name: gate.wait() if name == "load" else None
    engine = make_engine(store=store, load_or_compute=False, store_deadline=0.2)
    engine.add_request(PROMPTS[0], PARAMS, "one")
    for _ in range(2):
        engine.add_request(PROMPTS[3], SamplingParams(max_tokens=1))
        engine.step()
    engine.abort("one")
    gate.set()
    engine.close()
    engine.manager.check()
    assert engine.stats().num_used_blocks == 0 and not engine.has_unfinished


def test_stores_that_cannot_be_used() -> None:
    with pytest.raises(ValueError, match="store needs enable_prefix_caching"):
        make_engine(store=DictStore(), enable_prefix_caching=False)
    with pytest.raises(ValueError, match="store must be given once"):
        make_engine(store=DictStore()).use_store(DictStore())
