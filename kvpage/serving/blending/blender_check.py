"""The proof at load that a Blender is right for a model: a probe is blended, and compared with the model's own logits.

    probe at positions d, d + 1, ...  K and V of every layer ──── segment
    probe at positions 0, 1, ...      K and V, logits ═══╗           │
                                                         ║ equal     ▼
    the same, blended                 logits ════════════╝ some rows out of the segment, some computed

The second and the third differ in nothing but the blending, since the tokens before the segment are the same in both. A
model that rotates its K otherwise, or whose forward cannot go on with some rows, does not pass.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from kvpage import ops
from kvpage.blend.config import BlendConfig
from kvpage.blend.segments import Reuse, SegmentKV
from kvpage.cache.cache_engine import CacheEngine
from kvpage.layout.config import CacheConfig, DeviceConfig, ModelConfig
from kvpage.serving.blending.blender import Blender
from kvpage.serving.model.limits import max_model_len, vocab_size
from kvpage.serving.model.probe import MAX_ERROR, MAX_ERROR_HALF, relative_error, unquantized
from kvpage.serving.model.rotary import check_rope, rotary_of_layers
from kvpage.serving.model.row_hooks import decoder_layers
from kvpage.serving.model.runner import ModelRunner
from kvpage.serving.model.step import BatchItem, PackedTokens, Step

NUM_PROBE_TOKENS = 12
REUSED = slice(2, 9)  # of the probe's tokens
MAX_SHIFT = 1000

LayerRows = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""K and V of each layer: [num_tokens, kv heads, size] each."""


def checked_blender(
    config: BlendConfig, runner: ModelRunner, cache_config: CacheConfig, model_config: ModelConfig
) -> Blender:
    """Return the Blender of a model, once it was tried out over a few blocks of its own.

    ValueError, with the reason, for a check layer that the model does not have, and for a model that cannot be blended.
    """
    if model_config.use_mla:
        raise ValueError(
            "blend must be None for backend 'mla': it compares heads' K and V, which 'flash' keeps of such a model"
        )
    check_rope(runner.model)
    probe = _Probe(runner, unquantized(cache_config, model_config), model_config)
    config.stages_of(len(probe.layer_ids))
    layers = decoder_layers(runner.view, probe.layer_ids)
    shift = min(MAX_SHIFT, max_model_len(runner.model) - NUM_PROBE_TOKENS)
    at_zero, expected = probe.compute(0)
    shifted, _ = probe.compute(shift)
    rotary = rotary_of_layers(runner.view, at_zero, shifted, shift)
    half = Blender(replace(config, ratio=0.5), layers, rotary)
    # Before a standalone segment nothing new stands: its rows are chosen at once. Of the other a check layer chooses.
    for is_standalone in (True, False):
        _verify(half, probe, _segment(shifted, shift, is_standalone), expected)
    return Blender(config, layers, rotary)


def _segment(rows: LayerRows, shift: int, is_standalone: bool) -> SegmentKV:
    key, value = (torch.stack([pair[part] for pair in rows]) for part in (0, 1))
    return SegmentKV(key, value, torch.arange(shift, shift + NUM_PROBE_TOKENS), is_standalone)


def _verify(blender: Blender, probe: "_Probe", segment: SegmentKV, expected: torch.Tensor) -> None:
    """ValueError unless the blended probe gives the expected logits."""
    model = probe.runner.model
    name = type(model).__name__
    try:
        _, blended = probe.compute(0, blender, segment)
    except (AssertionError, IndexError, RuntimeError, TypeError) as cause:
        raise ValueError(f"blend needs layers that can go on with some rows, those of {name} cannot") from cause
    limit = MAX_ERROR if min(model.dtype.itemsize, segment.k.dtype.itemsize) >= 4 else MAX_ERROR_HALF
    error = relative_error(blended, expected)
    if not error <= limit:
        raise ValueError(f"blended logits must be the model's own, those of {name} are {error:.1e} off (relative)")


class _Probe:
    """A few tokens, computed over blocks of their own, at any positions."""

    def __init__(self, runner: ModelRunner, cache_config: CacheConfig, model_config: ModelConfig) -> None:
        self.runner = runner
        num_ids = vocab_size(runner.model)
        self._tokens = (np.arange(1, NUM_PROBE_TOKENS + 1) * num_ids // (NUM_PROBE_TOKENS + 1)).astype(np.int32)
        self._num_blocks = -(-NUM_PROBE_TOKENS // cache_config.block_size)
        config = replace(cache_config, num_gpu_blocks=self._num_blocks, num_cpu_blocks=0)
        self._engine = CacheEngine(config, model_config, device_config=DeviceConfig(runner.model.device))
        self.layer_ids = self._engine.layer_ids

    def compute(
        self, position: int, blender: Blender | None = None, segment: SegmentKV | None = None
    ) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
        """Return K and V of each layer, with the first token at `position`, and the last token's logits.

        segment: of these tokens, at any positions; some of them are then taken out of it.
        """
        count = NUM_PROBE_TOKENS
        table = np.arange(self._num_blocks, dtype=np.int32)[None]
        for cache in self._engine.gpu_cache:
            cache.zero_()  # rows of an earlier call must not help
        step = Step.make(self._engine, np.arange(count), table, [0], [count])
        if blender and segment:
            reuse = Reuse(segment, REUSED.start, REUSED.start, REUSED.stop - REUSED.start)
            item = BatchItem(None, self._tokens, 0, count, [count - 1], [reuse])
            step = replace(step, blend=blender.begin(step, [item]))
        packed = PackedTokens(self._tokens, [position], [position + count], np.array([count - 1]))
        logits = self.runner.forward(packed, step)
        gathered = (
            ops.gather_cache(cache, step.block_tables, [count], step.layout) for cache in self._engine.gpu_cache
        )
        return [(key, value) for key, value in gathered if value is not None], logits
