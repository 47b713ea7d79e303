"""The serving loop on a GPU says what it says on the CPU: each way of serving, with the same model and prompts."""

import pytest
import torch
from support.models import make_model, make_prompts

from kvpage import CacheConfig
from kvpage.blend import BlendConfig
from kvpage.serving import BeamSearchParams, Engine, EngineConfig, SamplingParams
from kvpage.store import KVStore, KVStoreConfig, metadata_of

B = 4
PARAMS = SamplingParams(max_tokens=8)
PROMPTS = make_prompts([1, B, 9 * B + 1, 33, 50, 17], seed=5)
SEGMENTS = make_prompts([37, 22, 41], seed=6)
ON_DEVICE = pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)])


def make_engine(device, kind="llama", num_gpu_blocks=128, num_cpu_blocks=0, dtype="auto", backend="flash", **options):
    cache = CacheConfig(B, num_gpu_blocks, num_cpu_blocks, cache_dtype=dtype, backend=backend)
    store = options.pop("store", None)
    return Engine.from_model(make_model(kind).to(device), EngineConfig(cache, **options), store=store)


def tokens_of(engine, prompts=PROMPTS, **options):
    return [output.token_ids for output in engine.generate(prompts, PARAMS, **options)]


@ON_DEVICE
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gemma3", "gpt_oss", "deepseek_v3"])
def test_families(device, kind):
    engine = make_engine(device, kind)
    want = tokens_of(make_engine("cpu", kind))
    assert tokens_of(engine) == want
    assert tokens_of(engine) == want, "out of the cache"


@ON_DEVICE
@pytest.mark.parametrize("max_num_batched_tokens", [7, 32, 2048])
def test_latents_in_blocks(device, max_num_batched_tokens):
    engine = make_engine(device, "deepseek_v3", backend="mla", max_num_batched_tokens=max_num_batched_tokens)
    want = tokens_of(make_engine("cpu", "deepseek_v3"))
    assert [tokens_of(engine) for _ in range(2)] == [want] * 2


@ON_DEVICE
def test_blocks_are_demoted_promoted_and_swapped(device):
    engine = make_engine(device, num_gpu_blocks=16, num_cpu_blocks=64, load_or_compute=False)
    want = tokens_of(make_engine("cpu"))
    assert [tokens_of(engine) for _ in range(3)] == [want] * 3
    assert engine.stats().transfers["swap_in"].num_blocks > 0


@ON_DEVICE
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "int8"])
def test_quantised_caches(device, dtype):
    """Their sums differ in the last bits: so do tokens that are nearly as likely. The first logits tell."""
    found = []
    for where in ("cpu", device):
        engine = make_engine(where, dtype=dtype, kv_scales="calibrate" if dtype != "int8" else None)
        forward, seen = engine.debug.runner.forward, []
        engine.debug.runner.forward = lambda *args, forward=forward, seen=seen: seen.append(forward(*args)) or seen[-1]
        tokens_of(engine, PROMPTS[3:4])
        found.append(seen[0].cpu())
    torch.testing.assert_close(found[1], found[0], rtol=0.05, atol=0.05 * found[0].abs().max().item())


@ON_DEVICE
def test_a_store_between_two_engines(device):
    first, config = make_engine(device), KVStoreConfig(8, ("memory://?size=64MiB",))
    want = tokens_of(make_engine("cpu"))
    with KVStore(config, metadata_of(first.cache, "test")) as store:
        first.use_store(store)
        assert tokens_of(first) == want
        first.close()
        second = make_engine(device, store=store)
        assert tokens_of(second) == want
        assert second.stats().store.num_loaded_tokens > 0
        second.close()


@ON_DEVICE
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "deepseek_v3"])
@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_blending(device, kind, ratio):
    prompt = [token for segment in reversed(SEGMENTS) for token in segment] + PROMPTS[3]
    found = []
    for where in ("cpu", device):
        engine = make_engine(where, kind, blend=BlendConfig(ratio=ratio, check_layer=1))
        engine.warm_segments(SEGMENTS)
        lengths = [len(segment) for segment in reversed(SEGMENTS)]
        request_id = engine.add_request([3, *prompt], PARAMS, blend=True, segments=[1, *lengths])
        outputs = []
        while engine.has_unfinished:
            outputs += [output.output for output in engine.step() if output.output]
        (output,) = outputs
        assert output.request_id == request_id and output.num_reused_tokens + output.num_recomputed_tokens == 100
        found.append((output.token_ids, output.num_reused_tokens))
        engine.close()
    assert found[0] == found[1]


@ON_DEVICE
def test_samples_and_beams(device):
    drawn, beams = SamplingParams(max_tokens=6, temperature=1.0, seed=3, n=3), BeamSearchParams(num_beams=3)
    found = []
    for where in ("cpu", device):
        engine = make_engine(where)
        samples = [sample.token_ids for sample in engine.generate(PROMPTS[3:4], drawn)[0].samples]
        found.append((samples, [output.token_ids for output in engine.beam_search(PROMPTS[3:5], beams)]))
    assert found[0] == found[1]


@ON_DEVICE
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_captured_decode_steps(device, kind, runs_ahead):
    """Of all numbers of sequences up to six; each number of tokens ends another sequence."""
    params = [SamplingParams(max_tokens=4 + 3 * index) for index in range(len(PROMPTS))]
    found = []
    for where in ("cpu", device):
        engine = make_engine(where, kind, max_num_seqs=6, async_scheduling=runs_ahead)
        engine.warmup(lambda num: None)
        found.append([output.token_ids for output in engine.generate(PROMPTS, params)])
    stats = engine.stats().graphs
    assert found[0] == found[1]
    assert stats.sizes == (1, 2, 4, 6) and stats.num_replays > 10 and not stats.misses
    assert 0 < stats.num_bytes <= engine.config.cudagraph_max_bytes


@ON_DEVICE
def test_a_model_that_waits_is_not_captured(device):
    engine = make_engine(device, max_num_seqs=4)
    layer = engine.debug.runner.view.model.layers[1]
    forward = layer.forward
    vars(layer)["forward"] = lambda x, *args, **kwargs: forward(x * (1 + int(x.isnan().any())), *args, **kwargs)
    engine.warmup(lambda num: None)
    assert engine.stats().graphs.sizes == ()
    assert tokens_of(engine) == tokens_of(make_engine("cpu"))


@ON_DEVICE
@pytest.mark.parametrize("fields", [{"temperature": 0.8, "top_k": 20, "seed": 3}, {"repetition_penalty": 1.3}], ids=str)
def test_captured_decode_steps_with_rules(device, fields):
    found = []
    for where in ("cpu", device):
        engine = make_engine(where, max_num_seqs=6)
        engine.warmup(lambda num: None)
        found.append([one.token_ids for one in engine.generate(PROMPTS, SamplingParams(max_tokens=8, **fields))])
    assert found[0] == found[1] and engine.stats().graphs.num_replays > 5
