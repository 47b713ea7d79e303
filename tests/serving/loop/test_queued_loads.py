"""A queue before a warm store: what is stored is loaded when a request's turn comes, once, however many wait."""

import threading
from collections.abc import Sequence

import pytest
from support.dict_store import CHUNK, B, DictStore
from support.models import make_model, make_prompts
from support.waiting import until

from kvpage import CacheConfig
from kvpage.serving import Engine, EngineConfig, SamplingParams

MAX_TOKENS = 4
PARAMS = SamplingParams(max_tokens=MAX_TOKENS)
LENGTH = 3 * CHUNK + 3
NUM_STORED = 3 * CHUNK
BLOCKS = -(-(LENGTH + MAX_TOKENS) // B)  # of a request at its end
PROMPTS = [[number + 1, *prompt[1:]] for number, prompt in enumerate(make_prompts([LENGTH] * 60))]  # nothing shared


def make_engine(store: DictStore | None, num_blocks: int, **options: object) -> Engine:
    cache = CacheConfig(block_size=B, num_gpu_blocks=num_blocks)
    config = EngineConfig(cache, **{"load_or_compute": False, "store_deadline": 60.0, "max_num_seqs": 4, **options})
    return Engine.from_model(make_model("llama"), config, store=store)


class NearStore(DictStore):
    """A DictStore that notes which prompts it is to bring nearer."""

    def __init__(self) -> None:
        super().__init__()
        self.near: list[tuple[int, ...]] = []
        self.brought = threading.Event()

    def prefetch(self, tokens, *, namespace: bytes) -> None:
        self.call("prefetch")
        self.near.append(tuple(tokens.tolist()))
        self.brought.set()


@pytest.fixture(scope="module")
def warm() -> tuple[DictStore, list[list[int]]]:
    """A store that has all prompts, and the tokens after each."""
    store = DictStore()
    engine = make_engine(store, 64 * BLOCKS, max_num_seqs=8)
    expected = []
    for begin in range(0, len(PROMPTS), 4):
        expected += [output.token_ids for output in engine.generate(PROMPTS[begin : begin + 4], PARAMS)]
        for save in engine.saves_under_way():
            save.result()  # a save that comes while many are under way is left out
    engine.close()
    store.calls.clear()
    assert len(store.chunks) == len(PROMPTS) * NUM_STORED // CHUNK
    return store, expected


def run_clients(engine: Engine, prompts: Sequence[list[int]], num_clients: int) -> list[list[int]]:
    """Each client has one request under way, and the next one as soon as that has ended."""
    finished: dict[int, list[int]] = {}
    num_added = 0
    while len(finished) < len(prompts):
        while num_added < len(prompts) and num_added - len(finished) < num_clients:
            engine.add_request(prompts[num_added], PARAMS, str(num_added))
            num_added += 1
        for output in engine.step():
            if output.output is not None:
                finished[int(output.request_id)] = output.output.token_ids
    return [finished[number] for number in range(len(prompts))]


def check_nothing_left(engine: Engine) -> None:
    engine.close()
    engine.manager.check()
    assert engine.stats().num_used_blocks == 0


@pytest.mark.parametrize("num_clients", [1, 4, 5, 8, 60])
def test_all_that_is_stored_is_loaded_whatever_the_queue(warm, num_clients: int) -> None:
    store, expected = warm
    store.calls.clear()
    prompts = PROMPTS[: max(num_clients, 20)]
    engine = make_engine(store, 4 * BLOCKS + 3)
    assert run_clients(engine, prompts, num_clients) == expected[: len(prompts)]
    stats = engine.stats()
    assert stats.store is not None
    assert stats.store.num_loaded_tokens == stats.store.num_found_tokens == len(prompts) * NUM_STORED
    assert (store.calls.count("load"), stats.store.num_loads) == (len(prompts), len(prompts))
    assert (stats.store.num_lookups, stats.store.num_lookup_tokens) == (len(prompts), len(prompts) * LENGTH)
    assert stats.num_cached_tokens == stats.blocks.hit_tokens == len(prompts) * NUM_STORED
    assert stats.num_prompt_tokens == stats.blocks.query_tokens == len(prompts) * LENGTH
    check_nothing_left(engine)


def test_those_that_wait_are_brought_nearer_before_their_turn() -> None:
    """One request runs at a time, and its load does not end before another one's prompt has been brought nearer."""
    store = NearStore()
    engine = make_engine(store, 64 * BLOCKS)
    engine.generate(PROMPTS[:6], PARAMS)
    engine.close()
    store.calls.clear()
    store.trouble = lambda name: store.brought.wait(60) if name == "load" else None
    engine = make_engine(store, BLOCKS + 1, max_num_seqs=1)
    engine.generate(PROMPTS[:6], PARAMS)
    assert store.near and set(store.near) <= {tuple(prompt[:NUM_STORED]) for prompt in PROMPTS[1:6]}
    assert len(set(store.near)) == len(store.near) and engine.stats().store.num_loads == 6
    check_nothing_left(engine)


def test_a_prefetch_that_fails_costs_nothing(warm) -> None:
    store, expected = warm
    failing = NearStore()
    failing.chunks = store.chunks
    failing.trouble = lambda name: 1 / 0 if name == "prefetch" else None
    engine = make_engine(failing, 2 * BLOCKS + 1)
    assert run_clients(engine, PROMPTS[:8], 8) == expected[:8]
    stats = engine.stats().store
    assert stats is not None and stats.num_loads == 8
    check_nothing_left(engine)


@pytest.mark.parametrize("num_blocks", [BLOCKS, 2 * BLOCKS, 64 * BLOCKS])
def test_a_prefix_that_many_wait_for_is_loaded_once(warm, num_blocks: int) -> None:
    store, _ = warm
    store.calls.clear()
    prompts = [[*PROMPTS[0][:NUM_STORED], number + 1] for number in range(12)]
    engine = make_engine(store, num_blocks)
    engine.generate(prompts, PARAMS)
    stats = engine.stats().store
    assert stats is not None
    assert (store.calls.count("load"), stats.num_loaded_tokens) == (1, NUM_STORED)
    check_nothing_left(engine)


def test_a_load_that_a_save_leaves_no_room_begins_once_that_is_done(warm) -> None:
    """Blocks for one prompt: while its K and V are stored, no other prompt has room, be it to load or to compute."""
    store, expected = warm
    store.trouble = lambda name: threading.Event().wait(0.05) if name == "store" else None
    try:
        engine = make_engine(store, BLOCKS + 1)
        assert run_clients(engine, PROMPTS[:6], 6) == expected[:6]
        stats = engine.stats().store
        assert stats is not None and stats.num_loaded_tokens == 6 * NUM_STORED
    finally:
        store.trouble = lambda name: None
    check_nothing_left(engine)


def test_what_another_request_has_saved_while_one_waited_is_loaded() -> None:
    """Two families in turn, and blocks for one prompt: by its turn each prefix is stored, and partly evicted."""
    store = DictStore()
    families = [prompt[:NUM_STORED] for prompt in PROMPTS[:2]]
    prompts = [[*families[number % 2], 100 + number] for number in range(8)]
    engine = make_engine(store, BLOCKS + 1, max_num_seqs=1)
    outputs = engine.generate(prompts, PARAMS)
    stats = engine.stats()
    assert stats.store is not None
    assert [output.num_cached_tokens for output in outputs] == [0, 0] + [NUM_STORED] * 6
    assert 0 < stats.store.num_loaded_tokens <= 6 * NUM_STORED  # some of it is cached still
    assert stats.num_computed_tokens == 2 * NUM_STORED + 8 * MAX_TOKENS
    check_nothing_left(engine)


def test_a_preempted_request_is_asked_for_again(warm) -> None:
    store, expected = warm
    store.calls.clear()
    engine = make_engine(store, BLOCKS + 1)
    engine.add_request(PROMPTS[0], PARAMS, "0")
    while not engine.stats().num_generated_tokens:
        engine.step()
    engine.add_request(PROMPTS[1], PARAMS, "1", priority=-1)
    engine.step()
    until(lambda: store.calls.count("lookup") == 2)  # or the first request ends before the second one's turn
    tokens = {}
    while engine.has_unfinished:
        tokens |= {int(one.request_id): one.output.token_ids for one in engine.step() if one.output is not None}
    assert [tokens[0], tokens[1]] == expected[:2]
    stats = engine.stats()
    assert stats.store is not None and stats.num_preemptions == 1
    # The first prompt is loaded again, unless the second one's blocks came so late that its own were still cached.
    assert store.calls.count("load") == stats.store.num_loads and stats.store.num_loads in (2, 3)
    assert (stats.store.num_lookups, stats.store.num_found_tokens) == (2, 2 * NUM_STORED)
    assert stats.blocks.query_tokens == 2 * LENGTH and stats.blocks.hit_tokens == 2 * NUM_STORED
    check_nothing_left(engine)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_requests_that_end_while_they_wait_leave_nothing(warm, num_steps: int) -> None:
    store, expected = warm
    engine = make_engine(store, 2 * BLOCKS + 1)
    for number in range(6):
        engine.add_request(PROMPTS[number], PARAMS, str(number))
    outputs: list = []
    for _ in range(num_steps):
        outputs += engine.step()
    unfinished = {str(number) for number in range(1, 6)} - {one.request_id for one in outputs if one.output}
    for request_id in unfinished:
        engine.abort(request_id)
    while engine.has_unfinished:
        outputs += engine.step()
    done = [one.output for one in outputs if one.output is not None]
    assert done[-1].token_ids == expected[int(done[-1].request_id)]
    check_nothing_left(engine)


def test_a_reset_forgets_what_was_loaded_for_those_that_wait(warm) -> None:
    store, expected = warm
    engine = make_engine(store, 2 * BLOCKS + 1)
    for number in range(4):
        engine.add_request(PROMPTS[number], PARAMS, str(number))
    engine.step()
    engine.reset_prefix_cache()
    assert engine.stats().num_used_blocks == 0
    tokens = {}
    while engine.has_unfinished:
        tokens |= {int(one.request_id): one.output.token_ids for one in engine.step() if one.output is not None}
    assert [tokens[number] for number in range(4)] == expected[:4]
    check_nothing_left(engine)
