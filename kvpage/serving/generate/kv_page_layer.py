"""KVPageLayer: a layer of a KVPageCache, as `layers` shows it: made when it is asked for, with copies of K and V."""

from typing import Any, NoReturn, Protocol

import torch
from transformers.cache_utils import CacheLayerMixin

from kvpage.serving.model.states.piece_cache import PieceCache


class LayeredRows(Protocol):
    """The cache of a layer; see KVPageCache."""

    @property
    def max_batch_size(self) -> int:
        """The number of rows."""

    def has_layer(self, layer_idx: int) -> bool:
        """Return whether a layer has K and V of its own."""

    def read_layer(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return copies of a layer's K and V; None where it holds nothing."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens of each row a layer holds."""

    def get_mask_sizes(self, query_length: torch.Tensor | int, layer_idx: int) -> tuple[int, int]:
        """Return the number of keys that the next queries see, and the position of the first."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new K and V of a layer, and return all."""


# transformers does not annotate CacheLayerMixin.__init_subclass__.
class KVPageLayer(CacheLayerMixin):  # type: ignore[no-untyped-call, unused-ignore]
    """One layer of a KVPageCache. Only the cache changes its rows, those of all layers at once."""

    is_sliding = False
    is_croppable = True

    def __init__(self, cache: LayeredRows, layer_idx: int) -> None:
        self._cache, self._layer_idx = cache, layer_idx

    @property
    def keys(self) -> torch.Tensor | None:
        """A copy of the layer's K: [num_rows, num_heads, num_tokens, size]. None where it holds nothing."""
        rows = self._cache.read_layer(self._layer_idx)
        return None if rows is None else rows[0]

    @keys.setter
    def keys(self, keys: torch.Tensor | None) -> None:
        self._refuse()

    @property
    def values(self) -> torch.Tensor | None:
        """A copy of the layer's V, as `keys`."""
        rows = self._cache.read_layer(self._layer_idx)
        return None if rows is None else rows[1]

    @values.setter
    def values(self, values: torch.Tensor | None) -> None:
        self._refuse()

    @property
    def is_initialized(self) -> bool:
        """Whether the layer holds K and V."""
        return self._cache.has_layer(self._layer_idx) and self.get_seq_length() > 0

    @is_initialized.setter
    def is_initialized(self, is_initialized: bool) -> None:
        self._refuse()

    @property
    def max_batch_size(self) -> int:
        """The number of rows."""
        return self._cache.max_batch_size

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new K and V, and return all: see KVPageCache.update."""
        return self._cache.update(key_states, value_states, self._layer_idx)

    def get_seq_length(self, *args: Any) -> int:
        """Return how many tokens of each row the layer holds."""
        return self._cache.get_seq_length(self._layer_idx)

    def get_mask_sizes(self, query_length: torch.Tensor | int) -> tuple[int, int]:
        """Return the number of keys, and the place of the first: see KVPageCache.get_mask_sizes."""
        return self._cache.get_mask_sizes(query_length, self._layer_idx)

    def get_max_length(self) -> int:
        """Return -1: only the number of blocks limits the length."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Return -1, as get_max_length."""
        return -1

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the pool has the blocks."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError("one layer of a KVPageCache cannot be changed alone: call the method of the cache")

    reset = reorder_cache = crop = batch_repeat_interleave = batch_select_indices = offload = prefetch = _refuse


class StatefulLayer(KVPageLayer):  # type: ignore[no-untyped-call, unused-ignore]
    """One layer within a forward, whose states mixers of transformers before 5.21 read here."""

    record_past = False  # states are of one position

    def __init__(self, cache: LayeredRows, layer_idx: int, states: PieceCache) -> None:
        super().__init__(cache, layer_idx)
        of_layer = states.layers[layer_idx]
        self._states, self.device = of_layer, of_layer.device

    @property
    def conv_states(self) -> Any:
        """The states of convolutions, as transformers' cache has them."""
        return self._states.conv_states

    @property
    def recurrent_states(self) -> Any:
        """The recurrent states, as transformers' cache has them."""
        return self._states.recurrent_states
