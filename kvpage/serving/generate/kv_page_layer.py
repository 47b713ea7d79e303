"""KVPageLayer: one layer of a KVPageCache, for code that walks the layers of a transformers Cache."""

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from transformers.cache_utils import CacheLayerMixin

if TYPE_CHECKING:
    from kvpage.serving.generate.kv_page_cache import KVPageCache


class KVPageLayer(CacheLayerMixin):
    """Made when it is asked for. Its rows are changed through the cache only, for all layers at once."""

    is_sliding = False
    is_croppable = True

    def __init__(self, cache: "KVPageCache", layer_idx: int) -> None:
        self._cache, self._layer_idx = cache, layer_idx

    @property  # type: ignore[override]
    def keys(self) -> torch.Tensor | None:
        """A copy of the layer's K: [num_rows, num_heads, num_tokens, size]. None where it holds nothing."""
        rows = self._cache.read_layer(self._layer_idx)
        return None if rows is None else rows[0]

    @property  # type: ignore[override]
    def values(self) -> torch.Tensor | None:
        """A copy of the layer's V, as keys."""
        rows = self._cache.read_layer(self._layer_idx)
        return None if rows is None else rows[1]

    @property
    def is_initialized(self) -> bool:
        return self._cache.has_layer(self._layer_idx) and self.get_seq_length() > 0

    @property
    def max_batch_size(self) -> int:
        return self._cache.max_batch_size

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See KVPageCache.update."""
        return self._cache.update(key_states, value_states, self._layer_idx)

    def get_seq_length(self, *args: Any) -> int:
        return self._cache.get_seq_length(self._layer_idx)

    def get_mask_sizes(self, query_length: torch.Tensor | int) -> tuple[int, int]:
        return self._cache.get_mask_sizes(query_length, self._layer_idx)

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """There is nothing to make: the blocks are the pool's."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError("one layer of a KVPageCache cannot be changed alone: call the method of the cache")

    reset = reorder_cache = crop = batch_repeat_interleave = batch_select_indices = offload = prefetch = _refuse
