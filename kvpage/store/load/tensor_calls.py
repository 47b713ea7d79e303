"""TensorCalls: K and V as tensors, into a store's tiers and back.

tokens    [ chunk 0 | chunk 1 | chunk 2 | ch]
wanted          [ skipped .............. end]       of a read; may begin within a chunk
out       [ found ........... | the rest ...... ]   the caller's memory, written up to the last token that is found
"""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvpage.checks.shared_memory import share_memory
from kvpage.checks.tensors import check_writable, parse_device
from kvpage.checks.values import check_flag
from kvpage.store.load.layer_chunks import LayerChunks
from kvpage.store.load.result_pool import ResultPool
from kvpage.store.records.kinds import KnownDtype, RecordKinds
from kvpage.store.records.kv_tensors import (
    KVTensors,
    as_parts,
    as_tuple,
    chunk_shape,
    num_leading_false,
    owned,
    token_dim,
    tokens_of,
    with_tokens,
)
from kvpage.store.records.record import Shape
from kvpage.store.records.record_io import read_record, read_shape
from kvpage.store.records.tensor_chunk import TensorChunk, TokenParts
from kvpage.store.stack.chunk_threads import done
from kvpage.store.stack.tier_stack import TierStack
from kvpage.store.tiers.tier import Key, Reader

Array = npt.NDArray[np.int32]
Mask = npt.ArrayLike | torch.Tensor | None


class TensorCalls:
    """Thread-safe. max_kept_bytes: of results' memory that is used again."""

    def __init__(self, dtype: KnownDtype, tiers: TierStack, chunks: LayerChunks, max_kept_bytes: int) -> None:
        self._dtype, self._tiers, self._chunks = dtype, tiers, chunks
        self.pool = ResultPool(max_kept_bytes)

    def store(
        self,
        tokens: Array,
        kv_tensors: KVTensors,
        mask: Mask,
        skip_existing: bool,
        blocking: bool,
        namespace: bytes,
    ) -> "Future[int]":
        """Store as KVStore.store, with tokens and namespace that are checked."""
        fmt, size = self._dtype.metadata.fmt, self._chunks.chunk_size
        check_flag("skip_existing", skip_existing)
        check_flag("blocking", blocking)
        num_skipped = num_leading_false("kv_tensors_mask", mask, len(tokens))
        if num_skipped % size:
            raise ValueError(f"kv_tensors_mask must be False for whole chunks of {size}, got {num_skipped} tokens")
        parts = as_parts(kv_tensors, fmt, self._dtype.metadata.kv_dtype)
        num_tokens = parts[0][0].shape[token_dim(fmt)]
        if num_tokens != len(tokens) - num_skipped:
            raise ValueError(f"kv_tensors must be of {len(tokens) - num_skipped} tokens, got {num_tokens}")
        kinds = self._dtype.settle(parts[0][0].dtype)
        source = TokenParts(parts if blocking else owned(parts, fmt, 0), fmt)

        def chunk(begin: int, end: int) -> TensorChunk:
            return TensorChunk(source, begin - num_skipped, end - num_skipped)

        def put() -> int:
            return self._chunks.put_chunks(kinds, tokens, num_skipped, chunk, skip_existing, namespace)[1]

        return done(put()) if blocking else self._tiers.threads.later(put)

    def retrieve(
        self,
        tokens: Array,
        mask: Mask,
        return_tuple: bool,
        device: torch.device | str | None,
        namespace: bytes,
        out: KVTensors | None,
    ) -> tuple[Any, torch.Tensor]:
        """Retrieve as KVStore.retrieve, with tokens and namespace that are checked."""
        check_flag("return_tuple", return_tuple)
        num_skipped = num_leading_false("mask", mask, len(tokens))
        result = self._result(out, len(tokens) - num_skipped, device, return_tuple)
        ret_mask = torch.zeros(len(tokens), dtype=torch.bool)
        kinds = self._chunks.find_kinds(tokens, namespace)
        self._tiers.count(query_tokens=len(tokens) - num_skipped)
        num_found = 0 if kinds is None else self._load(kinds, tokens, num_skipped, namespace, result)
        if num_found == 0:
            return (), ret_mask
        ret_mask[num_skipped : num_skipped + num_found] = True
        self._tiers.count(hit_tokens=num_found)
        return result.finish(num_found), ret_mask

    def close(self) -> None:
        """Let go of the memory that is kept for results."""
        self.pool.close()

    def _result(
        self, out: KVTensors | None, num_tokens: int, device: torch.device | str | None, return_tuple: bool
    ) -> "NewResult | TensorOut":
        metadata = self._dtype.metadata
        if out is None:
            return NewResult(self.pool, metadata.fmt, "cpu" if device is None else device, return_tuple)
        result = TensorOut(self.pool, metadata.fmt, out, metadata.kv_dtype, num_tokens, return_tuple)
        if device is not None and not is_same_device(parse_device("device", device), result.device):
            raise ValueError(f"device must be that of out, {result.device}, or None, got {device}")
        return result

    def _load(
        self, kinds: RecordKinds, tokens: Array, num_skipped: int, namespace: bytes, result: "NewResult | TensorOut"
    ) -> int:
        """Load K and V after the skipped tokens, as far as tiers have them; return the number of tokens.

        Raises the errors of `result`, before anything is written.
        """
        size, fmt = self._chunks.chunk_size, self._dtype.metadata.fmt
        start = num_skipped // size * size  # of the first chunk
        keys = kinds.keys.of(tokens, namespace)[start // size :] if num_skipped < len(tokens) else []
        located = self._tiers.locate(keys)
        count = located.index(None) if None in located else len(located)
        shape = self._shape(kinds, keys, namespace) if count else None
        if shape is None:
            return 0
        most = min(start + count * size, len(tokens))
        parts = result.room(with_tokens(shape, fmt, most - num_skipped), kinds.dtype)

        def read(index: int, reader: Reader, num_threads: int) -> bool:
            begin = start + index * size
            first, end = max(begin, num_skipped), min(begin + size, len(tokens))
            chunk = TensorChunk(parts, first - num_skipped, end - num_skipped, first - begin)
            return read_record(reader, kinds.of(keys[index], chunk.shape, namespace), chunk, num_threads)

        num_chunks = self._tiers.read(keys, read, located)
        return min(start + num_chunks * size, len(tokens)) - num_skipped if num_chunks else 0

    def _shape(self, kinds: RecordKinds, keys: Sequence[Key], namespace: bytes) -> Shape | None:
        """Return the shape of the first chunk."""
        return self._tiers.first(keys[0], lambda reader: read_shape(reader, kinds, namespace))


def is_same_device(device: torch.device, actual: torch.device) -> bool:
    """Return whether a device, such as cuda or cuda:1, is the tensor's."""
    return device.type == actual.type and device.index in (None, actual.index)


class NewResult:
    """A result in memory of the pool, given to the caller on `device`.

    room(shape) returns parts to load into; finish(n) the first n tokens, as the caller wants them.
    """

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
