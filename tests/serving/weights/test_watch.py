"""Weights that change in place without a word: an error or a new version, never silent."""

import gc
import weakref

import pytest
import torch
from support.models import make_model, make_prompts
from support.weight_versions import WeightVersions
from torch import nn

from kvpage import CacheConfig
from kvpage.serving import Branches, Engine, EngineConfig, SamplingParams, WeightsChanged
from kvpage.serving.model.native.joined import join
from kvpage.serving.weights.watch import SAMPLED, WeightWatch

B, PARAMS = 4, SamplingParams(max_tokens=6)
PROMPTS = make_prompts([20, 21], seed=3)


def step_of(make: type[torch.optim.Optimizer], **options: object) -> object:
    """Return a change by an optimizer."""

    def change(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        make(model.parameters(), lr=0.1, **options).step()

    return change


@torch.no_grad()
def load_in_place(model: nn.Module) -> None:
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})


def assign(model: nn.Module) -> None:
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


def move(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def write_around_torch(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.add_(1)


def write_in_inference_mode(model: nn.Module) -> None:
    with torch.inference_mode():
        next(iter(model.parameters())).add_(1)


CHANGES = [
    step_of(torch.optim.SGD),
    step_of(torch.optim.AdamW, foreach=True),
    step_of(torch.optim.AdamW, fused=True),
    load_in_place,
    assign,
    move,
    write_around_torch,
    write_in_inference_mode,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_all_weights_is_seen_at_the_next_look(change):
    model = make_model("llama")
    watch = WeightWatch(model)
    assert (watch.changed(), watch.any_changed(), watch.all_changed()) == (None, None, None)
    change(model)
    assert watch.any_changed() is not None and watch.all_changed() is not None
    watch.accept()
    assert (watch.changed(), watch.any_changed(), watch.all_changed()) == (None, None, None)


@pytest.mark.parametrize("number", [0, 1, -1])
@pytest.mark.parametrize("write", [lambda p: p.data.add_(1), lambda p: p.add_(1)])
@torch.no_grad()
def test_a_change_of_one_weight_is_seen_when_its_turn_comes(write, number):
    model = make_model("llama")
    watch, names = WeightWatch(model), [name for name, _ in model.named_parameters()]
    num_looks = -(-watch.num_weights // SAMPLED)
    name, parameter = list(model.named_parameters())[number]
    write(parameter)
    seen = [path for _ in range(num_looks) if (path := watch.changed())]
    assert seen == [name] and name in names


def test_optimizers_of_other_models_and_weights_without_gradients_do_not_count():
    model, other = make_model("llama"), make_model("llama")
    watch = WeightWatch(model)
    step_of(torch.optim.AdamW, fused=True)(other)
    torch.optim.AdamW(model.parameters(), fused=True).step()
    assert watch.all_changed() is None
    model.register_parameter("new", nn.Parameter(torch.zeros(1)))
    assert watch.all_changed() == "new"


def test_a_watch_that_nobody_holds_leaves_nothing_behind():
    model = make_model("llama")
    watch = WeightWatch(model)
    gone = weakref.ref(watch)
    del watch
    gc.collect()
    assert gone() is None
    step_of(torch.optim.SGD)(model)


def make_engine(model: nn.Module, **fields: object) -> Engine:
    return Engine.from_model(model, EngineConfig(CacheConfig(B, 64), **fields))


def test_an_optimizer_step_without_a_word_is_an_error_until_somebody_tells():
    versions = WeightVersions()
    engine = make_engine(versions.model)
    engine.generate(PROMPTS, PARAMS)
    request_id = engine.add_request(PROMPTS[0], PARAMS)
    engine.step()
    versions.load("v1")
    for _ in range(2):
        with pytest.raises(WeightsChanged, match=r"without update_weights or reset_prefix_cache, model\..* has"):
            engine.step()
    with pytest.raises(WeightsChanged):
        engine.generate(PROMPTS, PARAMS)
    engine.update_weights("v1")
    engine.abort(request_id)
    outputs = engine.generate(PROMPTS, PARAMS)
    assert [one.token_ids for one in outputs] == [versions.answer("v1", prompt, 6) for prompt in PROMPTS]
    versions.load("v2")
    engine.reset_prefix_cache()
    outputs = engine.generate(PROMPTS, PARAMS)
    assert [one.token_ids for one in outputs] == [versions.answer("v2", prompt, 6) for prompt in PROMPTS]


def test_a_branch_is_never_computed_by_two_weights():
    versions = WeightVersions()
    engine = make_engine(versions.model, changed_weights="version")
    with Branches(engine) as branches:
        branch = branches.start(PROMPTS[0])
        branches.compute([branch])
        versions.load("v1")
        branch.append([1])
        with pytest.raises(WeightsChanged):
            branches.compute([branch])


@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_new_version_begins_by_itself(num_steps):
    versions = WeightVersions()
    engine = make_engine(versions.model, changed_weights="version")
    engine.generate(PROMPTS, PARAMS)
    engine.add_request(PROMPTS[0], PARAMS)
    tokens = [one.token_id for _ in range(num_steps) for one in engine.step()]
    versions.load("v1")
    while engine.has_unfinished:
        tokens += [one.token_id for one in engine.step()]
    known = PROMPTS[0] + tokens[:num_steps]
    assert tokens[num_steps:] == versions.answer("v1", known, 6 - num_steps)
    stats = engine.stats().weights
    assert stats.version.startswith("changed-") and (stats.num_updates, stats.num_noticed) == (1, 1)
    outputs = engine.generate(PROMPTS, PARAMS)
    assert [one.token_ids for one in outputs] == [versions.answer("v1", prompt, 6) for prompt in PROMPTS]
    assert stats.num_restarted == (num_steps > 0)


def test_an_engine_that_keeps_nothing_goes_on():
    versions = WeightVersions()
    engine = make_engine(versions.model, enable_prefix_caching=False)
    for version in ("", "v1"):
        versions.load(version)
        outputs = engine.generate(PROMPTS, PARAMS)
        assert [one.token_ids for one in outputs] == [versions.answer(version, prompt, 6) for prompt in PROMPTS]
    engine.add_request(PROMPTS[0], PARAMS)
    engine.step()
    versions.load("")
    with pytest.raises(WeightsChanged):
        engine.step()


def test_the_choice_is_checked():
    with pytest.raises(ValueError, match="changed_weights must be 'error' or 'version', got 'ignore'"):
        EngineConfig(changed_weights="ignore")


def test_weights_that_an_engine_puts_side_by_side_have_not_changed():
    layers = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(3)])
    watch = WeightWatch(layers)
    assert join(list(layers), lambda rows: True) is not None
    assert watch.all_changed() is None
    layers[1].weight.data = layers[1].weight.data.clone()
    assert watch.all_changed() == "1.weight"


def test_memory_that_is_taken_away_and_given_back_elsewhere():
    """As those who shard weights do; a probe reads no memory that is not the weight's any more."""
    model = make_model("llama")
    watch, weight = WeightWatch(model), model.model.norm.weight
    kept = weight.detach().clone()
    weight.untyped_storage().resize_(0)
    assert watch.all_changed() is None, "a step that needs it says so"
    other = torch.empty(1 << 16)  # the old memory may be another's now
    weight.untyped_storage().resize_(kept.nbytes)
    with torch.no_grad():
        weight.copy_(kept)
    assert watch.any_changed() == "model.norm.weight" and other is not None
