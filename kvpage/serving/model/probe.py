"""The tokens and limits by which the checks at load compare logits over blocks with a model's own."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from kvpage.layout.config import CacheConfig, ModelConfig, ParallelConfig

PROBE_LENGTHS = (9, 5)
MAX_ERROR = 1e-3  # of the logits around their mean, relative; fp32 differs by 1e-6 to 1e-5
MAX_ERROR_HALF = 0.2  # bf16 and fp16 differ between transformers' own implementations too
MAX_ERROR_QUANTIZED = 1.0  # the error of logits that are all equal


def probe_tokens(vocab_size: int) -> list[npt.NDArray[np.int32]]:
    """Return one sequence for each of PROBE_LENGTHS. No token comes twice, and they span the vocabulary."""
    num_tokens = sum(PROBE_LENGTHS)
    spread = (np.arange(1, num_tokens + 1) * vocab_size // (num_tokens + 1)).astype(np.int32)
    return np.split(spread, np.cumsum(PROBE_LENGTHS)[:-1])


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference, divided by that of `expected`. Logits are taken around their mean."""
    computed, reference = (x.double() - x.double().mean(dim=-1, keepdim=True) for x in (found, expected))
    return float((computed - reference).norm() / reference.norm())


def max_error(*dtypes: torch.dtype) -> float:
    """Return the largest relative error of logits that may come of rounding, where these dtypes take part."""
    return MAX_ERROR if min(dtype.itemsize for dtype in dtypes) >= 4 else MAX_ERROR_HALF


def unquantized(cache_config: CacheConfig, model_config: ModelConfig) -> CacheConfig:
    """Return the config, with a cache of the model's dtype in place of one that quantises."""
    if model_config.is_attention_free:
        return replace(cache_config, cache_dtype="auto")
    is_quantized = cache_config.layout(model_config, ParallelConfig()).is_quantized
    return replace(cache_config, cache_dtype="auto") if is_quantized else cache_config
