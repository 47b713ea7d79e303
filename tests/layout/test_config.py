"""The configuration: every rule, and what is read from transformers' configs of many families."""

import itertools

import pytest
import torch

from kvpage import CacheConfig, CacheEngine, CacheLayout, DeviceConfig, ModelConfig, ParallelConfig, register_backend
from kvpage.layout import config as config_module
from kvpage.layout.backends import FlashBackend, get_backend, stride_order

LLAMA = ModelConfig(head_size=64, num_kv_heads=8, layer_types=("full_attention",) * 6)
ONE = ParallelConfig()


def bad(cls, message, **fields):
    return pytest.param(cls, fields, message, id=f"{cls.__name__}-{next(iter(fields))}-{next(iter(fields.values()))}")


MODEL = {"head_size": 8, "num_kv_heads": 2, "layer_types": ("full_attention",)}
LAYOUT = {"block_size": 4, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float16}
BAD = [
    *(
        bad(cls, rf"{name} must be an integer of at least {least}, got {value!r}", **{name: value})
        for cls, name, least in (
            (ParallelConfig, "tensor_parallel_size", 1),
            (ParallelConfig, "pipeline_parallel_size", 1),
            (ParallelConfig, "pipeline_rank", 0),
            (CacheConfig, "block_size", 1),
            (CacheConfig, "num_gpu_blocks", 0),
            (CacheConfig, "num_cpu_blocks", 0),
        )
        for value in (least - 1, True, 1.0, "1", None)
    ),
    bad(ParallelConfig, "pipeline_rank must be under pipeline_parallel_size=2, got 2", pipeline_rank=2,
        pipeline_parallel_size=2),
    *(bad(DeviceConfig, "device must be a CPU or a CUDA device, got", device=d) for d in ("meta", "gpu9", "", None)),
    bad(CacheConfig, "cache_dtype must be auto or one of fp32, .*, fp8_e4m3, fp8_e5m2, int8, got 'int4'",
        cache_dtype="int4"),
    bad(CacheConfig, "layer_layout must be one of separate, packed, got 'slab'", layer_layout="slab"),
    *(bad(CacheConfig, r"gpu_memory_utilization must be in \(0, 1\], got", gpu_memory_utilization=u)
      for u in (0, -0.5, 1.01, float("nan"), "0.5")),
    bad(CacheConfig, "backend must be one of .*flash.*, got 'flask'", backend="flask"),
    bad(CacheConfig, "kv_layout must be one that FlashBackend knows, got 'DNH'", kv_layout="DNH"),
    bad(CacheConfig, "kv_layout must be one that MlaBackend knows, got 'HND'", kv_layout="HND", backend="mla"),
    *(bad(ModelConfig, f"{name} must be an integer of at least 1, got {value!r}", **{name: value},
          **{k: v for k, v in MODEL.items() if k != name})
      for name in ("head_size", "num_kv_heads") for value in (0, 1.5, True)),
    bad(ModelConfig, "dtype must be a torch.dtype, got 'fp16'", dtype="fp16", **MODEL),
    bad(ModelConfig, "num_kv_heads must be 1 with use_mla, got 2", use_mla=True, **MODEL),
    *(bad(CacheLayout, f"{name} must be a positive integer, got {value!r}", **{name: value},
          **{k: v for k, v in LAYOUT.items() if k != name})
      for name in ("block_size", "num_kv_heads", "head_size") for value in (0, True, 2.0)),
    bad(CacheLayout, "dtype must be a torch.dtype, got 'fp16'", **(LAYOUT | {"dtype": "fp16"})),
    bad(CacheLayout, "layer_layout must be one of", layer_layout="slab", **LAYOUT),
    bad(CacheLayout, "backend must be one of", backend="flask", **LAYOUT),
    bad(CacheLayout, "kv_layout must be one that FlashBackend knows", kv_layout="", **LAYOUT),
]  # fmt: skip


@pytest.mark.parametrize("cls, fields, message", BAD)
def test_bad_values_raise(cls, fields, message):
    with pytest.raises(ValueError, match=message):
        cls(**fields)


def test_mla_and_its_backend_go_together():
    mla = ModelConfig(576, 1, ("full_attention",) * 2, use_mla=True)
    with pytest.raises(ValueError, match="backend must be 'mla' for a ModelConfig with use_mla=True, got 'flash'"):
        CacheConfig().layout(mla, ONE)
    with pytest.raises(ValueError, match="backend must not be 'mla', .* with use_mla=False, got 'mla'"):
        CacheConfig(backend="mla").layout(LLAMA, ONE)
    # One latent a token: no value part, no heads.
    assert CacheEngine.get_cache_block_size(CacheConfig(backend="mla"), mla) == 2 * 16 * 576 * 2
    assert CacheEngine.get_cache_block_size(CacheConfig(), LLAMA) == 6 * 2 * 16 * 8 * 64 * 2


@pytest.mark.parametrize("heads, ranks, expected", [(8, 1, 8), (8, 2, 4), (8, 8, 1), (2, 8, 1), (1, 3, 1)])
def test_heads_are_divided_and_never_under_one(heads, ranks, expected):
    model = ModelConfig(8, heads, ("full_attention",))
    assert CacheConfig().layout(model, ParallelConfig(ranks)).num_kv_heads == expected


@pytest.mark.parametrize("heads, ranks", [(8, 3), (6, 4), (3, 8)])
def test_heads_that_cannot_be_divided_raise(heads, ranks):
    with pytest.raises(ValueError, match=f"must divide num_kv_heads={heads} or be a multiple of it, got {ranks}"):
        ModelConfig(8, heads, ("full_attention",)).num_heads(ParallelConfig(ranks))


@pytest.mark.parametrize("num_layers, num_stages", list(itertools.product((0, 1, 2, 7, 8), (1, 2, 3, 8))))
def test_stages_share_out_the_layers(num_layers, num_stages):
    model = ModelConfig(8, 1, ("full_attention",) * num_layers)
    stages = [model.attention_layers(ParallelConfig(1, num_stages, rank)) for rank in range(num_stages)]
    assert list(itertools.chain(*stages)) == list(range(num_layers))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1


def test_only_attention_layers_count():
    kinds = ("mamba", "full_attention", "linear_attention", "sliding_attention", "moe", "hybrid", "chunked_attention")
    model = ModelConfig(8, 1, kinds)
    assert model.attention_layers(ONE) == [1, 3, 5, 6] and not model.is_attention_free
    free = ModelConfig(0, 0, ("mamba", "linear_attention"))
    assert free.is_attention_free and free.attention_layers(ONE) == []
    assert CacheEngine.get_cache_block_size(CacheConfig(), free) == 0


def test_for_memory_takes_what_fits_and_no_more():
    block = CacheEngine.get_cache_block_size(CacheConfig(block_size=4), LLAMA)
    for gpu, cpu in ((0, 0), (block - 1, block), (10 * block, 3 * block - 1)):
        config = CacheConfig.for_memory(gpu, LLAMA, cpu_bytes=cpu, block_size=4, kv_layout="HND")
        assert (config.num_gpu_blocks, config.num_cpu_blocks) == (gpu // block, cpu // block)
        assert (config.block_size, config.kv_layout) == (4, "HND")


def test_for_memory_counts_blocks_over_all_stages():
    """The bytes are one rank's: what its engine then allocates fits into them."""
    parallel = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=3)
    config = CacheConfig.for_memory(1_000_000, LLAMA, parallel)
    engine = CacheEngine(config, LLAMA, parallel)
    held = sum(cache.numel() * cache.element_size() for cache in engine.gpu_cache)
    block = CacheEngine.get_cache_block_size(config, LLAMA, parallel)
    assert 1_000_000 - block < held <= 1_000_000


def test_for_memory_errors():
    for fields, message in (({"gpu_bytes": -1}, "gpu_bytes"), ({"gpu_bytes": 1, "cpu_bytes": -1}, "cpu_bytes")):
        with pytest.raises(ValueError, match=f"{message} must be an integer of at least 0, got -1"):
            CacheConfig.for_memory(model_config=LLAMA, **fields)
    with pytest.raises(ValueError, match="needs a model with attention layers"):
        CacheConfig.for_memory(1, ModelConfig(0, 0, ("mamba",)))


def test_for_device_takes_its_part_of_free_memory(monkeypatch):
    block = CacheEngine.get_cache_block_size(CacheConfig(), LLAMA)
    monkeypatch.setattr(config_module.DeviceConfig, "free_memory", lambda self: 100 * block)
    config = CacheConfig.for_device(DeviceConfig(), LLAMA, gpu_memory_utilization=0.25, cpu_bytes=2 * block)
    assert (config.num_gpu_blocks, config.num_cpu_blocks, config.gpu_memory_utilization) == (25, 2, 0.25)


def test_pages_of_files_count_as_free_memory(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemFree: 2 kB\nMemAvailable:       7 kB\n")
    assert config_module.available_bytes(meminfo) == 7 * 1024
    for text in ("", "MemFree: 2 kB\n"):
        meminfo.write_text(text)
        assert 7 * 1024 < config_module.available_bytes(meminfo) < 1 << 50
    assert config_module.available_bytes(tmp_path / "none") > 7 * 1024


# --- backends ---------------------------------------------------------------------------------------------------------


def test_free_memory_of_the_cpu():
    assert 0 < DeviceConfig("cpu").free_memory() < 1 << 50


class Shapeless:
    block_dim = 0


class NoBlockDim:
    @staticmethod
    def get_kv_cache_shape(*sizes):
        return sizes


class WrongBlockDim(NoBlockDim):
    block_dim = 1


class NegativeBlockDim(NoBlockDim):
    block_dim = -4


@pytest.mark.parametrize("backend, message", [
    (Shapeless, "must define get_kv_cache_shape"), (NoBlockDim, "must define block_dim"),
    (WrongBlockDim, "block_dim must be the dimension that counts blocks, got 1"),
    (NegativeBlockDim, "block_dim must be the dimension that counts blocks, got -4"),
])  # fmt: skip
def test_register_backend_refuses(backend, message):
    with pytest.raises(ValueError, match=message):
        register_backend("refused", backend)
    with pytest.raises(ValueError, match="backend must be one of"):
        get_backend("refused")


def test_names_are_given_once():
    with pytest.raises(ValueError, match="'flash' is taken by FlashBackend"):
        register_backend("flash", WrongBlockDim)
    assert get_backend("flash") is FlashBackend


@pytest.mark.parametrize("kinds", ["full_attention", b"full_attention", None, 3, ("full_attention", 3), [None]])
def test_layer_types_are_one_word_a_layer(kinds):
    """A str would be taken for as many layers as it has letters."""
    with pytest.raises(ValueError, match="layer_types must be one str a layer, got"):
        ModelConfig(8, 2, kinds)


def test_for_memory_names_a_config_of_another_type():
    with pytest.raises(TypeError, match="model_config must be a ModelConfig, got str"):
        CacheConfig.for_memory(1 << 20, "llama")
    with pytest.raises(TypeError, match="parallel_config must be a ParallelConfig, got int"):
        CacheConfig.for_memory(1 << 20, ModelConfig(8, 2, ["full_attention"]), 0)


def test_a_stride_order_must_be_a_permutation():
    class Odd(FlashBackend):
        @staticmethod
        def get_kv_cache_stride_order(kv_layout):
            return (0, 1, 1, 3, 4)

    with pytest.raises(ValueError, match=r"must permute 5 dimensions, got \(0, 1, 1, 3, 4\)"):
        stride_order(Odd, "NHD")


# --- transformers -----------------------------------------------------------------------------------------------------

SMALL = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8}
GROUPED = SMALL | {"num_key_value_heads": 2}
# class, its arguments, expected (head_size, num_kv_heads, indices of attention layers)
FAMILIES = [
    ("LlamaConfig", GROUPED, (8, 2, range(4))),
    ("LlamaConfig", GROUPED | {"head_dim": 24}, (24, 2, range(4))),
    ("MistralConfig", GROUPED | {"head_dim": 8, "sliding_window": 4}, (8, 2, range(4))),
    ("Qwen2Config", GROUPED, (8, 2, range(4))),
    ("Qwen3Config", GROUPED | {"head_dim": 16}, (16, 2, range(4))),
    ("Gemma2Config", GROUPED | {"head_dim": 32}, (32, 2, range(4))),
    ("GPT2Config", {"n_embd": 64, "n_layer": 3, "n_head": 4}, (16, 4, range(3))),
    ("GPTNeoXConfig", SMALL | {"intermediate_size": 8}, (8, 8, range(4))),
    ("OPTConfig", {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}, (16, 4, range(2))),
    ("GPTBigCodeConfig", {"n_embd": 64, "n_layer": 2, "n_head": 4, "multi_query": True}, (16, 1, range(2))),
    ("FalconConfig", SMALL | {"multi_query": True}, (8, 1, range(4))),
    ("FalconConfig", SMALL | {"multi_query": False}, (8, 8, range(4))),
    ("FalconConfig", SMALL | {"new_decoder_architecture": True, "num_kv_heads": 2}, (8, 2, range(4))),
    ("GptOssConfig", GROUPED | {"head_dim": 64}, (64, 2, range(4))),
    ("MixtralConfig", GROUPED, (8, 2, range(4))),
    ("JambaConfig", GROUPED | {"attn_layer_offset": 1, "attn_layer_period": 2, "use_mamba_kernels": False},
     (8, 2, (1, 3))),
    ("MambaConfig", {"hidden_size": 64, "num_hidden_layers": 4}, (0, 0, ())),
    ("DeepseekV2Config", SMALL | {"num_key_value_heads": 8, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
     "v_head_dim": 16, "kv_lora_rank": 32}, (24, 8, range(4))),
    ("DeepseekV3Config", SMALL | {"num_key_value_heads": 8, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
     "v_head_dim": 40, "kv_lora_rank": 32}, (40, 8, range(4))),
]  # fmt: skip


def hf(name, **arguments):
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return getattr(transformers, name)(**arguments)


@pytest.mark.parametrize("name, arguments, expected", FAMILIES, ids=lambda value: value if type(value) is str else "")
def test_from_hf(name, arguments, expected):
    model = ModelConfig.from_hf(hf(name, **arguments))
    head_size, num_kv_heads, layers = expected
    assert (model.head_size, model.num_kv_heads) == (head_size, num_kv_heads)
    assert model.attention_layers(ONE) == list(layers)
    assert model.dtype == torch.float32 and not model.use_mla


@pytest.mark.parametrize("name, text", [("LlavaConfig", "LlamaConfig"), ("Gemma3Config", "Gemma3TextConfig"),
                                        ("Qwen2VLConfig", "Qwen2VLTextConfig")])  # fmt: skip
def test_from_hf_reads_nested_configs(name, text):
    inner = hf(text, **GROUPED, **({"head_dim": 48} if "Gemma" in text else {}))
    arguments = inner.to_dict() if name == "Qwen2VLConfig" else inner
    model = ModelConfig.from_hf(hf(name, text_config=arguments))
    assert (model.head_size, model.num_kv_heads) == (48 if "Gemma" in text else 8, 2)
    assert model.attention_layers(ONE) == [0, 1, 2, 3]


def test_from_hf_dtype():
    config = hf("LlamaConfig", **GROUPED)
    for dtype in (torch.bfloat16, "bfloat16"):
        config.dtype = dtype
        assert ModelConfig.from_hf(config).dtype == torch.bfloat16
    assert ModelConfig.from_hf(config, torch.float16).dtype == torch.float16


def test_from_hf_without_layers():
    class Blocks:
        num_attention_heads = 4

    with pytest.raises(ValueError, match="config must have num_hidden_layers, Blocks has none"):
        ModelConfig.from_hf(Blocks())


def test_from_hf_latents():
    config = hf("DeepseekV3Config", **SMALL, num_key_value_heads=8, kv_lora_rank=32, qk_rope_head_dim=8)
    model = ModelConfig.from_hf(config, use_mla=True)
    assert (model.head_size, model.num_kv_heads, model.use_mla) == (40, 1, True)
    with pytest.raises(ValueError, match="use_mla needs a config with kv_lora_rank"):
        ModelConfig.from_hf(hf("LlamaConfig", **GROUPED), use_mla=True)
