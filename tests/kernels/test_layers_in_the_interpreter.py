"""Layers of a view on a GPU, run by Triton's interpreter: what they compute, and how many kernels a layer launches."""

import copy
from collections import Counter

import numpy as np
import pytest
import torch
import transformers as tf
from support.cpu_graphs import as_on_a_device
from support.kernel_calls import INTERPRETED
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")
if not INTERPRETED:
    pytest.skip("the interpreter runs them", allow_module_level=True)

from kvpage import CacheConfig, CacheEngine, ModelConfig, ops
from kvpage.kernels.prepared import Prepared
from kvpage.kernels.row_grid import RowGrid
from kvpage.ops import reference
from kvpage.ops.cuda.layers import device_gate, device_rms_norm, device_rope
from kvpage.serving import Engine, EngineConfig, SamplingParams
from kvpage.serving.assembly import parts
from kvpage.serving.model.attention import HeadAttention
from kvpage.serving.model.native.device import DeviceLayers
from kvpage.serving.model.native.joined import JoinedLinear, join
from kvpage.serving.model.runner import ModelRunner
from kvpage.serving.model.step import PackedTokens, Step
from kvpage.serving.model.view import ModelView

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # of a number that rounds the other way
NO_KERNELS = {
    *("view", "_unsafe_view", "reshape", "transpose", "permute", "t", "expand", "slice", "unsqueeze", "squeeze"),
    *("split", "split_with_sizes", "chunk", "select", "alias", "detach", "unbind", "as_strided", "empty", "new_empty"),
}
LAUNCHES = 8  # of a layer, beside attention
NUMBERS_OF_LAYERS = 6, 12  # Gemma's kinds of layers alternate
ATTENTION = 4  # kernels of `averages`
MODULES = {"llama": 36, "qwen3": 52, "gemma3_text": 80}


@pytest.fixture(autouse=True)
def device(cpu_as_device):
    """The CPU stands in for one."""


def rows_of(dtype, *shapes):
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def close(got, want, dtype):
    torch.testing.assert_close(got.float(), want.float(), rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


@pytest.mark.parametrize("size", [1, 16, 48, 129, 4097])
@DTYPES
def test_norms_are_the_reference(size, dtype):
    weight, flat, heads = rows_of(dtype, (size,), (5, size), (3, 4, size))
    one, none = flat[0], flat[:0]
    for rows in (flat, one, none, heads, heads.transpose(0, 1), heads[:, :3], heads[None, 1:, ::2]):
        for offset, rounds in ((0.0, True), (1.0, False)):
            got = device_rms_norm(rows, weight, 1e-6, offset, rounds)
            close(got, reference.rms_norm(rows, weight, 1e-6, offset, rounds), dtype)
            assert got.is_contiguous()


def test_norms_take_no_other_rows_and_weights():
    rows, weight = torch.randn(2, 3, 4, 8), torch.randn(8)
    scattered = torch.randn(4, 6, 8, 8)[::2, ::2, ::3]
    for case in ((rows, torch.randn(7)), (rows, weight.half()), (rows.mT, torch.randn(4)), (scattered, weight)):
        assert device_rms_norm(*case, 1e-6, 0.0, True) is None
    assert device_rms_norm(rows, torch.randn(16)[::2], 1e-6, 0.0, True) is None
    assert device_rms_norm(rows, None, 1e-6, 0.0, True) is None


@pytest.mark.parametrize("size", [1, 5, 1024, 1025])
@DTYPES
def test_activations_are_torchs(size, dtype):
    gates, wide, none = rows_of(dtype, (2, 3, size), (2, 3, size + 7), (0, size))
    gates[0, 0, 0] = -200.0  # its exponential is infinite
    functions = {
        "silu": torch.nn.functional.silu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    }
    for name, function in functions.items():
        got = device_gate(gates, wide[..., :size], name)
        close(got, function(gates) * wide[..., :size], dtype)
        assert device_gate(none, none, name).shape == none.shape
    assert device_gate(gates, wide, "silu") is None


@pytest.mark.parametrize("size", [2, 10, 64, 96])
@DTYPES
def test_rotations_are_the_models_bit_by_bit(size, dtype):
    rotate = tf.models.llama.modeling_llama.apply_rotary_pos_emb
    for num_tokens, num_heads, num_kv_heads in ((0, 2, 1), (1, 1, 1), (5, 4, 2), (3, 6, 3)):
        query, key, cos, sin = rows_of(
            dtype,
            (1, num_tokens, num_heads, size),
            (1, num_tokens, num_kv_heads, size + 2),
            *[(1, num_tokens, size)] * 2,
        )
        query, key = query.transpose(1, 2), key[..., :size].transpose(1, 2)
        for got, want in zip(device_rope(query, key, cos, sin), rotate(query, key, cos, sin), strict=True):
            assert got.shape == want.shape and torch.equal(got.contiguous().view(torch.uint8), want.view(torch.uint8))
            assert got.transpose(1, 2).is_contiguous()
    assert device_rope(query, key[..., :0], cos, sin) is None


def test_grids_of_rows():
    rows = torch.arange(2 * 3 * 4).reshape(2, 3, 4)
    for view in (rows, rows.transpose(0, 1), rows[:, 1:], rows[1], rows[1, 2], rows[:, :0], rows[:1], rows[None, :, 1]):
        grid = RowGrid.of(view)
        starts = [
            i // grid.inner * grid.outer_stride + i % grid.inner * grid.inner_stride for i in range(grid.num_rows)
        ]
        memory = rows.flatten()[view.storage_offset() :]
        assert [memory[start : start + 4].tolist() for start in starts] == view.reshape(-1, 4).tolist()


class Counted(TorchDispatchMode):
    """Counts torch's kernels, and those of kvpage."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.counts, launch = Counter(), Prepared.launch
        monkeypatch.setattr(
            Prepared, "launch", lambda *args: self.counts.update(["kvpage"]) or self.aside(launch, *args)
        )

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().split("::")[1].split(".")[0]
        self.counts.update([] if name in NO_KERNELS else [name])
        return function(*args, **(kwargs or {}))

    def aside(self, launch, *args):
        """The interpreter computes with torch's operators."""
        before = self.counts.copy()
        launch(*args)
        self.counts = before


def model_of(kind, dtype, num_layers=2):
    torch.manual_seed(0)
    fields = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}
    config = tf.AutoConfig.for_model(
        kind,
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        pad_token_id=0,
        **fields,
    )
    return tf.AutoModelForCausalLM.from_config(config, attn_implementation="averages", dtype=dtype).eval()


def averages(module, query, key, value, mask, **kwargs):
    """Stand for attention: K and V matter, and no kernel is launched but one each."""
    repeats = query.shape[1] // key.shape[1]
    return (query + (key + value).repeat_interleave(repeats, 1)).transpose(1, 2).contiguous(), None


tf.AttentionInterface.register("averages", averages)
IDS = {"input_ids": torch.arange(8)[None], "position_ids": torch.arange(8)[None], "use_cache": False}


def is_plain(rows):
    return not torch.is_grad_enabled()


def view_of(model):
    return ModelView(model, DeviceLayers(HeadAttention(), is_plain), "averages").module


def counts_of(modules, monkeypatch):
    with torch.no_grad():
        modules(**IDS)
        with Counted(monkeypatch) as counted:
            modules(**IDS)
    return counted.counts


def engine_of(model, monkeypatch):
    model.set_attn_implementation("sdpa")
    monkeypatch.setattr(parts, "_native_layers", lambda *args: DeviceLayers(HeadAttention(), is_plain))
    return Engine.from_model(model, EngineConfig(CacheConfig(4, 64), max_num_seqs=2))


def runner_of(model):
    model.set_attn_implementation("sdpa")
    return ModelRunner(model, DeviceLayers(HeadAttention(), is_plain))


def step_of(model):
    """A step of two sequences, of 1 and 3 tokens, that begin."""
    cache = CacheEngine(CacheConfig(4, 4), ModelConfig.from_hf(model.config, model.dtype))
    slots, tables = np.array([8, 0, 1, 2]), np.array([[2], [0]], np.int32)
    return Step.make(cache, slots, tables, [0, 0], [1, 3])


PACKED = PackedTokens(np.array([5, 9, 7, 1], np.int32), [0, 0], [1, 3], np.array([0, 3]))


@pytest.mark.parametrize("kind", MODULES)
def test_a_models_own_layer_launches_many_kernels(kind, monkeypatch):
    few, many = (counts_of(model_of(kind, torch.bfloat16, num), monkeypatch).total() for num in NUMBERS_OF_LAYERS)
    assert (many - few) / 6 - ATTENTION == MODULES[kind]


@pytest.mark.parametrize("kind", MODULES)
def test_a_layer_of_a_step_launches_few_kernels(kind, monkeypatch):
    monkeypatch.setattr(ops, "attend", lambda query, *args: torch.empty(query.shape, dtype=query.dtype))
    counts = []
    for num_layers in (2, 3):
        model = model_of(kind, torch.bfloat16, num_layers)
        runner = runner_of(model)
        runner.forward(PACKED, step_of(model))  # it shows which norm comes after which layer
        step = step_of(model)
        with torch.no_grad(), Counted(monkeypatch) as counted:
            runner.forward(PACKED, step)
        counts.append(counted.counts.total())
    assert counts[1] - counts[0] == LAUNCHES


@pytest.mark.parametrize("kind", MODULES)
@DTYPES
def test_a_view_computes_what_the_model_computes(kind, dtype):
    model = model_of(kind, dtype)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        want = model(**IDS).logits
        view = view_of(model)
        got = view(**IDS).logits
        assert torch.equal(model(**IDS).logits, want) or dtype != torch.float32
    torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=ROUNDING[dtype] * 8 * float(want.abs().max()))
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("kind", MODULES)
def test_an_engine_answers_as_generate_does(kind, monkeypatch):
    """The second time by captured steps."""
    model = model_of(kind, torch.float32)
    engine = engine_of(model, monkeypatch)
    assert any(isinstance(module, JoinedLinear) for module in engine.debug.runner.view.modules())
    prompts = [list(range(3, 12)), list(range(40, 45))]
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    outputs = engine.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt])
        want = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
        assert output.samples[0].token_ids == want[0, len(prompt) :].tolist()
    again = as_on_a_device(engine).generate(prompts, params)
    assert [output.token_ids for output in again] == [output.token_ids for output in outputs]
    assert engine.stats().graphs.num_replays > 0


class Doubling(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


def joined_pair(bias=False, dtype=torch.float32):
    torch.manual_seed(0)
    sources = [torch.nn.Linear(6, size, bias=bias).to(dtype).requires_grad_(False) for size in (4, 2)]
    copies = [copy.deepcopy(source) for source in sources]
    return sources, copies, join(sources, is_plain)


@pytest.mark.parametrize("bias", [False, True])
def test_joined_layers_are_the_layers(bias):
    sources, copies, layers = joined_pair(bias)
    with torch.no_grad():
        for rows in (torch.randn(3, 6), torch.randn(1, 5, 6), torch.randn(0, 6)):
            for order in ((0, 1), (1, 0), (0, 0), (1,)):
                for index in order:
                    torch.testing.assert_close(layers[index](rows), copies[index](rows))
    for source, other in zip(sources, copies, strict=True):
        assert torch.equal(source.weight, other.weight)
    again = join(sources, is_plain)
    assert again is not None and again[0].weight.data_ptr() == layers[0].weight.data_ptr()


def test_joined_layers_follow_what_happens_to_rows_and_weights():
    sources, copies, layers = joined_pair()
    rows = torch.randn(3, 6)
    with torch.no_grad():
        layers[0](rows)
        rows.mul_(2)  # between the two
        torch.testing.assert_close(layers[1](rows), copies[1](rows))
        for part in (*sources, *copies):
            part.weight.add_(1)  # in place: both see it
        torch.testing.assert_close(layers[1](rows), copies[1](rows))
        sources[0].weight.data = copies[0].weight.data.mul(3).clone()  # moved away
        torch.testing.assert_close(layers[0](rows), 3 * copies[0](rows))
        torch.testing.assert_close(layers[1](rows), copies[1](rows))
        torch.nn.utils.parametrize.register_parametrization(sources[1], "weight", Doubling())
        torch.testing.assert_close(layers[1](rows), 2 * copies[1](rows))
    with torch.inference_mode():
        rows = torch.randn(3, 6)
        torch.testing.assert_close(joined_pair()[2][1](rows), joined_pair()[1][1](rows))


def test_other_layers_are_not_joined():
    torch.manual_seed(0)
    plain, narrow, half, biased = (
        torch.nn.Linear(6, 4, bias=False), torch.nn.Linear(5, 4, bias=False),
        torch.nn.Linear(6, 4, bias=False).half(), torch.nn.Linear(6, 4),
    )  # fmt: skip
    tied = torch.nn.Linear(6, 4, bias=False)
    tied.weight = torch.nn.Parameter(torch.randn(8, 6)[:4])  # memory that others have, too
    address = plain.weight.data_ptr()
    for other in (narrow, half, biased, tied):
        assert join([plain, other], is_plain) is None
    assert plain.weight.data_ptr() == address
