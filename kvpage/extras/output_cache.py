"""OutputCache: a bounded cache of tensors. The least recently used tensor goes first."""

from collections import OrderedDict
from collections.abc import Hashable

import torch

from kvpage.checks.values import as_integer
from kvpage.extras.owned_arrays import owned


class OutputCache:
    """A bounded cache of tensors. The tensor that was not read or written for the longest time goes first.

    A tensor whose storage holds more than itself is copied. So `num_bytes` is the memory that the cache keeps. A tensor
    under two keys counts twice.

    Args:
        maxsize: Number of tensors to keep; 0 keeps none.
        move_to_cpu: Whether tensors are kept in host memory, and returned on the device that they came from.

    Raises:
        ValueError: maxsize is negative.
        TypeError: maxsize is no integer.
    """

    def __init__(self, maxsize: int, move_to_cpu: bool = False) -> None:
        """`maxsize`: tensors kept; 0 keeps none. ValueError if negative."""
        maxsize = as_integer("maxsize", maxsize)
        if maxsize < 0:
            raise ValueError(f"maxsize must not be negative, got {maxsize}")
        self.maxsize = maxsize
        self.move_to_cpu = move_to_cpu
        self._entries: OrderedDict[Hashable, tuple[torch.device, torch.Tensor]] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors held."""
        return self._num_bytes

    def __getitem__(self, key: Hashable) -> torch.Tensor:
        """Return the tensor on its original device. It is the last used then.

        Raises:
            KeyError: The key is not held.
        """
        device, tensor = self._entries[key]
        self._entries.move_to_end(key)
        return tensor.to(device)

    def __setitem__(self, key: Hashable, tensor: torch.Tensor) -> None:
        """Keep a tensor in place of the key's earlier one. In a full cache, the least recently used one goes.

        Raises:
            TypeError: The value is no tensor.
        """
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"values must be torch.Tensors, got {type(tensor).__name__}")
        if self.maxsize == 0:
            return
        stored = owned(tensor.cpu() if self.move_to_cpu else tensor)
        if key in self._entries:
            del self[key]
        elif len(self._entries) == self.maxsize:
            del self[next(iter(self._entries))]
        self._entries[key] = (tensor.device, stored)
        self._num_bytes += stored.untyped_storage().nbytes()

    def __delitem__(self, key: Hashable) -> None:
        """Forget a key.

        Raises:
            KeyError: The key is not held.
        """
        _, tensor = self._entries.pop(key)
        self._num_bytes -= tensor.untyped_storage().nbytes()

    def __contains__(self, key: Hashable) -> bool:
        """Return whether the key is held. It does not count as a use."""
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forget all tensors."""
        self._entries.clear()
        self._num_bytes = 0
