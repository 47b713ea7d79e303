"""TensorCalls: K and V as tensors, into a store's tiers and back."""

import functools
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvpage.checks.tensors import parse_device
from kvpage.checks.values import check_flag
from kvpage.store.load.known_dtype import KnownDtype
from kvpage.store.load.layer_chunks import LayerChunks
from kvpage.store.load.result_pool import ResultPool
from kvpage.store.load.tensor_load import TensorLoad
from kvpage.store.load.tensor_results import NewResult, TensorOut
from kvpage.store.records.kv_tensors import KVTensors, as_parts, num_leading_false, owned, token_dim
from kvpage.store.records.tensor_chunk import TensorChunk, TokenParts
from kvpage.store.stack.chunk_threads import done
from kvpage.store.stack.tier_stack import TierStack

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
        """Do what KVStore.store does, with tokens and namespace that are checked."""
        fmt = self._dtype.metadata.fmt
        check_flag("skip_existing", skip_existing)
        check_flag("blocking", blocking)
        num_skipped = num_leading_false("kv_tensors_mask", mask, len(tokens))
        if num_skipped % self._chunks.chunk_size:
            raise ValueError(
                f"kv_tensors_mask must be False for whole chunks of {self._chunks.chunk_size}, got {num_skipped} tokens"
            )
        parts = as_parts(kv_tensors, fmt, self._dtype.metadata.kv_dtype)
        num_given = parts[0][0].shape[token_dim(fmt)]
        if num_given != len(tokens) - num_skipped:
            raise ValueError(f"kv_tensors must be of {len(tokens) - num_skipped} tokens, got {num_given}")
        kinds = self._dtype.settle(parts[0][0].dtype)
        source = TokenParts(parts if blocking else owned(parts, fmt, 0), fmt)

        def chunk(begin: int, end: int) -> TensorChunk:
            return source.chunk(begin - num_skipped, end - num_skipped)

        put = functools.partial(self._chunks.put_tokens, kinds, tokens, num_skipped, chunk, skip_existing, namespace)
        return done(put()) if blocking else self._tiers.later(put)

    def retrieve(
        self,
        tokens: Array,
        mask: Mask,
        return_tuple: bool,
        device: torch.device | str | None,
        namespace: bytes,
        out: KVTensors | None,
    ) -> tuple[Any, torch.Tensor]:
        """Do what KVStore.retrieve does, with tokens and namespace that are checked."""
        check_flag("return_tuple", return_tuple)
        num_skipped = num_leading_false("mask", mask, len(tokens))
        result = self._result(out, len(tokens) - num_skipped, device, return_tuple)
        ret_mask = torch.zeros(len(tokens), dtype=torch.bool)
        kinds = self._dtype.find(self._tiers, tokens, namespace)
        self._tiers.count(query_tokens=len(tokens) - num_skipped)
        if kinds is None:
            return (), ret_mask
        keys, fmt = kinds.keys.of(tokens, namespace), self._dtype.metadata.fmt
        num_found = TensorLoad(kinds, fmt, keys, len(tokens), num_skipped, namespace).run(self._tiers, result)
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
    ) -> NewResult | TensorOut:
        metadata = self._dtype.metadata
        if out is None:
            return NewResult(self.pool, metadata.fmt, "cpu" if device is None else device, return_tuple)
        result = TensorOut(self.pool, metadata.fmt, out, metadata.kv_dtype, num_tokens, return_tuple)
        if device is not None and not is_same_device(parse_device("device", device), result.device):
            raise ValueError(f"device must be that of out, {result.device}, or None, got {device}")
        return result


def is_same_device(device: torch.device, actual: torch.device) -> bool:
    """Return whether a device, such as cuda or cuda:1, is the tensor's."""
    return device.type == actual.type and device.index in (None, actual.index)
