"""Choose the scales of a cache of 8-bit floats, by the K and V that the model computes.

    calibration tokens ─► one forward pass over blocks of the model's dtype ─► K and V of each layer ─► KVScales

The blocks are dropped afterwards. The scales are chosen once, before the first request, since requests share blocks.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvpage import ops
from kvpage.cache.cache_engine import CacheEngine
from kvpage.cache.state_cache import StateCache
from kvpage.checks.tokens import Tokens, as_tokens
from kvpage.layout.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig
from kvpage.layout.kv_scales import FP8_DTYPES, KVScales
from kvpage.serving.model.limits import max_model_len, vocab_size
from kvpage.serving.model.probe import probe_tokens, unquantized
from kvpage.serving.model.runner import ModelRunner
from kvpage.serving.model.states.state_pass import StatePass, StateRow
from kvpage.serving.model.step import PackedTokens, Step


def choose_scales(
    runner: ModelRunner,
    cache_config: CacheConfig,
    model_config: ModelConfig,
    kv_scales: Sequence[KVScales] | Literal["calibrate"] | None,
    calibration_tokens: Tokens | None,
) -> list[KVScales] | None:
    """Return the given scales, computed ones, or None. Raises ValueError for tokens without "calibrate"."""
    if calibration_tokens is not None and not isinstance(kv_scales, str):
        raise ValueError("calibration_tokens must be None unless kv_scales is 'calibrate'")
    if not isinstance(kv_scales, str):
        return None if kv_scales is None else list(kv_scales)
    if kv_scales != "calibrate":
        raise ValueError(f"kv_scales must be KVScales, one a layer, 'calibrate' or None, got {kv_scales!r}")
    if calibration_tokens is None:
        tokens = np.concatenate(probe_tokens(vocab_size(runner.model)))
    else:
        tokens = as_tokens(calibration_tokens, "calibration_tokens")
    return calibrate(runner, cache_config, model_config, tokens)


def calibrate(
    runner: ModelRunner, cache_config: CacheConfig, model_config: ModelConfig, tokens: npt.NDArray[np.int32]
) -> list[KVScales]:
    """Return scales for each layer, by which the largest K, and V, becomes the largest number of the cache's dtype.

    tokens: int32, one sequence. Raises ValueError for a cache without scales, and for tokens outside the vocabulary.
    """
    dtype = cache_config.layout(model_config, ParallelConfig()).dtype
    if dtype not in FP8_DTYPES:
        raise ValueError(f"kv_scales must be None for a cache of {dtype}")
    _check_tokens(tokens, vocab_size(runner.model), max_model_len(runner.model))
    num_blocks = -(-len(tokens) // cache_config.block_size)
    config = replace(unquantized(cache_config, model_config), num_gpu_blocks=num_blocks, num_cpu_blocks=0)
    engine = CacheEngine(config, model_config, device_config=DeviceConfig(runner.model.device))
    table, ends = np.arange(num_blocks, dtype=np.int32)[None], [len(tokens)]
    step = Step.make(engine, np.arange(len(tokens)), table, [0], ends)
    if runner.state_layout is not None:
        states = StateCache(runner.state_layout, 1, device=runner.model.device)
        step.use_states(StatePass(states, [StateRow(0, 0, len(tokens))]))
    runner.forward(PackedTokens(tokens, [0], ends, np.array(ends) - 1), step)
    rows = (ops.gather_cache(cache, step.block_tables, ends) for cache in engine.bound_caches)
    return [KVScales.from_rows(key, value, dtype) for key, value in rows]


def _check_tokens(tokens: npt.NDArray[np.int32], num_ids: int, max_tokens: int) -> None:
    if not 1 <= len(tokens) <= max_tokens:
        raise ValueError(f"calibration_tokens must be 1 to {max_tokens} tokens, got {len(tokens)}")
    if tokens.min() < 0 or tokens.max() >= num_ids:
        raise ValueError(
            f"calibration_tokens must be ids in [0, {num_ids}), got {int(tokens.min())} to {int(tokens.max())}"
        )
