"""A decode worker loads the chunks of a prompt as a prefill worker stores them; what does not come is a miss."""

import threading

import pytest
import torch
from support.models import generate_each, make_model, make_prompts
from support.store_engines import TOKENS, B, C, all_bytes, make_engine, tokens_of

from kvpage import CacheConfig
from kvpage.serving import Engine, EngineConfig, SamplingParams
from kvpage.store import ArrivingStore, KVStore, KVStoreConfig, metadata_of

BLOCKS = list(range(8))
PARAMS = SamplingParams(max_tokens=6)


@pytest.fixture
def store():
    engine = make_engine()
    with KVStore(KVStoreConfig(C, ("memory://?size=4MiB",)), metadata_of(engine, "m")) as made:
        yield made


def whole(num_tokens: int) -> int:
    return num_tokens // B * B


def in_thread(call) -> tuple[threading.Thread, list]:
    results: list = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    return thread, results


@pytest.mark.parametrize("num_tokens", [0, 1, B - 1, B, B + 1, C, C + 1, len(TOKENS)])
@pytest.mark.parametrize("start", [0, B])
def test_it_waits_for_chunks_that_come_one_by_one(store, num_tokens: int, start: int) -> None:
    source, target, tokens = make_engine(seed=1), make_engine(seed=2), TOKENS[:num_tokens]
    before = all_bytes(target)
    arriving = ArrivingStore(store, patience=60)
    with arriving.expect(tokens):
        assert arriving.lookup(tokens) == num_tokens
        thread, results = in_thread(lambda: arriving.load_blocks(tokens, target, BLOCKS, start=start))
        for end in range(C, whole(num_tokens) + C, C):
            store.store_blocks(tokens[: min(end, whole(num_tokens))], source, BLOCKS)
        thread.join(60)
    assert results == [max(start, whole(num_tokens))]
    if whole(num_tokens) > start:
        got, expected = (tokens_of(one, BLOCKS, start, whole(num_tokens)) for one in (target, source))
        assert torch.equal(got, expected)
    else:
        assert all(torch.equal(a, b) for a, b in zip(before, all_bytes(target), strict=True))


def test_an_end_of_the_other_worker_ends_the_wait(store) -> None:
    source, target = make_engine(seed=1), make_engine(seed=2)
    arriving = ArrivingStore(store, patience=3600)
    expectation = arriving.expect(TOKENS)
    store.store_blocks(TOKENS[:C], source, BLOCKS)
    thread, results = in_thread(lambda: arriving.load_blocks(TOKENS, target, BLOCKS))
    expectation.close()
    expectation.close()
    thread.join(60)
    assert results == [C]
    assert torch.equal(tokens_of(target, BLOCKS, 0, C), tokens_of(source, BLOCKS, 0, C))


def test_patience_ends_the_wait(store) -> None:
    arriving = ArrivingStore(store, patience=0.01)
    with arriving.expect(TOKENS):
        assert arriving.load_blocks(TOKENS, make_engine(), BLOCKS, start=B) == B


def test_prompts_that_nobody_expects_never_wait(store) -> None:
    arriving = ArrivingStore(store, patience=3600)
    with arriving.expect(TOKENS), arriving.expect(TOKENS, b"a"):
        assert arriving.lookup(TOKENS, namespace=b"other") == 0
        assert arriving.lookup(TOKENS[:-1]) == 0
        assert arriving.load_blocks(TOKENS, make_engine(), BLOCKS, namespace=b"other") == 0
    assert arriving.lookup(TOKENS) == arriving.lookup(TOKENS, namespace=b"a") == 0


def test_arguments_are_checked(store) -> None:
    for patience in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="patience must be finite and not negative, got"):
            ArrivingStore(store, patience)
    for wrong in (lambda: ArrivingStore(store, True), lambda: ArrivingStore(object())):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(TypeError):
        ArrivingStore(store).expect("text")


# --- two engines -----------------------------------------------------------------------------------------------------


def make_worker(store, **fields) -> Engine:
    config = EngineConfig(CacheConfig(block_size=B, num_gpu_blocks=64), load_or_compute=False, **fields)
    return Engine.from_model(make_model("llama"), config, store=store)


@pytest.fixture
def shared():
    cache = Engine.from_model(make_model("llama"), EngineConfig(CacheConfig(block_size=B, num_gpu_blocks=1))).cache
    with KVStore(KVStoreConfig(C, ("memory://?size=4MiB",)), metadata_of(cache, "m")) as made:
        yield made


def step_all(engine: Engine, request_id: str) -> list[int]:
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    return [one.token_id for one in outputs if one.request_id == request_id]


@pytest.mark.parametrize("num_tokens", [C, 5 * C + B + 3])
def test_decoding_begins_with_the_chunks_of_a_prefill_that_goes_on(shared, num_tokens: int) -> None:
    (prompt,) = make_prompts([num_tokens])
    (expected,) = generate_each(make_model("llama"), [prompt], 6)
    prefill = make_worker(shared, save_portions=True, max_num_batched_tokens=C)
    arriving = ArrivingStore(shared, patience=60)
    decode = make_worker(arriving, store_deadline=60)
    with arriving.expect(prompt):
        request_id = decode.add_request(prompt, PARAMS)
        thread, results = in_thread(lambda: step_all(decode, request_id))
        prefill.generate([prompt], SamplingParams(max_tokens=1))
        prefill.close()
    thread.join(60)
    assert results == [expected]
    assert decode.stats().num_cached_tokens == (num_tokens - 1) // B * B
    assert decode.stats().store.num_loads == (num_tokens > B)
    decode.close()
