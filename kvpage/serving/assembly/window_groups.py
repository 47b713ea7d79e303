"""WindowGroups: layers that attend over windows, apart from the others: the caches of each group, and its blocks.

layers     0    1    2    3    4    5
window     16   16   16   -    16   16        Gemma 3: five of six have one
           '--- a group ----------'--'        blocks of their own, given back once they are behind the window
                          |
                          full layers         num_gpu_blocks, as ever
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kvpage.blocks.groups.states.state_space import States
from kvpage.blocks.groups.window_blocks import Window
from kvpage.cache.cache_engine import CacheEngine
from kvpage.layout.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig
from kvpage.layout.kv_scales import KVScales
from kvpage.serving.config import EngineConfig
from kvpage.serving.model.states.slot_budget import with_tails


def short_windows(windows: Mapping[int, int | None], max_model_len: int) -> dict[int, int]:
    """Return the windows of layers that have one. A window that holds all tokens of a request is none."""
    return {layer: window for layer, window in windows.items() if window is not None and window < max_model_len}


def num_blocks_of_sequence(window: int, block_size: int, max_model_len: int) -> int:
    """Return how many blocks of a window a sequence needs at most, beside those of the portion that a step computes."""
    return min(window // block_size + 2, -(-max_model_len // block_size))


@dataclass(frozen=True, slots=True)
class WindowGroups:
    """The groups of one model, for one EngineConfig.

    num_blocks: of each window. num_host_blocks: of each window, on the host.
    layers: those of each window, by the tokens that it holds. full: all other layers.
    """

    num_blocks: int
    num_host_blocks: int
    layers: Mapping[int, Sequence[int]]
    full: Sequence[int]

    @classmethod
    def of(cls, config: EngineConfig, windows: Mapping[int, int | None], max_model_len: int) -> "WindowGroups | None":
        """Return the groups; None where all layers share one table. windows: of each layer, None for those without.

        ValueError if no layer has a short window, or if a sequence does not fit into the blocks of one.
        """
        num_blocks = config.num_window_blocks
        if not isinstance(num_blocks, int):
            return None
        short = short_windows(windows, max_model_len)
        if not short:
            raise ValueError(
                f"num_window_blocks must be None for a model without windows shorter than max_model_len="
                f"{max_model_len}, got {num_blocks}"
            )
        least = num_blocks_of_sequence(max(short.values()), config.cache_config.block_size, max_model_len)
        if num_blocks < least:
            raise ValueError(
                f"num_window_blocks must be at least {least}, which a sequence needs in a window of "
                f"{max(short.values())} tokens, got {num_blocks}"
            )
        layers = {size: [layer for layer in short if short[layer] == size] for size in sorted(set(short.values()))}
        num_host_blocks = _share_of(num_blocks, config.cache_config, least)
        return cls(num_blocks, num_host_blocks, layers, [layer for layer in windows if layer not in short])

    def options(self) -> list[Window]:
        """Return the groups' options for the manager."""
        return [Window(num_tokens, self.num_blocks, self.num_host_blocks) for num_tokens in self.layers]

    def caches(
        self,
        cache_config: CacheConfig,
        model_config: ModelConfig,
        device: torch.device,
        kv_scales: Sequence[KVScales] | None,
        slots: States | None,
    ) -> list[CacheEngine]:
        """Return the cache of the full layers, then that of each window.

        kv_scales: of all layers with a cache. slots: of states, whose tail blocks each cache has, too.
        """
        layer_ids = model_config.attention_layers(ParallelConfig())
        of_windows = replace(cache_config, num_gpu_blocks=self.num_blocks, num_cpu_blocks=self.num_host_blocks)
        configs = [with_tails(config, slots) for config in (cache_config, *[of_windows] * len(self.layers))]
        caches = []
        for config, layers in zip(configs, [self.full, *self.layers.values()], strict=True):
            scales = None if kv_scales is None else [kv_scales[layer_ids.index(layer)] for layer in sorted(layers)]
            shape = model_config.with_caches_of(layers)
            caches.append(CacheEngine(config, shape, device_config=DeviceConfig(device), kv_scales=scales))
        return caches


def _share_of(num_blocks: int, cache: CacheConfig, least: int) -> int:
    """Return the blocks on the host of a window: as many a block there as on the device, and enough for a sequence."""
    if not cache.num_cpu_blocks:
        return 0
    return max(-(-num_blocks * cache.num_cpu_blocks // cache.num_gpu_blocks), least)
