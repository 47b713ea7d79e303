"""Check at load that a model's latents can be kept in blocks.

The latents of a few tokens are expanded from blocks. The result must be the K and V that each layer attends with.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from kvpage.cache.cache_engine import CacheEngine
from kvpage.layout.attention import Attention
from kvpage.layout.config import CacheConfig, DeviceConfig, ModelConfig
from kvpage.serving.model.latents.attention import LatentPass
from kvpage.serving.model.latents.heads import PROJECTION, LatentHeads
from kvpage.serving.model.limits import vocab_size
from kvpage.serving.model.probe import MAX_ERROR, probe_tokens, unquantized
from kvpage.serving.model.runner import ModelRunner
from kvpage.serving.model.step import PackedTokens, Step

MAX_ERROR_HALF = 2e-2  # one product in bf16 is a hundredth off at most; a layer of another form, all of it


def check_latents(config: object, name: str) -> None:
    """Raise ValueError for a model whose config names no latents."""
    if getattr(config, "kv_lora_rank", None) is None:
        raise ValueError(
            f"backend must be 'flash', 'flashinfer' or 'paged' for a model without latents (MLA), {name} has no "
            f"kv_lora_rank in its config, got 'mla'"
        )


def verify_latents(runner: ModelRunner, cache_config: CacheConfig, model_config: ModelConfig) -> None:
    """Compute a few tokens over blocks. Raise ValueError, with the reason, if latents do not expand to K and V."""
    tokens = probe_tokens(vocab_size(runner.model))[0]
    num_tokens = len(tokens)
    num_blocks = -(-num_tokens // cache_config.block_size)
    config = replace(unquantized(cache_config, model_config), num_gpu_blocks=num_blocks, num_cpu_blocks=0)
    engine = CacheEngine(config, model_config, device_config=DeviceConfig(runner.model.device))
    table = np.arange(num_blocks, dtype=np.int32)[None]
    step = Step.make(engine, np.arange(num_tokens), table, [0], [num_tokens])
    step = replace(step, latents=_CheckedPass(step, type(runner.model).__name__, runner.same_bits))
    runner.forward(PackedTokens(tokens, [0], [num_tokens], np.array([num_tokens - 1])), step)


class _CheckedPass(LatentPass):
    """A LatentPass that checks each layer. model_name: for the errors."""

    def __init__(self, step: Step, model_name: str, all_in_place: bool) -> None:
        super().__init__(step, all_in_place)
        self._model_name = model_name

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        attention: Attention,
    ) -> torch.Tensor:
        heads = LatentHeads.of_layer(module, key.shape[1], value.shape[2])
        self._check_forms(query, key, heads, layer)
        output = super().attend(module, query, key, value, layer, attention)
        expanded = heads.expanded(self._gather(0, layer, Attention(1.0), query))
        itemsize = min(query.dtype.itemsize, self._step.layout.dtype.itemsize)
        limit = MAX_ERROR if itemsize >= 4 else MAX_ERROR_HALF
        for name, rows, expected in zip("KV", expanded, (key, value), strict=True):
            error = float((rows.double() - expected.double()).norm() / expected.double().norm())
            if not error <= limit:  # also for NaN
                raise ValueError(
                    f"{name} must be what {PROJECTION} makes of a latent for backend 'mla', that of layer {layer} of "
                    f"{self._model_name} is {error:.1e} off (relative)"
                )
        return output

    def _check_forms(self, query: torch.Tensor, key: torch.Tensor, heads: LatentHeads, layer: int) -> None:
        if query.shape != key.shape:
            raise ValueError(
                f"each query head must have a K of its size for backend 'mla', layer {layer} of {self._model_name} has "
                f"queries of {list(query.shape[1:])} and K of {list(key.shape[1:])}"
            )
        weight = heads.key
        if (weight.dtype, weight.device) != (key.dtype, key.device):
            raise ValueError(
                f"the weight of {PROJECTION} must be {key.dtype} on {key.device} for backend 'mla', that of layer "
                f"{layer} of {self._model_name} is {weight.dtype} on {weight.device}"
            )
