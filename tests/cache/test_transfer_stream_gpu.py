"""Transfers on a GPU: their order on streams, layers, captured graphs, calibration."""

import pytest
import torch
from support.swap_pairs import MODEL, NAMES, pairs
from support.waiting import until

from kvpage import BlockPool, CacheConfig, CacheEngine, Calibration, DeviceConfig, ModelConfig

EXECUTORS = {"engine": 0, "kernel": 1 << 40}
DELAY = 100_000_000  # clock cycles, a twentieth of a second
BLOCKS = 64
SCATTERED = pairs(*((block, (7 * block + 3) % BLOCKS) for block in range(BLOCKS)))


def gpu_engine(executor: str, **names) -> CacheEngine:
    """Everything was run once: loading a kernel may wait for the whole device, which would end a delay."""
    made = new_gpu_engine(executor, **names)
    for by_layer in (False, True):
        made.swap_out(SCATTERED, non_blocking=True, by_layer=by_layer).wait()
        made.swap_in(SCATTERED, non_blocking=True, by_layer=by_layer).wait()
    for few in (pairs((0, 1)), pairs((0, 1), (2, 3))):
        made.swap_out(few)
        made.swap_in(few)
        made.copy(few)
    _ = [cache.clone().fill_(0)[:, 0].fill_(0) for cache in made.gpu_cache]
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    return made


def new_gpu_engine(executor: str, **names) -> CacheEngine:
    model = ModelConfig(32, 1 if names["backend"] == "mla" else 4, ("full_attention",) * 4)
    if names["backend"] == "mla":
        model = ModelConfig(32, 1, ("full_attention",) * 4, use_mla=True)
    max_bytes = EXECUTORS[executor]
    calibration = Calibration("made up", 16, (), (), max_bytes, max_bytes, 0.0)
    config = CacheConfig(16, BLOCKS, BLOCKS, cache_dtype="fp16", **names)
    return CacheEngine(config, model, None, DeviceConfig("cuda"), calibration=calibration)


def gpu_streams() -> dict:
    return {"null": torch.cuda.default_stream(), "side": torch.cuda.Stream()}


def fill(caches, value) -> None:
    for cache in caches:
        cache.fill_(value)


def values(caches) -> list[float]:
    return sorted({float(value) for cache in caches for value in cache.unique()})


@pytest.mark.gpu
@pytest.mark.parametrize("names", NAMES, ids=lambda names: "-".join(names.values()))
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("stream", ["null", "side"])
@pytest.mark.parametrize("by_layer", [False, True])
def test_gpu_a_transfer_out_comes_after_the_work_that_wrote_and_before_the_work_that_waits(
    names, executor, stream, by_layer
):
    made = gpu_engine(executor, **names)
    fill(made.gpu_cache, 7)
    torch.cuda.synchronize()
    assert made._swap_out.executor(SCATTERED) == executor
    with torch.cuda.stream(gpu_streams()[stream]):
        torch.cuda._sleep(DELAY)
        fill(made.gpu_cache, 1)
        transfer = made.swap_out(SCATTERED, non_blocking=True, by_layer=by_layer)
        assert not transfer.is_done() and values(made.cpu_cache) == [0]
        transfer.wait_stream()
        fill(made.gpu_cache, 2)
    transfer.wait()
    assert values(made.cpu_cache) == [1]
    torch.cuda.synchronize()
    assert values(made.gpu_cache) == [2]
    assert 0 < transfer.seconds < 10 and transfer.gigabytes_per_second > 0


@pytest.mark.gpu
@pytest.mark.parametrize("names", NAMES, ids=lambda names: "-".join(names.values()))
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("stream", ["null", "side"])
def test_gpu_a_transfer_in_comes_layer_by_layer(names, executor, stream):
    """The device's blocks are read by slow work before, and each layer by work that waits for that layer alone."""
    made = gpu_engine(executor, **names)
    fill(made.gpu_cache, 7)
    for layer, cache in enumerate(made.cpu_cache):
        cache.fill_(layer + 1)
    torch.cuda.synchronize()
    with torch.cuda.stream(gpu_streams()[stream]):
        torch.cuda._sleep(DELAY)
        before = [cache.clone() for cache in made.gpu_cache]
        transfer = made.swap_in(SCATTERED, non_blocking=True, by_layer=True)
        after = []
        for layer, cache in enumerate(made.gpu_cache):
            transfer.wait_layer(layer)
            after.append(cache.clone())
    transfer.wait()
    assert all(transfer.layer_ready(layer) for layer in range(4))
    torch.cuda.synchronize()
    assert values(before) == [7]
    assert [values([cache]) for cache in after] == [[1], [2], [3], [4]]


@pytest.mark.gpu
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("stream", ["null", "side"])
def test_gpu_calls_are_ordered_after_transfers(executor, stream):
    """Out, over, and in again: a chain of transfers, a blocking swap and a copy, all behind one delay."""
    made = gpu_engine(executor, backend="flash", kv_layout="NHD", layer_layout="separate")
    pool = BlockPool(BLOCKS)
    pool.allocate(BLOCKS)
    fill(made.gpu_cache, 7)
    torch.cuda.synchronize()
    with torch.cuda.stream(gpu_streams()[stream]):
        torch.cuda._sleep(DELAY)
        for block in range(BLOCKS):
            for cache in made.gpu_cache:
                cache[:, block].fill_(block)
        made.swap_out(pairs((5, 0), (6, 1)), non_blocking=True, pools=(pool, None))
        made.swap_in(pairs((0, 10), (1, 11)), non_blocking=True, pools=(None, pool))
        made.copy(pairs((10, 12), (11, 13)))
        made.swap_in(pairs((0, 14), (1, 15)))
        assert pool.ref_count(5) == pool.ref_count(10) == 2
        last = made.swap_out(pairs((12, 2), (15, 3)), non_blocking=True)
    last.wait()
    assert made.poll() == 0 and pool.ref_count(5) == pool.ref_count(10) == 1
    for cache in made.cpu_cache:
        assert cache[:, :4].float().amax((0, 2, 3, 4)).tolist() == [5, 6, 5, 6]
        assert cache[:, :4].float().amin((0, 2, 3, 4)).tolist() == [5, 6, 5, 6]


@pytest.mark.gpu
def test_gpu_a_dropped_engine_finishes_its_transfers():
    made = gpu_engine("kernel", backend="flash", kv_layout="NHD", layer_layout="separate")
    fill(made.gpu_cache, 1)
    host = made.cpu_cache
    torch.cuda._sleep(DELAY)
    transfer = made.swap_out(SCATTERED, non_blocking=True)
    del made
    until(transfer.is_done)
    assert values(host) == [1]


@pytest.mark.gpu
def test_gpu_capture():
    """No swap or copy under capture, with and without transfers in flight; the capture itself goes on."""
    made = gpu_engine("kernel", backend="flash", kv_layout="NHD", layer_layout="separate")
    fill(made.gpu_cache, 1)
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    for in_flight in (False, True):
        torch.cuda._sleep(DELAY)
        transfer = made.swap_out(SCATTERED, non_blocking=True) if in_flight else None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in (
                lambda: made.swap_in(SCATTERED),
                lambda: made.swap_out(SCATTERED, non_blocking=True),
                lambda: made.copy(pairs((0, 1))),
            ):
                with pytest.raises(ValueError, match="must not be capturing"):
                    call()
            if transfer:
                assert not transfer.is_done()
                for call in (transfer.wait, transfer.wait_stream):
                    with pytest.raises(ValueError, match="must not be capturing"):
                        call()
            x.add_(1)
        graph.replay()
        if transfer:
            transfer.wait()
    torch.cuda.synchronize()
    assert x.tolist() == [2] * 4 and values(made.cpu_cache) == [1]


@pytest.mark.gpu
def test_gpu_an_engine_calibrates_itself():
    made = CacheEngine(CacheConfig(16, 8, 8), MODEL, None, DeviceConfig("cuda"))
    fill(made.gpu_cache, 3)
    made.swap_out(pairs((0, 7), (3, 1)), non_blocking=True).wait()
    assert made.cpu_cache[0][:, [1, 7]].unique().tolist() == [3] and made.cpu_cache[0][:, 0].unique().tolist() == [0]
