"""Captured decode steps: tokens are those of plain steps, addresses are static, padding writes and spoils nothing."""

import logging

import pytest
import torch
from support.cpu_graphs import CpuCapturer, as_on_a_device
from support.models import make_model, make_prompts

from kvpage import CacheConfig
from kvpage.serving import Engine, EngineConfig, SamplingParams
from kvpage.serving.loop.graphs.decode_graphs import default_sizes

B, MOST = 4, 6


def make_engine(kind: str = "llama", num_gpu_blocks: int = 160, num_cpu_blocks: int = 0, **options: object) -> Engine:
    cache = CacheConfig(B, num_gpu_blocks, num_cpu_blocks, backend=options.pop("backend", "flash"))
    model = options.pop("model", None) or make_model(kind)
    return Engine.from_model(model, EngineConfig(cache, **{"max_num_seqs": MOST, **options}))


def captured(*args: object, capturer: CpuCapturer | None = None, **options: object) -> Engine:
    return as_on_a_device(make_engine(*args, **options), capturer=capturer)


def poison(engine: Engine) -> None:
    """Spoil all blocks: a row of padding that reads or writes one shows."""
    for cache in engine.cache.gpu_cache:
        cache.fill_(float("nan"))


@pytest.mark.parametrize("kind", ["gemma2", "gpt2", "mistral"])
def test_families(kind: str) -> None:
    prompts = make_prompts([3, 9, 2 * B], seed=5)
    want = [one.token_ids for one in make_engine(kind).generate(prompts, SamplingParams(max_tokens=9))]
    engine = captured(kind)
    assert [one.token_ids for one in engine.generate(prompts, SamplingParams(max_tokens=9))] == want
    assert engine.stats().graphs.num_replays >= 6


def test_latents_in_blocks() -> None:
    prompts, params = make_prompts([3, 9], seed=5), SamplingParams(max_tokens=6)
    want = [one.token_ids for one in make_engine("deepseek_v3", backend="mla").generate(prompts, params)]
    engine = captured("deepseek_v3", backend="mla")
    assert [one.token_ids for one in engine.generate(prompts, params)] == want
    assert engine.stats().graphs.num_replays > 0


# --- reasons ---------------------------------------------------------------------------------------------------------


def run(engine: Engine, **fields: object) -> list[list[int]]:
    params = SamplingParams(**{"max_tokens": 6, **fields})
    return [one.token_ids for one in engine.generate(make_prompts([5, 9], seed=3), params)]


def test_without_warmup_it_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine()
    engine.debug.use_graphs(CpuCapturer())
    with caplog.at_level(logging.INFO, "kvpage"):
        assert run(engine) == run(make_engine())
    assert caplog.text.count("Engine.warmup() was not called") == 1
    assert engine.stats().graphs.misses["Engine.warmup() was not called"] == 5


def test_a_capture_that_raises_leaves_the_engine_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(CpuCapturer):
        def capture(self, work, beside):
            work()
            if len(self.beside) == 2:
                raise RuntimeError("no recording here")
            return super().capture(work, beside)

    engine = make_engine()
    poison(engine)
    free = engine.manager.num_free_blocks
    engine.debug.use_graphs(Broken())
    engine.warmup(lambda num: None)
    stats = engine.stats().graphs
    assert stats.sizes == () and stats.num_bytes == 0 and engine.manager.num_free_blocks == free
    assert all(cache.isnan().all() for cache in engine.cache.gpu_cache)
    assert caplog.text.count("no recording here") == 1
    assert run(engine) == run(make_engine())
    assert engine.stats().graphs.misses["RuntimeError: no recording here"] == 5


def test_an_interrupt_leaves_nothing_captured() -> None:
    class Interrupted(CpuCapturer):
        def capture(self, work, beside):
            if self.beside:
                raise KeyboardInterrupt
            return super().capture(work, beside)

    engine = make_engine()
    engine.debug.use_graphs(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        engine.warmup(lambda num: None)
    assert engine.stats().graphs.sizes == () and run(engine) == run(make_engine())


class Foreign(torch.nn.Linear):
    __module__ = "adapters.layer"


def test_a_module_of_another_package_is_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("llama")
    model.lm_head.__class__ = Foreign
    engine = as_on_a_device(make_engine(model=model))
    assert engine.stats().graphs.sizes == () and "lm_head is a Foreign of adapters" in caplog.text


def test_hooks_run(caplog: pytest.LogCaptureFixture) -> None:
    """Those that come after the capture, too; once they are gone, steps are replayed again."""
    engine = captured()
    model, seen = engine.debug.runner.model, []
    hook = model.model.layers[0].mlp.register_forward_hook(lambda *args: seen.append(1))
    assert run(engine) == run(make_engine())
    assert len(seen) == 6 and engine.stats().graphs.num_replays == 0
    assert engine.stats().graphs.misses["the model has hooks"] == 5
    hook.remove()
    engine.reset_prefix_cache()
    run(engine)
    assert len(seen) == 6 and engine.stats().graphs.num_replays == 5
    model.lm_head.register_forward_pre_hook(lambda *args: None)
    engine.warmup(lambda num: None)
    assert engine.stats().graphs.sizes == () and "because the model has hooks" in caplog.text


@pytest.mark.parametrize("change", ["in place", "data", "parameter", "module", "forward"])
def test_weights_are_those_of_now(change: str) -> None:
    """Changed in place they are found at their addresses. Else steps are computed anew, until the next warmup."""
    engine, expected = captured(), make_model("llama")
    model = engine.debug.runner.model
    layer, other = model.model.layers[0].mlp.down_proj, expected.model.layers[0].mlp.down_proj
    before = run(engine)
    weight = layer.weight.detach().flip(0).clone()
    if change == "in place":
        layer.weight.data.copy_(weight)
    elif change == "data":
        layer.weight.data = weight
    elif change == "parameter":
        layer.weight = torch.nn.Parameter(weight)
    elif change == "module":
        model.model.layers[0].mlp.down_proj = torch.nn.Linear(*weight.shape[::-1], bias=False)
        model.model.layers[0].mlp.down_proj.weight.data = weight
    else:
        layer.forward = lambda x: torch.nn.functional.linear(x, weight)
    other.weight.data.copy_(weight)
    engine.reset_prefix_cache()
    num_replays = engine.stats().graphs.num_replays
    after = run(engine)
    assert after == run(make_engine(model=expected)) and after != before
    assert (engine.stats().graphs.num_replays > num_replays) is (change == "in place")
    engine.warmup(lambda num: None)
    assert bool(engine.stats().graphs.sizes) is (change != "forward")


# --- memory and sizes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_captures", [0, 1, 3, 4])
def test_the_memory_budget_is_kept(num_captures: int) -> None:
    """The largest come first. A batch for which none is large enough runs without."""
    unbound = captured(capturer=CpuCapturer(1000))
    (inputs,) = {unbound.stats().graphs.num_bytes - 4 * 1000}
    engine = make_engine(cudagraph_max_bytes=inputs + 1000 * num_captures + 999)
    as_on_a_device(engine, capturer=CpuCapturer(1000))
    stats = engine.stats().graphs
    assert stats.sizes == (1, 2, 4, 6)[4 - num_captures :] and stats.num_bytes <= inputs + 1000 * num_captures
    assert run(engine) == run(make_engine())


class Short(CpuCapturer):
    """Captures of some numbers of rows fail for want of memory."""

    def __init__(self, failing: set[int], error: RuntimeError) -> None:
        super().__init__(1000)
        self.left, self.failing, self.error = [6, 4, 2, 1], failing, error

    def capture(self, work, beside):
        size = self.left.pop(0)
        if size in self.failing:
            work()
            raise self.error
        return super().capture(work, beside)


NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 640.00 MiB")


@pytest.mark.parametrize("error", [NO_MEMORY, RuntimeError("CUDA error: out of memory")], ids=["torch", "CUDA"])
@pytest.mark.parametrize("failing", [{6}, {6, 4}, {2}, {6, 4, 2, 1}], ids=str)
def test_a_capture_without_memory_costs_its_size_alone(
    failing: set[int], error: RuntimeError, caplog: pytest.LogCaptureFixture
) -> None:
    engine, capturer = make_engine(), Short(failing, error)
    as_on_a_device(engine, capturer=capturer)
    stats, kept = engine.stats().graphs, sorted({1, 2, 4, 6} - failing)
    assert stats.sizes == tuple(kept) and capturer.num_releases == len(failing)
    inputs = engine.debug.batch_runner.graphs._inputs.num_bytes
    assert stats.num_bytes == inputs + 1000 * len(kept)
    assert caplog.text.count("rows are not captured, because the device's memory does not suffice (CUDA") == len(
        failing
    )
    assert run(engine) == run(make_engine())
    assert bool(engine.stats().graphs.num_replays) is bool(kept)


def test_captures_share_memory() -> None:
    capturer = CpuCapturer()
    captured(capturer=capturer)
    assert capturer.beside[0] is None and all(one is not None for one in capturer.beside[1:])


def test_sizes_of_the_config() -> None:
    engine = captured(cudagraph_capture_sizes=[4, 2])
    assert engine.stats().graphs.sizes == (2, 4)
    prompts, params = make_prompts([3] * 5, seed=1), SamplingParams(max_tokens=3)
    assert [one.token_ids for one in engine.generate(prompts, params)] == [
        one.token_ids for one in make_engine().generate(prompts, params)
    ]
    assert engine.stats().graphs.misses["it has more than 4 sequences"] == 2


def test_default_sizes() -> None:
    assert default_sizes(1) == [1] and default_sizes(5) == [1, 2, 4, 5]
    assert default_sizes(64) == [1, 2, 4, 8, 16, 24, 32, 48, 64]
    assert default_sizes(100) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100]


def test_progress_and_a_second_warmup() -> None:
    engine, told = captured(), []
    engine.warmup(told.append)
    assert told == [1] * 7 and engine.stats().graphs.sizes == (1, 2, 4, 6)
    cpu = make_engine()
    cpu.warmup(told.append)
    assert told == [1] * 10 and cpu.stats().graphs is None and run(cpu) == run(engine)
