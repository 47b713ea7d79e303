"""Check a model at load by computing over blocks: its logits must be its own.

Some models would run without an error and without a cache, or with wrong results. Their attention bypasses the
interface, they have state outside of attention (Mamba, convolutions), or their mask holds biases. So two short
sequences are computed over blocks, packed, in two steps. The logits are compared with those of the model's own forward.

    step 1   [ a0 a1 a2 a3 a4 a5 | b0 b1 b2 b3 ]
    step 2   [ a6 a7 a8 | b4 ]

A model with mixers has three steps, the last one of decodes. Each step goes on from the snapshots of the one before.
Slots hold NaN where nothing was written.

For this, blocks have the model's dtype. Blocks that quantise are checked apart: their logits may differ, and must not
be nowhere near.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from transformers import PretrainedConfig, PreTrainedModel

from kvpage.cache.cache_engine import CacheEngine
from kvpage.cache.state_cache import StateCache
from kvpage.checks.errors import OptionError
from kvpage.layout.config import CacheConfig, DeviceConfig, ModelConfig
from kvpage.layout.kv_scales import KVScales
from kvpage.ops.args.bound_cache import AttentionOfOthers
from kvpage.serving.model.limits import max_model_len, vocab_size
from kvpage.serving.model.probe import (
    MAX_ERROR_QUANTIZED,
    PROBE_LENGTHS,
    max_error,
    probe_tokens,
    relative_error,
    unquantized,
)
from kvpage.serving.model.runner import ModelRunner
from kvpage.serving.model.states.held_states import without_own_states
from kvpage.serving.model.states.state_pass import StatePass, StateRow
from kvpage.serving.model.step import PackedTokens, Step

_NUM_SLOTS = 3  # of each sequence, with states: the working slot, and those of two marks
_BOUNDS_OF_BITS = (0, 30, 46, 47), (0, 1, 21, 22)  # even and odd numbers of rows
_SHORT_BOUNDS = (0, 1, 2), (0, 1, 2)  # for models of fewer positions
_BOUNDS = tuple((0, cut, length) for cut, length in zip((6, 4), PROBE_LENGTHS, strict=True))  # of each sequence's steps
_BOUNDS_OF_STATES = (0, 6, 8, 9), (0, 3, 4, 5)  # the last step is of decodes alone


def verify_model(
    runner: ModelRunner,
    cache_config: CacheConfig,
    model_config: ModelConfig,
    library: AttentionOfOthers | None = None,
) -> dict[int, int | None]:
    """Compute the probe's tokens over a few blocks. Raise ValueError, with the reason, if the model cannot be served.

    library: attends in place of kvpage's kernels, where it is given.

    Returns, by layer with a cache, how many tokens its window holds, the newest included; None if it has no window.
    """
    name = type(runner.model).__name__
    config = unquantized(cache_config, model_config)
    error, dtype, windows = _paged_error(runner, config, model_config, None, library)
    if not error <= max_error(runner.model.dtype, dtype):  # also for NaN
        raise ValueError(f"logits over blocks must be the model's own, those of {name} are {error:.1e} off (relative)")
    return _of_caches(windows, dict(model_config.shared_layers))


def verify_bits(runner: ModelRunner, cache_config: CacheConfig, model_config: ModelConfig) -> None:
    """Compute two sequences step by step, and each in one step. OptionError if a bit of a logit differs.

        step by step    [ a0 ... a29 | b0 ]  [ a30 ... a45 | b1 ... b20 ]  [ a46 | b21 ]
        in one step     [ a0 ... a46 ]  [ b0 ... b21 ]

    RowBits has looked at the operators one by one. This would show those that work on other rows than their own. It is
    the last check: afterwards the runner's operators count as known.
    """
    bounds = _BOUNDS_OF_BITS if max_model_len(runner.model) >= _BOUNDS_OF_BITS[0][-1] else _SHORT_BOUNDS
    num_tokens = max(row[-1] for row in bounds)
    sequences = [np.arange(row[-1], dtype=np.int32) * 7 % vocab_size(runner.model) for row in bounds]
    block_size = max(PROBE_LENGTHS) if model_config.is_attention_free else cache_config.block_size
    blocks_each = -(-num_tokens // block_size)  # as `paged_logits` counts them
    config = replace(unquantized(cache_config, model_config), num_gpu_blocks=2 * blocks_each, num_cpu_blocks=0)
    engine, layout = (
        CacheEngine(config, model_config, device_config=DeviceConfig(runner.model.device)),
        runner.state_layout,
    )
    states = None if layout is None else StateCache(layout, _NUM_SLOTS * len(sequences), device=runner.model.device)
    whole = [paged_logits(runner, engine, [tokens], blocks_each, states, [(0, len(tokens))])[0] for tokens in sequences]
    stepwise, _ = paged_logits(runner, engine, sequences, blocks_each, states, bounds)
    if not torch.equal(torch.cat(whole), stepwise):
        raise OptionError(
            f"same_bits must be False for {type(runner.model).__name__}: the logits of a prompt that is computed in "
            f"portions differ from those of the whole prompt"
        )
    runner.know_operators()


def _of_caches(windows: dict[int, int | None], shared: dict[int, int]) -> dict[int, int | None]:
    """Return the windows of layers with a cache: the widest of a layer and of those that share its K and V."""
    widest = {layer: window for layer, window in windows.items() if layer not in shared}
    for layer, source in shared.items():
        both = windows[layer], widest[source]
        widest[source] = None if both[0] is None or both[1] is None else max(both[0], both[1])
    return widest


def verify_quantized(
    runner: ModelRunner,
    cache_config: CacheConfig,
    model_config: ModelConfig,
    kv_scales: Sequence[KVScales] | None,
    library: AttentionOfOthers | None = None,
) -> None:
    """Raise ValueError if logits over blocks that quantise, with these scales, are nowhere near the model's own."""
    error, dtype, _ = _paged_error(runner, cache_config, model_config, kv_scales, library)
    if not error <= MAX_ERROR_QUANTIZED:
        raise ValueError(
            f"logits over blocks of {dtype} must be near the model's own, with these scales they are {error:.1e} off "
            f"(relative)"
        )


def _paged_error(
    runner: ModelRunner,
    cache_config: CacheConfig,
    model_config: ModelConfig,
    kv_scales: Sequence[KVScales] | None,
    library: AttentionOfOthers | None,
) -> tuple[float, torch.dtype, dict[int, int | None]]:
    """Return the relative error of logits over blocks, the blocks' dtype, and the window of each layer."""
    model = runner.model
    sequences = probe_tokens(vocab_size(model))
    computing = without_own_states(model)
    expected = torch.cat([_own_logits(computing, tokens) for tokens in sequences])
    blocks_each = -(-max(PROBE_LENGTHS) // cache_config.block_size)
    config = replace(cache_config, num_gpu_blocks=blocks_each * len(sequences), num_cpu_blocks=0)
    engine = CacheEngine(config, model_config, device_config=DeviceConfig(model.device), kv_scales=kv_scales)
    for layer in engine.bound_layers.values():
        layer.use_library(library)
    layout = runner.state_layout
    slots = None if layout is None else StateCache(layout, _NUM_SLOTS * len(sequences), device=model.device)
    logits, windows = paged_logits(runner, engine, sequences, blocks_each, slots)
    dtype = engine.layout.dtype if engine.layer_ids else model.dtype
    return relative_error(logits, expected), dtype, windows


def _own_logits(model: PreTrainedModel, tokens: npt.NDArray[np.int32]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(tokens).long().unsqueeze(0).to(model.device)).logits[0]
    assert isinstance(logits, torch.Tensor)
    return logits


def paged_logits(
    runner: ModelRunner,
    engine: CacheEngine,
    sequences: Sequence[npt.NDArray[np.int32]],
    blocks_each: int,
    states: StateCache | None = None,
    bounds: Sequence[Sequence[int]] | None = None,
) -> tuple[torch.Tensor, dict[int, int | None]]:
    """Return the logits of the probe's tokens, one sequence after the other, and the window of each layer.

    engine: with `blocks_each` blocks for each sequence, which are overwritten.
    states: with three slots for each sequence, likewise; None for a model without states.
    bounds: of the steps of each sequence; None for those of the probe.
    """
    tables = np.arange(blocks_each * len(sequences), dtype=np.int32)[::-1].reshape(len(sequences), -1).copy()
    rows: list[list[torch.Tensor]] = [[] for _ in sequences]
    windows: dict[int, int | None] = {}
    block_size = engine.layout.block_size if engine.layer_ids else max(PROBE_LENGTHS)
    if states is not None:
        states.slots.fill_(0xFF)  # NaN in each float dtype
    bounds = bounds or (_BOUNDS if states is None else _BOUNDS_OF_STATES)
    for number in range(len(bounds[0]) - 1):
        starts, ends = [list(column) for column in zip(*(row[number : number + 2] for row in bounds), strict=True)]
        parts = [tokens[start:end] for tokens, start, end in zip(sequences, starts, ends, strict=True)]
        token_ids = np.concatenate(parts)
        packed = PackedTokens(token_ids, starts, ends, np.arange(len(token_ids)))
        step = Step.make(engine, _slots(tables, starts, ends, block_size), tables, starts, ends)
        step.use_states(None if states is None else _states_of(states, number, starts, ends, len(bounds[0]) > 2))
        logits = runner.forward(packed, step)
        _check_calls(runner.model, engine, step)
        windows = dict(step.calls)
        for row_parts, part in zip(rows, torch.split(logits, [len(tokens) for tokens in parts]), strict=True):
            row_parts.append(part)
    return torch.cat([part for parts in rows for part in parts]), windows


def _states_of(states: StateCache, number: int, starts: Sequence[int], ends: Sequence[int], is_cut: bool) -> StatePass:
    """Return the states of one step. Its working slots are those of the marks at the end of the step before.

    is_cut: whether there is a mark after the first token, where mixers cut the row.
    """
    rows = []
    for seq, (start, end) in enumerate(zip(starts, ends, strict=True)):
        slot, at_end, inside = (_NUM_SLOTS * seq + (number + turn) % _NUM_SLOTS for turn in range(_NUM_SLOTS))
        marks = [(start + 1, inside), (end, at_end)]
        rows.append(StateRow(slot, start, end, marks if is_cut else marks[1:]))
    return StatePass(states, rows)


def _slots(
    tables: npt.NDArray[np.int32], starts: Sequence[int], ends: Sequence[int], block_size: int
) -> npt.NDArray[np.int64]:
    spans = [np.arange(start, end) for start, end in zip(starts, ends, strict=True)]
    slots = [
        table[span // block_size].astype(np.int64) * block_size + span % block_size
        for table, span in zip(tables, spans, strict=True)
    ]
    return np.concatenate(slots)


def _check_calls(model: PreTrainedModel, engine: CacheEngine, step: Step) -> None:
    """Raise ValueError unless each layer has called the attention function once, with its window."""
    name, called, layer_ids = type(model).__name__, sorted(layer for layer, _ in step.calls), list(engine.bound_layers)
    if called != layer_ids:
        raise ValueError(f"layers {layer_ids} must each attend once over blocks, of {name} it was {called}")
    windows = dict(step.calls)
    missing = [layer for layer in _windowed_layers(model.config, layer_ids) if windows[layer] is None]
    if missing:
        raise ValueError(
            f"a sliding window must reach the attention function, {name} has it only in its mask or its cache"
        )


def _windowed_layers(config: PretrainedConfig, layer_ids: Sequence[int]) -> list[int]:
    """Return the layers that have a sliding window by the config."""
    text = config.get_text_config(decoder=True)
    if not getattr(text, "sliding_window", None) or getattr(text, "use_sliding_window", True) is False:
        return []
    kinds = getattr(text, "layer_types", None)
    return [layer for layer in layer_ids if kinds is None or kinds[layer] in ("sliding_attention", "hybrid_sliding")]
