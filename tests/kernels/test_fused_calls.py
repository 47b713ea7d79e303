"""Layers whose sums and heads are one kernel, in Triton's interpreter: what is done to a model shows in its view."""

from collections import Counter
from itertools import cycle

import numpy as np
import pytest
import torch
import transformers as tf
from support.kernel_calls import INTERPRETED

pytest.importorskip("triton")
if not INTERPRETED:
    pytest.skip("the interpreter runs them", allow_module_level=True)

from transformers.models.qwen3 import modeling_qwen3

from kvpage import CacheConfig, CacheEngine, ModelConfig
from kvpage.kernels.prepared import Prepared
from kvpage.serving.model.attention import HeadAttention
from kvpage.serving.model.native.device import DeviceLayers
from kvpage.serving.model.runner import ModelRunner
from kvpage.serving.model.step import PackedTokens, Step

PACKED = PackedTokens(np.array([5, 9, 7, 1], np.int32), [0, 0], [1, 3], np.array([0, 3]))


@pytest.fixture(autouse=True)
def device(cpu_as_device):
    """The CPU stands in for one."""


@pytest.fixture
def launches(monkeypatch):
    """Counts launches by the names of kernels."""
    counts, launch = Counter(), Prepared.launch

    def counted(prepared, *args):
        counts[prepared._kernel.fn.__name__] += 1
        launch(prepared, *args)

    monkeypatch.setattr(Prepared, "launch", counted)
    return counts


def model_of(kind, num_layers=2, **fields):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": num_layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
    config = tf.AutoConfig.for_model(kind, **sizes, **heads, **fields)
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data += torch.randn(parameter.shape) / 4
    return model


def logits_of(runner, cache_dtype="auto", backend="flash"):
    """Of a step of two sequences, of 1 and 3 tokens, that begin; and all bytes of the cache."""
    model = runner.model
    config = CacheConfig(4, 4, cache_dtype=cache_dtype, backend=backend)
    cache = CacheEngine(config, ModelConfig.from_hf(model.config, model.dtype))
    slots, tables = np.array([8, 0, 1, 2]), np.array([[2], [0]], np.int32)
    logits = runner.forward(PACKED, Step.make(cache, slots, tables, [0, 0], [1, 3]))
    return logits, [layer.float() for layer in cache.gpu_cache]


def is_plain(rows):
    return not torch.is_grad_enabled()


def runners_of(model):
    """With fused layers, which know what comes after each layer, and without."""
    fused = ModelRunner(model, DeviceLayers(HeadAttention(), is_plain))
    logits_of(fused)
    return fused, ModelRunner(model)


def check(model, change=lambda model: None):
    fused, own = runners_of(model)
    before = logits_of(fused)[0]
    change(model)
    got, want = logits_of(fused), logits_of(own)
    torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-5)
    return bool((got[0] - before).abs().max() > 1e-3)


def doubled(module, args, output):
    return output * 2 + 1


def doubled_in_place(module, args, output):
    output.mul_(2).add_(1)


KINDS = "qwen3", "gemma3_text"
CHANGES = {
    "a layer's output": lambda layers: layers[0].register_forward_hook(doubled),
    "a layer's output, in place": lambda layers: layers[0].register_forward_hook(doubled_in_place),
    "rows before a norm": lambda layers: layers[1].input_layernorm.register_forward_pre_hook(
        lambda module, args: (args[0] + 1,)
    ),
    "rows before a norm, in place": lambda layers: layers[1].input_layernorm.register_forward_pre_hook(
        lambda module, args: (args[0].add_(1),)
    ),
    "the first norm": lambda layers: layers[1].input_layernorm.register_forward_hook(doubled),
    "the norm between": lambda layers: layers[0].post_attention_layernorm.register_forward_hook(doubled),
    "a weight": lambda layers: layers[1].input_layernorm.weight.data.mul_(3),
    "another weight": lambda layers: setattr(
        layers[1].input_layernorm, "weight", torch.nn.Parameter(torch.linspace(0, 3, 32))
    ),
    "a product": lambda layers: layers[1].self_attn.k_proj.register_forward_hook(doubled),
    "the last product": lambda layers: layers[1].self_attn.o_proj.register_forward_hook(doubled),
    "another layer": lambda layers: layers.append(layers.pop(0)),
    "attention": lambda layers: layers[1].self_attn.register_forward_hook(
        lambda module, args, output: (output[0] * 2 + 1, output[1])
    ),
    "an MLP": lambda layers: layers[0].mlp.register_forward_hook(doubled),
}


@pytest.mark.parametrize("change, kind", [*zip(CHANGES.values(), cycle(KINDS), strict=False)], ids=CHANGES)
def test_changes_of_a_model_count(change, kind):
    assert check(model_of(kind), lambda model: change(model.model.layers))


@pytest.mark.parametrize("norm", ["q_norm", "k_norm"])
def test_hooks_of_norms_of_heads_are_called(norm, launches):
    model = model_of("qwen3")
    assert check(model, lambda model: getattr(model.model.layers[0].self_attn, norm).register_forward_hook(doubled))
    fused, _ = runners_of(model)
    launches.clear()
    logits_of(fused)
    assert launches["heads_kernel"] == 1 and launches["reshape_and_cache_kernel"] == 0  # the CPU writes the others


def test_functions_and_forwards_that_come_later_are_called(monkeypatch):
    rotate, norm = modeling_qwen3.apply_rotary_pos_emb, modeling_qwen3.Qwen3RMSNorm.forward
    layer, attention = modeling_qwen3.Qwen3DecoderLayer.forward, modeling_qwen3.Qwen3Attention.forward
    others = (
        (modeling_qwen3, "apply_rotary_pos_emb", lambda query, key, cos, sin: rotate(query * 2, key, cos, sin)),
        (modeling_qwen3.Qwen3RMSNorm, "forward", lambda self, rows: 2 * norm(self, rows) + 1),
        (modeling_qwen3.Qwen3DecoderLayer, "forward", lambda self, *args, **named: 2 * layer(self, *args, **named) + 1),
        (modeling_qwen3.Qwen3Attention, "forward", lambda self, **named: (attention(self, **named)[0] * 2, None)),
    )
    for other in others:
        with monkeypatch.context() as patch:
            assert check(model_of("qwen3"), lambda model, patch=patch, other=other: patch.setattr(*other))


def test_other_ways_to_call():
    """With gradients, in inference mode, and with a cache of transformers."""
    model = model_of("gemma3_text")
    fused, _ = runners_of(model)
    arguments = {"input_ids": torch.arange(6)[None], "position_ids": torch.arange(6)[None], "use_cache": False}
    view = fused.view
    view.set_attn_implementation("eager")
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            for _ in range(2):
                got, want = view(**arguments).logits, model(**arguments).logits
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
                assert got.requires_grad == want.requires_grad
    with torch.no_grad():
        cache = tf.DynamicCache(config=model.config)
        view(**{**arguments, "use_cache": True, "past_key_values": cache})
        assert cache.get_seq_length() == 6


@pytest.mark.parametrize(
    "cache_dtype, backend",
    [("auto", "flash"), ("auto", "paged"), ("fp8_e4m3", "flashinfer"), ("int8", "flash")],
)
def test_caches(cache_dtype, backend, launches):
    fused, own = runners_of(model_of("qwen3"))
    launches.clear()
    got = logits_of(fused, cache_dtype, backend)
    assert launches["heads_kernel"] == 2 and launches["add_norm_kernel"] == 4
    want = logits_of(own, cache_dtype, backend)
    torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-4 if cache_dtype == "auto" else 1e-2)


@pytest.mark.parametrize(
    "kind, fields, heads, sums",
    [
        ("llama", {}, 2, 4),
        ("qwen2", {}, 2, 4),
        ("olmo2", {}, 0, 4),  # norms of all heads together
        ("granite", {"residual_multiplier": 0.5}, 2, 0),  # it does not add rows as they are
        ("gemma2", {}, 2, 4),
        ("phi3", {}, 0, 0),  # one product for all heads, and parts between modules and sums
    ],
)
def test_families(kind, fields, heads, sums, launches):
    model = model_of(kind, **fields)
    fused, own = runners_of(model)
    launches.clear()
    torch.testing.assert_close(logits_of(fused)[0], logits_of(own)[0], rtol=1e-4, atol=1e-5)
    assert (launches["heads_kernel"], launches["add_norm_kernel"]) == (heads, sums)
