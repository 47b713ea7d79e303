"""An engine whose blocks hold latents gives the tokens of `model.generate`, for every family that makes some."""

import threading
from dataclasses import fields
from functools import cache

import numpy as np
import pytest
import torch
from support.engines import PATIENCE
from support.insides import stack_of
from support.latent_models import KINDS, MLA, make_latent_model
from support.models import generate_each, make_model, make_prompts
from transformers import DynamicCache

from kvpage import CacheConfig, CacheEngine, ModelConfig, ops
from kvpage.blend.config import BlendConfig
from kvpage.serving import BeamSearchParams, Engine, EngineConfig, KVPageCache, KVPageCachePool, SamplingParams
from kvpage.serving.model import step as step_module
from kvpage.serving.model.kv_shape import KVShape
from kvpage.serving.model.latents import heads as latent_heads
from kvpage.serving.model.latents.heads import LatentHeads
from kvpage.serving.model.probe import relative_error
from kvpage.serving.model.runner import ModelRunner
from kvpage.serving.model.step import PackedTokens, Step
from kvpage.store import KVStore, KVStoreConfig, metadata_of

B, C = 4, 8
MAX_TOKENS = 10
PARAMS = SamplingParams(max_tokens=MAX_TOKENS)
LATENT = MLA["kv_lora_rank"] + MLA["qk_rope_head_dim"]


def sharing_prompts() -> list[list[int]]:
    """Of 1 to 58 tokens: three begin alike, one of these wholly the beginning of another; one is there twice."""
    shared = make_prompts([4 * B + 1], seed=1)[0]
    tails = make_prompts([1, B, 10 * B + 1], seed=2)
    return [*make_prompts([1, B - 1, B, B + 1]), *(shared + tail for tail in tails), shared, shared + tails[1]]


PROMPTS = sharing_prompts()
LENGTHS = [len(prompt) for prompt in PROMPTS]


@cache
def model_of(kind: str) -> torch.nn.Module:
    return make_latent_model(kind)


@cache
def expected(kind: str) -> list[list[int]]:
    tokens = generate_each(model_of(kind), PROMPTS, MAX_TOKENS)
    distinct = {token for row in tokens for token in row}
    assert len(distinct) > 20, f"{kind} generates {len(distinct)} different tokens, too few to tell right from wrong"
    return tokens


def make_engine(kind: str = "deepseek_v3", num_blocks: int = 128, num_host_blocks: int = 0, **options) -> Engine:
    """An engine whose blocks hold NaN where nothing has been written: what is read without being owned shows."""
    fields = {name: options.pop(name) for name in ("cache_dtype", "layer_layout", "backend") if name in options}
    config = CacheConfig(B, num_blocks, num_host_blocks, **{"backend": "mla", **fields})
    engine = Engine.from_model(
        options.pop("model", None) or model_of(kind), EngineConfig(config, **{**PATIENCE, **options})
    )
    if not engine.cache.layout.has_token_scales:
        for layer in (*engine.cache.gpu_cache, *engine.cache.cpu_cache):
            layer.fill_(float("nan"))
    return engine


def tokens_of(engine: Engine, prompts: list[list[int]] = PROMPTS, params: SamplingParams = PARAMS) -> list[list[int]]:
    return [output.token_ids for output in engine.generate(prompts, params)]


def check_drained(engine: Engine) -> None:
    engine.manager.check()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)


# --- every family ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_seven_then_wholly_cached(kind: str) -> None:
    engine = make_engine(kind, max_num_batched_tokens=7)
    assert engine.cache.gpu_cache[0].shape == (128, B, LATENT)
    assert tokens_of(engine) == expected(kind)
    again = engine.generate(PROMPTS, PARAMS)
    assert [output.token_ids for output in again] == expected(kind)
    assert [output.num_cached_tokens for output in again] == [length - 1 for length in LENGTHS]
    check_drained(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_few_blocks_two_tiers_and_long_pieces(kind: str) -> None:
    blocks = -(-(max(LENGTHS) + MAX_TOKENS) // B) + 3
    recomputing = make_engine(kind, blocks, max_num_batched_tokens=32)
    assert tokens_of(recomputing) == expected(kind)
    assert recomputing.stats().num_preemptions > 0
    check_drained(recomputing)
    swapping = make_engine(kind, blocks, 40, load_or_compute=False)
    assert [tokens_of(swapping) for _ in range(2)] == [expected(kind)] * 2
    stats = swapping.stats()
    assert stats.num_swaps > 0 and stats.transfers["swap_in"].num_blocks > 0
    check_drained(swapping)


# --- what else an engine does ----------------------------------------------------------------------------------------


def test_beams_and_samples_are_those_over_expanded_heads() -> None:
    latents, heads = (make_engine(backend=backend) for backend in ("mla", "flash"))
    for num_beams in (2, 5):
        beams = [
            engine.beam_search(PROMPTS[6:7], BeamSearchParams(num_beams, max_tokens=MAX_TOKENS))[0].beams
            for engine in (latents, heads)
        ]
        assert [beam.token_ids for beam in beams[0]] == [beam.token_ids for beam in beams[1]]
        assert [beam.score for beam in beams[0]] == pytest.approx([beam.score for beam in beams[1]], abs=1e-4)
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=7, n=3)
    forks = [
        [[sample.token_ids for sample in output.samples] for output in engine.generate(PROMPTS[3:6], params)]
        for engine in (latents, heads)
    ]
    assert forks[0] == forks[1]
    check_drained(latents)


@pytest.mark.parametrize("layer_layout", ["separate", "packed"])
def test_a_second_process_starts_warm(tmp_path, layer_layout: str) -> None:
    config = KVStoreConfig(C, (f"disk://{tmp_path}?size=16MiB&segment=8MiB",))
    for is_warm in (False, True):
        engine = make_engine(layer_layout=layer_layout)
        with KVStore(config, metadata_of(engine.cache, "m")) as store:
            engine.use_store(store)
            outputs = engine.generate(PROMPTS, PARAMS)
            engine.close()
            assert [output.token_ids for output in outputs] == expected("deepseek_v3")
            num_cached = outputs[6].num_cached_tokens
            assert num_cached == 56 if is_warm else 4 * B <= num_cached < 5 * B  # others may share a part of a block
            assert store.stats().corrupt_records == 0


def test_one_store_of_latents_and_heads_of_one_model_mixes_nothing_up() -> None:
    config = KVStoreConfig(C, ("memory://?size=4MiB",))
    engines = [make_engine(backend=backend) for backend in ("flash", "mla", "flash", "mla")]
    first = KVStore(config, metadata_of(engines[0].cache, "m"))
    cached = []
    for engine in engines:
        store = KVStore(config, metadata_of(engine.cache, "m"), [stack_of(first).tiers[0]])
        engine.use_store(store)
        outputs = engine.generate(PROMPTS, PARAMS)
        engine.close()
        assert [output.token_ids for output in outputs] == expected("deepseek_v3")
        assert store.stats().corrupt_records == 0
        cached.append(outputs[6].num_cached_tokens)
    assert cached[2:] == [56, 56] and all(4 * B <= num < 5 * B for num in cached[:2])


class Seen(DynamicCache):
    """Keeps what each layer hands to its cache."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object):
        self.__dict__.setdefault("rows", []).append((key_states, value_states))
        return super().update(key_states, value_states, *args, **kwargs)


@pytest.mark.parametrize("fmt", ["vllm", "huggingface"])
def test_a_stores_tensors_are_the_models_latents(fmt: str) -> None:
    """What a model computed elsewhere, by transformers alone, is found by an engine, and the other way round."""
    model, prompt, seen = model_of("deepseek_v3"), PROMPTS[6], Seen()
    if not KVShape.of_model(model).is_latent:
        pytest.skip("this transformers hands expanded heads to its cache")
    with torch.no_grad():
        model(input_ids=torch.tensor([prompt]), past_key_values=seen, use_cache=True)
    rows = [torch.cat(pair, dim=3)[0] for pair in seen.rows]  # each [1, tokens, latent]
    tensors = [(layer.transpose(0, 1) if fmt == "vllm" else layer,) for layer in rows]
    config = KVStoreConfig(C, ("memory://?size=4MiB",))
    for is_given in (True, False):
        engine = make_engine()
        with KVStore(config, metadata_of(engine.cache, "m", fmt=fmt)) as store:
            if is_given:
                store.store(prompt, tensors)
            engine.use_store(store)
            output = engine.generate([prompt], PARAMS)[0]
            engine.close()
            assert output.token_ids == expected("deepseek_v3")[6]
            assert output.num_cached_tokens == (56 if is_given else 0)
            found = store.retrieve(prompt)[0]
        for one, want in zip(found, tensors, strict=True):
            dim = 0 if fmt == "vllm" else 1
            assert one[0].shape[dim] >= 56  # an engine stores whole chunks
            torch.testing.assert_close(one[0], want[0].narrow(dim, 0, one[0].shape[dim]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache_dtype", ["fp8_e4m3", "fp8_e5m2", "int8", "bf16"])
def test_narrow_latents_are_those_of_a_cache_in_the_model_and_keep_every_bit_in_a_store(cache_dtype: str) -> None:
    kv_scales = "calibrate" if cache_dtype.startswith("fp8") else None
    engines = [make_engine(cache_dtype=cache_dtype, kv_scales=kv_scales) for _ in range(2)]
    assert_logits_of_a_cache(engines[0], cache_dtype)
    found = []
    with KVStore(KVStoreConfig(C, ("memory://?size=4MiB",)), metadata_of(engines[0].cache, "m")) as store:
        for engine in engines:
            engine.use_store(store)
            found.append(tokens_of(engine))
            engine.close()
    assert found[0] == found[1]


def assert_logits_of_a_cache(engine: Engine, cache_dtype: str) -> None:
    """KVPageCache hands the model the latents out of its blocks, which the model expands itself."""
    config = CacheConfig(B, 64, backend="mla", cache_dtype=cache_dtype)
    model, row = model_of("deepseek_v3"), torch.tensor(PROMPTS[6:7])
    if not KVShape.of_model(model).is_latent:
        pytest.skip("this transformers hands expanded heads to its cache")
    pool = KVPageCachePool.from_model(model, config, kv_scales=engine.cache.kv_scales)
    with KVPageCache(pool, row) as cache, torch.no_grad():
        expected = model(input_ids=row, past_key_values=cache, use_cache=True).logits[0, -1:]
    assert relative_error(first_logits(engine, PROMPTS[6]), expected) < 1e-3


def first_logits(engine: Engine, prompt: list[int]) -> torch.Tensor:
    forward, seen = engine.debug.runner.forward, []
    engine.debug.runner.forward = lambda *args: seen.append(forward(*args)) or seen[-1]
    engine.generate([prompt], SamplingParams(max_tokens=1))
    engine.debug.runner.forward = forward
    return seen[-1]


def test_how_many_bytes_a_token_takes() -> None:
    """Of DeepSeek-V3: heads of 192 and 128, against 512 + 64."""
    config = make_latent_model("deepseek_v3").config
    sizes = {"num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128}
    for name, value in {**sizes, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_hidden_layers": 61}.items():
        setattr(config, name, value)
    found = {
        backend: CacheEngine.get_cache_block_size(
            CacheConfig(16, backend=backend), ModelConfig.from_hf(config, torch.bfloat16, use_mla=backend == "mla")
        )
        // 16
        for backend in ("flash", "mla")
    }
    assert found == {"flash": 61 * 128 * (192 + 128) * 2, "mla": 61 * 576 * 2}  # 5.0 MB and 70 KB
    assert found["flash"] > 71 * found["mla"]


def test_which_way_a_piece_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its beginning by the K and V at hand, a long piece by expanded ones, the last token over rows in place."""
    calls: list[tuple[str, int]] = []

    def spy(name: str, where: object, attribute: str) -> None:
        works = getattr(where, attribute)
        monkeypatch.setattr(
            where, attribute, lambda *args, **kwargs: calls.append((name, kwargs.get("n", 0))) or works(*args, **kwargs)
        )

    engine = make_engine(max_num_batched_tokens=32)
    monkeypatch.setattr(latent_heads, "MAX_EXPANDED", 1)  # one head at a time
    spy("expanded", LatentHeads, "expanded")
    spy("in place", ops, "attend")
    assert tokens_of(engine, PROMPTS[6:7]) == expected("deepseek_v3")[6:7]
    num_layers, num_heads = 3, 4
    names = [name for name, _ in calls]
    assert names == ["expanded"] * num_layers * num_heads + ["in place"] * num_layers * (MAX_TOKENS - 1)


def test_gathering_instead_of_reading_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on devices for which no operation reads blocks in place."""
    monkeypatch.setattr(step_module, "attends_in_place", lambda device: False)
    for name in ("attend", "write_and_attend"):
        monkeypatch.setattr(ops, name, None)
    engine = make_engine(max_num_batched_tokens=7)
    assert tokens_of(engine) == expected("deepseek_v3")
    check_drained(engine)


def test_other_dtypes() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        model = make_latent_model("deepseek_v3", first_k_dense_replace=3).to(dtype)  # experts are not of every dtype
        outputs = make_engine(model=model, max_num_batched_tokens=24).generate(PROMPTS, PARAMS)
        if dtype == torch.float64:
            assert [output.token_ids for output in outputs] == generate_each(model, PROMPTS, MAX_TOKENS)


def test_weights_that_change_in_place_are_followed() -> None:
    model = make_latent_model("deepseek_v3")
    engine = make_engine(model=model, enable_prefix_caching=False)
    assert tokens_of(engine) == expected("deepseek_v3")
    with torch.no_grad():
        model.model.layers[1].self_attn.kv_b_proj.weight.mul_(-1.5)
    changed = generate_each(model, PROMPTS, MAX_TOKENS)
    assert changed != expected("deepseek_v3")
    assert tokens_of(engine) == changed


def test_the_model_is_left_as_it_was() -> None:
    model = make_latent_model("deepseek_v3")
    before = [vars(module).keys() for module in model.modules()]
    engine = make_engine(model=model)
    engine.generate(PROMPTS[:2], PARAMS)
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *args: 1 / 0)
    engine.add_request(PROMPTS[4], PARAMS)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    handle.remove()
    assert [vars(module).keys() for module in model.modules()] == before
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert generate_each(model, PROMPTS[:1], MAX_TOKENS) == expected("deepseek_v3")[:1]


def test_a_forward_adds_calls_to_its_step_and_changes_nothing_else_of_it() -> None:
    engine = make_engine(num_blocks=8)
    step = Step.make(engine.cache, np.arange(5), np.arange(2, dtype=np.int32)[None], [0], [5])
    before = {one.name: getattr(step, one.name) for one in fields(step)}
    packed = PackedTokens(np.arange(5, dtype=np.int32), [0], [5], np.array([4]))
    ModelRunner(model_of("deepseek_v3")).forward(packed, step)
    assert all(getattr(step, name) is value for name, value in before.items())
    assert [layer for layer, _ in step.calls] == engine.cache.layer_ids


def test_a_projection_that_others_use_meanwhile_is_not_listened_to() -> None:
    model = make_latent_model("deepseek_v3")
    engine = make_engine(model=model)
    layer, mine, num_calls = model.model.layers[0].self_attn, threading.get_ident(), []
    projection = layer.kv_b_proj

    def disturb(*args: object) -> None:
        if threading.get_ident() == mine:
            latent = torch.full((1, 1, MLA["kv_lora_rank"]), 9.0)
            other = threading.Thread(target=projection, args=(latent,))
            other.start()
            other.join()
            num_calls.append(1)

    projection.register_forward_hook(disturb)  # before its layer attends
    assert tokens_of(engine) == expected("deepseek_v3")
    assert num_calls


# --- heads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_heads", [1, 5])
@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_turned_queries_score_as_expanded_keys(num_heads: int, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_heads)
    nope, rot, value_size, rank = 3, 2, 4, 7
    module = torch.nn.Module()
    module.kv_b_proj = torch.nn.Linear(rank, num_heads * (nope + value_size), bias=False, dtype=torch.float64)
    heads = LatentHeads.of_layer(module, num_heads, value_size)
    rows = torch.randn(6, rank + rot, generator=generator, dtype=torch.float64)
    query = torch.randn(num_rows, num_heads, nope + rot, generator=generator, dtype=torch.float64)
    keys, values = heads.expanded(rows)
    whole = module.kv_b_proj(rows[:, :rank]).view(6, num_heads, nope + value_size)
    torch.testing.assert_close(keys[..., :nope], whole[..., :nope])
    torch.testing.assert_close(values, whole[..., nope:])
    torch.testing.assert_close(heads.rows(rows[:, :rank], keys).squeeze(1), rows)
    scores = torch.einsum("qhs,khs->qhk", query, keys)
    torch.testing.assert_close(torch.einsum("qhs,ks->qhk", heads.turned(query), rows), scores)
    sums = torch.einsum("qhk,kr->qhr", scores, rows[:, :rank])
    torch.testing.assert_close(heads.turned_back(sums), torch.einsum("qhk,khs->qhs", scores, values))


def test_where_expanding_gains() -> None:
    """DeepSeek-V3: a pair of a query and a key costs 1088 products in rows, 320 expanded, a key's expansion 131072."""
    heads = LatentHeads(torch.empty(128, 128, 512), torch.empty(128, 128, 512))
    assert [heads.gains_by_expanding(count) for count in (1, 170, 171, 4096)] == [False, False, True, True]
    small = LatentHeads(torch.empty(2, 8, 4), torch.empty(2, 8, 4))  # latents that save nothing
    assert not any(small.gains_by_expanding(count) for count in (1, 1000))


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_model_without_latents() -> None:
    message = "backend must be .* for a model without latents .* LlamaForCausalLM has no kv_lora_rank .* got 'mla'"
    with pytest.raises(ValueError, match=message):
        make_engine(model=make_model("llama"))


def test_blending_is_refused() -> None:
    with pytest.raises(ValueError, match="blend must be None for backend 'mla'"):
        make_engine(blend=BlendConfig())


class Adapted(torch.nn.Module):
    """As adapters wrap a linear layer: its weight is there, and not all of what it does."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.weight, self.bias = base.weight, base.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) * 1.5


def with_bias(layer: torch.nn.Module) -> None:
    layer.kv_b_proj.bias = torch.nn.Parameter(torch.ones(len(layer.kv_b_proj.weight)))


def adapted(layer: torch.nn.Module) -> None:
    layer.kv_b_proj = Adapted(layer.kv_b_proj)


def hooked(layer: torch.nn.Module) -> None:
    layer.kv_b_proj.register_forward_hook(lambda module, args, output: output * 1.01)


class Packed(torch.nn.Linear):
    """As quantised models have them: the weight is no number that a product could take."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=False)
        self.weight = torch.nn.Parameter(base.weight.to(torch.float16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight.float())


def packed(layer: torch.nn.Module) -> None:
    layer.kv_b_proj = Packed(layer.kv_b_proj)


class Bypassed:
    """A layer whose projection is called past its name."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self._layer, self.kv_b_proj = layer, layer.kv_b_proj

    def __getattr__(self, name: str) -> object:
        return getattr(self._layer, name)


def past_its_name(layer: torch.nn.Module) -> None:
    bypassed = Bypassed(layer)
    layer.expand_kv = lambda kv, rot: type(layer).expand_kv(bypassed, kv, rot)


@pytest.mark.parametrize(
    "change, message",
    [
        (with_bias, "kv_b_proj must be a torch.nn.Linear without bias for backend 'mla', that of DeepseekV3Attention"),
        (adapted, "kv_b_proj must be a torch.nn.Linear without bias .* is Adapted"),
        (packed, "the weight of kv_b_proj must be torch.float32 on cpu .* of layer 1 .* is torch.float16 on cpu"),
        (hooked, "K must be what kv_b_proj makes of a latent .* of layer 1 of DeepseekV3ForCausalLM is .* off"),
        (past_its_name, "kv_b_proj must be called before attention, that of DeepseekV3Attention was not"),
    ],
)
def test_layers_of_another_form_are_refused_and_served_with_expanded_heads(change, message: str) -> None:
    model = make_latent_model("deepseek_v3")
    layer = model.model.layers[1].self_attn
    if change is past_its_name and not hasattr(layer, "expand_kv"):
        pytest.skip("this transformers expands within forward")
    change(layer)
    with pytest.raises(ValueError, match=message):
        make_engine(model=model)
    assert tokens_of(make_engine(model=model, backend="flash")) == generate_each(model, PROMPTS, MAX_TOKENS)


def test_a_config_whose_latents_are_of_another_size() -> None:
    model = make_latent_model("deepseek_v3")
    model.config.kv_lora_rank += 1
    with pytest.raises(ValueError, match="must be 25 numbers by the model's config, DeepseekV3Attention makes 24"):
        make_engine(model=model)
