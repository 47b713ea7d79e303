"""Memory: a device's memory that is numbers, and LiveBytes: the memory that tensors of no memory would take."""

import contextlib
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Memory:
    """torch.cuda's memory. Torch caches what it once took; modules and captures take theirs beside it."""

    def __init__(self, patch: pytest.MonkeyPatch, total: int) -> None:
        self.total, self.used, self.cached, self.beside, self.peak = total, 0, 0, 0, 0
        cuda = torch.cuda
        patch.setattr(cuda, "device", lambda device: contextlib.nullcontext())
        patch.setattr(cuda, "synchronize", lambda device=None: None)
        patch.setattr(cuda, "empty_cache", self.empty_cache)
        patch.setattr(cuda, "mem_get_info", lambda device=None: (self.total - self.reserved - self.beside, self.total))
        patch.setattr(cuda, "memory_reserved", lambda device=None: self.reserved)
        patch.setattr(cuda, "max_memory_reserved", lambda device=None: self.peak)
        patch.setattr(cuda, "reset_peak_memory_stats", self.reset_peak)

    @property
    def reserved(self) -> int:
        return self.used + self.cached

    def empty_cache(self) -> None:
        self.cached = 0

    def reset_peak(self, device: object = None) -> None:
        self.peak = self.reserved

    def take(self, num_bytes: int) -> None:
        """Use memory for a moment: torch keeps it."""
        more = max(num_bytes - self.cached, 0)
        if self.reserved + self.beside + more > self.total:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_bytes} bytes")
        self.cached += more
        self.peak = max(self.peak, self.reserved)

    def keep(self, num_bytes: int) -> None:
        """Use memory from now on."""
        self.take(num_bytes)
        self.cached -= num_bytes
        self.used += num_bytes


class LiveBytes(TorchDispatchMode):
    """Inside, the bytes of tensors that operations make, while these live. most: at once, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {_storage_of(each)._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and (storage := _storage_of(each))._cdata not in known:
                known.add(storage._cdata)
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.most = max(self.most, self.now)


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
