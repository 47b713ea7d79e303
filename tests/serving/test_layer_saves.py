"""The first layers of chunks are stored while the last ones are computed, and nothing wrong is ever found."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch
from support.engines import PATIENCE
from support.group_memory import free_blocks
from support.models import generate_each, make_model, make_prompts
from support.store_engines import B, C
from transformers import PreTrainedModel

from kvpage import CacheConfig, CacheEngine, ops
from kvpage.serving import Engine, EngineConfig, SamplingParams
from kvpage.serving.model import attention
from kvpage.store import ArrivingStore, KVStore, KVStoreConfig, LayerwiseStore, metadata_of

SOON = 120.0
NUM_LAYERS = 3
PARAMS = SamplingParams(max_tokens=6)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model("llama")


@pytest.fixture
def store(model) -> Iterator[KVStore]:
    cache = Engine.from_model(model, EngineConfig(CacheConfig(B, 1))).cache
    with KVStore(KVStoreConfig(C, ("memory://?size=4MiB",)), metadata_of(cache, "m")) as made:
        yield made


def make_worker(model: PreTrainedModel, store: KVStore, num_layers: int = 1, num_blocks: int = 64, **fields) -> Engine:
    settings = {"save_portions": True, "load_or_compute": False, **fields}
    engine = Engine.from_model(model, EngineConfig(CacheConfig(B, num_blocks), **{**PATIENCE, **settings}))
    engine.use_store(LayerwiseStore(store, engine.cache, num_layers))
    return engine


def groups_of(engine: Engine) -> tuple:
    return engine.debug.store.store.groups


def on_attend(monkeypatch, do: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
    """Have `do` called with each layer that has attended, and with what it gives; it returns that, or other numbers."""
    attend = attention._attend

    def watched(module, rows, layer, step, how):
        return do(layer, attend(module, rows, layer, step, how))

    monkeypatch.setattr(attention, "_attend", watched)


def comes(is_there: Callable[[], bool]) -> bool:
    end = time.monotonic() + SOON
    while not is_there() and time.monotonic() < end:
        time.sleep(0.001)
    return is_there()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_tokens", [B, C - 1, C + 1, 2 * C + B + 1])
def test_first_layers_are_stored_before_the_last_one_is_computed(store, monkeypatch, device, num_tokens: int) -> None:
    served = make_model("llama").to(device)
    (prompt,) = make_prompts([num_tokens])
    whole = prompt[: num_tokens // B * B]
    engine, found = make_worker(served, store), []

    def watch(layer: int, output: torch.Tensor) -> torch.Tensor:
        first, second, last = groups_of(engine)
        if layer == NUM_LAYERS - 1 and output.shape[1] > 1:
            found.append(comes(lambda: all(first.there(whole)) and all(second.there(whole))))
            found.append(any(last.there(whole)))
        return output

    with monkeypatch.context() as patch:
        on_attend(patch, watch)
        (output,) = engine.generate([prompt], PARAMS)
    engine.debug.connectors.drain()
    assert found == [True, False]
    assert store.lookup(whole) == 0 and engine.debug.store.store.lookup(whole) == len(whole)
    engine.close()
    second = make_worker(served, store, save_portions=False)
    (again,) = second.generate([prompt], PARAMS)
    assert again.token_ids == output.token_ids
    assert second.stats().num_cached_tokens == num_tokens // C * C  # of a longer prompt, as every KVStore
    second.close()


def test_layers_are_not_stored_early_unless_portions_are(model, store, monkeypatch) -> None:
    (prompt,) = make_prompts([2 * C])
    engine, found = make_worker(model, store, save_portions=False), []
    on_attend(monkeypatch, lambda layer, output: (found.append(any(groups_of(engine)[0].there(prompt))), output)[1])
    engine.generate([prompt], PARAMS)
    engine.debug.connectors.drain()
    assert not any(found[:NUM_LAYERS]) and all(groups_of(engine)[0].there(prompt))
    engine.close()


@pytest.mark.parametrize("what", ["raises", "no numbers"])
def test_a_step_that_fails_in_its_last_layer_completes_no_chunk(model, store, monkeypatch, what: str) -> None:
    (prompt,) = make_prompts([2 * C])
    engine = make_worker(model, store)

    def spoil(layer: int, output: torch.Tensor) -> torch.Tensor:
        if layer != NUM_LAYERS - 1:
            return output
        assert comes(lambda: all(groups_of(engine)[0].there(prompt)))
        if what == "raises":
            raise ArithmeticError("of the test")
        return output * float("nan")

    with monkeypatch.context() as patch:
        on_attend(patch, spoil)
        (output,) = engine.generate([prompt], PARAMS)
        assert output.samples[0].finish_reason == "error"
    engine.debug.connectors.drain()
    assert all(groups_of(engine)[0].there(prompt)) and not any(groups_of(engine)[-1].there(prompt))
    assert engine.debug.store.store.lookup(prompt) == 0
    engine.manager.check()
    (expected,) = generate_each(model, [prompt], 6)
    assert engine.generate([prompt], PARAMS)[0].token_ids == expected
    engine.debug.connectors.drain()
    assert engine.debug.store.store.lookup(prompt) == 2 * C
    engine.close()


def test_chunks_that_are_there_stay_as_they_are(model, store, monkeypatch) -> None:
    """A prompt that gives no numbers now cannot mend a chunk whose first layers were evicted."""
    (prompt,) = make_prompts([2 * C])
    engine = make_worker(model, store)
    engine.generate([prompt], PARAMS)
    engine.debug.connectors.drain()
    groups_of(engine)[0].remove(prompt[:C])
    engine.reset_prefix_cache()
    with monkeypatch.context() as patch:
        on_attend(patch, lambda layer, output: output * float("nan"))
        engine.generate([prompt], PARAMS)
    engine.debug.connectors.drain()
    assert groups_of(engine)[0].there(prompt) == [False, True]
    engine.close()


def rows_of(cache: CacheEngine, table: list[int], num_tokens: int) -> torch.Tensor:
    """K and V of a sequence's first tokens."""
    tables = torch.tensor([table], dtype=torch.int32)
    return torch.stack([torch.stack(ops.gather_cache(one, tables, [num_tokens])) for one in cache.bound_caches])


def poison(engine: Engine) -> None:
    """Spoil the blocks that nobody owns."""
    is_free = torch.from_numpy(free_blocks(engine.manager.space.pool))
    free = is_free.nonzero().flatten().repeat_interleave(B) * B + torch.arange(B).repeat(int(is_free.sum()))
    for cache in engine.cache.bound_caches:
        rows = torch.full((len(free), cache.layout.num_kv_heads, cache.layout.head_size), float("nan"))
        ops.reshape_and_cache(rows, rows, cache, free)


def right_rows(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> torch.Tensor:
    """K and V of a prompt's first tokens, as an engine computes them that has nothing else to do."""
    engine = Engine.from_model(model, EngineConfig(CacheConfig(B, 64), enable_prefix_caching=False))
    request = engine.add_request(prompt, SamplingParams(max_tokens=2))
    engine.step()
    rows = rows_of(engine.cache, engine.manager.block_ids(request).tolist(), num_tokens)
    engine.close()
    return rows


@pytest.mark.parametrize("seed", range(4))
def test_busy_engines_store_right_bytes(model, store, seed: int) -> None:
    """Twins, shared prefixes, preemptions and a slow store: whatever is found is what a prompt's K and V are.

    Blocks are poisoned as soon as nobody owns them.
    """
    draw = random.Random(seed)
    shared = make_prompts([3 * C], seed)[0]
    prompts = [
        [*shared[: draw.randrange(3 * C)], *make_prompts([draw.randrange(1, 3 * C)], 9 + i)[0]] for i in range(6)
    ]
    prompts += [list(prompt) for prompt in prompts[:4]]
    expected, num_layers = generate_each(model, prompts, 6), draw.choice([1, 2])
    engine = make_worker(model, store, num_layers, num_blocks=44, max_num_batched_tokens=draw.choice([C, 48]))
    for group in groups_of(engine):
        put = group.put
        group.put = lambda *args, put=put, **how: (time.sleep(draw.choice([0, 0, 0.004])), put(*args, **how))[1]
    tokens: dict[str, list[int]] = {engine.add_request(prompt, PARAMS): [] for prompt in prompts}
    saves, unheld = engine.debug.store.saves, []
    end_step = saves.end_step
    saves.end_step = lambda: (saves._written and unheld.append(len(saves._block_ids)), end_step())
    while engine.has_unfinished:
        for one in engine.step():
            tokens[one.request_id].append(one.token_id)
        poison(engine)
    assert list(tokens.values()) == expected
    assert unheld.count(0) > len(unheld) / 2, "the saves of whole chunks hold the blocks: few steps wait for the store"
    engine.debug.connectors.drain()
    engine.manager.check()
    engine.close()
    reference = make_worker(model, store).cache
    layerwise, num_found = LayerwiseStore(store, reference, num_layers), 0
    for prompt in prompts:
        end = layerwise.load_blocks(prompt[: len(prompt) // B * B], reference, list(range(64)))
        num_found += end
        if end:
            found, right = rows_of(reference, list(range(64)), end), right_rows(model, prompt, end)
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
    assert num_found > sum(map(len, prompts)) / 2


@pytest.mark.parametrize("is_same_process", [True, False, None])
def test_first_layers_that_a_failed_step_has_left_are_replaced(
    model, store, monkeypatch, is_same_process: bool | None
) -> None:
    """A passing fault gives K and V of no numbers. A healthy step does not complete such a chunk."""
    (prompt,) = make_prompts([2 * C + B])
    (expected,) = generate_each(model, [prompt], 6)
    engine = make_worker(model, store)

    def fault(layer: int, output: torch.Tensor) -> torch.Tensor:
        if layer == NUM_LAYERS - 1:
            assert comes(lambda: all(groups_of(engine)[1].there(prompt)))
        return output * float("nan") if layer == 0 else output

    with monkeypatch.context() as patch:
        on_attend(patch, fault)
        (output,) = engine.generate([prompt], PARAMS)
        assert output.samples[0].finish_reason == "error"
    engine.debug.connectors.drain()
    assert all(groups_of(engine)[1].there(prompt)) and not any(groups_of(engine)[2].there(prompt))
    if is_same_process is None:  # and finds no place for the next prompt, until its step is over
        engine.debug.store.begin_step = lambda prompts: None
    elif not is_same_process:
        engine.close()
        engine = make_worker(model, store, save_portions=False)
    assert engine.generate([prompt], PARAMS)[0].token_ids == expected
    engine.close()
    reference = make_worker(model, store).cache
    assert LayerwiseStore(store, reference, 1).load_blocks(prompt, reference, list(range(64))) == len(prompt)
    found, right = rows_of(reference, list(range(64)), len(prompt)), right_rows(model, prompt, len(prompt))
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def test_no_block_is_given_back_while_it_is_being_stored(model, store, monkeypatch) -> None:
    """A request ends without numbers, and its blocks are poisoned after the step. Its first layers stay right."""
    (prompt,) = make_prompts([2 * C])
    engine, unheld = make_worker(model, store), []
    begun, ended, poisoned = (threading.Event() for _ in range(3))
    saves, first = engine.debug.store.saves, groups_of(engine)[0]
    put, end_step = first.put, saves.end_step

    def slow_put(*args, **how) -> None:
        begun.set()
        assert ended.wait(SOON)
        poisoned.wait(0.2)  # in vain: the step ends after this call
        put(*args, **how)

    def end() -> None:
        unheld.append(len(saves._block_ids))
        ended.set()
        end_step()

    first.put, saves.end_step = slow_put, end
    engine.add_request(prompt, PARAMS)

    def spoil(layer: int, output: torch.Tensor) -> torch.Tensor:
        return output * float("nan") if layer == NUM_LAYERS - 1 and begun.wait(SOON) else output

    with monkeypatch.context() as patch:
        on_attend(patch, spoil)
        assert engine.step()[0].finish_reason == "error"
    poison(engine)
    poisoned.set()
    assert unheld == [2 * C // B] and all(first.there(prompt))
    engine.generate([prompt], PARAMS)
    engine.debug.connectors.drain()
    reference = make_worker(model, store).cache
    assert LayerwiseStore(store, reference, 1).load_blocks(prompt, reference, list(range(64))) == 2 * C
    found, right = rows_of(reference, list(range(64)), 2 * C), right_rows(model, prompt, 2 * C)
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
    engine.close()


# --- trouble ---------------------------------------------------------------------------------------------------------


def slow_first(engine: Engine) -> tuple[threading.Event, threading.Event]:
    """Have the first group's puts wait. Returns an event that is set when one waits, and the one that lets them go."""
    first, is_waiting, goes = groups_of(engine)[0], threading.Event(), threading.Event()
    put = first.put

    def waiting(*args, **how) -> None:
        is_waiting.set()
        assert goes.wait(SOON)
        put(*args, **how)

    first.put = waiting
    return is_waiting, goes


def test_a_step_that_fails_does_not_wait_for_saves_before_its_own(model, store, monkeypatch) -> None:
    earlier, prompt = make_prompts([2 * C, 3 * C])
    engine = make_worker(model, store)
    is_waiting, goes = slow_first(engine)
    engine.add_request(earlier, SamplingParams(max_tokens=40))
    engine.step()
    assert is_waiting.wait(SOON)
    engine.add_request(prompt, PARAMS)
    with monkeypatch.context() as patch:
        on_attend(patch, lambda layer, output: output * float("nan") if output.shape[1] > 1 else output)
        while not any(one.finish_reason == "error" for one in engine.step()):
            pass  # it waits for what the store says
    assert not goes.is_set()
    goes.set()
    while engine.has_unfinished:
        engine.step()
    engine.debug.connectors.drain()
    assert engine.debug.store.store.lookup(earlier) == 2 * C and not any(groups_of(engine)[0].there(prompt))
    engine.close()


def test_prompts_that_have_begun_have_places(model, store) -> None:
    """Others of the same step may take all places of the saves under way."""
    (prompt,) = make_prompts([3 * C])
    engine = make_worker(model, store, max_num_batched_tokens=2 * C)
    connector = engine.debug.store
    begin_step = connector.begin_step

    def begin(prompts):
        connector._max_saves = 8
        written = begin_step(prompts)
        connector._max_saves = 0
        return written

    connector.begin_step = begin
    engine.generate([prompt], PARAMS)
    connector.drain()
    assert connector.store.lookup(prompt) == 3 * C and connector.stats.num_skipped == 0
    engine.close()


def test_a_close_within_a_step_ends(model, store, monkeypatch) -> None:
    """As a signal handler might."""
    (prompt,) = make_prompts([2 * C])
    engine, closed = make_worker(model, store), []

    def close(layer: int, output: torch.Tensor) -> torch.Tensor:
        if not closed:
            closed.append(engine.debug.store)
            engine.debug.store.close()
        return output

    with monkeypatch.context() as patch:
        on_attend(patch, close)
        engine.add_request(prompt, PARAMS)
        with suppress(RuntimeError):  # no thread takes saves any more
            engine.step()
    assert closed and not engine.debug.store.saves._block_ids


def test_what_cannot_be_submitted_holds_nothing_up(model, store, monkeypatch) -> None:
    (prompt,) = make_prompts([2 * C])
    engine = make_worker(model, store)
    saves = engine.debug.store.saves
    submit = saves._thread.submit

    def interrupted(*args):
        submit(*args)
        raise ArithmeticError("of the test")

    with monkeypatch.context() as patch:
        patch.setattr(saves._thread, "submit", interrupted)
        engine.add_request(prompt, PARAMS)
        with pytest.raises(ArithmeticError):
            engine.step()
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    assert [one.token_id for one in outputs] == generate_each(model, [prompt], 6)[0]
    engine.debug.connectors.drain()
    assert engine.debug.store.store.lookup(prompt) == 2 * C
    engine.close()


def test_a_put_that_raises_is_counted_and_made_up_for(model, store) -> None:
    (prompt,) = make_prompts([2 * C])
    engine, raised = make_worker(model, store), []
    first = groups_of(engine)[0]
    put = first.put

    def raising(*args, **how) -> None:
        if not raised:
            raised.append(1)
            raise OSError("of the test")
        put(*args, **how)

    first.put = raising
    engine.generate([prompt], PARAMS)
    engine.debug.connectors.drain()
    assert raised and engine.stats().store.num_errors == 1
    assert engine.debug.store.store.lookup(prompt) == 2 * C
    engine.close()


def test_a_store_of_another_engine_is_refused(model, store) -> None:
    config = EngineConfig(CacheConfig(B, 8))
    one, other = (Engine.from_model(model, config) for _ in range(2))
    layerwise = LayerwiseStore(store, other.cache)
    for refused in (layerwise, ArrivingStore(layerwise)):
        with pytest.raises(ValueError, match="engine must be the one that the LayerwiseStore was made with"):
            one.use_store(refused)
    one.use_store(ArrivingStore(store))
    one.close()


# --- two roles -------------------------------------------------------------------------------------------------------


def test_a_decode_worker_loads_layers_as_they_are_computed(model, store) -> None:
    (prompt,) = make_prompts([5 * C + B + 3])
    (expected,) = generate_each(model, [prompt], 6)
    prefill = make_worker(model, store, 2, max_num_batched_tokens=2 * C)
    decode = Engine.from_model(model, EngineConfig(CacheConfig(B, 64), load_or_compute=False, store_deadline=SOON))
    arriving = ArrivingStore(LayerwiseStore(store, decode.cache, 2), patience=SOON)
    decode.use_store(arriving)
    results: list[list[int]] = []
    with arriving.expect(prompt):
        thread = threading.Thread(target=lambda: results.append(decode.generate([prompt], PARAMS)[0].token_ids))
        thread.start()
        prefill.generate([prompt], SamplingParams(max_tokens=1))
        prefill.close()
    thread.join(SOON)
    assert results == [expected]
    assert decode.stats().num_cached_tokens == (len(prompt) - 1) // B * B
    decode.close()


@pytest.mark.parametrize("num_window_blocks", [12])
def test_models_whose_layers_have_other_blocks_refuse_it(store, num_window_blocks: int) -> None:
    config = EngineConfig(CacheConfig(B, 32), num_window_blocks=num_window_blocks)
    engine = Engine.from_model(make_model("gemma3"), config)
    with pytest.raises(ValueError, match="store must keep groups of layers apart with num_window_blocks, as a KVStore"):
        engine.use_store(LayerwiseStore(store, engine.cache))
