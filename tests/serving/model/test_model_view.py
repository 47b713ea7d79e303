"""One model for engines, caches and plain calls in any threads: nobody sees that another is at work."""

import copy
import functools
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
import transformers as tf
from support.models import COMMON, generate_each, make_model, make_prompts

from kvpage import CacheConfig
from kvpage.blend.config import BlendConfig
from kvpage.serving import Engine, EngineConfig, KVPageCache, KVPageCachePool, SamplingParams
from kvpage.serving.model.view import ModelView

B, NEW = 4, 6
CACHE = CacheConfig(block_size=B, num_gpu_blocks=64)
PROMPTS = make_prompts([5, 3 * B, 2], seed=3)


def by_engine(model: tf.PreTrainedModel) -> Callable[[], list[list[int]]]:
    engine = Engine.from_model(model, EngineConfig(CACHE, max_num_batched_tokens=7))
    return lambda: [one.token_ids for one in engine.generate(PROMPTS, SamplingParams(max_tokens=NEW))]


def serve(engine: Engine, namespace: bytes) -> list[list[int]]:
    ids = [engine.add_request(one, SamplingParams(max_tokens=NEW), namespace=namespace) for one in PROMPTS]
    outputs = {}
    while engine.has_unfinished:
        outputs |= {one.request_id: one.output for one in engine.step() if one.output}
    return [outputs[one].token_ids for one in ids]


def by_cache(model: tf.PreTrainedModel) -> Callable[[], list[list[int]]]:
    pool = KVPageCachePool.from_model(model, CACHE)

    def generate(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        with KVPageCache(pool, ids) as cache:
            mask = torch.ones_like(ids)
            options = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
            return model.generate(ids, past_key_values=cache, **options)[0, len(prompt) :].tolist()

    return lambda: [generate(prompt) for prompt in PROMPTS]


def by_generate(model: tf.PreTrainedModel) -> Callable[[], list[list[int]]]:
    return lambda: generate_each(model, PROMPTS, NEW)


WAYS = {"engine": by_engine, "cache": by_cache, "generate": by_generate}


@contextmanager
def within_each_forward(model: tf.PreTrainedModel, call: Callable[[], object]) -> Iterator[None]:
    """Inside, `call` is made in another thread amid each forward of this one, which waits for it."""
    mine = threading.get_ident()
    with ThreadPoolExecutor(1) as other:

        def hook(module: torch.nn.Module, args: tuple) -> None:
            if threading.get_ident() == mine:
                other.submit(call).result()

        handle = model.model.layers[1].register_forward_pre_hook(hook)
        yield
        handle.remove()


@pytest.mark.parametrize("inner", WAYS)
@pytest.mark.parametrize("outer", WAYS)
def test_others_amid_a_forward(outer: str, inner: str) -> None:
    model = make_model("llama")
    expected = generate_each(model, PROMPTS, NEW)
    outer_way, inner_way, found = WAYS[outer](model), WAYS[inner](model), []
    with within_each_forward(model, lambda: found.append(inner_way())):
        assert outer_way() == expected
    assert len(found) >= NEW and all(tokens == expected for tokens in found)
    assert generate_each(model, PROMPTS, NEW) == expected


def test_threads_at_once() -> None:
    model = make_model("mistral")
    expected, before, seen = generate_each(model, PROMPTS, NEW), type(model), set()
    calls = [make(model) for make in (by_engine, by_engine, by_cache, by_cache, by_generate)]

    def sample(module: torch.nn.Module, args: tuple) -> None:
        configs = [model.config, model.model.config, *(layer.self_attn.config for layer in model.model.layers)]
        seen.update((type(model), type(config), config._attn_implementation) for config in configs)

    handle = model.model.layers[1].register_forward_pre_hook(sample)
    with ThreadPoolExecutor(len(calls)) as pool:
        results = [pool.submit(lambda call=call: [call() for _ in range(4)]) for call in calls]
        assert [one.result() for one in results] == [[expected] * 4] * len(calls)
    handle.remove()
    assert seen == {(before, type(model.config), "eager")}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_is_as_it_was_amid_a_step_and_after() -> None:
    model = make_model("llama")
    before = [(module, dict(vars(module))) for module in model.modules()]
    config = copy.deepcopy(model.config.to_dict())
    engine = Engine.from_model(model, EngineConfig(CACHE, blend=BlendConfig()))
    engine.generate(PROMPTS, SamplingParams(max_tokens=NEW))
    for module, state in before:
        assert vars(module).keys() == state.keys()
        assert all(vars(module)[name] is value for name, value in state.items()), type(module).__name__
    assert model.config.to_dict() == config


# --- the same weights, whatever is done to them -----------------------------------------------------------------------


def negate(model: tf.PreTrainedModel) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.neg_()


def load(model: tf.PreTrainedModel) -> None:
    model.load_state_dict(make_model("llama", initializer_range=0.2).state_dict())


def assign(model: tf.PreTrainedModel) -> None:
    model.load_state_dict(make_model("llama", initializer_range=0.2).state_dict(), assign=True)


def replace_parameter(model: tf.PreTrainedModel) -> None:
    model.model.norm.weight = torch.nn.Parameter(torch.linspace(-1, 2, 32))


class Adapter(torch.nn.Module):
    """As those of PEFT: in place of a linear layer, around it, with a switch."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base, self.is_on = base, True
        generator = torch.Generator().manual_seed(4)
        self.delta = torch.nn.Parameter(torch.randn(base.weight.shape, generator=generator) * 0.3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.base(rows) + (rows @ self.delta.T if self.is_on else 0)


class Still(torch.nn.Module):
    """Attention that does not attend."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> tuple[torch.Tensor, None]:
        return hidden_states, None


def adapt(model: tf.PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)
        layer.mlp.up_proj = Adapter(layer.mlp.up_proj)


def replace_layer(model: tf.PreTrainedModel) -> None:
    model.model.layers[1] = make_model("llama", initializer_range=0.2).model.layers[1]


def hook_layer(model: tf.PreTrainedModel) -> None:
    model.model.layers[1].register_forward_hook(lambda module, args, output: output * 1.5)


CHANGES = [negate, load, assign, replace_parameter, adapt, replace_layer, hook_layer]


@pytest.mark.parametrize("change", CHANGES)
def test_an_engine_sees_what_is_done_to_the_model(change: Callable[[tf.PreTrainedModel], None]) -> None:
    model = make_model("llama")
    engine = Engine.from_model(model, EngineConfig(CACHE))
    engine.generate(PROMPTS, SamplingParams(max_tokens=NEW))
    before = generate_each(model, PROMPTS, NEW)
    change(model)
    expected = generate_each(model, PROMPTS, NEW)
    assert expected != before
    engine.update_weights("changed")
    assert serve(engine, b"") == expected
    assert model.config._attn_implementation == "eager"


def test_a_layer_that_no_longer_attends_over_blocks_is_told() -> None:
    """Its tokens would be those of a model without a past."""
    model = make_model("llama")
    engine = Engine.from_model(model, EngineConfig(CACHE))
    own, model.model.layers[1].self_attn = model.model.layers[1].self_attn, Still()
    engine.add_request(PROMPTS[0], SamplingParams(max_tokens=NEW))
    with pytest.raises(ValueError, match=r"layers \[0, 1, 2\] must each attend once .* it was \[0, 2\]"):
        engine.step()
    model.model.layers[1].self_attn = own
    assert serve(engine, b"") == generate_each(model, PROMPTS, NEW)


# --- forwards that were replaced --------------------------------------------------------------------------------------


def patch_by_method(module: torch.nn.Module) -> None:
    own = type(module).forward

    @functools.wraps(own)
    def forward(self: torch.nn.Module, *args: object, **kwargs: object) -> object:
        return own(self, *args, **kwargs)

    module.forward = types.MethodType(forward, module)


def patch_by_partial(module: torch.nn.Module) -> None:
    """As accelerate does."""
    module._old_forward = module.forward

    def forward(module: torch.nn.Module, *args: object, **kwargs: object) -> object:
        return module._old_forward(*args, **kwargs)

    module.forward = functools.update_wrapper(functools.partial(forward, module), module._old_forward)


def patch_by_compile(module: torch.nn.Module) -> None:
    """As a call of the module's `compile` does. A whole model that was compiled is refused."""
    if not isinstance(module, tf.PreTrainedModel):
        module._compiled_call_impl = module._call_impl


@pytest.mark.parametrize("patch", [patch_by_method, patch_by_partial, patch_by_compile])
def test_forwards_that_were_replaced(patch: Callable[[torch.nn.Module], None]) -> None:
    model = make_model("llama")
    expected = generate_each(model, PROMPTS, NEW)
    for module in model.modules():
        patch(module)
    assert by_engine(model)() == expected
    assert by_generate(model)() == expected


def test_a_forward_that_leads_back_to_the_models_own_modules_is_refused() -> None:
    model = make_model("llama")
    attention = model.model.layers[1].self_attn
    own = attention.forward
    attention.forward = lambda *args, **kwargs: own(*args, **kwargs)
    with pytest.raises(ValueError, match=r"layers \[0, 1, 2\] must each attend once .* it was \[0, 2\]"):
        Engine.from_model(model, EngineConfig(CACHE))
    assert model.config._attn_implementation == "eager"


def test_copies_of_modules_that_stay_are_the_same() -> None:
    model = make_model("llama")
    view = ModelView(model)
    module, layers = view.module, [*view.module.model.layers]
    own, model.model.layers[1] = model.model.layers[1], make_model("llama").model.layers[1]
    assert view.module is module and [*module.model.layers] != layers
    assert (module.model.layers[0], module.model.layers[2]) == (layers[0], layers[2])
    model.model.layers[1] = own
    assert view.module is module and module.model.layers[1].self_attn is not own.self_attn


# --- what a view holds ------------------------------------------------------------------------------------------------


def test_a_view_has_the_models_tensors_and_own_configs() -> None:
    model = make_model("gemma3")
    view = ModelView(model).module
    assert type(view) is type(model) and view is not model
    for (name, own), (other, shared) in zip(view.named_parameters(), model.named_parameters(), strict=True):
        assert name == other and own is shared
    for (name, own), (other, shared) in zip(view.named_buffers(), model.named_buffers(), strict=True):
        assert name == other and own is shared
    assert view.config is not model.config and view.model.config is view.config
    assert view.config._attn_implementation == "kvpage" and model.config._attn_implementation == "eager"
    assert view.config.to_dict() == {**model.config.to_dict()}
    assert view.model.embed_tokens is model.model.embed_tokens
    assert view.lm_head is model.lm_head


def test_tables_that_change_with_the_length_are_each_users_own() -> None:
    torch.manual_seed(0)
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
    config = tf.LlamaConfig(**{**COMMON, "max_position_embeddings": 24}, rope_parameters=rope, rope_scaling=rope)
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    both = PROMPTS + make_prompts([40], seed=5)  # the tables grow for the last, and are put back for the first
    expected = generate_each(model, both, NEW)
    engine, found = by_engine(model), []
    with within_each_forward(model, lambda: found.append(generate_each(model, both, NEW))):
        assert engine() == expected[:-1]
    assert found and all(tokens == expected for tokens in found)


def test_a_view_is_collected_with_its_engine() -> None:
    import gc
    import weakref

    model = make_model("llama")
    engine = Engine.from_model(model, EngineConfig(CACHE))
    view = weakref.ref(engine.debug.runner.view)
    del engine
    gc.collect()
    assert view() is None


def test_the_model_can_still_be_trained() -> None:
    model = make_model("llama")
    Engine.from_model(model, EngineConfig(CACHE)).generate(PROMPTS, SamplingParams(max_tokens=NEW))
    model(torch.tensor([PROMPTS[0]]), labels=torch.tensor([PROMPTS[0]])).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
