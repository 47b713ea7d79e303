"""Check a model for KVPageCache by computing with it: its logits over blocks must be its own."""

import torch

from kvpage.layout.cache_layout import CacheLayout
from kvpage.serving.generate.kv_page_cache import KVPageCache
from kvpage.serving.generate.model_blocks import ModelBlocks
from kvpage.serving.model.hf_cache.argument import checked_cache_argument
from kvpage.serving.model.limits import vocab_size
from kvpage.serving.model.probe import MAX_ERROR_QUANTIZED, max_error, probe_tokens, relative_error

_CUT = 5  # inside a block, after some whole ones


def verify_blocks(blocks: ModelBlocks) -> None:
    """Compute one row in two parts, then its end once more over the blocks found. `blocks` should be small.

    Raises ValueError, with the reason, if the logits differ from those of the row in one part with a cache of the
    model's own. Over blocks that quantise they may differ, and must not be nowhere near.
    """
    model = blocks.model
    row = torch.from_numpy(probe_tokens(vocab_size(model))[0]).long().unsqueeze(0).to(model.device)
    with torch.no_grad():
        expected = model(input_ids=row, use_cache=True).logits[0]  # some models share K and V only with a cache
        try:
            logits = _over_blocks(blocks, row)
        except AssertionError as wrong:
            words = f"{type(model).__name__} does not: {wrong}"
            raise ValueError(f"model must take several tokens after those in its cache, {words}") from wrong
    num_again = len(logits) - len(expected)
    error = relative_error(logits, torch.cat([expected, expected[-num_again:]]))
    limit = _limit(model.dtype, blocks.engine.layout)
    if not error <= limit:  # also for NaN
        dtype = blocks.engine.layout.dtype
        raise ValueError(
            f"logits over blocks of {dtype} must be the model's own, those of {type(model).__name__} are {error:.1e} "
            f"off (relative), and may be {limit:.1e}"
        )


def _over_blocks(blocks: ModelBlocks, row: torch.Tensor) -> torch.Tensor:
    """Return the logits of a row in two parts, then those of its end once more."""
    model, name = blocks.model, checked_cache_argument(blocks.model)
    with KVPageCache(blocks, row) as cache:
        parts = row[:, :_CUT], row[:, _CUT:]
        outputs = [model(input_ids=part, **{name: cache}, use_cache=True).logits[0] for part in parts]
    with KVPageCache(blocks, row) as cache:
        rest = row[:, cache.get_seq_length() :]
        outputs.append(model(input_ids=rest, **{name: cache}, use_cache=True).logits[0])
    return torch.cat(outputs)


def _limit(dtype: torch.dtype, layout: CacheLayout) -> float:
    return MAX_ERROR_QUANTIZED if layout.is_quantized else max_error(dtype, layout.dtype)
