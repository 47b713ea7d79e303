"""What a model has to be to be served from blocks, found out at load: from its config, then by computing with it.

Many models would run without an error and without any cache, or with wrong results: attention that bypasses the
interface, state outside of attention (Mamba, convolutions), biases in the mask. So two short sequences are computed
over blocks, packed and in two pieces, and the logits have to be those of the model's own forward. Blocks that quantise
are no part of that question: the model is computed over blocks of its own dtype, and what the quantised ones make of it
only has to be nearer to it than nothing is.

    step 1   [ a0 a1 a2 a3 a4 a5 | b0 b1 b2 b3 ]
    step 2   [ a6 a7 a8 | b4 ]
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from kvpage.cache.cache_engine import CacheEngine
from kvpage.layout.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig
from kvpage.layout.kv_scales import KVScales
from kvpage.serving.model.limits import vocab_size
from kvpage.serving.model.runner import ModelRunner, PackedTokens
from kvpage.serving.model.step import Step

KNOWN_LAYERS = ("attention", "full_attention", "sliding_attention")
PIECES = ((0, 6, 9), (0, 4, 5))  # where the pieces of each sequence begin and end
MAX_ERROR = 1e-3  # of the logits around their mean, relative; fp32 differs by 1e-6 to 1e-5
MAX_ERROR_HALF = 0.2  # bf16 and fp16 differ between transformers' own implementations too
MAX_ERROR_QUANTIZED = 1.0  # that of logits which are all the same


def check_config(model: PreTrainedModel) -> None:
    """ValueError, with the reason, if the config says that K and V in blocks are not all of the model's state."""
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"model must be a decoder only, {name} has an encoder")
    if not hasattr(model, "lm_head") and model.get_output_embeddings() is None:
        raise ValueError(f"model must give logits over its vocabulary, {name} has no output embeddings")
    unknown = set(ModelConfig.from_hf(model.config).layer_types) - set(KNOWN_LAYERS)
    if unknown:
        raise ValueError(f"layers must be of {', '.join(KNOWN_LAYERS)}, {name} has {', '.join(sorted(unknown))}")


def verify_model(runner: ModelRunner, cache_config: CacheConfig, model_config: ModelConfig) -> int | None:
    """Computes a little over a few blocks of its own. ValueError, with the reason, if the model cannot be served.

    Returns how many tokens, the newest included, the attention of any layer reaches back to, if all layers slide.
    """
    name = type(runner.model).__name__
    error, dtype, windows = _paged_error(runner, unquantized(cache_config, model_config), model_config, None)
    limit = MAX_ERROR if min(runner.model.dtype.itemsize, dtype.itemsize) >= 4 else MAX_ERROR_HALF
    if not error <= limit:  # also for NaN
        raise ValueError(f"logits over blocks must be the model's own, those of {name} are {error:.1e} off (relative)")
    return None if None in windows else max(window for window in windows if window is not None)


def verify_quantized(
    runner: ModelRunner, cache_config: CacheConfig, model_config: ModelConfig, kv_scales: Sequence[KVScales] | None
) -> None:
    """ValueError if blocks that quantise with these scales, or their dtype, leave nothing of the model's logits."""
    error, dtype, _ = _paged_error(runner, cache_config, model_config, kv_scales)
    if not error <= MAX_ERROR_QUANTIZED:
        raise ValueError(
            f"logits over blocks of {dtype} must be near the model's own, with these scales they are {error:.1e} off "
            f"(relative)"
        )


def unquantized(cache_config: CacheConfig, model_config: ModelConfig) -> CacheConfig:
    """The config itself, or, where its cache quantises, that of a cache of the model's dtype."""
    is_quantized = cache_config.layout(model_config, ParallelConfig()).is_quantized
    return replace(cache_config, cache_dtype="auto") if is_quantized else cache_config


def _paged_error(
    runner: ModelRunner, cache_config: CacheConfig, model_config: ModelConfig, kv_scales: Sequence[KVScales] | None
) -> tuple[float, torch.dtype, list[int | None]]:
    """How far the logits over blocks are from the model's own, relatively, the blocks' dtype, the layers' windows."""
    model = runner.model
    sequences = probe_tokens(vocab_size(model))
    expected = torch.cat([_own_logits(model, tokens) for tokens in sequences])
    blocks_each = -(-max(map(len, sequences)) // cache_config.block_size)
    config = replace(cache_config, num_gpu_blocks=blocks_each * len(sequences), num_cpu_blocks=0)
    engine = CacheEngine(config, model_config, device_config=DeviceConfig(model.device), kv_scales=kv_scales)
    found, windows = _paged_logits(runner, engine, sequences, blocks_each)
    return relative_error(found, expected), engine.layout.dtype, windows


def probe_tokens(vocab_size: int) -> list[np.ndarray]:
    """Two sequences that share no token, spread over the vocabulary."""
    lengths = [pieces[-1] for pieces in PIECES]
    spread = (np.arange(1, sum(lengths) + 1) * vocab_size // (sum(lengths) + 1)).astype(np.int32)
    return np.split(spread, np.cumsum(lengths)[:-1])


def _own_logits(model: PreTrainedModel, tokens: np.ndarray) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(tokens).long().unsqueeze(0).to(model.device)).logits[0]


def _paged_logits(
    runner: ModelRunner, engine: CacheEngine, sequences: list[np.ndarray], blocks_each: int
) -> tuple[torch.Tensor, list[int | None]]:
    """The logits of all tokens of all sequences, one sequence after the other, and the window of each layer."""
    tables = np.arange(blocks_each * len(sequences), dtype=np.int32)[::-1].reshape(len(sequences), -1).copy()
    rows: list[list[torch.Tensor]] = [[] for _ in sequences]
    for piece in range(len(PIECES[0]) - 1):
        starts, ends = [list(column) for column in zip(*(bounds[piece : piece + 2] for bounds in PIECES), strict=True)]
        pieces = [tokens[start:end] for tokens, start, end in zip(sequences, starts, ends, strict=True)]
        token_ids = np.concatenate(pieces)
        packed = PackedTokens(token_ids, starts, ends, np.arange(len(token_ids)))
        step = Step.make(engine, _slots(tables, starts, ends, engine.layout.block_size), tables, starts, ends)
        logits = runner.forward(packed, step)
        _check_calls(runner.model, engine, step)
        for kept, part in zip(rows, logits.split([len(tokens) for tokens in pieces]), strict=True):
            kept.append(part)
    return torch.cat([part for parts in rows for part in parts]), [window for _, window in step.calls]


def _slots(tables: np.ndarray, starts: list[int], ends: list[int], block_size: int) -> np.ndarray:
    spans = [np.arange(start, end) for start, end in zip(starts, ends, strict=True)]
    slots = [
        table[span // block_size].astype(np.int64) * block_size + span % block_size
        for table, span in zip(tables, spans, strict=True)
    ]
    return np.concatenate(slots)


def _check_calls(model: PreTrainedModel, engine: CacheEngine, step: Step) -> None:
    """Each layer must have called the attention function once, with its window."""
    name, called = type(model).__name__, sorted(layer for layer, _ in step.calls)
    if called != engine.layer_ids:
        raise ValueError(f"layers {engine.layer_ids} must each attend once over blocks, of {name} it was {called}")
    windows = dict(step.calls)
    missing = [layer for layer in _windowed_layers(model.config, engine.layer_ids) if windows[layer] is None]
    if missing:
        raise ValueError(
            f"a sliding window must reach the attention function, {name} has it only in its mask or its cache"
        )


def _windowed_layers(config: PretrainedConfig, layer_ids: list[int]) -> list[int]:
    """The layers whose attention has a window, by the config."""
    text = config.get_text_config(decoder=True)
    if not getattr(text, "sliding_window", None) or getattr(text, "use_sliding_window", True) is False:
        return []
    kinds = getattr(text, "layer_types", None)
    return [layer for layer in layer_ids if kinds is None or kinds[layer] == "sliding_attention"]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of logits around their mean: the norm of the difference, by the norm of what is expected."""
    found, expected = (x.double() - x.double().mean(dim=-1, keepdim=True) for x in (found, expected))
    return float((found - expected).norm() / expected.norm())
