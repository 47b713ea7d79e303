"""An engine with a KVStore, of models with states: prompts go on from disk at exact positions, with the same tokens."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.dict_store import StandIn
from support.engines import PATIENCE
from support.models import generate_each
from support.state_engines import states_for
from support.state_loop import random_tokens
from support.state_models import make_state_model
from support.store_kv import Troubled, corrupt

from kvpage import CacheConfig
from kvpage.serving import Engine, EngineConfig, SamplingParams
from kvpage.serving.params.states import StateConfig
from kvpage.store import ArrivingStore, KVStore, KVStoreConfig, KVStoreMetadata, metadata_of
from kvpage.store.tiers.memory_tier import MemoryTier

B, C = 4, 8
MAX_TOKENS = 6
PARAMS = SamplingParams(max_tokens=MAX_TOKENS)
FAMILIES = ["jamba", "falcon_h1", "lfm2", "qwen3_next", "mamba2"]
"""Mamba one by one, Mamba-2 beside attention, short convolutions, gated delta nets, and no attention at all."""
COMMON, FIRST, SECOND, THIRD = random_tokens(3 * C + 3, 5, 7, 2)
PROMPTS = [COMMON + FIRST, COMMON + SECOND, COMMON + THIRD, COMMON[: C - 3]]
ENDS = [len(prompt) - 1 for prompt in PROMPTS]


def make_engine(model: torch.nn.Module, num_blocks: int = 96, **fields: object) -> Engine:
    """What nobody has written is NaN in all blocks, tails and slots."""
    config = CacheConfig(B, num_blocks)
    engine = Engine.from_model(
        model, EngineConfig(config, **{"max_num_seqs": 4, "load_or_compute": False, **PATIENCE, **fields})
    )
    assert engine.states is not None
    engine.states.slots.fill_(0xFF)
    for layer in engine.cache.gpu_cache:
        layer.fill_(torch.nan)
    return engine


def make_store(*tiers: str | MemoryTier, chunk_size: int = C, name: str = "m") -> KVStore:
    config = KVStoreConfig(
        chunk_size, tuple(one for one in tiers if isinstance(one, str)) or ("memory://?size=4MiB",), num_threads=1
    )
    given = [one for one in tiers if not isinstance(one, str)] or None
    return KVStore(config, KVStoreMetadata(name, kv_dtype=torch.float32), given)


def memory_tier() -> MemoryTier:
    return MemoryTier(4 << 20, pin_memory=False)


def serve(engine: Engine, store: Any, prompts: list[list[int]] = PROMPTS) -> tuple[list[list[int]], list[int]]:
    """The tokens of each prompt, one after the other, and how many were cached. Nothing is left behind."""
    engine.use_store(store)
    outputs = [engine.generate([prompt], PARAMS)[0] for prompt in prompts]
    engine.close()
    engine.manager.check()
    stats = engine.manager.stats()
    assert stats.num_sequences == 0 and stats.slots is not None
    assert stats.slots.num_free_slots + stats.slots.num_checkpoints == stats.slots.num_slots
    return [output.token_ids for output in outputs], [output.num_cached_tokens for output in outputs]


@pytest.fixture(scope="module")
def lfm2() -> torch.nn.Module:
    return make_state_model("lfm2")


@pytest.fixture(scope="module")
def expected(lfm2: torch.nn.Module) -> list[list[int]]:
    return generate_each(lfm2, PROMPTS, MAX_TOKENS)


@pytest.mark.parametrize(("kind", "chunk_size"), [*((kind, C) for kind in FAMILIES), ("lfm2", B), ("lfm2", 64)])
def test_a_second_engine_goes_on_from_the_store(tmp_path: Path, kind: str, chunk_size: int) -> None:
    model = make_state_model(kind)
    expected = generate_each(model, PROMPTS, MAX_TOKENS)
    for found in ([0, 0, len(COMMON), 0], ENDS):
        with make_store(f"disk://{tmp_path}?size=16MiB&segment=8MiB", chunk_size=chunk_size) as store:
            assert serve(make_engine(model), store) == (expected, found)
            assert store.stats().corrupt_records == 0


@pytest.mark.parametrize("codec", ["state", "float32", "state-index"])
def test_damage_is_computed_again(lfm2: torch.nn.Module, expected: list[list[int]], codec: str) -> None:
    tier = memory_tier()
    store = make_store(tier)
    serve(make_engine(lfm2), store)
    for record in store.records():
        if record.codec == codec:
            corrupt(tier, bytes.fromhex(record.key), record.num_bytes - 40)
    tokens, found = serve(make_engine(lfm2), store)
    assert tokens == expected and found[0] == 0
    assert store.stats().corrupt_records > 0
    assert serve(make_engine(lfm2), store)[0] == expected  # what nobody has read before is found damaged now
    assert serve(make_engine(lfm2), store) == (expected, ENDS)  # all is stored anew
    store.close()


def test_chunks_without_a_checkpoint_are_reported(lfm2: torch.nn.Module, expected: list[list[int]]) -> None:
    with make_store() as store:
        engine = make_engine(lfm2)
        states = store.states(engine.states.layout, torch.float32)
        serve(engine, store)
        for prompt in PROMPTS:
            states.remove(prompt)
        explained = states.explain(PROMPTS[0])
        assert explained.num_cached_tokens == 0
        assert "attention: 24 tokens" in str(explained) and "state: 0 tokens, then no usable checkpoint" in str(
            explained
        )
        assert serve(make_engine(lfm2), store, PROMPTS[:1]) == (expected[:1], [0])
        assert states.explain(PROMPTS[0]).num_cached_tokens == ENDS[0]
        assert states.explain(PROMPTS[0], b"other").num_cached_tokens == 0


@pytest.mark.parametrize("kind", ["lfm2", "mamba2"])
def test_a_tier_in_trouble(kind: str) -> None:
    fails, model = [False], make_state_model(kind)
    store = make_store(Troubled(lambda: fails[0]))
    tokens = serve(make_engine(model), store)[0]
    fails[0] = True
    assert serve(make_engine(model), store) == (tokens, [0, 0, len(COMMON), 0])
    fails[0] = False
    assert serve(make_engine(model), store) == (tokens, ENDS)
    store.close()


def faulty(store: KVStore, method: str, answer: object) -> StandIn:
    """A store whose states raise, or answer nonsense, in one of their methods."""

    def call(*args: object) -> object:
        if isinstance(answer, Exception):
            raise answer
        return answer(*args) if callable(answer) else answer

    def states(*about: Any) -> SimpleNamespace:
        right = store.states(*about)
        calls = {name: getattr(right, name) for name in ("longest", "get_into", "put", "prefetch")}
        return SimpleNamespace(**{**calls, method: call})

    return StandIn(store, states=states)


@pytest.mark.parametrize(
    ("method", "answer"),
    [("longest", OSError()), ("longest", -1), ("longest", "3"), ("longest", 10**6), ("get_into", OSError()),
     ("get_into", False), ("put", OSError()), ("put", False)],
)  # fmt: skip
def test_faults_of_a_store(lfm2: torch.nn.Module, expected: list[list[int]], method: str, answer: object) -> None:
    with make_store() as store:
        if method != "put":
            serve(make_engine(lfm2), store)
        engine = make_engine(lfm2)
        tokens, found = serve(engine, faulty(store, method, answer))
        assert tokens == expected
        assert found == (ENDS if answer == 10**6 else [0, 0, len(COMMON), 0])  # cut to the prompt, and verified
        assert serve(make_engine(lfm2), store)[0] == expected


def test_a_chunk_that_vanishes_between_lookup_and_load(lfm2: torch.nn.Module, expected: list[list[int]]) -> None:
    with make_store() as store:
        engine = make_engine(lfm2)
        serve(engine, store)
        states = store.states(engine.states.layout, torch.float32)
        longest = states.longest

        def lookup(tokens: Any, namespace: bytes) -> int:
            found = longest(tokens, namespace)
            store.remove(PROMPTS[0][:C])
            return found

        states.longest = lookup
        gone = StandIn(store, states=lambda *about: states)
        assert serve(make_engine(lfm2), gone, PROMPTS[:1]) == (expected[:1], ENDS[3:])  # which has a chunk of its own


@pytest.mark.parametrize("keeps", [0, 5, len(COMMON)])
@pytest.mark.parametrize("damages", [True, False])
def test_a_state_that_cannot_be_loaded_gives_way_to_a_shorter_one(
    lfm2: torch.nn.Module, expected: list[list[int]], keeps: int, damages: bool
) -> None:
    """The states at the prompt's end and at its 20th token are damaged, or vanish after they were found."""
    tier = memory_tier()
    with make_store(tier) as store:
        engine = make_engine(lfm2)
        states = store.states(engine.states.layout, torch.float32)
        engine.use_store(store)
        marks = [20, keeps] if keeps else [20]
        engine.add_request(PROMPTS[0], PARAMS, cache_at=marks)
        while engine.has_unfinished:
            engine.step()
        engine.close()
        bad = sorted({*marks, ENDS[0]} - {keeps})
        if damages:
            for record in store.records():
                if record.codec == "state" and record.num_tokens in bad:
                    corrupt(tier, bytes.fromhex(record.key), record.num_bytes - 40)
            assert serve(make_engine(lfm2), store, PROMPTS[:1]) == (expected[:1], [keeps])
            assert store.stats().corrupt_records == (len([one for one in bad if one > keeps]))
        else:

            def get_into(tokens: Any, *rest: Any) -> bool:
                return len(tokens) == keeps and states.get_into(tokens, *rest)

            gone = faulty(store, "get_into", get_into)
            assert serve(make_engine(lfm2), gone, PROMPTS[:1]) == (expected[:1], [keeps])


@pytest.mark.parametrize(
    "fields",
    [
        {"max_num_seqs": 1, "states": StateConfig(checkpoint_bytes=0)},
        {"max_num_seqs": 2, "states": StateConfig(checkpoint_bytes=10**4)},
        {"num_blocks": 12},
        {"max_num_batched_tokens": 7, "save_portions": True},
        {"states": StateConfig(checkpoint_every=5)},
        {"load_or_compute": True},
    ],
    ids=str,
)
def test_budgets_and_portions(lfm2: torch.nn.Module, expected: list[list[int]], fields: dict[str, Any]) -> None:
    with make_store() as store:
        for _ in range(2):
            assert serve(make_engine(lfm2, **fields), store)[0] == expected
        assert serve(make_engine(lfm2, **fields), store)[0] == expected
        if "max_num_seqs" not in fields:
            assert serve(make_engine(lfm2), store) == (expected, ENDS)


def test_a_state_that_has_come_stays_in_a_full_budget(lfm2: torch.nn.Module, expected: list[list[int]]) -> None:
    warm = random_tokens(40)[0]
    with make_store() as store:
        serve(make_engine(lfm2), store, PROMPTS[:1])
        engine = make_engine(lfm2)
        engine = make_engine(lfm2, states=states_for(engine, 1))
        for _ in range(3):
            engine.generate([warm], PARAMS)
        assert serve(engine, store, PROMPTS[:1]) == (expected[:1], ENDS[:1])


def test_all_prompts_at_once(lfm2: torch.nn.Module, expected: list[list[int]]) -> None:
    with make_store() as store:
        for _ in range(3):
            engine = make_engine(lfm2)
            engine.use_store(store)
            assert [one.token_ids for one in engine.generate(PROMPTS, PARAMS)] == expected
            engine.close()
            engine.manager.check()
        assert engine.stats().store is None and engine.manager.stats().num_sequences == 0


@pytest.mark.parametrize("save_generated", [False, True])
def test_answers_and_named_positions(lfm2: torch.nn.Module, save_generated: bool) -> None:
    with make_store() as store:
        engine = make_engine(lfm2, save_generated=save_generated)
        engine.use_store(store)
        engine.add_request(PROMPTS[0], PARAMS, "first", cache_at=[9])
        answer = next(one.output for one in iter(lambda: next(iter(engine.step()), None), 0) if one and one.output)
        engine.close()
        talk = PROMPTS[0] + answer.token_ids + FIRST
        end = len(PROMPTS[0]) + MAX_TOKENS - 1 if save_generated else ENDS[0]
        prompts = [talk, COMMON[:9] + SECOND]
        own = generate_each(lfm2, prompts, MAX_TOKENS)
        assert serve(make_engine(lfm2), store, prompts) == (own, [end, 9])


@pytest.mark.parametrize("where", ["save", "save_generated"])
def test_a_save_that_raises_costs_a_step(lfm2: torch.nn.Module, expected: list[list[int]], where: str) -> None:
    with make_store() as store:
        engine = make_engine(lfm2, save_generated=True)
        engine.use_store(store)
        works, calls = getattr(engine.debug.connectors, where), []

        def fails(*args: object) -> None:
            calls.append(where)
            if len(calls) == 2:
                raise KeyboardInterrupt
            works(*args)

        setattr(engine.debug.connectors, where, fails)
        ids = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
        outputs, num_raised = {}, 0
        while engine.has_unfinished:
            try:
                outputs |= {one.request_id: one.output for one in engine.step() if one.output}
            except KeyboardInterrupt:
                num_raised += 1
            engine.manager.check()
        assert [outputs[one].token_ids for one in ids] == expected and num_raised == 1
        engine.close()
        engine.manager.check()
        assert serve(make_engine(lfm2), store) == (expected, ENDS)


def test_others_never_meet(expected: list[list[int]]) -> None:
    model = make_state_model("mamba2")
    with make_store() as store:
        serve(make_engine(model), store)
        other = make_engine(make_state_model("mamba2").bfloat16())
        assert serve(other, store)[1] == [0, 0, len(COMMON), 0]
        engine = make_engine(model)
        engine.use_store(store)
        engine.add_request(PROMPTS[0], SamplingParams(max_tokens=1), namespace=b"other")
        assert engine.step()[0].output.num_cached_tokens == 0
        engine.close()


def test_metadata_of_a_model_without_attention() -> None:
    model = make_state_model("mamba2")
    engines = [make_engine(model) for _ in range(2)]
    with KVStore(KVStoreConfig(C, ("memory://?size=4MiB",)), metadata_of(engines[0].cache, "m")) as store:
        tokens, _ = serve(engines[0], store)
        assert store.metadata.kv_dtype is None
        assert serve(engines[1], store) == (tokens, ENDS)


def test_stores_that_do_not_go_with_states(lfm2: torch.nn.Module) -> None:
    with make_store() as store:
        with pytest.raises(ValueError, match="store must keep states for a model .*, as a KVStore does, got Arriving"):
            make_engine(lfm2).use_store(ArrivingStore(store))
        engine = make_engine(make_state_model("lfm2").bfloat16())
        with pytest.raises(ValueError, match=r"kv_dtype of the store must be the engine's"):
            engine.use_store(store)
