"""NewResult, TensorOut: the memory that takes K and V which a store has found, and the result that the caller gets.

room(shape)   ─► parts to load into: new memory, or the caller's
finish(n)     ─► the first n tokens, as the caller wants them

out   [ found ........... | the rest ...... ]     written up to the last token that is found
"""

from typing import Any

import torch

from kvpage.checks.shared_memory import share_memory
from kvpage.checks.tensors import check_writable
from kvpage.store.load.result_pool import ResultPool
from kvpage.store.records.kv_tensors import KVTensors, as_parts, as_tuple, chunk_shape, token_dim, tokens_of
from kvpage.store.records.record import Shape
from kvpage.store.records.tensor_chunk import TokenParts


class NewResult:
    """A result in memory of the pool, given to the caller on `device`."""

    def __init__(self, pool: ResultPool, fmt: str, device: torch.device | str, return_tuple: bool) -> None:
        self._pool, self._fmt, self._device, self._return_tuple = pool, fmt, device, return_tuple

    def room(self, shape: Shape, dtype: torch.dtype) -> TokenParts:
        self._kv = self._pool.empty(shape, dtype)
        return TokenParts([list(layer) for layer in self._kv], self._fmt)

    def finish(self, num_found: int) -> Any:
        dim = 2 + token_dim(self._fmt)
        if num_found < self._kv.shape[dim]:  # torch.save writes all of the tensor's memory, with earlier results
            self._kv.narrow(dim, num_found, self._kv.shape[dim] - num_found).zero_()
        kv = self._kv.narrow(dim, 0, num_found).to(self._device)
        return as_tuple(kv) if self._return_tuple else kv


class TensorOut:
    """A caller's tensors, for `num_tokens`. dtype: of K and V; None if it is not known yet.

    Raises ValueError or TypeError unless they can be written to, share no memory, are of one shape and device, for as
    many tokens.
    """

    def __init__(
        self,
        pool: ResultPool,
        fmt: str,
        out: KVTensors,
        dtype: torch.dtype | None,
        num_tokens: int,
        return_tuple: bool,
    ) -> None:
        self._pool, self._fmt, self._out, self._return_tuple = pool, fmt, out, return_tuple
        self._parts = as_parts(out, fmt, dtype, "out")
        flat = [part for layer in self._parts for part in layer]
        for tensor in (out,) if isinstance(out, torch.Tensor) else flat:
            check_writable("out", tensor)
            if tensor.requires_grad:
                raise ValueError("out must not require a gradient, got a tensor that does")
        self.device = flat[0].device
        if any(part.device != self.device for part in flat):
            raise ValueError("out must be on one device, got tensors on several")
        num_given = flat[0].shape[token_dim(fmt)]
        if num_given != num_tokens:
            raise ValueError(f"out must be of {num_tokens} tokens, got {num_given}")
        if num_given and len({part.data_ptr() for part in flat}) < len(flat):
            raise ValueError("out must name each tensor once, got one twice")
        if num_given and not isinstance(out, torch.Tensor) and share_memory(flat):
            raise ValueError("out must not share memory between its tensors, got two that overlap")
        if not return_tuple and not isinstance(out, torch.Tensor):
            raise ValueError("out must be one tensor where return_tuple is False, got several")

    def room(self, shape: Shape, dtype: torch.dtype) -> TokenParts:
        """Return memory to load into; for tensors of a device, memory of the host.

        Raises ValueError unless the tensors are of this dtype, and of this shape for as many tokens.
        """
        first = self._parts[0][0]
        out_shape = chunk_shape(self._parts, self._fmt, shape[2 + token_dim(self._fmt)])
        if (out_shape, first.dtype) != (shape, dtype):
            raise ValueError(
                f"out must be of {dtype}, for K and V of {list(shape)}, got {first.dtype}, {list(out_shape)}"
            )
        self._host = self._parts if first.is_cpu else [list(layer) for layer in self._pool.empty(shape, dtype)]
        return TokenParts(self._host, self._fmt)

    def finish(self, num_found: int) -> Any:
        views = tokens_of(self._parts, self._fmt, 0, num_found)
        if self._host is not self._parts:
            for layer, host in zip(views, tokens_of(self._host, self._fmt, 0, num_found), strict=True):
                for part, data in zip(layer, host, strict=True):
                    part.copy_(data)
        if not self._return_tuple and isinstance(self._out, torch.Tensor):
            return self._out.narrow(2 + token_dim(self._fmt), 0, num_found)
        return tuple(map(tuple, views))
