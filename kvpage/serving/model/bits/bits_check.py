"""Check at load that rows have the same bits whatever is beside them, or name the reason why they cannot.

    step by step    [ a0 ... a29 | b0 ]  [ a30 ... a45 | b1 ... b20 ]  [ a46 | b21 ]
    in one step     [ a0 ... a46 ]            the logits must be equal, bit by bit
                    [ b0 ... b21 ]

The operators that the model calls are looked at one by one (RowBits). The comparison is a second look: it would show
operators that work on other rows than their own.
"""

from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from kvpage.cache.cache_engine import CacheEngine
from kvpage.checks.errors import OptionError
from kvpage.layout.config import CacheConfig, DeviceConfig, ModelConfig
from kvpage.ops.args.tokens import ROW_TYPES
from kvpage.serving.model.bits.row_bits import RowBits
from kvpage.serving.model.limits import limited_model_len, vocab_size
from kvpage.serving.model.native.device import DeviceLayers
from kvpage.serving.model.native.layers import NativeLayers
from kvpage.serving.model.native.torch_threads import TorchThreads
from kvpage.serving.model.paged_check import paged_logits
from kvpage.serving.model.probe import unquantized
from kvpage.serving.model.runner import ModelRunner

_BOUNDS = (0, 30, 46, 47), (0, 1, 21, 22)  # even and odd numbers of rows
_SHORT_BOUNDS = (0, 1, 2), (0, 1, 2)  # for models of fewer positions


def make_row_bits(model: PreTrainedModel, native: NativeLayers | DeviceLayers | None, has_states: bool) -> RowBits:
    """Return the mode for a model's view. OptionError where the kind of model or machine rules it out.

    native: the layers of the view. has_states: whether its layers keep more than K and V.
    """
    threads = TorchThreads() if native is None else native.threads
    name = type(model).__name__
    for is_refused, why in (
        (model.device.type != "cpu", f"{name} is on {model.device}, and only layers on a CPU have such bits"),
        (has_states, f"{name} has recurrent layers, whose sums begin anew where a portion of a prompt does"),
        (model.dtype not in ROW_TYPES, f"{name} is in {model.dtype}, whose products are torch's"),
        (not threads.can_limit, "torch's threads, which share a row's sums, cannot be limited in this process"),
    ):
        if is_refused:
            raise OptionError(f"same_bits must be False: {why}")
    return RowBits(name, threads)


def verify_bits(runner: ModelRunner, bits: RowBits, cache_config: CacheConfig, model_config: ModelConfig) -> None:
    """Compute two sequences in both ways. OptionError if a bit differs.

    Afterwards `bits` knows the operators of the view.
    """
    bounds = _BOUNDS if limited_model_len(runner.model, None) >= _BOUNDS[0][-1] else _SHORT_BOUNDS
    num_tokens = max(row[-1] for row in bounds)
    sequences = [np.arange(row[-1], dtype=np.int32) * 7 % vocab_size(runner.model) for row in bounds]
    blocks_each = -(-num_tokens // cache_config.block_size)
    config = replace(unquantized(cache_config, model_config), num_gpu_blocks=2 * blocks_each, num_cpu_blocks=0)
    engine = CacheEngine(config, model_config, device_config=DeviceConfig(runner.model.device))
    whole = [paged_logits(runner, engine, [tokens], blocks_each, bounds=[(0, len(tokens))])[0] for tokens in sequences]
    stepwise, _ = paged_logits(runner, engine, sequences, blocks_each, bounds=bounds)
    if not torch.equal(torch.cat(whole), stepwise):
        raise OptionError(
            f"same_bits must be False for {type(runner.model).__name__}: the logits of a prompt that is computed in "
            f"portions differ from those of the whole prompt"
        )
    bits.checked_version = runner.view_version
