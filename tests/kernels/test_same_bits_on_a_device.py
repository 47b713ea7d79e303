"""Engines with `same_bits` as on a GPU: its layers and products in the interpreter, a CPU's memory and attention."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers as tf
from support.cpu_graphs import as_on_a_device
from support.kernel_calls import INTERPRETED

pytest.importorskip("triton")
if not INTERPRETED:
    pytest.skip("the interpreter runs them", allow_module_level=True)

from kvpage import CacheConfig
from kvpage.checks.errors import OptionError
from kvpage.kernels.prepared import Prepared
from kvpage.ops.cuda.layers import device_linear, device_log_softmax
from kvpage.serving import Engine, EngineConfig, KVPageCachePool, SamplingParams
from kvpage.serving.assembly import parts
from kvpage.serving.loop.batch import logprobs
from kvpage.serving.model.attention import HeadAttention
from kvpage.serving.model.native.bits import device_bits
from kvpage.serving.model.native.bits.device_bits import DeviceBits, check_device_bits
from kvpage.serving.model.native.bits.numerics import device_numerics_name, numerics_name
from kvpage.serving.model.native.bits.row_bits import RowBits
from kvpage.serving.model.native.device import DeviceLayers
from kvpage.serving.model.native.torch_threads import TorchThreads

CONFIG = EngineConfig(CacheConfig(4, 64), max_num_seqs=4, max_num_batched_tokens=5, same_bits=True)
PROMPTS = [[3, 4, 5, 6, 7, 8], [3, 4, 5, 9, 8], [7]]
PARAMS = SamplingParams(max_tokens=2, temperature=1.0, seed=5, logprobs=2, ignore_eos=True)


@pytest.fixture(autouse=True)
def device(cpu_as_device, monkeypatch):
    """The CPU stands in for one."""
    plain = DeviceLayers(HeadAttention(), lambda rows: not torch.is_grad_enabled())
    monkeypatch.setattr(parts, "_native_layers", lambda *args: plain)
    monkeypatch.setattr(parts, "_row_bits", lambda model, *args: DeviceBits(type(model).__name__, plain.threads))
    monkeypatch.setattr(logprobs, "log_softmax", device_log_softmax)
    launch = Prepared.launch

    def launch_unseen(*args):  # the interpreter calls torch, which a launch does not
        with torch._C._DisableTorchDispatch():
            launch(*args)

    monkeypatch.setattr(Prepared, "launch", launch_unseen)


def model_of(kind, dtype=torch.float32, **options):
    torch.manual_seed(0)
    config = tf.AutoConfig.for_model(
        kind, vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, pad_token_id=0, **options,
    )  # fmt: skip
    return tf.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def answers(engine, prompts):
    return [
        (sample.token_ids, [(token.logprob, token.rank) for token in sample.logprobs])
        for output in engine.generate(prompts, PARAMS)
        for sample in output.samples
    ]


@pytest.mark.parametrize("kind, dtype", [("llama", torch.bfloat16), ("qwen3", torch.float32)], ids=str)
def test_an_answer_has_the_bits_of_the_request_alone(kind, dtype):
    """Beside others, in portions, warm at an offset within a block, and from captured steps."""
    model = model_of(kind, dtype)
    engine = Engine.from_model(model, CONFIG)
    together = answers(engine, PROMPTS)
    for prompt, answer in zip(PROMPTS, together, strict=True):
        assert answers(engine, [prompt]) == [answer]  # warm
        engine.reset_prefix_cache()
        assert answers(engine, [prompt]) == [answer]
    if dtype == torch.float32:
        assert answers(as_on_a_device(engine), PROMPTS[1:]) == together[1:]


def by_number(rows, weight, bias):
    """A product in another order for few rows."""
    weight = weight.contiguous()
    size = weight.shape[1] // 2
    if len(rows) > 9 or weight.shape[1] < 2:
        return device_linear(rows, weight, bias)
    parts = [device_linear(rows[:, at], weight[:, at], None) for at in (slice(size), slice(size, None))]
    return sum(parts) if bias is None else sum(parts) + bias


def test_a_product_that_depends_on_the_number_of_rows_is_refused(monkeypatch):
    monkeypatch.setattr(device_bits, "device_linear", by_number)
    with pytest.raises(OptionError, match="portions differ"):
        Engine.from_model(model_of("llama"), CONFIG)


REFUSED = {"gpt2": "native_layer_norm", "mixtral": "same_bits must be False for MixtralForCausalLM: it calls aten::"}


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_call_other_operators_are_refused_by_these_names(kind):
    torch.manual_seed(0)
    options = {"num_local_experts": 2} if kind == "mixtral" else {"n_inner": 48, "bos_token_id": 1, "eos_token_id": 2}
    with pytest.raises(OptionError, match=REFUSED[kind]):
        Engine.from_model(model_of(kind, **options), CONFIG)


def on_a_gpu(**attributes):
    """What is asked of a model."""
    return SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16, **attributes)


USUAL = {"has_states": False, "backend": "flash", "blends": False, "native_layers": True, "attention_backend": "auto"}
OPTIONS = {
    "keeps states": {"has_states": True},
    "latents": {"backend": "mla"},
    "blending": {"blends": True},
    "native_layers": {"native_layers": False},
    "attention_backend": {"attention_backend": "flashinfer"},
}


@pytest.mark.parametrize("why", OPTIONS)
def test_what_is_refused_on_a_gpu(why):
    with pytest.raises(OptionError, match=f"same_bits must be False: .*{why}"):
        check_device_bits(on_a_gpu(), **USUAL | OPTIONS[why])


def test_a_model_on_a_gpu_gets_the_mode_of_a_gpu(monkeypatch):
    monkeypatch.undo()
    config = replace(CONFIG, attention_backend="kvpage")
    bits = parts._row_bits(on_a_gpu(), config, TorchThreads(lambda: None), False)
    assert type(bits) is DeviceBits
    assert type(parts._row_bits(model_of("llama"), config, TorchThreads(), False)) is RowBits
    with pytest.raises(OptionError, match="quantised weights"):
        parts._row_bits(on_a_gpu(hf_quantizer=object()), config, TorchThreads(lambda: None), False)
    with pytest.raises(OptionError, match="is on cpu"):
        DeviceBits.of_model(model_of("llama"), TorchThreads())
    with pytest.raises(OptionError, match="for `generate` on meta"):
        KVPageCachePool.from_model(model_of("llama").to("meta"), CacheConfig(4, 8), same_bits=True)


@pytest.mark.parametrize("num_addends", [0, 1])
def test_products_of_torch_by_the_mode(num_addends):
    rows, matrix, batch = torch.randn(3, 8), torch.randn(8, 5), torch.randn(2, 3, 8)
    bias, whole = torch.randn(10)[::2], torch.randn(3, 5)
    with torch.no_grad():
        pairs = [(torch.mm, rows, matrix), (torch.bmm, batch, matrix.expand(2, 8, 5))]
        if num_addends:
            pairs = [(torch.addmm, bias, rows, matrix), (torch.addmm, whole, rows, matrix)]
            pairs.append((torch.baddbmm, whole.expand(2, 3, 5), batch, matrix.expand(2, 8, 5)))
        wants = [function(*args) for function, *args in pairs]
        with DeviceBits("M", TorchThreads(lambda: None)) as bits:
            for (function, *args), want in zip(pairs, wants, strict=True):
                torch.testing.assert_close(function(*args), want, rtol=1e-5, atol=1e-5)
            for call in (lambda: rows.sum(-1), lambda: rows.topk(2), lambda: rows.double() @ matrix.double()):
                with pytest.raises(OptionError, match=r"M: it calls aten::(sum|topk|mm of another form)"):
                    call()
            turned, most = matrix.t().cos(), rows.amax(-1)
        assert torch.equal(turned, matrix.cos().t()) and torch.equal(most, rows.max(-1).values)
        assert bits.replaced >= {"mm", "cos"}


def test_a_gpu_has_a_numerics_name_of_its_own():
    assert device_numerics_name(9, 0).split()[1] == "sm_90"
    assert len({device_numerics_name(9, 0), device_numerics_name(8, 0), numerics_name()}) == 3
    assert numerics_name(torch.device("cpu")) == numerics_name()
