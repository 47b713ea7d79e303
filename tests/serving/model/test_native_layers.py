"""Layers of a view that compute with kvpage's operations: they give what the model's own give, and see the same.

The oracle is the model's own module, called with the same rows.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import transformers as tf
from support.models import CONFIGS, generate_each, make_model, make_prompts
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.flop_counter import FlopCounterMode

from kvpage import CacheConfig
from kvpage.ops import has_fast_linear
from kvpage.serving import Engine, EngineConfig, SamplingParams
from kvpage.serving.model.native import gated_mlp
from kvpage.serving.model.native import layers as native_layers
from kvpage.serving.model.native import linear as linear_layer
from kvpage.serving.model.native.gated_mlp import GatedForward
from kvpage.serving.model.native.layers import NativeLayers
from kvpage.serving.model.native.linear import NativeLinear
from kvpage.serving.model.native.rotary import RotaryForward
from kvpage.serving.model.view import ModelView

CACHE = CacheConfig(block_size=4, num_gpu_blocks=64)
COUNTED = (
    (linear_layer, "host_product", "linear"),
    (gated_mlp, "host_product", "gated_linear"),
    (native_layers, "host_rms_norm", "rms_norm"),
)
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
PER_LAYER = {"linear": 5, "gated_linear": 1, "rms_norm": 2}  # of a Llama: q, k, v, o, down; gate and up; two norms
NUM_LAYERS = 3


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Count the calls of native operations that gave rows."""
    counts: Counter = Counter()

    def counted(name: str, own: Callable) -> Callable:
        @functools.wraps(own)
        def operation(*args: object) -> object:
            found = own(*args)
            if found is not None:
                counts[name] += 1
            return found

        return operation

    for module, function, name in COUNTED:
        monkeypatch.setattr(module, function, counted(name, getattr(module, function)))
    return counts


def view_of(model: nn.Module, calls: Counter | None = None) -> nn.Module:
    """Return a view of the model. `calls` begin after it: a view tries operations out."""
    view = ModelView(model, NativeLayers()).module
    if calls is not None:
        calls.clear()
    return view


def rows_for(module: nn.Module, num_rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows [1, num_rows, size] for an MLP, a norm or a linear layer."""
    size = module.gate_proj.in_features if hasattr(module, "gate_proj") else module.weight.shape[-1]
    return torch.randn(1, num_rows, size, generator=torch.Generator().manual_seed(num_rows)).to(dtype)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCES[expected.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def native_pairs(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """The name, the view's module and the model's, of each layer that is native."""
    own = dict(model.named_modules())
    for name, module in view_of(model).named_modules():
        if type(vars(module).get("forward")) is GatedForward or (
            type(module) is not type(own[name]) and not [*module.children()]
        ):
            yield name, module, own[name]


# --- which layers -----------------------------------------------------------------------------------------------------

KINDS = {  # linear layers, norms, gated MLPs, rotations
    "llama": (22, 7, 3, 3), "qwen2": (22, 7, 3, 3), "qwen3": (22, 13, 3, 3), "mistral": (22, 7, 3, 3),
    "gemma2": (22, 13, 3, 3), "gemma3": (22, 19, 3, 3), "gpt2": (1, 0, 0, 0), "gpt_oss": (13, 7, 0, 0),
    "phi3": (13, 7, 0, 3),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_the_native_layers_of_a_family(kind: str) -> None:
    modules = [*view_of(make_model(kind)).modules()]
    norms = [module for module in modules if type(module).__name__.startswith("Native") and "Norm" in str(type(module))]
    linears = [module for module in modules if type(module) is NativeLinear]
    forwards = Counter(type(vars(module).get("forward")) for module in modules)
    assert (len(linears), len(norms), forwards[GatedForward], forwards[RotaryForward]) == KINDS[kind]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind != "gpt2"])
def test_each_layer_gives_what_the_models_gives(kind: str, dtype: torch.dtype, calls: Counter) -> None:
    model = make_model(kind).to(dtype)
    for name, parameter in model.named_parameters():  # weights of norms are all 1 at first
        if name.endswith("norm.weight"):
            parameter.data.normal_()
    with torch.no_grad():
        for name, module, own in native_pairs(model):
            for num_rows in (0, 1, 17):
                rows, before = rows_for(own, num_rows, dtype), calls.total()
                found, expected = module(rows), own(rows)
                assert calls.total() > before or not has_fast_linear(dtype), name
                assert found.dtype == expected.dtype and found.shape == expected.shape
                if num_rows:
                    assert_close(found, expected)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss"])
def test_norms_round_as_the_models_own(kind: str) -> None:
    """Before the product with the weight, or after it: nearly all numbers are then equal bit by bit."""
    model = make_model(kind).to(torch.bfloat16)
    model.model.norm.weight.data.normal_()
    rows = rows_for(model.model.norm, 50, torch.bfloat16)
    with torch.no_grad():
        found, expected = view_of(model).model.norm(rows), model.model.norm(rows)
    assert float((found == expected).float().mean()) > 0.98


def test_a_step_calls_each_operation_as_often_as_the_model_has_it(calls: Counter) -> None:
    model = make_model("llama")
    engine = Engine.from_model(model, EngineConfig(CACHE))
    calls.clear()
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=1))
    assert calls == {name: NUM_LAYERS * number for name, number in PER_LAYER.items()} | {
        "linear": NUM_LAYERS * PER_LAYER["linear"] + 1,
        "rms_norm": NUM_LAYERS * PER_LAYER["rms_norm"] + 1,
    }


def test_the_option_leaves_all_layers_as_they_are(calls: Counter) -> None:
    model, prompts = make_model("llama"), make_prompts([5, 9], seed=3)
    engine = Engine.from_model(model, EngineConfig(CACHE, native_layers=False))
    tokens = [one.token_ids for one in engine.generate(prompts, SamplingParams(max_tokens=4))]
    assert tokens == generate_each(model, prompts, 4)
    assert not calls and engine.debug.runner.view.lm_head is model.lm_head


# --- the same attributes ----------------------------------------------------------------------------------------------


def test_a_native_layer_has_the_attributes_of_the_models_own() -> None:
    model = make_model("llama")
    before = [(module, type(module), vars(module), dict(vars(module))) for module in model.modules()]
    view = view_of(model)
    assert vars(view.lm_head) is vars(model.lm_head)
    assert vars(view.model.norm) is vars(model.model.norm)
    assert isinstance(view.model.norm, type(model.model.norm))
    for module, kind, held, state in before:
        assert type(module) is kind and vars(module) is held and held.keys() == state.keys()
        assert all(held[name] is value for name, value in state.items())


def test_tied_embeddings_stay_tied() -> None:
    torch.manual_seed(0)
    config = CONFIGS["llama"]()
    config.tie_word_embeddings = True
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    view = view_of(model)
    assert view.lm_head.weight is view.model.embed_tokens.weight is model.model.embed_tokens.weight
    prompts = make_prompts([5, 9], seed=3)
    engine = Engine.from_model(model, EngineConfig(CACHE))
    tokens = [one.token_ids for one in engine.generate(prompts, SamplingParams(max_tokens=4))]
    assert tokens == generate_each(model, prompts, 4)


def test_one_layer_in_two_places_is_one_in_the_view() -> None:
    model = make_model("llama")
    model.model.layers[1].self_attn.q_proj = model.model.layers[0].self_attn.q_proj
    layers = view_of(model).model.layers
    assert layers[1].self_attn.q_proj is layers[0].self_attn.q_proj
    assert type(layers[0].self_attn.q_proj) is NativeLinear


def change_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1.5)


def replace_parameters(model: nn.Module) -> None:
    model.load_state_dict({name: -2 * value for name, value in model.state_dict().items()}, assign=True)


def cast(model: nn.Module) -> None:
    model.to(torch.bfloat16)


def change_epsilon(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 3.0


@pytest.mark.parametrize("change", [change_in_place, replace_parameters, cast, change_epsilon])
def test_changes_of_weights_are_seen_at_once(change: Callable[[nn.Module], None], calls: Counter) -> None:
    model = make_model("llama")
    pairs = [*native_pairs(model)]
    change(model)
    with torch.no_grad():
        for name, module, own in pairs:
            rows, before = rows_for(own, 5, next(own.parameters()).dtype), calls.total()
            assert_close(module(rows), own(rows))
            assert calls.total() > before or not has_fast_linear(rows.dtype), name


# --- hooks and forwards -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["gate_proj", "up_proj", "down_proj", "act_fn"])
def test_hooks_of_inner_modules_run(inner: str, calls: Counter) -> None:
    model = make_model("llama")
    mlp, own = view_of(model, calls).model.layers[0].mlp, model.model.layers[0].mlp
    handle = getattr(own, inner).register_forward_hook(lambda module, args, output: output + 1)
    rows, plain = rows_for(own, 3), own(rows_for(own, 3))
    with torch.no_grad():
        assert_close(mlp(rows), plain.detach())
        assert calls["gated_linear"] == (inner == "down_proj")
        handle.remove()
        assert_close(mlp(rows), own(rows))
    assert calls["gated_linear"] == (inner == "down_proj") + 1


def test_hooks_of_all_modules_run(calls: Counter) -> None:
    model, seen = make_model("llama"), []
    mlp = view_of(model, calls).model.layers[0].mlp
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(module))
    try:
        with torch.no_grad():
            mlp(rows_for(mlp, 3))
    finally:
        handle.remove()
    assert seen == [mlp.gate_proj, mlp.act_fn, mlp.up_proj, mlp.down_proj, mlp]
    assert calls["gated_linear"] == 0


def test_a_forward_that_a_layer_gets_later_is_called(calls: Counter) -> None:
    model = make_model("llama")
    view = view_of(model, calls)
    for linear in (model.lm_head, model.model.layers[0].mlp.gate_proj, model.model.norm):
        linear.forward = lambda rows: rows * 0 + 7
    with torch.no_grad():
        assert bool((view.lm_head(rows_for(model.lm_head, 2)) == 7).all())
        assert bool((view.model.norm(rows_for(model.model.norm, 2)) == 7).all())
        view.model.layers[0].mlp.gate_proj(torch.ones(1, 32))
        assert not calls
        model.model.layers[0].mlp.gate_proj.forward = lambda rows: torch.full((*rows.shape[:-1], 48), 7.0)
        mlp = model.model.layers[0].mlp
        assert_close(view.model.layers[0].mlp(rows_for(mlp, 2)), mlp(rows_for(mlp, 2)))
    assert calls["gated_linear"] == 0


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


@pytest.mark.parametrize("name", ["lm_head", "model.norm", "model.layers.0.mlp.up_proj"])
def test_a_parametrisation_that_a_layer_gets_later(name: str, calls: Counter) -> None:
    model = make_model("llama")
    view = view_of(model, calls)
    parametrize.register_parametrization(model.get_submodule(name), "weight", Doubled())
    with torch.no_grad():
        own, module = model.get_submodule(name), view.get_submodule(name)
        assert_close(module(torch.ones(1, 32)), own(torch.ones(1, 32)))
        assert not calls
        mlp = model.model.layers[0].mlp
        assert_close(view.model.layers[0].mlp(rows_for(mlp, 2)), mlp(rows_for(mlp, 2)))
    assert calls["gated_linear"] == ("mlp" not in name)


def test_weight_norm_of_a_layer(calls: Counter) -> None:
    model = make_model("llama")
    view = view_of(model, calls)
    torch.nn.utils.weight_norm(model.lm_head)
    with torch.no_grad():
        model.lm_head.weight_g.mul_(3)
        assert_close(view.lm_head(rows_for(model.model.norm, 2)), model.lm_head(rows_for(model.model.norm, 2)))
    assert not calls


# --- calls that are not plain -----------------------------------------------------------------------------------------


class Marked(torch.Tensor):
    """A subclass, as those of quantised and distributed weights."""


@contextmanager
def subclass_weight(linear: nn.Module) -> Iterator[None]:
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Marked))
    yield


@contextmanager
def transposed_weight(linear: nn.Module) -> Iterator[None]:
    linear.weight = nn.Parameter(linear.weight.detach().T.contiguous().T)
    yield


@contextmanager
def autocast(linear: nn.Module) -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16):
        yield


@contextmanager
def counting(linear: nn.Module) -> Iterator[None]:
    with FlopCounterMode(display=False) as counter:
        yield
    assert counter.get_total_flops() > 0


@pytest.mark.parametrize("unusual", [torch.enable_grad, subclass_weight, transposed_weight, autocast, counting])
def test_unusual_calls_are_the_models_own(unusual: Callable, calls: Counter) -> None:
    model = make_model("llama")
    linear = view_of(model, calls).lm_head
    rows = rows_for(linear, 3)
    with torch.no_grad(), unusual() if unusual is torch.enable_grad else unusual(linear):
        found, expected = linear(rows), model.lm_head(rows)
        assert found.dtype == expected.dtype and torch.equal(found, expected)
        assert found.requires_grad == (unusual is torch.enable_grad)
    assert not calls


def test_rows_of_a_subclass_and_of_another_dtype(calls: Counter) -> None:
    linear = view_of(make_model("llama"), calls).lm_head
    with torch.no_grad():
        assert type(linear(rows_for(linear, 3).as_subclass(Marked))) is Marked
        with pytest.raises(RuntimeError):
            linear(rows_for(linear, 3).double())
        with pytest.raises(RuntimeError):
            linear(torch.ones(3, 31))
    assert calls["linear"] <= 1


def test_tracing_sees_torchs_own_operations(calls: Counter) -> None:
    linear = view_of(make_model("llama"), calls).lm_head
    with torch.no_grad():
        traced = torch.jit.trace(linear, rows_for(linear, 3), check_trace=False)
    assert "aten::linear" in str(traced.graph) and not calls


def test_a_view_of_a_model_without_memory_and_of_one_in_training() -> None:
    with torch.device("meta"):
        model = tf.AutoModelForCausalLM.from_config(CONFIGS["llama"](), attn_implementation="eager")
    assert view_of(model).lm_head(torch.ones(1, 32, device="meta")).is_meta
    trained = make_model("llama").train()
    view_of(trained).lm_head(torch.ones(1, 32)).sum().backward()
    assert trained.lm_head.weight.grad is not None


def test_a_view_leaves_torchs_random_numbers_alone() -> None:
    model, before = make_model("gemma3"), torch.get_rng_state()
    view_of(model)
    assert torch.equal(torch.get_rng_state(), before)


# --- layers of other kinds --------------------------------------------------------------------------------------------


class Quantised(nn.Linear):
    """As quantised layers are: another class, with weights that mean something else."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ (self.weight * 0.5).T


class LowRank(nn.Module):
    """As adapters that wrap a layer, with a switch."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.is_on = base, True
        self.lora_A = nn.Linear(base.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base.out_features, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output = self.base_layer(rows)
        return output + self.lora_B(self.lora_A(rows)) if self.is_on else output


def wrap(base: nn.Linear) -> nn.Module:
    return LowRank(base)


def inherit(base: nn.Linear) -> nn.Module:
    quantised = Quantised(base.in_features, base.out_features, bias=False)
    quantised.weight = base.weight
    return quantised


@pytest.mark.parametrize("adapt", [wrap, inherit])
def test_layers_of_other_classes_are_left_alone(adapt: Callable[[nn.Linear], nn.Module]) -> None:
    torch.manual_seed(1)
    model, prompts = make_model("llama"), make_prompts([5, 9], seed=3)
    for layer in model.model.layers:
        layer.self_attn.q_proj = adapt(layer.self_attn.q_proj)
        layer.mlp.gate_proj = adapt(layer.mlp.gate_proj)
    engine = Engine.from_model(model, EngineConfig(CACHE))
    view = engine.debug.runner.view
    assert view.model.layers[0].self_attn.q_proj is model.model.layers[0].self_attn.q_proj
    for is_on in (True, False):
        for module in model.modules():
            if isinstance(module, LowRank):
                module.is_on = is_on
        engine.reset_prefix_cache()
        tokens = [one.token_ids for one in engine.generate(prompts, SamplingParams(max_tokens=4))]
        assert tokens == generate_each(model, prompts, 4)


class LimitedMLP(nn.Module):
    """A gated MLP with a limit that small rows do not reach."""

    limit = 500.0

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(32, 48, bias=False), nn.Linear(32, 48, bias=False)
        self.down_proj, self.act_fn = nn.Linear(48, 32, bias=False), nn.SiLU()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(rows)).clamp(max=self.limit) * self.up_proj(rows))


class PlainMLP(LimitedMLP):
    limit = float("inf")


class ErfMLP(PlainMLP):
    def __init__(self) -> None:
        super().__init__()
        self.act_fn = nn.GELU()


class ViewedMLP(PlainMLP):
    """It takes rows of its own size only."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows.view(-1, 32))


class HalvedRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(32)), 1e-6

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return 0.5 * self.weight * rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.eps)


class OutsideRMSNorm(HalvedRMSNorm):
    """Its epsilon is added after the root."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.weight * rows / (rows.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)


class MeanRMSNorm(HalvedRMSNorm):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.weight * nn.functional.layer_norm(rows, (32,), eps=self.eps)


@pytest.mark.parametrize("kind", [LimitedMLP, ErfMLP, ViewedMLP, HalvedRMSNorm, OutsideRMSNorm, MeanRMSNorm])
def test_layers_that_compute_something_else_stay_as_they_are(kind: type[nn.Module], calls: Counter) -> None:
    model = make_model("llama")
    layer, module = model.model.layers[0], kind()
    name = "mlp" if kind.__name__.endswith("MLP") else "input_layernorm"
    setattr(layer, name, module)
    module = view_of(model, calls).model.layers[0].get_submodule(name)
    calls.clear()
    with torch.no_grad():
        torch.testing.assert_close(module(torch.ones(3, 32)), layer.get_submodule(name)(torch.ones(3, 32)))
    assert calls["gated_linear"] == calls["rms_norm"] == 0


def test_a_gated_mlp_of_the_callers_own_is_not_copied() -> None:
    """What is switched on it must count at once."""
    model = make_model("llama")
    mlp = model.model.layers[0].mlp = PlainMLP()
    assert view_of(model).model.layers[0].mlp is mlp
