"""How many blocks an engine has whose config leaves it open: as many as fit beside all that its steps take.

free memory, the weights are loaded
'-- steps, at most --'-- graphs --'-- states --'-- blocks: gpu_memory_utilization of the rest ------'-- spare --'
    of padding, over a cache of one block       and never more than requests can fill
"""

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from kvpage.cache.state_cache import StateCache
from kvpage.layout.config import DeviceConfig, ModelConfig, ParallelConfig, cache_block_bytes
from kvpage.serving.assembly.device_memory import bytes_taken, free_bytes
from kvpage.serving.assembly.parts import ServableModel, make_cache, without_autocast
from kvpage.serving.assembly.state_parts import SlotCounts
from kvpage.serving.config import EngineConfig
from kvpage.serving.loop.graphs.capture import Capturer, CudaCapturer, is_out_of_memory
from kvpage.serving.loop.graphs.decode_graphs import captures_decodes, graphs_of
from kvpage.serving.loop.graphs.padding import PaddedSteps, StepLimits
from kvpage.serving.loop.graphs.step_caches import StepCaches
from kvpage.serving.loop.graphs.warmup import prepare_steps
from kvpage.serving.model.limits import limited_model_len

logger = logging.getLogger(__name__)

CPU_BYTES = 4 << 30  # of blocks on a CPU; half of the free memory at most
STATE_BLOCKS = 1 << 16  # at most, of a model without K and V: they only count tokens, and take no memory
"""Bounds that hold where nothing else does."""


def with_blocks(
    servable: ServableModel,
    config: EngineConfig,
    agreed: Callable[[int], int] = lambda num_blocks: num_blocks,
    make_capturer: Callable[[torch.device], Capturer] = CudaCapturer,
) -> EngineConfig:
    """Return the config with as many blocks as fit, unless it names a number.

    agreed: gives the least number of all ranks. ValueError if not one block fits.
    """
    if config.cache_config.num_gpu_blocks:
        return config
    num_bytes = _bytes_for_blocks(servable, config, make_capturer)
    num_blocks = agreed(min(most_blocks(servable, config), _num_fitting(servable.config, config, num_bytes)))
    if num_blocks == 0:
        raise ValueError(
            f"num_gpu_blocks must be positive, {max(num_bytes, 0) / 2**20:.0f} MiB are left for blocks: lower "
            f"max_num_batched_tokens={config.max_num_batched_tokens} or max_num_seqs={config.max_num_seqs}"
        )
    return replace(config, cache_config=replace(config.cache_config, num_gpu_blocks=num_blocks))


def most_blocks(servable: ServableModel, config: EngineConfig) -> int:
    """Return how many blocks requests can make use of: four times those of the longest ones that run at once."""
    longest = min(limited_model_len(servable.runner.model, config.max_model_len), 1 << 20)
    return 4 * config.max_num_seqs * -(-longest // config.cache_config.block_size)


def is_host(device: torch.device) -> bool:
    """Return whether the blocks are in host memory, which steps share with everything else."""
    return device.type == "cpu"


def _num_fitting(shape: ModelConfig, config: EngineConfig, num_bytes: int) -> int:
    block_bytes = cache_block_bytes(config.cache_config, shape, ParallelConfig())
    return max(num_bytes, 0) // block_bytes if block_bytes else STATE_BLOCKS


def _bytes_for_blocks(
    servable: ServableModel, config: EngineConfig, make_capturer: Callable[[torch.device], Capturer]
) -> int:
    device = servable.runner.model.device
    if is_host(device):
        return min(CPU_BYTES, DeviceConfig(device).free_memory() // 2)
    free = free_bytes(device)
    needed = _bytes_of_steps(servable, config, free, make_capturer) + _bytes_of_states(servable, config, free)
    logger.info("steps need %.0f MiB of %.0f MiB that are free beside the weights", needed / 2**20, free / 2**20)
    return int((free - needed) * config.cache_config.gpu_memory_utilization)


def _bytes_of_steps(
    servable: ServableModel, config: EngineConfig, free: int, make_capturer: Callable[[torch.device], Capturer]
) -> int:
    """Return what steps and captured steps take besides blocks, by a trial with padding. ValueError if it fails."""
    runner, longest = servable.runner, limited_model_len(servable.runner.model, config.max_model_len)
    longest = min(longest, max(_num_fitting(servable.config, config, free), 1) * config.cache_config.block_size)
    num_seqs = config.max_num_seqs if servable.states is None else 1  # each would have a state more
    limits = StepLimits(num_seqs, config.max_num_batched_tokens, longest)
    try:
        with without_autocast(runner.model.device):
            cache = make_cache(servable, _with_one_block(config))
            steps = PaddedSteps(runner, cache)
            of_steps = bytes_taken(cache.device, lambda: prepare_steps(steps, limits))
            if not captures_decodes(config):
                return of_steps.most
            layout = runner.state_layout
            states = None if layout is None else StateCache(layout, 1, device=cache.device)  # that of padding
            caches = StepCaches(cache, states=states)
            graphs = graphs_of(runner, caches, make_capturer(cache.device), config, longest)
            of_graphs = bytes_taken(cache.device, graphs.capture)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ValueError(
            f"max_num_batched_tokens must leave memory for blocks, a step of {config.max_num_batched_tokens} tokens "
            f"takes more than the {free / 2**20:.0f} MiB that are free: {error}"
        ) from error
    graphs.forget("it was a trial")
    return of_steps.most + of_graphs.kept


def _with_one_block(config: EngineConfig) -> EngineConfig:
    return replace(config, cache_config=replace(config.cache_config, num_gpu_blocks=1, num_cpu_blocks=0))


def _bytes_of_states(servable: ServableModel, config: EngineConfig, free: int) -> int:
    """Return the bytes of all state slots, with that of padding, and of tail blocks, which come beside the blocks."""
    if servable.states is None:
        return 0
    num_blocks = min(most_blocks(servable, config), max(_num_fitting(servable.config, config, free), 1))
    filled = replace(config, cache_config=replace(config.cache_config, num_gpu_blocks=num_blocks))
    tail_bytes = cache_block_bytes(config.cache_config, servable.config, ParallelConfig())
    slot_bytes = servable.states.layout.slot_bytes
    return SlotCounts.of(filled, servable.states).device * (slot_bytes + tail_bytes) + slot_bytes
