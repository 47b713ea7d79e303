"""As many blocks as fit: by the memory that steps and captures leave, on a device whose memory is numbers."""

from collections.abc import Callable

import pytest
import torch
from support.cpu_graphs import CpuCapturer, CpuReplay
from support.device_memory import Memory
from support.models import make_model
from support.state_models import make_state_model

from kvpage import CacheConfig
from kvpage.cache.cache_engine import CacheEngine
from kvpage.layout.config import DeviceConfig
from kvpage.serving import Engine, EngineConfig, SamplingParams, StateConfig
from kvpage.serving.assembly import block_count
from kvpage.serving.assembly.block_count import bytes_taken, with_blocks
from kvpage.serving.assembly.parts import check_servable
from kvpage.serving.model.states.model_states import ModelStates

MIB = 2**20
BLOCK_BYTES = 2 * 3 * 16 * 2 * 8 * 4  # K and V, layers, tokens, KV heads, elements, fp32


class Capturer(CpuCapturer):
    """Each capture keeps memory until it is forgotten, the first one more than the others, which share it."""

    def __init__(self, memory: Memory, of_first: int, of_each: int) -> None:
        super().__init__()
        self.memory, self.of_first, self.of_each = memory, of_first, of_each

    def capture(self, work: Callable[[], None], beside: object) -> CpuReplay:
        num_bytes = self.of_each if beside else self.of_first
        self.memory.keep(num_bytes)
        replay = super().capture(work, beside)
        replay.num_bytes = num_bytes
        return replay

    def release_memory(self) -> None:
        super().release_memory()
        self.memory.empty_cache()


def sized(
    monkeypatch, memory, kind="llama", *, of_step=10 * MIB, of_modules=0, captures=(0, 0), model=None, **options
) -> EngineConfig:
    """The config with blocks, of a model on a CPU that counts as a device: its steps take `of_step`."""
    config = EngineConfig(CacheConfig(16), **{"max_num_seqs": 2, "max_num_batched_tokens": 64, **options})
    servable = check_servable(model or make_model(kind), config)
    compute, taken = block_count.prepare_steps, []

    def prepare_steps(steps, limits):
        compute(steps, limits)
        memory.take(of_step)
        memory.beside += of_modules
        taken.append(limits)

    monkeypatch.setattr(block_count, "prepare_steps", prepare_steps)
    monkeypatch.setattr(block_count, "is_host", lambda device: False)
    monkeypatch.setattr(block_count, "most_blocks", lambda servable, config: 1 << 30)
    found = with_blocks(servable, config, make_capturer=lambda device: Capturer(memory, *captures))
    assert [(limits.num_seqs, limits.num_tokens) for limits in taken] == [(1 if model else 2, 64)]
    return found


@pytest.mark.parametrize("of_modules", [0, 7 * MIB])
@pytest.mark.parametrize("captures", [(0, 0), (20 * MIB, 1 * MIB)])
def test_blocks_fill_what_steps_modules_and_captures_leave(monkeypatch, of_modules, captures):
    """And once they are there, the largest step still fits beside the captures."""
    memory = Memory(monkeypatch, 100 * MIB)
    config = sized(monkeypatch, memory, of_modules=of_modules, captures=captures)
    needed = 10 * MIB + of_modules + sum(captures)
    assert config.cache_config.num_gpu_blocks == int((100 * MIB - needed) * 0.9) // BLOCK_BYTES
    memory = Memory(monkeypatch, 100 * MIB)
    memory.keep(config.cache_config.num_gpu_blocks * BLOCK_BYTES)
    memory.beside += of_modules
    for num_bytes in captures:
        memory.keep(num_bytes)
    memory.take(10 * MIB)


@pytest.mark.parametrize("kind", ["falcon_h1", "lfm2"])
def test_captures_over_states_are_tried_too(monkeypatch, kind):
    """Over a slot of padding alone."""
    model, captures = make_state_model(kind), (20 * MIB, 1 * MIB)
    config, without = (
        sized(
            monkeypatch, Memory(monkeypatch, 100 * MIB), captures=of, model=model, states=StateConfig(MIB)
        ).cache_config
        for of in (captures, (0, 0))
    )
    block_bytes = CacheEngine.get_cache_block_size(config, ModelStates.of_model(model).model_config)
    num_less = without.num_gpu_blocks - config.num_gpu_blocks
    assert config.num_gpu_blocks > 0 and num_less == pytest.approx(sum(captures) * 0.9 / block_bytes, abs=1)


def test_a_capture_that_does_not_fit_takes_nothing_from_blocks(monkeypatch):
    memory = Memory(monkeypatch, 100 * MIB)
    config = sized(monkeypatch, memory, captures=(200 * MIB, 1 * MIB))
    assert config.cache_config.num_gpu_blocks == int(90 * MIB * 0.9) // BLOCK_BYTES


def test_eager_steps_leave_room_for_no_captures(monkeypatch):
    config = sized(monkeypatch, Memory(monkeypatch, 100 * MIB), captures=(20 * MIB, 0), enforce_eager=True)
    assert config.cache_config.num_gpu_blocks == int(90 * MIB * 0.9) // BLOCK_BYTES


def test_windows_share_what_steps_and_captures_leave(monkeypatch):
    config = sized(monkeypatch, Memory(monkeypatch, 100 * MIB), "gemma3", captures=(20 * MIB, 0))
    layer_bytes = 2 * 16 * 2 * 16 * 4  # K and V, tokens, KV heads, elements, fp32; two layers of three have windows
    num_windows = 4 * 2 * 2 + 64 // 16
    assert config.num_window_blocks == num_windows
    assert config.cache_config.num_gpu_blocks == (int(70 * MIB * 0.9) - num_windows * 2 * layer_bytes) // layer_bytes


def test_one_table_is_sized_by_a_trial_of_its_own(monkeypatch):
    """Little memory holds as many tokens in one table, whose steps are captured."""
    memory = Memory(monkeypatch, 10 * MIB + 26000)
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=64)
    servable, taken = check_servable(make_model("gemma3"), config), []
    monkeypatch.setattr(block_count, "prepare_steps", lambda *of: taken.append(of) or memory.take(10 * MIB))
    monkeypatch.setattr(block_count, "is_host", lambda device: False)
    found = with_blocks(servable, config, make_capturer=lambda device: Capturer(memory, 0, 0))
    assert (found.num_window_blocks, found.cache_config.num_gpu_blocks, len(taken)) == (None, 1, 2)


@pytest.mark.parametrize(
    ("of_step", "message"),
    [
        (100 * MIB, "num_gpu_blocks must be positive, 0 MiB are left for blocks: lower max_num_batched_tokens=64 or"),
        (101 * MIB, "a step of 64 tokens takes more than the 100 MiB that are free: CUDA out of memory"),
    ],
)
def test_too_little_memory_is_an_error_that_says_what_to_lower(monkeypatch, of_step, message):
    with pytest.raises(ValueError, match=message):
        sized(monkeypatch, Memory(monkeypatch, 100 * MIB), of_step=of_step)


def test_ranks_take_the_least_of_their_numbers(monkeypatch):
    servable = check_servable(make_model("llama"), config := EngineConfig(CacheConfig(16)))
    assert with_blocks(servable, config, lambda num: num - 7).cache_config.num_gpu_blocks == 4 * 64 * 16 - 7


def test_on_a_cpu_blocks_take_a_part_of_the_free_memory(monkeypatch):
    monkeypatch.setattr(DeviceConfig, "free_memory", lambda self: 20 * BLOCK_BYTES)
    engine = Engine.from_model(make_model("llama"), EngineConfig(CacheConfig(16)))
    assert engine.manager.num_blocks == engine.config.cache_config.num_gpu_blocks == 10
    assert len(engine.generate([[3, 4, 5]], SamplingParams(max_tokens=3))[0].token_ids) == 3


def test_blocks_are_no_more_than_requests_can_fill():
    config = EngineConfig(CacheConfig(16), max_num_seqs=2, max_model_len=40)
    assert Engine.from_model(make_model("llama"), config).manager.num_blocks == 4 * 2 * 3
    without = EngineConfig(CacheConfig(16), max_num_seqs=2, max_model_len=40, states=StateConfig(2**20))
    assert Engine.from_model(make_state_model("mamba2"), without).manager.num_blocks == 4 * 2 * 3


def test_a_given_number_is_left_alone():
    config = EngineConfig(CacheConfig(16, 5))
    assert with_blocks(None, config) is config


def test_what_is_taken_is_torchs_most_and_all_that_is_kept(monkeypatch):
    memory = Memory(monkeypatch, 100 * MIB)
    memory.keep(10 * MIB)

    def work():
        memory.take(9 * MIB)
        memory.keep(2 * MIB)
        memory.beside += 3 * MIB

    assert bytes_taken(torch.device("cpu"), work) == (12 * MIB, 5 * MIB)
