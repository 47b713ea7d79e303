"""How many blocks an engine has whose config leaves it open: as many as fit beside all that its steps take.

free memory, the weights are loaded
'-- steps, at most --'-- graphs --'-- states --'-- blocks: gpu_memory_utilization of the rest ------'-- spare --'
    of padding, over a cache of one block       windows and checkpoints among them, see memory_split;
                                                and never more than requests can fill
"""

import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from kvpage.cache.state_cache import StateCache
from kvpage.checks.device_lock import synchronize
from kvpage.layout.config import DeviceConfig, ParallelConfig, cache_block_bytes
from kvpage.serving.assembly.memory_split import SEQUENCES, WindowSplit, checkpoint_share, split_windows
from kvpage.serving.assembly.parts import ServableModel, make_cache, takes_own_blocks, without_autocast
from kvpage.serving.assembly.state_parts import slot_bytes, slots_of
from kvpage.serving.assembly.window_groups import num_blocks_of_sequence, short_windows
from kvpage.serving.config import EngineConfig
from kvpage.serving.loop.graphs.capture import Capturer, CudaCapturer, is_out_of_memory
from kvpage.serving.loop.graphs.decode_graphs import captures_decodes, graphs_of
from kvpage.serving.loop.graphs.padding import PaddedSteps, StepLimits
from kvpage.serving.loop.graphs.warmup import prepare_steps
from kvpage.serving.loop.ranks.rank_caches import RankCaches
from kvpage.serving.model.limits import limited_model_len

logger = logging.getLogger(__name__)
CPU_BYTES = 4 << 30  # of blocks on a CPU; half of the free memory at most
COUNTING_BLOCKS = 1 << 16  # at most, where they have no K and V: they only count tokens, and take no memory
"""Bounds that hold where nothing else does."""


class Taken(NamedTuple):
    """Bytes beyond those before some work. most: while it was done. kept: once it was done, and nothing is cached."""

    most: int
    kept: int


def free_bytes(device: torch.device) -> int:
    """Return the device's free memory, once torch's allocator keeps nothing that nobody uses."""
    with torch.cuda.device(device):
        gc.collect()
        synchronize(device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]


def bytes_taken(device: torch.device, work: Callable[[], object]) -> Taken:
    """Do the work, and return what it has taken: by torch's allocator, and by modules and libraries beside it."""
    free = free_bytes(device)
    reserved = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    most = torch.cuda.max_memory_reserved(device) - reserved
    num_kept = free - free_bytes(device)
    beside = num_kept - (torch.cuda.memory_reserved(device) - reserved)
    return Taken(max(most + max(beside, 0), 0), max(num_kept, 0))


def with_blocks(
    servable: ServableModel,
    config: EngineConfig,
    agreed: Callable[[int], int] = lambda num_blocks: num_blocks,
    make_capturer: Callable[[torch.device], Capturer] = CudaCapturer,
) -> EngineConfig:
    """Return the config with as many blocks as fit, unless it names a number.

    Windows have blocks of their own where the config leaves it open, and more tokens fit so. Checkpoints of states are
    in the same memory, where the config leaves their bytes open.

    agreed: gives the least number of all ranks. ValueError if not one block fits.
    """
    if config.cache_config.num_gpu_blocks:
        return config
    if not takes_own_blocks(config, servable.attention, servable.runner.model, servable.states):
        return _with_one_table(servable, config, agreed, make_capturer)
    split = _split_windows(servable, config, _bytes_for_blocks(servable, config, make_capturer))
    if split is None:
        return _with_one_table(servable, config, agreed, make_capturer)
    num_blocks = min(most_blocks(servable, config), split.num_blocks or COUNTING_BLOCKS)
    logger.info("blocks of all tokens: %d, of each window: %d", num_blocks, split.num_window_blocks)
    return _sized(config, num_blocks, num_window_blocks=split.num_window_blocks)


def _with_one_table(
    servable: ServableModel,
    config: EngineConfig,
    agreed: Callable[[int], int],
    make_capturer: Callable[[torch.device], Capturer],
) -> EngineConfig:
    """Return the config with as many blocks of all layers as fit. See `with_blocks`."""
    config = replace(config, num_window_blocks=None)
    num_bytes = _bytes_for_blocks(servable, config, make_capturer)
    share = _checkpoint_share(servable, config, num_bytes)
    block_bytes = _block_bytes(servable, config)
    num_blocks = agreed(min(most_blocks(servable, config), _num_fitting(block_bytes, num_bytes - (share or 0))))
    if num_blocks == 0:
        raise ValueError(_why_no_block(config, num_bytes))
    logger.info("blocks of all tokens: %d", num_blocks)
    states = config.states if share is None else replace(config.states, checkpoint_bytes=share)
    return _sized(config, num_blocks, states=states)


def _sized(config: EngineConfig, num_blocks: int, **fields: Any) -> EngineConfig:
    cache_config = replace(config.cache_config, num_gpu_blocks=num_blocks)
    return replace(config, cache_config=cache_config, kv_cache_memory=None, **fields)


def _why_no_block(config: EngineConfig, num_bytes: int) -> str:
    if config.kv_cache_memory is not None:
        return f"kv_cache_memory must hold a block, got {config.kv_cache_memory}"
    return (
        f"num_gpu_blocks must be positive, {num_bytes / 2**20:.0f} MiB are left for blocks: lower "
        f"max_num_batched_tokens={config.max_num_batched_tokens} or max_num_seqs={config.max_num_seqs}"
    )


def _split_windows(servable: ServableModel, config: EngineConfig, num_bytes: int) -> WindowSplit | None:
    max_model_len = limited_model_len(servable.runner.model, config.max_model_len)
    windows = short_windows(servable.attention.windows, max_model_len)
    window_bytes = cache_block_bytes(config.cache_config, servable.config.with_caches_of(windows), ParallelConfig())
    block_size = config.cache_config.block_size
    num_sequence_blocks = num_blocks_of_sequence(max(windows.values()), block_size, max_model_len)
    num_step_blocks = -(-config.max_num_batched_tokens // block_size)
    block_bytes = _block_bytes(servable, config)
    return split_windows(
        num_bytes, block_bytes, window_bytes, num_sequence_blocks, config.max_num_seqs, num_step_blocks
    )


def _checkpoint_share(servable: ServableModel, config: EngineConfig, num_bytes: int) -> int | None:
    """Return the bytes of checkpoints; None where the config names them, or the model keeps no states."""
    if servable.states is None or config.states.checkpoint_bytes is not None:
        return None
    checkpoint_bytes = slot_bytes(config.cache_config, servable.states)
    share = checkpoint_share(num_bytes, _block_bytes(servable, config), checkpoint_bytes, config.max_num_seqs)
    logger.info("checkpoints of states: %d", share // checkpoint_bytes)
    return share


def most_blocks(servable: ServableModel, config: EngineConfig) -> int:
    """Return how many blocks requests can make use of: four times those of the longest ones that run at once."""
    longest = min(limited_model_len(servable.runner.model, config.max_model_len), 1 << 20)
    return SEQUENCES * config.max_num_seqs * -(-longest // config.cache_config.block_size)


def is_host(device: torch.device) -> bool:
    """Return whether the blocks are in host memory, which steps share with everything else."""
    return device.type == "cpu"


def _block_bytes(servable: ServableModel, config: EngineConfig) -> int:
    """Return the bytes of a block of all tokens: without the layers whose windows have blocks of their own."""
    shape = servable.config
    if config.num_window_blocks is not None:
        max_model_len = limited_model_len(servable.runner.model, config.max_model_len)
        short = short_windows(servable.attention.windows, max_model_len)
        shape = shape.with_caches_of(layer for layer in servable.attention.windows if layer not in short)
    return cache_block_bytes(config.cache_config, shape, ParallelConfig())


def _num_fitting(block_bytes: int, num_bytes: int) -> int:
    return max(num_bytes, 0) // block_bytes if block_bytes else COUNTING_BLOCKS


def _bytes_for_blocks(
    servable: ServableModel, config: EngineConfig, make_capturer: Callable[[torch.device], Capturer]
) -> int:
    """Return the bytes for blocks, windows and checkpoints, 0 or more."""
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory
    device = servable.runner.model.device
    if is_host(device):
        free = DeviceConfig(device).free_memory()
        return max(min(CPU_BYTES, (free - _bytes_of_states(servable, config, free)) // 2), 0)
    free = free_bytes(device)
    needed = _bytes_of_steps(servable, config, free, make_capturer) + _bytes_of_states(servable, config, free)
    logger.info("steps need %.0f MiB of %.0f MiB that are free beside the weights", needed / 2**20, free / 2**20)
    return max(int((free - needed) * config.cache_config.gpu_memory_utilization), 0)


def _bytes_of_steps(
    servable: ServableModel, config: EngineConfig, free: int, make_capturer: Callable[[torch.device], Capturer]
) -> int:
    """Return what steps and captured steps take besides blocks, by a trial with padding. ValueError if it fails."""
    runner, longest = servable.runner, limited_model_len(servable.runner.model, config.max_model_len)
    num_fitting = max(_num_fitting(_block_bytes(servable, config), free), 1)
    longest = min(longest, num_fitting * config.cache_config.block_size)
    num_seqs = config.max_num_seqs if servable.states is None else 1  # each would have a state more
    limits = StepLimits(num_seqs, config.max_num_batched_tokens, longest)
    try:
        with without_autocast(runner.model.device):
            cache, layout = make_cache(servable, _with_one_block(config)), runner.state_layout
            states = None if layout is None else StateCache(layout, 0, device=runner.model.device)
            steps = PaddedSteps(runner, RankCaches(cache, states=states))
            of_steps = bytes_taken(cache.device, lambda: prepare_steps(steps, limits))
            if not captures_decodes(config):
                return of_steps.most
            layout = runner.state_layout
            states = None if layout is None else StateCache(layout, 1, device=cache.device)  # that of padding
            caches = RankCaches(cache, states=states)
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
    return _sized(replace(config, cache_config=replace(config.cache_config, num_cpu_blocks=0)), 1)


def _bytes_of_states(servable: ServableModel, config: EngineConfig, free: int) -> int:
    """Return the bytes of state slots, with that of padding, and of their tail blocks, which come beside the blocks.

    Checkpoints are among them where the config names their bytes; else they get a share of what is left.
    """
    if servable.states is None:
        return 0
    num_blocks = min(most_blocks(servable, config), max(_num_fitting(_block_bytes(servable, config), free), 1))
    cache_config = replace(config.cache_config, num_gpu_blocks=num_blocks)
    states = replace(config.states, checkpoint_bytes=config.states.checkpoint_bytes or 0)
    slots = slots_of(replace(config, cache_config=cache_config, states=states), servable.states)
    return slots.num_slots * slot_bytes(cache_config, servable.states) + servable.states.layout.slot_bytes
