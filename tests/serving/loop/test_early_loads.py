"""Requests that compute while bytes of theirs still come out of a store: each layer waits for its own, and no other.

The blocks are full of NaN, and copies are made when somebody waits for them. So whoever waits for too little gets no
tokens.
"""

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from support.insides import gathered_by, nobody_reads, num_lent
from support.late_lanes import LateLanes
from support.models import generate_each, make_model, make_prompts

from kvpage import CacheConfig
from kvpage.blocks.config import HostPolicy
from kvpage.cache import layered_moves
from kvpage.cache.layered_moves import Arrival
from kvpage.serving import Engine, EngineConfig, SamplingParams
from kvpage.serving.loop.moves.expected_blocks import ExpectedBlocks
from kvpage.serving.model.step import BatchItem
from kvpage.store import BlockStore, KVStore, KVStoreConfig, metadata_of
from kvpage.store.load import block_chunks
from kvpage.store.tiers.memory_tier import MemoryTier

B, CHUNK, MAX_TOKENS, PATIENCE = 4, 8, 6, 120
PARAMS = SamplingParams(max_tokens=MAX_TOKENS)
PROMPTS = make_prompts([5 * CHUNK + 3, 3 * CHUNK, CHUNK + 1, 3])


@pytest.fixture(autouse=True)
def one_layer_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_chunks, "RUN_BYTES", 1)
    monkeypatch.setattr(layered_moves, "MIN_PIECE_BYTES", 1)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return generate_each(make_model("llama"), PROMPTS, MAX_TOKENS)


class OnDevice:
    """A cache whose blocks are said to be on a GPU."""

    device = torch.device("cuda", 0)

    def __init__(self, cache: object) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> object:
        return getattr(self._cache, name)


class LateStore(BlockStore):
    """A store in memory. What it has verified comes late: a load ends when `released` is set.

    in_load: called in the store's thread after `verified` was told.
    """

    def __init__(self, seed: int = 0, tier: MemoryTier | None = None) -> None:
        self.lanes, self.released = LateLanes(seed), threading.Event()
        self.tier = tier or MemoryTier(1 << 20, pin_memory=False)
        self.arrivals: list[Arrival] = []
        self.in_load: Callable[[], None] = lambda: None
        self._there: dict[int, OnDevice] = {}
        self._store: KVStore | None = None

    def of(self, cache: object) -> KVStore:
        if self._store is None:
            self._store = KVStore(KVStoreConfig(CHUNK, num_threads=2), metadata_of(cache, "m"), [self.tier])
            gathered_by(self._store, self.lanes.pool)
        return self._store

    def close(self) -> None:
        """The calls are over; the tier stays open."""
        if self._store is not None:
            self._store.gate.close()

    def lookup(self, tokens, *, namespace: bytes = b"") -> int:
        return 0 if self._store is None else self._store.lookup(tokens, namespace=namespace)

    def store_blocks(self, tokens, engine, block_table, *, namespace: bytes) -> int:
        return self.of(engine).store_blocks(tokens, engine, block_table, namespace=namespace)

    def load_blocks(self, tokens, engine, block_table, *, start: int, namespace: bytes) -> int:
        return self.of(engine).load_blocks(tokens, engine, block_table, start=start, namespace=namespace)

    def load_early(self, tokens, engine, block_table, verified, *, start: int, namespace: bytes) -> int:
        def tell(end: int, arrival: Arrival) -> None:
            self.arrivals.append(arrival)
            verified(end, arrival)
            assert self.released.wait(PATIENCE)
            self.in_load()

        there = self._there.setdefault(id(engine), OnDevice(engine))
        return self.of(engine).load_early(tokens, there, block_table, tell, start=start, namespace=namespace)


@pytest.fixture(scope="module")
def full() -> MemoryTier:
    """A tier with all prompts."""
    store = LateStore()
    engine = make_engine(store, is_beside=False)
    engine.generate(PROMPTS, PARAMS)
    engine.close()
    assert store.tier.stats().num_records == 5 + 3 + 1
    return store.tier


def make_engine(
    store: LateStore, is_beside: bool = True, num_blocks: int = 64, num_host_blocks: int = 0, **options
) -> Engine:
    config = CacheConfig(block_size=B, num_gpu_blocks=num_blocks, num_cpu_blocks=num_host_blocks)
    fields = {"load_or_compute": False, "store_deadline": 600.0, **options}
    engine = Engine.from_model(make_model("llama"), EngineConfig(config, **fields), store=store)
    engine.debug.transfers._is_beside = is_beside
    store.of(engine.cache)
    for layer in engine.cache.gpu_cache:
        layer.fill_(float("nan"))
    return engine


@pytest.fixture
def store(full: MemoryTier) -> Iterator[LateStore]:
    made = LateStore(tier=full)
    yield made
    made.released.set()
    made.close()
    assert made.lanes.is_idle() and num_lent(made.lanes.pool) == 0
    assert nobody_reads(full)


def finish(engine: Engine, store: LateStore) -> dict[str, list[int]]:
    found = {}
    while engine.has_unfinished:
        found |= {one.request_id: one.output.token_ids for one in engine.step() if one.output}
    store.released.set()
    engine.close()
    engine.manager.check()
    assert engine.stats().num_used_blocks == 0
    return found


def step_until(engine: Engine, is_so: Callable[[], object]) -> None:
    for _ in range(50):
        engine.step()
        if is_so():
            return
    raise AssertionError("it never came to that")


def test_prompts_are_computed_and_end_before_their_loads_do(expected, store: LateStore) -> None:
    engine = make_engine(store)
    for prompt in PROMPTS[:2]:
        engine.add_request(prompt, PARAMS)
    outputs = {}
    while engine.has_unfinished:
        outputs |= {one.request_id: one.output for one in engine.step() if one.output}
    assert not store.released.is_set() and len(engine.debug.store.loads._late) == 2
    assert [outputs[f"request-{number}"].token_ids for number in (0, 1)] == expected[:2]
    assert [outputs[f"request-{number}"].num_cached_tokens for number in (0, 1)] == [5 * CHUNK, 3 * CHUNK - B]
    stats = engine.stats().store
    assert (stats.num_early_loads, stats.num_loads, stats.num_late, stats.num_errors) == (2, 2, 0, 0)
    assert engine.stats().num_used_blocks > 0, "blocks are given back before the last byte is there"
    finish(engine, store)
    assert (stats.num_loaded_tokens, engine.debug.transfers.expected._arrivals) == (8 * CHUNK - B, [])


def test_layers_wait_one_after_the_other(expected, store: LateStore) -> None:
    """Layer 0 attends while copies of later layers have not been made."""
    engine, late = make_engine(store), []
    for layer in engine.debug.runner.model.model.layers:
        layer.mlp.register_forward_hook(lambda *args: late.append(not store.lanes.is_idle()))
    engine.add_request(PROMPTS[0], PARAMS)
    step_until(engine, lambda: late)
    assert late == [True, True, False] and store.arrivals[0].is_over
    assert finish(engine, store) == {"request-0": expected[0]}


def test_a_layer_that_does_not_wait_is_caught(expected, store: LateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arrival, "wait_layer", lambda self, layer: None)
    engine = make_engine(store)
    engine.add_request(PROMPTS[0], PARAMS)
    assert finish(engine, store) != {"request-0": expected[0]}


def test_requests_that_share_the_blocks_wait_too(expected, store: LateStore) -> None:
    """The second prompt is the same. A step that ended amid its layers has not waited for the others."""
    engine, num_calls = make_engine(store), []

    def fail_once(*args: object) -> None:
        num_calls.append(not store.lanes.is_idle())
        if len(num_calls) == 1:
            raise RuntimeError("a hook of the model's has failed")

    engine.debug.runner.model.model.layers[0].mlp.register_forward_hook(fail_once)
    for _ in range(2):
        engine.add_request(PROMPTS[0], PARAMS)
    with pytest.raises(RuntimeError, match="a hook of the model's has failed"):
        step_until(engine, lambda: False)
    assert num_calls == [True] and not store.arrivals[0].is_over
    assert finish(engine, store) == {"request-0": expected[0], "request-1": expected[0]}


def test_an_aborted_request_leaves_its_load_the_blocks(expected, store: LateStore) -> None:
    """They are given to nobody before the last byte is there."""
    num_blocks = 16
    engine = make_engine(store, num_blocks=num_blocks)
    engine.add_request(PROMPTS[0], PARAMS, request_id="first")
    step_until(engine, lambda: store.arrivals and store.arrivals[0].is_over)
    (load,) = engine.debug.store.loads._late
    held = set(load.block_ids.tolist())
    engine.abort("first")
    assert engine.stats().num_used_blocks >= 5 * CHUNK // B
    engine.add_request(PROMPTS[3] + PROMPTS[2], SamplingParams(max_tokens=2), request_id="second")
    engine.step()
    assert not held & set(engine.manager.block_ids(engine.loop.requests["second"].seq_id).tolist())
    finish(engine, store)
    assert engine.generate(PROMPTS[:1], PARAMS)[0].token_ids == expected[0], "what has come can be found"


def test_blocks_that_are_short_come_from_loads_that_have_ended(expected, store: LateStore) -> None:
    engine = make_engine(store, num_blocks=14)
    engine.add_request(PROMPTS[0], PARAMS, request_id="first")
    step_until(engine, lambda: store.arrivals and store.arrivals[0].is_over)
    engine.abort("first")
    prompt = make_prompts([50])[0][::-1]
    reclaim = engine.debug.store.reclaim

    def release_first() -> bool:
        store.released.set()
        return reclaim()

    engine.scheduler.reclaimers[:] = [release_first]
    engine.add_request(prompt, PARAMS, request_id="second")
    assert finish(engine, store) == {"second": generate_each(make_model("llama"), [prompt], MAX_TOKENS)[0]}


def test_a_reset_waits_for_the_last_byte(expected, store: LateStore) -> None:
    engine = make_engine(store)
    engine.add_request(PROMPTS[0], PARAMS)
    step_until(engine, lambda: store.arrivals and store.arrivals[0].is_over)
    drain, order = engine.debug.store.drain, []
    store.in_load = lambda: order.append("the load ends")

    def drain_later() -> None:
        threading.Timer(0.05, store.released.set).start()
        drain()
        order.append("drained")

    engine.debug.store.drain = drain_later
    engine.reset_prefix_cache()
    assert order == ["the load ends", "drained"] and engine.stats().num_used_blocks == 0
    assert finish(engine, store) == {"request-0": expected[0]}


def test_copies_that_fail_after_all_are_forgotten(expected, store: LateStore) -> None:
    """The first step raises; the next ones load the prompt again."""
    engine = make_engine(store)
    store.lanes.failing_work = 7

    def end_load() -> bool:
        if store.arrivals:
            store.released.set()
        return False

    engine.add_request(PROMPTS[0], PARAMS)
    with pytest.raises(RuntimeError, match="copy 7 has failed"):
        step_until(engine, end_load)
    store.released.set()
    (load,) = engine.debug.store.loads._late
    while not load.future.done():
        load.future.exception(PATIENCE)
    assert finish(engine, store) == {"request-0": expected[0]}
    assert engine.stats().num_cached_tokens == 5 * CHUNK, "at the first admission"
    assert engine.stats().num_computed_tokens == len(PROMPTS[0]) - 5 * CHUNK + MAX_TOKENS - 1
    assert len(store.arrivals) == 2


def test_tokens_that_others_have_computed_meanwhile(expected, store: LateStore) -> None:
    """The tree would give the load's own blocks back while they are written. So these are the load's to its end.

    Its request needs it no more.
    """
    engine = make_engine(store)
    connector, (tokens,) = engine.debug.store, [np.array(PROMPTS[0], np.int32)]
    engine.add_request(PROMPTS[0], PARAMS)
    (request,) = engine.scheduler.waiting
    connector.ask([request])
    assert connector.loads.begin(request, 0)
    connector.wait()
    connector.ask(())
    assert connector.loads.begin(request, 0)  # its turn has come: the load begins
    (load,) = connector.loads._loads.values()
    load.verified.result(PATIENCE)
    engine.manager.allocate("other", tokens)
    engine.compute([BatchItem("other", tokens, 0, len(tokens), ())])
    engine.manager.commit("other", tokens)
    connector.ask(())
    held = load.block_ids.tolist()
    assert load.num_early == 0 and not connector.loads.holds(load.request)
    free = engine.manager.allocate("more", np.arange(4 * B, dtype=np.int32))
    assert not set(free.block_ids.tolist()) & set(held)
    for name in ("other", "more"):
        engine.manager.release(name)
    store.released.set()
    assert finish(engine, store) == {"request-0": expected[0]}


def test_moves_wait_for_what_is_on_its_way(expected, store: LateStore) -> None:
    """With write-through the host gets its copy at the commit: of the bytes, not of what was there before."""
    engine = make_engine(store, num_host_blocks=32, host_policy=HostPolicy(0))
    engine.add_request(PROMPTS[0], PARAMS)
    assert finish(engine, store) == {"request-0": expected[0]}
    assert engine.stats().transfers["swap_out"].num_blocks >= 5 * CHUNK // B
    for layer in engine.cache.cpu_cache:
        assert not bool(layer[:, : 5 * CHUNK // B].isnan().any())


def test_a_load_that_is_late_is_committed_at_its_end(expected, store: LateStore) -> None:
    engine = make_engine(store, store_deadline=0.0)
    engine.add_request(PROMPTS[0], PARAMS)
    assert finish(engine, store) == {"request-0": expected[0]}


@pytest.mark.parametrize("told", [10**6, -1, True, "40", None])
def test_a_store_that_tells_another_count(expected, store: LateStore, told: object) -> None:
    """More than was asked for is all of it; what is no count is nothing."""
    engine = make_engine(store)
    load_early = store.load_early

    def lie(tokens, engine, block_table, verified, *, start: int, namespace: bytes) -> int:
        return load_early(
            tokens, engine, block_table, lambda end, one: verified(told, one), start=start, namespace=namespace
        )

    store.load_early = lie
    engine.add_request(PROMPTS[1], PARAMS)
    assert finish(engine, store) == {"request-0": expected[1]}
    assert (engine.stats().num_cached_tokens > 0) == (told == 10**6)


class Waits:
    """An arrival, as far as ExpectedBlocks uses it."""

    def __init__(self) -> None:
        self.layers: list[int | None] = []
        self.is_over = False

    def wait_layer(self, layer: int) -> None:
        self.layers.append(layer)

    def wait(self) -> None:
        self.layers.append(None)
        self.is_over = True


def test_who_waits_for_which_blocks() -> None:
    expected, arrivals = ExpectedBlocks(), [Waits(), Waits(), Waits()]
    tables = np.array([[1, 2, 0], [5, 0, 0]], np.int32)
    assert expected.join(None, tables) is None and expected.join(arrivals[2], tables) is arrivals[2]
    expected.add(np.array([3, 4], np.int32), arrivals[0])
    expected.add(np.array([5, 6], np.int32), arrivals[1])
    assert expected.join(None, np.array([[1, 2]], np.int32)) is None
    assert expected.join(None, tables) is arrivals[1]
    expected.join(arrivals[2], tables).wait_layer(4)
    assert [one.layers for one in arrivals] == [[], [4], [4]]
    expected.wait(tables)
    assert [one.is_over for one in arrivals] == [False, True, False] and expected.join(None, tables) is None
    expected.discard(arrivals[1])
    expected.discard(arrivals[1])
    expected.wait()
    assert [one.layers for one in arrivals] == [[None], [4, None], [4]]
