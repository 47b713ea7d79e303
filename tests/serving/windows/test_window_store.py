"""An engine with a KVStore, of models whose windows have blocks of their own: prompts go on from disk, same tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from support.models import WINDOW
from support.state_engines import own_tokens, random_prompt
from support.store_kv import Troubled, corrupt
from support.window_engines import KINDS, B, ask, check_nothing_held, finished, greedy, make_engine, make_window_model

from kvpage.serving import Engine
from kvpage.store import KVStore, KVStoreConfig, KVStoreMetadata
from kvpage.store.tiers.memory_tier import MemoryTier

C = 2 * B
NUM_TOKENS = 8
LEAST = WINDOW // B + 2
COMMON = random_prompt(9 * B + 1, 5)
PROMPTS = [[*COMMON, 7, 9, 11], [*COMMON, 8], COMMON[: 3 * B + 2], random_prompt(B + 1, 6)]


def make_store(*tiers: str | MemoryTier, chunk_size: int = C) -> KVStore:
    texts = tuple(one for one in tiers if isinstance(one, str)) or ("memory://?size=4MiB",)
    config = KVStoreConfig(chunk_size, texts, num_threads=1)
    given = [one for one in tiers if not isinstance(one, str)] or None
    return KVStore(config, KVStoreMetadata("m", kv_dtype=torch.float32), given)


def memory_tier() -> MemoryTier:
    return MemoryTier(4 << 20, pin_memory=False)


def serve(engine: Engine, store: Any, prompts: list[list[int]] = PROMPTS) -> tuple[list[list[int]], list[int]]:
    """The tokens of each prompt, one after the other, and how many were cached. Nothing is left behind."""
    engine.use_store(store)
    answers = [ask(engine, prompt, NUM_TOKENS) for prompt in prompts]
    engine.close()
    check_nothing_held(engine)
    return [tokens for tokens, _ in answers], [num_cached for _, num_cached in answers]


def expected_of(model: tf.PreTrainedModel) -> list[list[int]]:
    return [own_tokens(model, prompt, NUM_TOKENS) for prompt in PROMPTS]


def whole(num_tokens: int) -> int:
    return num_tokens // B * B


SHARED = [0, whole(len(COMMON)), whole(len(PROMPTS[2]) - 1), 0]
ALL = [whole(len(prompt) - 1) for prompt in PROMPTS]


@pytest.mark.parametrize("chunk_size", [B, C, C + 2, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_a_second_engine_goes_on_from_the_store(tmp_path: Path, kind: str, chunk_size: int) -> None:
    model = make_window_model(kind)
    for found in (SHARED, ALL):
        with make_store(f"disk://{tmp_path}?size=16MiB&segment=8MiB", chunk_size=chunk_size) as store:
            tokens, num_cached = serve(make_engine(model, load_or_compute=False), store)
            assert tokens == expected_of(model)
            assert num_cached == found or chunk_size > C, num_cached
            assert store.stats().corrupt_records == 0
    assert num_cached[0] == ALL[0]


@pytest.mark.parametrize(("kind", "step"), [("gemma3", C), ("mistral", B)])
def test_a_shared_prefix_is_found_at_chunks(kind: str, step: int) -> None:
    """A prompt that leaves another one early finds the windows that the other one had there. step: chunks of full
    layers; those of windows are blocks."""
    model, first = make_window_model(kind), random_prompt(9 * B + 1, 5)
    with make_store() as store:
        serve(make_engine(model, load_or_compute=False), store, [first])
        for position in (C + 1, 2 * C, 3 * C + B + 1):
            prompt = [*first[:position], first[position] % 90 + 1, 3]
            answer = serve(make_engine(model, load_or_compute=False), store, [prompt])
            assert answer == ([own_tokens(model, prompt, NUM_TOKENS)], [position // step * step])


@pytest.mark.parametrize("kind", KINDS)
def test_windows_that_have_gone_are_not_stored(kind: str) -> None:
    """In few blocks, a long prompt leaves its last window. Where the store is asked on the way, all are stored."""
    model, prompt = make_window_model(kind), PROMPTS[0]
    expected = [own_tokens(model, prompt, NUM_TOKENS)]
    other = [*prompt[: 2 * C], 1, 2, 3]
    for save_portions, num_shared in ((False, 0), (True, 2 * C)):
        few = {
            "num_window_blocks": LEAST + C // B, "max_num_batched_tokens": C, "save_portions": save_portions,
            "load_or_compute": False,
        }  # fmt: skip
        with make_store() as store:
            assert serve(make_engine(model, **few), store, [prompt]) == (expected, [0])
            assert serve(make_engine(model, **few), store, [prompt]) == (expected, [ALL[0]])
            tokens, num_cached = serve(make_engine(model, **few), store, [other])
            assert tokens == [own_tokens(model, other, NUM_TOKENS)]
            assert num_cached == [num_shared]


@pytest.mark.parametrize("num_window_blocks", [12, 16, 64])
def test_a_busy_engine_stores_last_windows(num_window_blocks: int) -> None:
    """Sequences share few blocks. All last windows are stored nevertheless, though chunks reach behind them.

    A prompt of whole blocks needs the window a block before its end when it comes again, which may have gone: blocks
    that a slow store still reads are not free. An engine stores eight prompts at once, so it skips none of these.
    """
    model = make_window_model("gemma3")
    prompts = [random_prompt(5 * B + number, 100 + number) for number in range(8)]
    fields = {"num_window_blocks": num_window_blocks, "load_or_compute": False, "max_num_batched_tokens": 13}
    with make_store(chunk_size=4 * B) as store:
        engine = make_engine(model, **fields)
        engine.use_store(store)
        for prompt in prompts:
            engine.add_request(prompt, greedy(NUM_TOKENS))
        finished(engine)
        engine.close()
        tokens, num_cached = serve(make_engine(model, **fields), store, prompts)
    assert tokens == [own_tokens(model, prompt, NUM_TOKENS) for prompt in prompts]
    for prompt, found in zip(prompts, num_cached, strict=True):
        assert found == whole(len(prompt) - 1) or (len(prompt) % B == 0 and num_window_blocks < 64), len(prompt)


@pytest.mark.parametrize("kind", ["gemma2", "mistral"])
def test_damage_is_computed_again(kind: str) -> None:
    model, tier = make_window_model(kind), memory_tier()
    store = make_store(tier)
    serve(make_engine(model, load_or_compute=False), store)
    for record in store.records():
        corrupt(tier, bytes.fromhex(record.key), record.num_bytes - 40)
    assert serve(make_engine(model, load_or_compute=False), store)[0] == expected_of(model)
    assert store.stats().corrupt_records > 0
    for _ in range(2):  # what nobody has read before is found damaged now, and stored anew
        assert serve(make_engine(model, load_or_compute=False), store)[0] == expected_of(model)
    assert serve(make_engine(model, load_or_compute=False), store) == (expected_of(model), ALL)
    store.close()


def test_a_tier_in_trouble() -> None:
    fails, model = [False], make_window_model("gemma3")
    store = make_store(Troubled(lambda: fails[0]))
    tokens = serve(make_engine(model, load_or_compute=False), store)[0]
    fails[0] = True
    assert serve(make_engine(model, load_or_compute=False), store) == (tokens, SHARED)
    fails[0] = False
    assert serve(make_engine(model, load_or_compute=False), store) == (tokens, ALL)
    store.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_window_blocks", [LEAST, 9])
def test_many_requests_in_few_blocks(kind: str, num_window_blocks: int) -> None:
    """Loads and saves hold blocks that others wait for."""
    model = make_window_model(kind)
    prompts = [*PROMPTS, *[[*COMMON[: 2 * B + number], 40 + number, 3] for number in range(5)]]
    expected = {tuple(prompt): own_tokens(model, prompt, NUM_TOKENS) for prompt in prompts}
    with make_store() as store:
        for _ in range(2):
            few = {"num_window_blocks": num_window_blocks, "max_num_batched_tokens": 13, "load_or_compute": False}
            engine = make_engine(model, 40, **few)
            engine.use_store(store)
            for prompt in prompts:
                engine.add_request(prompt, greedy(NUM_TOKENS))
            found = {tuple(one.prompt_token_ids): one.samples[0].token_ids for one in finished(engine)}
            assert found == expected
            engine.close()
            check_nothing_held(engine)


def test_caches_of_other_layers_find_nothing() -> None:
    """One table of all layers, and the full layers' alone: neither reads the records of the other."""
    model = make_window_model("gemma3")
    tokens = expected_of(model)
    with make_store() as store:
        for num_window_blocks in (64, None, 64, None):
            engine = make_engine(model, load_or_compute=False) if num_window_blocks else _shared_table(model)
            engine.use_store(store)
            outputs = [engine.generate([prompt], greedy(NUM_TOKENS))[0] for prompt in PROMPTS]
            assert [output.token_ids for output in outputs] == tokens
            engine.close()
        assert store.stats().corrupt_records == 0


def _shared_table(model: tf.PreTrainedModel) -> Engine:
    from kvpage import CacheConfig
    from kvpage.serving import EngineConfig

    return Engine.from_model(model, EngineConfig(CacheConfig(B, 96), load_or_compute=False))


def test_explain_names_each_group() -> None:
    model = make_window_model("gemma3")
    with make_store() as store:
        serve(make_engine(model, load_or_compute=False), store, PROMPTS[:1])
        engine = make_engine(model, load_or_compute=False)
        engine.use_store(store)
        reach = engine.explain([*PROMPTS[0][: 3 * C], 1, 2, 3]).store
        assert reach is not None and reach.num_tokens == 3 * C
        assert [(group.group, group.num_tokens) for group in reach.groups] == [
            ("attention", 3 * C), (f"window of {WINDOW}", 3 * C)
        ]  # fmt: skip
        engine.close()
