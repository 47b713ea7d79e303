"""KnownDtype: the dtype of a store's K and V, given from the start or learnt from the first of them.

    metadata with a dtype      ─► RecordKinds
    metadata without           ─► the first K and V, the first engine, or the first record that is found ─► RecordKinds

Keys name the dtype, so that no record of another dtype is ever found. An unknown dtype costs a look for each one.
"""

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from kvpage.store.records.keys import KVStoreMetadata
from kvpage.store.records.kinds import RecordKinds
from kvpage.store.records.record_io import read_shape
from kvpage.store.stack.tier_stack import TierStack
from kvpage.store.tiers.tier import Key

SOUGHT = (
    torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8,
    torch.float64,
)  # fmt: skip
"""Dtypes that a store without one looks for, in this order."""


class KnownDtype:
    """Thread-safe. metadata: with the dtype as soon as it is known. kinds: None until then. chunk_size: in tokens.
    codec: its name.

    Raises ValueError or ImportError for a codec that cannot be made.
    """

    def __init__(self, metadata: KVStoreMetadata, chunk_size: int, codec: str) -> None:
        self.metadata = metadata
        self.kinds: RecordKinds | None = None
        self.chunk_size, self.codec = chunk_size, codec
        self._lock = threading.Lock()
        self._sought: list[tuple[torch.dtype, RecordKinds]] = []
        if metadata.kv_dtype is not None:
            self.kinds = RecordKinds(metadata, chunk_size, codec)
        else:
            self._sought = [(dtype, kinds) for dtype in SOUGHT if (kinds := self._kinds_of(dtype)) is not None]

    def of(self, dtype: torch.dtype) -> RecordKinds:
        """Return the kinds of this dtype. Raises ValueError if another is known, or the codec does not take it."""
        if self.kinds is None:
            return RecordKinds(replace(self.metadata, kv_dtype=dtype), self.chunk_size, self.codec)
        if self.metadata.kv_dtype != dtype:
            raise ValueError(f"K and V must be of {self.metadata.kv_dtype}, as the first of them, got {dtype}")
        return self.kinds

    def settle(self, dtype: torch.dtype) -> RecordKinds:
        """Set the dtype, unless it is known, and return its kinds. Raises ValueError as `of`."""
        with self._lock:
            kinds = self.of(dtype)
            if self.kinds is None:
                self.metadata, self.kinds = replace(self.metadata, kv_dtype=dtype), kinds
            return kinds

    def find(self, tiers: TierStack, tokens: npt.NDArray[np.int32], namespace: bytes) -> RecordKinds | None:
        """Return the known kinds, or the kinds of the first right record of these tokens; None for no record."""
        if self.kinds is not None or not len(tokens):
            return self.kinds
        first = tokens[: self.chunk_size]
        keys = [kinds.keys.of(first, namespace)[0] for _, kinds in self._sought]
        for at, tier in enumerate(tiers.locate(keys)):
            dtype, kinds = self._sought[at]
            if tier is None or tiers.first(keys[at], lambda reader: read_shape(reader, kinds, namespace)) is None:  # noqa: B023
                continue
            try:
                return self.settle(dtype)
            except ValueError:  # another thread was first
                return self.kinds
        return self.kinds

    def keys(self, tokens: npt.NDArray[np.int32], namespace: bytes) -> Sequence[Key]:
        """Return the keys that the tokens' chunks may have, of every dtype that is possible."""
        kinds = [kinds for _, kinds in self._sought] if self.kinds is None else [self.kinds]
        return [key for candidate in kinds for key in candidate.keys.of(tokens, namespace)]

    def _kinds_of(self, dtype: torch.dtype) -> RecordKinds | None:
        """Return None for a dtype that the codec does not take. Raises the errors of the codec itself."""
        try:
            return RecordKinds(replace(self.metadata, kv_dtype=dtype), self.chunk_size, self.codec)
        except ValueError:
            if dtype is SOUGHT[0]:
                raise
            return None
