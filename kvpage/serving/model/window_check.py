"""Check that a model's mask holds its sliding windows, and that it does not rely on the cache to forget tokens.

Blocks keep all tokens. A model whose window is in the cache alone (Moshi) would see them all, and give other tokens
than `model.generate`. So one token is computed twice, after equally many tokens. Only V outside of the windows differs,
and the logits must not:

    before a window | in the window | the token
      V  or  -3 V   |       V       |     V         K is the same everywhere, so that all tokens weigh the same
"""

import inspect

import torch
from transformers import DynamicCache, PreTrainedModel

from kvpage.serving.model.hf_cache.argument import checked_cache_argument
from kvpage.serving.model.limits import constant_rope_len
from kvpage.serving.model.probe import max_error, relative_error

OUTSIDE_FACTOR = -3.0  # outweighs the window of the same size: no norm over the heads can hide it


def check_windows(model: PreTrainedModel) -> None:
    """Raise ValueError if a window of transformers' cache is not in the model's mask, too.

    Windows longer than any row are skipped: rows end where the rotary embedding changes. The check takes the memory of
    one layer's K and V over twice the longest window.
    """
    windows = short_windows(model)
    if not windows:
        return
    error = relative_error(_logits(model, windows, OUTSIDE_FACTOR), _logits(model, windows, 1.0))
    if not error <= max_error(model.dtype):  # also for NaN
        raise ValueError(
            f"a sliding window must be in the model's mask, {type(model).__name__} leaves that of "
            f"{max(windows.values())} tokens to a cache that forgets the tokens before it; blocks keep them"
        )


def short_windows(model: PreTrainedModel) -> dict[int, int]:
    """Return those of `cache_windows` that are shorter than the longest row."""
    limit = constant_rope_len(model)
    return {layer: window for layer, window in cache_windows(model).items() if window < limit}


def cache_windows(model: PreTrainedModel) -> dict[int, int]:
    """Return, by layer, how many tokens the cache of `generate` keeps, where it does not keep all."""
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    windows = {layer_id: getattr(layer, "sliding_window", None) for layer_id, layer in enumerate(layers)}
    return {layer_id: int(window) for layer_id, window in windows.items() if window is not None}


def _logits(model: PreTrainedModel, windows: dict[int, int], factor: float) -> torch.Tensor:
    """Return the logits of a token after twice the longest window. V outside of each window is times `factor`."""
    inputs = {"input_ids": torch.ones(1, 1, dtype=torch.long, device=model.device)}
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = torch.zeros_like(inputs["input_ids"])  # equal K; windows count places in the cache
    with torch.no_grad():
        cache = {checked_cache_argument(model): _Repeated(windows, factor)}
        logits = model(**inputs, **cache, use_cache=True).logits[0]
    assert isinstance(logits, torch.Tensor)
    return logits


class _Repeated(DynamicCache):
    """Return to each layer the K and V of its token as those of all tokens before it, too."""

    def __init__(self, windows: dict[int, int], factor: float) -> None:
        super().__init__()
        self._windows, self._factor = windows, factor
        self._num_before = 2 * max(windows.values())

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens = self._num_before + 1
        keys, values = (x.expand(-1, -1, num_tokens, -1).clone() for x in (key_states, value_states))
        num_outside = num_tokens - self._windows.get(layer_idx, num_tokens)
        values[:, :, :num_outside] *= self._factor
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._num_before

    def get_mask_sizes(self, query_length: torch.Tensor | int, layer_idx: int) -> tuple[int, int]:
        num_queries = query_length.shape[0] if isinstance(query_length, torch.Tensor) else query_length
        return self._num_before + num_queries, 0
