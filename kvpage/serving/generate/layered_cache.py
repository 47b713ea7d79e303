"""LayeredCache and its KVPageLayers: the part of a transformers Cache that reads layers and answers questions."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin


class LayeredCache(Cache):
    """A cache whose layers are made as they are asked for, with copies of their K and V.

    A subclass holds the K and V. All of its rows have one length, in every layer.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of layers."""

    @property
    @abstractmethod
    def max_batch_size(self) -> int:
        """The number of rows."""

    @property
    def batch_size(self) -> int:
        """The number of rows."""
        return self.max_batch_size

    @abstractmethod
    def get_mask_sizes(self, query_length: torch.Tensor | int, layer_idx: int) -> tuple[int, int]:
        """Return the number of keys that the next queries see, and the place of the first."""

    @abstractmethod
    def has_layer(self, layer_idx: int) -> bool:
        """Return whether a layer has K and V of its own."""

    @abstractmethod
    def read_layer(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return copies of a layer's K and V, [num_rows, num_heads, num_tokens, size]; None where it holds nothing."""

    def _made_layers(self) -> list[Any]:
        """Return what `layers` is at this moment."""
        return [KVPageLayer(self, layer_idx) for layer_idx in range(len(self))]

    @property
    def layers(self) -> list[Any]:
        """The KVPageLayers, made at each call: their `keys` and `values` are copies of the K and V in the cache."""
        return self._made_layers()

    @layers.setter
    def layers(self, layers: Sequence[object]) -> None:
        if layers:
            raise ValueError("layers of a KVPageCache are those of its pool's model, and cannot be set")

    def __getitem__(self, layer_idx: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return copies of a layer's K and V."""
        layer = self.layers[layer_idx]
        return layer.keys, layer.values

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Iterate as DynamicCache does: over K and V of each layer and, in some versions of transformers, a window."""
        iterate = getattr(DynamicCache, "__iter__", None)
        layers: Iterator[tuple[Any, ...]]
        layers = iter([(layer.keys, layer.values) for layer in self.layers]) if iterate is None else iterate(self)
        return layers

    def to_legacy_cache(self) -> tuple[tuple[torch.Tensor | None, torch.Tensor | None], ...]:
        """Return a pair of K and V for each layer."""
        return tuple(self[layer_idx] for layer_idx in range(len(self)))

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: only the number of blocks limits the length.

        Args:
            layer_idx: The layer; all have the same limit.
        """
        return -1

    def get_max_cache_shape(self, layer_idx: int | None = None) -> int:
        """Return -1, as get_max_length.

        Args:
            layer_idx: The layer; all have the same limit.
        """
        return -1

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise TypeError: a copy would copy the pool. Another cache over the pool finds the same beginning."""
        raise TypeError("KVPageCache cannot be copied or pickled: make another one over the same pool")

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return True

    @property
    def is_sliding(self) -> list[bool]:
        """False for each layer: those with a sliding window keep all tokens."""
        return [False] * len(self)

    @property
    def is_linear(self) -> list[bool]:
        """False for each layer: none has a state of linear attention."""
        return [False] * len(self)

    @property
    def is_dummy(self) -> list[bool]:
        """False for each layer."""
        return [False] * len(self)


# transformers does not annotate CacheLayerMixin.__init_subclass__.
class KVPageLayer(CacheLayerMixin):  # type: ignore[no-untyped-call, unused-ignore]
    """One layer of a LayeredCache. Only the cache changes its rows, those of all layers at once."""

    is_sliding = False
    is_croppable = True

    def __init__(self, cache: LayeredCache, layer_idx: int) -> None:
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
