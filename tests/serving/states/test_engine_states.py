"""Engine with states: preemption, eviction, tiers, failures, what is refused. Tokens stay those of model.generate."""

import asyncio
from collections.abc import Iterator

import pytest
import torch
from support.dict_store import DictStore
from support.models import make_model
from support.state_engines import (
    B,
    ask,
    check_nothing_held,
    greedy,
    make_engine,
    own_tokens,
    poison,
    random_prompt,
    states_for,
)
from support.state_models import make_state_model

from kvpage import CacheConfig
from kvpage.blocks.explain import Ending
from kvpage.server.command.options import ServeOptions
from kvpage.serving import AsyncEngine, Engine, EngineConfig, SamplingParams, StateConfig

KINDS = ["jamba", "lfm2", "mamba2", "qwen3_next"]
PROMPT = random_prompt(4 * B + 3)


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest):
    return make_state_model(request.param)


def crowd(engine: Engine, model, num_tokens: int = 3 * B) -> None:
    """Ask several prompts at once; tokens are right, and nothing is left."""
    prompts = [random_prompt(length, seed) for seed, length in enumerate((9, 12, 5, 14, 12))] + [PROMPT]
    outputs = engine.generate(prompts, greedy(num_tokens))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.samples[0].token_ids == own_tokens(model, prompt, num_tokens)
    check_nothing_held(engine)


def test_preempted_and_computed_again(model) -> None:
    engine = make_engine(model, num_blocks=12)
    crowd(engine, model)
    stats = engine.stats()
    assert stats.num_preemptions > 0 and stats.num_swaps == 0


def test_preempted_to_the_host_and_back(model) -> None:
    budget = states_for(make_engine(model), 2, 8)
    engine = make_engine(model, num_blocks=12, num_host_blocks=24, states=budget)
    crowd(engine, model)
    assert engine.stats().num_swaps > 0


def test_evicted_checkpoints_are_computed_again(model) -> None:
    engine = make_engine(model, states=states_for(make_engine(model), 1), max_num_seqs=1)
    assert engine.stats().blocks.slots.num_slots == 2
    expected = own_tokens(model, PROMPT, 4)
    for seed in range(3):
        ask(engine, random_prompt(9, seed), 2)
    assert ask(engine, PROMPT, 4)[0] == expected
    for seed in range(3):
        ask(engine, random_prompt(9, seed), 2)
    assert ask(engine, PROMPT, 4) == (expected, 0)
    assert engine.stats().blocks.slots.evicted > 0
    check_nothing_held(engine)


def test_checkpoints_of_the_host_come_back(model) -> None:
    budget = states_for(make_engine(model), 1, 16)
    engine = make_engine(model, num_host_blocks=32, states=budget, max_num_seqs=1)
    expected = own_tokens(model, PROMPT, 4)
    assert ask(engine, PROMPT, 4) == (expected, 0)
    for seed in range(3):
        ask(engine, random_prompt(9, seed), 2)
    assert engine.stats().blocks.slots.num_host_checkpoints > 0
    assert ask(engine, PROMPT, 4) == (expected, len(PROMPT) - 1)
    check_nothing_held(engine)


def test_no_budget_is_no_hit(model) -> None:
    engine = make_engine(model, states=StateConfig(checkpoint_bytes=0), max_num_seqs=1)
    expected = own_tokens(model, PROMPT, 4)
    assert [ask(engine, PROMPT, 4) for _ in range(2)] == [(expected, 0)] * 2
    assert engine.stats().blocks.slots.num_slots == 1
    check_nothing_held(engine)


@pytest.mark.parametrize("every", [1, 4, 5])
def test_checkpoints_every_so_many_tokens(every: int) -> None:
    model = make_state_model("lfm2")
    engine = make_engine(model, states=StateConfig(checkpoint_every=every), max_num_batched_tokens=6)
    ask(engine, PROMPT, 2)
    prompt = [*PROMPT[:14], PROMPT[14] % 90 + 1, 5]
    assert ask(engine, prompt, 4) == (own_tokens(model, prompt, 4), 14 // every * every)


def test_a_second_prompt_finds_what_it_shares_without_marks() -> None:
    assert ServeOptions.__dataclass_fields__["checkpoint_every"].default == StateConfig().checkpoint_every == 512
    model = make_state_model("lfm2")
    model.config.max_position_embeddings = 2048
    shared = random_prompt(1100, 1)
    for states, num_cached in ((StateConfig(), 1024), (StateConfig(checkpoint_every=None), 0)):
        engine = make_engine(model, num_blocks=1024, states=states)
        ask(engine, [*shared, *random_prompt(9, 2)], 2)
        assert ask(engine, [*shared, *random_prompt(9, 3)], 2)[1] == num_cached


class Failing:
    """A hook of a layer that raises at its n-th call."""

    def __init__(self, at: int) -> None:
        self._calls = iter(range(at, -1, -1))

    def __call__(self, *_: object) -> None:
        if next(self._calls, None) == 0:
            raise ArithmeticError("a layer has failed")


@pytest.fixture
def failing(model) -> Iterator[torch.nn.Module]:
    yield list(model.model.layers if hasattr(model, "model") else model.backbone.layers)[-1]


@pytest.mark.parametrize("at", [1, 4])
def test_a_failed_step_leaves_no_wrong_state(model, failing: torch.nn.Module, at: int) -> None:
    expected = own_tokens(model, PROMPT, 6)
    engine = make_engine(model, max_num_batched_tokens=8)
    engine.add_request(PROMPT, greedy(6))
    hook = failing.register_forward_pre_hook(Failing(at))
    outputs = []
    for _ in range(64):
        try:
            outputs += [one.output for one in engine.step() if one.output is not None]
        except ArithmeticError:
            poison(engine)
        if not engine.has_unfinished:
            break
    hook.remove()
    check_nothing_held(engine)
    assert outputs
    assert ask(engine, PROMPT, 6)[0] == expected


@pytest.mark.parametrize(
    ("cache_at", "error", "words"),
    [
        ([0], ValueError, "cache_at must be"),
        ([len(PROMPT) + 1], ValueError, "cache_at must be"),
        ([-1], ValueError, "cache_at must be"),
        ([3, 3], ValueError, "cache_at must"),
        ([True], TypeError, "cache_at must"),
        ([1.5], TypeError, "cache_at must"),
        ("12", TypeError, "cache_at must"),
        ("", TypeError, "cache_at must"),
        (None, TypeError, "cache_at must"),
        (torch.tensor([[1, 2]]), TypeError, "cache_at must"),
    ],
)
def test_bad_marks_are_refused(cache_at: object, error: type[Exception], words: str) -> None:
    for model in (make_state_model("lfm2"), make_model("llama")):
        engine = Engine.from_model(model, EngineConfig(CacheConfig(B, 32)))
        with pytest.raises(error, match=words):
            engine.add_request(PROMPT, cache_at=cache_at)
        assert not engine.has_unfinished


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"checkpoint_bytes": -1}, "checkpoint_bytes must be an integer of at least 0, got -1"),
        ({"checkpoint_bytes": 1.5}, "checkpoint_bytes must be an integer of at least 0, got 1.5"),
        ({"host_checkpoint_bytes": True}, "host_checkpoint_bytes must be an integer of at least 0, got True"),
        ({"checkpoint_every": 0}, "checkpoint_every must be an integer of at least 1, got 0"),
    ],
)
def test_bad_budgets_are_refused(fields: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        StateConfig(**fields)


def test_what_models_with_states_do_not_have() -> None:
    engine = make_engine(make_state_model("lfm2"))
    with pytest.raises(ValueError, match="store must keep states for a model whose layers have some"):
        engine.use_store(DictStore())
    with pytest.raises(TypeError, match="store must derive from kvpage.store.BlockStore, got object"):
        engine.use_store(object())  # type: ignore[arg-type]
    engine.warmup()
    with pytest.raises(TypeError, match="states must be"):
        EngineConfig(CacheConfig(B, 32), states=3)  # type: ignore[arg-type]


def test_scales_of_eight_bit_blocks_are_calibrated() -> None:
    """The tokens that scales are computed from have states, too."""
    model = make_state_model("jamba")
    config = EngineConfig(CacheConfig(B, 64, cache_dtype="fp8_e4m3"), kv_scales="calibrate", max_num_seqs=4)
    engine = Engine.from_model(model, config)
    assert len(engine.cache.kv_scales) == len(engine.cache.layer_ids) > 0
    first, again = (engine.generate([PROMPT], greedy(6))[0] for _ in range(2))
    assert first.token_ids == again.token_ids and again.num_cached_tokens == len(PROMPT) - 1


def test_an_engine_explains(model) -> None:
    engine = make_engine(model)
    assert engine.explain(PROMPT).num_cached_tokens == 0
    ask(engine, PROMPT, 2)
    prompt = [*PROMPT[:10], PROMPT[10] % 90 + 1, 3]
    found = engine.explain(prompt)
    by_group = {group.group: group for group in found.groups}
    assert found.num_cached_tokens == 0 and found.num_tokens == len(prompt)
    assert by_group["attention"].differs_at == 10 and by_group["attention"].token == prompt[10]
    assert by_group["state"].ending is Ending.NO_CHECKPOINT and by_group["state"].below is None
    ask(engine, prompt, 2)
    ask(engine, [*PROMPT[:10], 95, 4, 4], 2)
    assert engine.explain([*PROMPT[:10], 96, 5]).num_cached_tokens == 10
    with pytest.raises(ValueError, match="token"):
        engine.explain([])


def test_samples_of_one_prompt_have_states_of_their_own(model) -> None:
    engine = make_engine(model, num_blocks=12, max_num_batched_tokens=8)
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
    found = engine.generate([PROMPT], params)[0]
    again = make_engine(model, max_num_batched_tokens=64).generate([PROMPT], params)[0]
    assert [one.token_ids for one in found.samples] == [one.token_ids for one in again.samples]
    assert len({tuple(one.token_ids) for one in found.samples}) > 1
    check_nothing_held(engine)


# --- positions for others, by each way in ----------------------------------------------------------------------------


async def _generated(live: AsyncEngine, prompt: list[int], marks: list[int]) -> int:
    return (await live.generate(prompt, greedy(1), cache_at=marks)).num_cached_tokens


def _submitted(live: AsyncEngine, prompt: list[int], marks: list[int]) -> int:
    request = live.submit(prompt, greedy(1), cache_at=marks)
    assert list(request)
    return request.output.num_cached_tokens


def _streamed(engine: Engine, prompt: list[int], marks: list[int]) -> int:
    stream = engine.stream(prompt, greedy(1), cache_at=marks)
    assert list(stream)
    return stream.output.num_cached_tokens


def test_every_call_takes_positions_for_others() -> None:
    engine = make_engine(make_state_model("lfm2"))
    ways = [
        lambda prompt, marks: engine.generate([prompt], greedy(1), cache_at=marks)[0].num_cached_tokens,
        lambda prompt, marks: _streamed(engine, prompt, marks),
        lambda prompt, marks: _submitted(live, prompt, marks),
        lambda prompt, marks: asyncio.run(_generated(live, prompt, marks)),
    ]

    def check(way, seed: int) -> None:
        common = random_prompt(2 * B + 3, seed)
        for expected, marks in ((0, [B + 1]), (B + 1, [])):
            prompt = [*common[: B + 1], *random_prompt(9, seed + 50 + expected)]
            assert way(prompt, marks) == expected
        with pytest.raises(ValueError, match=r"cache_at must be positions in \[1, 3\], got 4"):
            way([1, 2, 3], [4])

    for seed, way in enumerate(ways[:2]):
        check(way, seed)
    with AsyncEngine(engine) as live:
        for seed, way in enumerate(ways[2:], 2):
            check(way, seed)
