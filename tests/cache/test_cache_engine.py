"""CacheEngine: what it allocates, where it lies, and what its swaps and copies call."""

import uuid

import pytest
import torch
from support.swap_pairs import FLASH_NAMES, MODEL, pairs

from kvpage import CacheConfig, CacheEngine, DeviceConfig, ModelConfig, ParallelConfig, register_backend
from kvpage.layout.backends import FlashBackend
from kvpage.layout.cache_layout import CacheLayout


def engine(model=MODEL, parallel=None, num_gpu_blocks=7, num_cpu_blocks=5, **names) -> CacheEngine:
    config = CacheConfig(4, num_gpu_blocks, num_cpu_blocks, **names)
    return CacheEngine(config, model, parallel, DeviceConfig("cpu"))


def numbered(caches, block_dim, start=1.0):
    """Each block of each layer filled with a number of its own."""
    for layer, cache in enumerate(caches):
        for block_id in range(cache.shape[block_dim]):
            cache.select(block_dim, block_id).fill_(start + 100 * layer + block_id)


def numbers(caches, block_dim) -> list[list[float]]:
    """What `numbered` wrote; fails if a block holds two numbers."""
    rows = []
    for cache in caches:
        blocks = cache.movedim(block_dim, 0).flatten(1)
        assert bool((blocks == blocks[:, :1]).all())
        rows.append(blocks[:, 0].tolist())
    return rows


@pytest.mark.parametrize("names", FLASH_NAMES, ids=lambda names: "-".join(names.values()))
def test_shapes_strides_zeros_and_bytes(names):
    made = engine(**names)
    flash = names["backend"] == "flash"
    for caches, num_blocks in ((made.gpu_cache, 7), (made.cpu_cache, 5)):
        assert len(caches) == 3 and made.layer_ids == [0, 1, 2]
        for cache in caches:
            assert tuple(cache.shape) == ((2, num_blocks) if flash else (num_blocks, 2)) + (4, 2, 8)
            assert cache.dtype == torch.float16 and cache.device.type == "cpu"
            assert not cache.any() and not cache.is_pinned()
            token, head = cache.stride()[2:4]
            assert (token, head) == ((16, 8) if names["kv_layout"] == "NHD" else (8, 32))
            if names["layer_layout"] == "packed":
                assert cache.stride(made.layout.block_dim) == 3 * made.layout.block_bytes // 2
        allocated = sum({c.untyped_storage().data_ptr(): c.untyped_storage().nbytes() for c in caches}.values())
        block = CacheEngine.get_cache_block_size(CacheConfig(4, **names), MODEL)
        assert allocated == num_blocks * block


class Turned(FlashBackend):
    """A stride order that is not its own inverse: in memory [num_blocks, block_size, 2, heads, head_size]."""

    @staticmethod
    def get_kv_cache_stride_order(kv_layout):
        return (1, 2, 0, 3, 4)


@pytest.fixture
def backend_name():
    return f"test-{uuid.uuid4()}"  # names are given once


@pytest.mark.parametrize("layer_layout", ["separate", "packed"])
def test_a_stride_order_that_is_not_its_own_inverse(layer_layout, backend_name):
    register_backend(backend_name, Turned)
    made = engine(backend=backend_name, layer_layout=layer_layout)
    cache = made.gpu_cache[1]
    assert tuple(cache.shape) == (2, 7, 4, 2, 8)
    layers = 3 if layer_layout == "packed" else 1
    assert cache.stride() == (2 * 8, layers * 4 * 2 * 2 * 8, 2 * 2 * 8, 8, 1)
    numbered(made.gpu_cache, 1)
    made.swap_out(pairs((6, 0), (2, 4)))
    assert numbers(made.cpu_cache, 1) == [[100 * layer + 7, 0, 0, 0, 100 * layer + 3] for layer in range(3)]


@pytest.mark.parametrize("names", FLASH_NAMES, ids=lambda names: "-".join(names.values()))
def test_swaps_and_copies(names):
    made = engine(**names)
    dim = made.layout.block_dim
    numbered(made.gpu_cache, dim)
    numbered(made.cpu_cache, dim, 50)
    made.swap_out(pairs((0, 4), (6, 0)))
    assert numbers(made.cpu_cache, dim) == [[100 * i + n for n in (7, 51, 52, 53, 1)] for i in range(3)]
    made.swap_in(pairs((1, 0), (2, 6)))
    made.copy(pairs((3, 4), (3, 5), (2, 2)))
    assert numbers(made.gpu_cache, dim) == [[100 * i + n for n in (51, 2, 3, 4, 4, 4, 52)] for i in range(3)]
    assert numbers(made.cpu_cache, dim) == [[100 * i + n for n in (7, 51, 52, 53, 1)] for i in range(3)]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"cache_config": None}, "cache_config must be a CacheConfig, got NoneType"),
        ({"cache_config": MODEL}, "cache_config must be a CacheConfig, got ModelConfig"),
        ({"model_config": 8}, "model_config must be a ModelConfig, got int"),
        ({"parallel_config": 0}, "parallel_config must be a ParallelConfig, got int"),
        ({"parallel_config": DeviceConfig()}, "parallel_config must be a ParallelConfig, got DeviceConfig"),
    ],
)
def test_configs_of_another_type_are_named(change, message):
    configs = {"cache_config": CacheConfig(4, 7, 5), "model_config": MODEL, "parallel_config": None}
    with pytest.raises(TypeError, match=message):
        CacheEngine(**configs | change)
    with pytest.raises(TypeError, match=message):
        CacheEngine.get_cache_block_size(**configs | change)


def test_a_model_without_attention_holds_nothing_and_still_checks():
    made = engine(ModelConfig(0, 0, ("mamba",) * 2))
    assert made.gpu_cache == made.cpu_cache == made.layer_ids == []
    for call in (made.swap_in, made.swap_out, made.copy):
        call(pairs((0, 1)))
        with pytest.raises(TypeError, match="block_mapping must be a torch.Tensor"):
            call([[0, 1]])
    with pytest.raises(ValueError, match="needs a stage with attention layers"):
        _ = made.layout


def test_parallel_ranks_share_out_heads_layers_and_blocks():
    model = ModelConfig(8, 8, ("full_attention",) * 5)
    made = [engine(model, ParallelConfig(4, 2, rank), 8, 6) for rank in range(2)]
    assert [part.layer_ids for part in made] == [[0, 1], [2, 3, 4]]
    for part in made:
        assert len(part.gpu_cache) == len(part.layer_ids)
        assert tuple(part.gpu_cache[0].shape) == (2, 4, 4, 2, 8) and tuple(part.cpu_cache[0].shape) == (2, 3, 4, 2, 8)
    (one_head,) = {tuple(c.shape) for c in engine(model, ParallelConfig(16)).gpu_cache}
    assert one_head[3] == 1


class Recorder(FlashBackend):
    """An out-of-tree backend with operations of its own."""

    calls: list = []

    @staticmethod
    def swap_blocks(src, dst, block_mapping):
        Recorder.calls.append(("swap", src.data_ptr(), dst.data_ptr(), block_mapping.tolist()))

    @staticmethod
    def copy_blocks(caches, block_mapping):
        Recorder.calls.append(("copy", [cache.data_ptr() for cache in caches], block_mapping.tolist()))


def test_a_backend_with_operations_of_its_own(backend_name):
    register_backend(backend_name, Recorder)
    made = engine(backend=backend_name)
    gpu, cpu = ([cache.data_ptr() for cache in caches] for caches in (made.gpu_cache, made.cpu_cache))
    made.swap_in(pairs((0, 1)))
    made.swap_out(pairs((1, 0)))
    made.copy(pairs((2, 3)))
    swaps_in = [("swap", c, g, [[0, 1]]) for c, g in zip(cpu, gpu, strict=True)]
    swaps_out = [("swap", g, c, [[1, 0]]) for c, g in zip(cpu, gpu, strict=True)]
    assert Recorder.calls == [*swaps_in, *swaps_out, ("copy", gpu, [[2, 3]])]
    with pytest.raises(ValueError, match="dtype must be torch.int64"):
        made.swap_in(torch.zeros(1, 2))
    assert len(Recorder.calls) == 7


def test_validate_names_what_does_not_fit():
    layout = CacheLayout(4, 2, 8, torch.float16)
    (cache,) = layout.allocate(3, 1, torch.device("cpu"))
    assert layout.num_blocks(cache) == 3
    for wrong, message in (
        (cache.float(), "cache.dtype must be torch.float16, got torch.float32"),
        (cache[0], r"cache.shape must be \(2, 4, 4, 2, 8\), got \(3, 4, 2, 8\)"),
        (cache[0, 0, 0, 0], r"cache.shape must be \(2, 0, 4, 2, 8\), got \(8,\)"),
        (cache.repeat(1, 1, 1, 1, 2)[..., ::2], "contiguous in its last dimension, got stride 2"),
    ):
        with pytest.raises(ValueError, match=message):
            layout.num_blocks(wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("names", FLASH_NAMES, ids=lambda names: "-".join(names.values()))
def test_gpu_engine(names):
    config = CacheConfig(4, 7, 5, **names)
    made = CacheEngine(config, MODEL, None, DeviceConfig("cuda"))
    dim = made.layout.block_dim
    assert all(cache.is_cuda for cache in made.gpu_cache) and all(cache.is_pinned() for cache in made.cpu_cache)
    numbered(made.gpu_cache, dim)
    made.swap_out(pairs((0, 4), (6, 0)))
    torch.cuda.synchronize()
    assert numbers(made.cpu_cache, dim) == [[100 * i + 7, 0, 0, 0, 100 * i + 1] for i in range(3)]
    made.swap_in(pairs((4, 3)))
    made.copy(pairs((3, 5)))
    assert numbers(made.gpu_cache, dim) == [[100 * i + n for n in (1, 2, 3, 1, 5, 1, 7)] for i in range(3)]
