"""ModelStates: what is found in a model, and what is refused by name. The model of the caller does not change."""

import copy
import re
from pathlib import Path

import pytest
import torch
from support.models import make_model
from support.state_loop import Portion, StateLoop, own_logits, random_tokens
from support.state_models import NAMED, REFUSED, SCANNED, SERVED, STEPWISE, make_state_model

from kvpage import CacheConfig
from kvpage.layout.groups import GroupKind
from kvpage.serving import Engine, EngineConfig, KVPageCachePool
from kvpage.serving.assembly import state_parts as found_states
from kvpage.serving.assembly.parts import check_servable
from kvpage.serving.model.probe import relative_error
from kvpage.serving.model.states.model_states import ModelStates, are_states_served

PAGE = Path(__file__).parents[3] / "docs" / "notes" / "state_models.md"
CONFIG = EngineConfig(CacheConfig(block_size=4, num_gpu_blocks=16))


@pytest.mark.parametrize(
    ("kind", "attends", "states", "num_parts"),
    [
        ("qwen3_next", (2,), (0, 1, 3), 6),
        ("falcon_h1", (0, 1, 2), (0, 1, 2), 6),
        ("zamba2", (1,), (0, 1, 2), 6),
        ("lfm2", (1,), (0, 2), 2),
        ("nemotron_h", (2,), (0,), 2),
        ("mamba2", (), (0, 1, 2), 6),
        ("kimi_linear", (1,), (0, 2), 4),
    ],
)
def test_groups(kind: str, attends: tuple[int, ...], states: tuple[int, ...], num_parts: int) -> None:
    found = ModelStates.of_model(make_state_model(kind))
    by_kind = {group.kind: group for group in found.groups}
    assert by_kind.keys() == ({GroupKind.FULL, GroupKind.STATE} if attends else {GroupKind.STATE})
    assert by_kind[GroupKind.STATE].layer_ids == states
    assert len(found.layout.parts) == num_parts
    assert not attends or by_kind[GroupKind.FULL].layer_ids == attends
    assert found.model_config.is_attention_free == (not attends)


@pytest.mark.parametrize("kind", SERVED)
def test_mixers_that_read_their_state_for_one_token_alone(kind: str) -> None:
    found = {mixer.is_stepwise for mixer in ModelStates.of_model(make_state_model(kind)).mixers}
    if kind in STEPWISE or are_states_served("5.15"):  # before, others may, too
        assert found == {kind in STEPWISE}


def test_the_page_lists_what_is_tried() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (at once|one by one) \|", PAGE.read_text(), re.MULTILINE)
    assert [kind for kind, _ in rows] == list(NAMED)
    assert {kind for kind, how in rows if how == "one by one"} == STEPWISE - SCANNED


@pytest.mark.parametrize("kind", ["qwen3_next", "mamba2", "zamba2"])
def test_states_in_another_dtype_than_the_model(kind: str) -> None:
    model = make_state_model(kind).bfloat16()
    (tokens,) = random_tokens(13)
    loop = StateLoop(model, [tokens], num_slots=2)
    if kind != "zamba2" and are_states_served("5.14"):
        assert torch.float32 in {part.dtype for part in loop.layout.parts if part.name == "recurrent"}
    parts = [loop.step([Portion(0, start, end, 1)])[0] for start, end in ((0, 7), (7, 12), (12, 13))]
    assert relative_error(torch.cat(parts), own_logits(model, tokens)) < 0.05


@pytest.mark.parametrize("kind", ["qwen3_next", "jamba", "mamba2", "recurrent_gemma"])
def test_the_model_does_not_change(kind: str) -> None:
    model = make_state_model(kind)
    (tokens,) = random_tokens(9)
    expected = own_logits(model, tokens)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    config, weights = copy.deepcopy(model.config), {name: one.clone() for name, one in model.state_dict().items()}
    loop = StateLoop(model, [tokens], num_slots=2)
    loop.step([Portion(0, 0, 9, 1)])
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys()
        assert all(vars(module)[key] is value for key, value in before[name].items())
    assert model.config.to_dict() == config.to_dict()
    assert all(torch.equal(one, weights[name]) for name, one in model.state_dict().items())
    assert torch.equal(own_logits(model, tokens), expected)


@pytest.mark.parametrize("kind", ["minimax", "qwen4_exp"])
def test_a_cache_of_the_model_s_own_is_refused_by_name(kind: str) -> None:
    model = make_state_model(kind)
    words = f"model must take a cache of kvpage's, {type(model).__name__} says: "
    with pytest.raises(ValueError, match=words):
        Engine.from_model(model, CONFIG)
    with pytest.raises(ValueError, match=words if are_states_served("5.14") else "transformers must be 5.14 or later"):
        KVPageCachePool.from_model(model, CONFIG.cache_config)


def test_states_outside_of_the_cache_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of all models in transformers 4.57."""
    model = make_model("llama")
    monkeypatch.setattr(type(model), "_is_stateful", True)
    words = "states must be in layers of transformers' cache, those of LlamaForCausalLM are elsewhere in transformers"
    with pytest.raises(ValueError, match=words):
        Engine.from_model(model, CONFIG)
    with pytest.raises(ValueError, match=words):
        KVPageCachePool.from_model(model, CONFIG.cache_config)


@pytest.mark.parametrize("kind", REFUSED)
def test_windows_beside_states_are_refused_by_a_pool(kind: str) -> None:
    with pytest.raises(ValueError, match="layers must not have windows beside states, those of Inkling"):
        KVPageCachePool.from_model(make_state_model(kind), CONFIG.cache_config)


@pytest.mark.parametrize("kind", REFUSED)
def test_attention_that_blocks_do_not_take_is_refused(kind: str) -> None:
    with pytest.raises(
        ValueError, match="logits over blocks must be the model's own|must be causal, is_causal is False"
    ):
        check_servable(make_state_model(kind), CONFIG)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"compile_model": True},
            "compile_model must be False for a model whose layers keep states, Lfm2ForCausalLM does",
        ),
        ({"cache_config": CacheConfig(4, 16, backend="mla")}, "backend must be another than 'mla'"),
    ],
)
def test_options_that_do_not_go_with_states(fields: dict, words: str) -> None:
    config = EngineConfig(**{"cache_config": CONFIG.cache_config, **fields})
    with pytest.raises(ValueError, match=words):
        check_servable(make_state_model("lfm2"), config)


def test_an_option_is_refused_without_another_class() -> None:
    """Without the option, Engine serves the model."""
    config = EngineConfig(CacheConfig(4, 64), compile_model=True)
    with pytest.raises(ValueError, match="compile_model must be False for a model whose layers keep") as error:
        Engine.from_model(make_state_model("lfm2"), config)
    assert "KVPageCache" not in str(error.value)


def test_a_model_without_states_is_as_before() -> None:
    assert check_servable(make_model("llama"), CONFIG).states is None


def test_a_transformers_without_states_in_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found_states, "keeps_states", lambda config: False)
    with pytest.raises(
        ValueError, match="layers must be of attention, .*, Mamba2ForCausalLM has (linear_attention|mamba)"
    ):
        check_servable(make_state_model("mamba2"), CONFIG)


def test_a_mixer_that_was_replaced_is_noticed() -> None:
    model, (tokens,) = make_state_model("lfm2"), random_tokens(5)
    loop = StateLoop(model, [tokens], num_slots=2)
    model.model.layers[0].conv = copy.deepcopy(model.model.layers[0].conv)
    with pytest.raises(ValueError, match=r"each state must be computed once in a step, \[\(0, 'conv', 0\)\] were not"):
        loop.step([Portion(0, 0, 5, 1)])
