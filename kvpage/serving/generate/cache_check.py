"""What a model has to be for KVPageCache, found out by computing with it: its logits must be its own."""

from typing import TYPE_CHECKING

import torch

from kvpage.layout.cache_layout import CacheLayout
from kvpage.serving.generate.kv_page_cache import KVPageCache
from kvpage.serving.model.check import MAX_ERROR, MAX_ERROR_HALF, MAX_ERROR_QUANTIZED, probe_tokens, relative_error
from kvpage.serving.model.limits import vocab_size

if TYPE_CHECKING:
    from kvpage.serving.generate.cache_pool import KVPageCachePool

_CUT = 5  # inside a block, and with whole blocks before it


def verify_pool(pool: "KVPageCachePool") -> None:
    """Computes one row in two pieces, then the end of it after what is found. The pool's blocks should be small.

    ValueError, with the reason, if the logits are others than those of the row in one piece with a cache of the model's
    own, or, of blocks that quantise, nowhere near.
    """
    model = pool.model
    row = torch.from_numpy(probe_tokens(vocab_size(model))[0]).long().unsqueeze(0).to(model.device)
    with torch.no_grad():
        expected = model(input_ids=row, use_cache=True).logits[0]  # layers that share K and V do it there alone
        with KVPageCache(pool, row) as cache:
            pieces = row[:, :_CUT], row[:, _CUT:]
            found = [model(input_ids=piece, past_key_values=cache, use_cache=True).logits[0] for piece in pieces]
        with KVPageCache(pool, row) as cache:
            rest = row[:, cache.get_seq_length() :]
            found.append(model(input_ids=rest, past_key_values=cache, use_cache=True).logits[0])
    error = relative_error(torch.cat(found), torch.cat([expected, expected[-rest.shape[1] :]]))
    limit = _max_error(model.dtype, pool.engine.layout)
    if not error <= limit:  # also for NaN
        name, dtype = type(model).__name__, pool.engine.layout.dtype
        raise ValueError(
            f"logits over blocks of {dtype} must be the model's own, those of {name} are {error:.1e} off (relative), "
            f"and may be {limit:.1e}"
        )


def _max_error(dtype: torch.dtype, layout: CacheLayout) -> float:
    if layout.is_quantized:
        return MAX_ERROR_QUANTIZED
    return MAX_ERROR if min(dtype.itemsize, layout.dtype.itemsize) >= 4 else MAX_ERROR_HALF
