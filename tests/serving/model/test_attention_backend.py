"""EngineConfig(attention_backend=...): an engine attends by a library, or says why it cannot; "auto" finds the way.

The libraries are fakes that compute on the CPU.
"""

import logging

import pytest
import torch
from support.fake_libraries import Fakes
from support.latent_models import make_latent_model
from support.models import make_model, make_prompts

from kvpage import CacheConfig, ModelConfig
from kvpage.blend import BlendConfig
from kvpage.ops.cuda.libraries import choice, flashinfer
from kvpage.serving import Engine, EngineConfig, RankLost, SamplingParams
from kvpage.serving.assembly import parts
from kvpage.serving.assembly.parts import choose_attention
from kvpage.serving.model.runner import ModelRunner

PROMPTS = make_prompts([1, 33, 50, 17, 16], seed=5)
PARAMS = SamplingParams(max_tokens=6)
BLOCKS = {"flashinfer": 16, "flash_attn": 256, "flash_attn_3": 16}


@pytest.fixture
def fakes(monkeypatch):
    made = Fakes()
    made.install(monkeypatch)
    monkeypatch.setattr(choice, "capability_of", lambda device: 90)
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 64)
    return made


def make_half_model(kind="llama", **fields):
    torch.manual_seed(0)
    sizes = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2} | fields
    return make_model(kind, **sizes).bfloat16()


def make_engine(model, name, block_size=16, backend="flash", **options):
    config = CacheConfig(block_size, 40, backend=backend, cache_dtype=options.pop("cache_dtype", "auto"))
    return Engine.from_model(model, EngineConfig(config, attention_backend=name, native_layers=False, **options))


def first_logits(engine, prompts=PROMPTS):
    """The logits of the first forward pass of each prompt and of a few decodes after it."""
    seen, forward = [], engine.debug.runner.forward
    engine.debug.runner.forward = lambda *args: seen[-1].append(forward(*args)) or seen[-1][-1]
    for prompt in prompts:
        seen.append([])
        engine.generate([prompt], SamplingParams(max_tokens=3, ignore_eos=True))
    return seen


def check_alike(engine, ours):
    """Tokens differ where two are nearly as likely; logits by rounding."""
    for steps, others in zip(first_logits(engine), first_logits(ours), strict=True):
        for logits, want in zip(steps, others, strict=True):
            torch.testing.assert_close(logits, want, rtol=0.05, atol=0.05 * want.abs().max().item())
            if logits[-1].argmax() != want[-1].argmax():
                break  # the next tokens follow others


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mistral"])
@pytest.mark.parametrize("name", BLOCKS)
def test_an_engine_over_a_library_computes_the_same(fakes, name, kind):
    model = make_half_model(kind)
    engine = make_engine(model, name, BLOCKS[name])
    assert engine.attention_backend == name
    fakes.calls.clear()
    check_alike(engine, make_engine(model, "kvpage", BLOCKS[name]))
    assert sum(fakes.calls.values()) > 0


def test_steps_of_prompts_in_portions_and_of_decodes(fakes):
    model = make_half_model()
    engine = make_engine(model, "flashinfer", max_num_batched_tokens=24)
    fakes.calls.clear()
    outputs = engine.generate(PROMPTS, PARAMS)
    assert [len(output.token_ids) for output in outputs] == [6] * len(PROMPTS)
    runs = {name: count for name, count in fakes.calls.items() if name.endswith("run")}
    plans = {name: count for name, count in fakes.calls.items() if name.endswith("plan")}
    num_layers = model.config.num_hidden_layers
    assert runs == {name.replace("plan", "run"): num_layers * count for name, count in plans.items()}
    assert runs.keys() == {"flashinfer.decode.run", "flashinfer.prefill.run"}


@pytest.mark.parametrize("name", ["flashinfer", "flash_mla"])
def test_latents(fakes, name):
    model = make_latent_model("deepseek_v3", kv_lora_rank=512, qk_rope_head_dim=64).bfloat16()
    engine = make_engine(model, name, 64, "mla")
    fakes.calls.clear()
    check_alike(engine, make_engine(model, "kvpage", 64, "mla"))
    assert sum(fakes.calls.values()) > 0 and engine.attention_backend == name


def test_a_cache_of_8_bit_floats(fakes):
    model = make_half_model()
    engine = make_engine(model, "auto", cache_dtype="fp8_e4m3", kv_scales="calibrate")
    assert engine.attention_backend == "flashinfer"
    check_alike(engine, make_engine(model, "kvpage", cache_dtype="fp8_e4m3", kv_scales="calibrate"))


def test_blending_goes_on_beside_a_library(fakes):
    engine = make_engine(make_half_model(), "flashinfer", blend=BlendConfig(ratio=0.3, check_layer=1))
    segments = PROMPTS[1:3]
    engine.warm_segments(segments)
    prompt = [3, *segments[1], *segments[0], *PROMPTS[3]]
    engine.add_request(prompt, PARAMS, blend=True, segments=[1, len(segments[1]), len(segments[0])])
    outputs = []
    while engine.has_unfinished:
        outputs += [output.output for output in engine.step() if output.output]
    assert outputs[0].num_reused_tokens > 0 and len(outputs[0].token_ids) == 6
    engine.close()


def test_auto_takes_a_library_that_works(fakes, caplog):
    """FlashAttention 3 comes first, and does not work: the next one serves, and a line says why."""
    del fakes.modules["flash_attn_interface"].flash_attn_with_kvcache
    with caplog.at_level(logging.WARNING):
        engine = make_engine(make_half_model(), "auto")
    assert engine.attention_backend == "flashinfer"
    assert "'auto' leaves out flash_attn_3" in caplog.text and "flash_attn_with_kvcache" in caplog.text


def choose(name, num_ranks):
    model, blocks = make_half_model(), CacheConfig(16, 40)
    sizes = ModelConfig.from_hf(model.config, model.dtype, use_mla=False)
    return choose_attention(ModelRunner(model), blocks, sizes, name, num_ranks)


def test_no_library_attends_where_windows_have_blocks_of_their_own(fakes):
    model = make_half_model("gemma2")
    for num_window_blocks, is_apart in (("auto", True), (None, False)):
        config = EngineConfig(max_num_seqs=2, native_layers=False, num_window_blocks=num_window_blocks)
        engine = Engine.from_model(model, config)
        library = next(iter(engine.cache.bound_layers.values())).library
        assert bool(engine.stats().windows) == (library is None) == is_apart


def test_several_ranks_try_one_library(fakes, monkeypatch):
    """Each chooses for itself: a rank that tried another one would compute collectives that no other meets."""
    assert choose("auto", 2).library.name == "flash_attn_3"
    del fakes.modules["flash_attn_interface"].flash_attn_with_kvcache
    with pytest.raises(ValueError, match="must name another than flash_attn_3, which 'auto' takes on 2 ranks"):
        choose("auto", 2)
    assert choose("auto", 1).library.name == choose("flashinfer", 2).library.name == "flashinfer"


def test_a_lost_rank_says_nothing_of_a_library(fakes, monkeypatch):
    def lose(*arguments):
        raise RankLost("rank 1 is gone")

    monkeypatch.setattr(parts, "verify_model", lose)
    for name, num_ranks in (("auto", 1), ("auto", 2), ("flashinfer", 2)):
        with pytest.raises(RankLost, match="rank 1 is gone"):
            choose(name, num_ranks)


def test_auto_takes_no_library_that_computes_something_else(fakes, monkeypatch):
    names = {"flash_attn_interface": "flash_attn_with_kvcache", "flash_attn": "flash_attn_with_kvcache"}
    for module, name in names.items():
        monkeypatch.setattr(fakes.modules[module], name, lambda q, *args, **options: torch.zeros_like(q))
    broken = type("Broken", (), {"__init__": lambda *args, **options: None, "plan": lambda *args, **options: None,
                                 "run": lambda self, q, pages, **options: torch.zeros_like(q)})  # fmt: skip
    for name in ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"):
        monkeypatch.setattr(fakes.modules["flashinfer"], name, broken)
    model = make_half_model()
    assert make_engine(model, "auto").attention_backend == "kvpage"
    with pytest.raises(ValueError, match="attention_backend 'flashinfer' cannot serve this model: logits over blocks"):
        make_engine(model, "flashinfer")


def test_options_of_a_model_that_no_library_takes(fakes):
    model = make_half_model("gpt_oss")
    with pytest.raises(ValueError, match="'flashinfer' cannot serve this model: sinks must be None for flashinfer"):
        make_engine(model, "flashinfer")
    engine = make_engine(model, "auto")
    fakes.calls.clear()
    engine.generate(PROMPTS[:2], PARAMS)
    assert not fakes.calls, "kvpage's kernel has sinks"


def test_a_cpu_without_libraries_is_as_it_was():
    engine = make_engine(make_model("llama"), "auto", 4)
    assert engine.attention_backend == "kvpage"
    with pytest.raises(ValueError, match="needs flashinfer-python, which is not installed|must be on a CUDA device"):
        make_engine(make_model("llama"), "flashinfer", 4)
    with pytest.raises(ValueError, match="attention_backend must be one of auto, kvpage, flashinfer, .* got 'triton'"):
        EngineConfig(CacheConfig(4, 16), attention_backend="triton")
