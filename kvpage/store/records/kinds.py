"""RecordKinds: keys, metadata and codecs that the records of one store must have. KnownDtype: the kinds of its dtype.

metadata, codec ─► keys of tokens
key, shape      ─► RecordKind
a record's head ─► the shape of its payload

metadata with a dtype      ─► RecordKinds
metadata without           ─► the first K and V, the first engine, or the first record that is found ─► RecordKinds
"""

import math
import threading
from dataclasses import replace
from typing import Literal, NamedTuple

import torch

from kvpage.checks.tokens import Tokens
from kvpage.store.records.codec import LOSSLESS, Codec, get_codec
from kvpage.store.records.keys import ChunkKeys, KVStoreMetadata
from kvpage.store.records.record import CorruptRecord, RecordHead, Shape, UnreadableRecord
from kvpage.store.tiers.tier import Key

SOUGHT = (
    torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8,
    torch.float64,
)  # fmt: skip
"""Dtypes that a store without one looks for, in this order."""


class RecordKind(NamedTuple):
    """The head that a record must have.

    shape, raw_bytes: of its payload, decoded. codecs: all readable codecs by name, None for raw; the first is used
    for writing.
    """

    key: bytes
    meta: bytes
    shape: Shape
    raw_bytes: int
    codecs: dict[str, Codec | None]

    def written_by(self, way: str | None) -> str:
        """Return the name of the codec that writes records for a tier.

        way: what the tier asks for, such as "split"; None, or one that this kind lacks, for the kind's own codec.
        """
        ways = {"raw" if codec is None else codec.way: name for name, codec in reversed(self.codecs.items())}
        return ways.get(way or "", next(iter(self.codecs)))

    def head(self, payload_bytes: int, stretch_bytes: int, name: str) -> RecordHead:
        """Return the head of a record of this kind. name: of its codec."""
        return RecordHead(self.key, self.meta, name, self.shape, self.raw_bytes, payload_bytes, stretch_bytes)


class RecordKinds:
    """Records of one metadata, chunk size (tokens) and codec name.

    Raises ValueError for an unknown codec, ImportError for one whose package is missing.
    """

    def __init__(self, metadata: KVStoreMetadata, chunk_size: int, codec: str) -> None:
        if metadata.kv_dtype is None:
            raise ValueError("kv_dtype must be known to read and write records, got None")
        self.dtype = metadata.kv_dtype
        self._codecs = _codecs(codec, self.dtype, metadata.fmt)
        written = next(iter(self._codecs.values()))
        lossy = written.name if written and not written.is_lossless else ""
        self.keys = ChunkKeys(metadata, chunk_size, lossy)

    def of(self, key: Key, shape: Shape, namespace: bytes) -> RecordKind:
        """Return the kind of the record of a key and a payload's shape."""
        num_bytes = math.prod(shape) * self.dtype.itemsize
        return RecordKind(key, self.keys.meta(namespace), shape, num_bytes, self._codecs)

    def shape_of(self, head: RecordHead) -> Shape:
        """Return the payload's shape. Raises CorruptRecord for one that cannot be; UnreadableRecord for its codec."""
        if head.codec not in self._codecs:
            raise UnreadableRecord(f"the codec must be one of {', '.join(self._codecs)}, got {head.codec}")
        num_bytes = math.prod(head.shape) * self.dtype.itemsize
        is_raw = self._codecs[head.codec] is None
        if num_bytes != head.raw_bytes or num_bytes == 0 or (is_raw and num_bytes != head.payload_bytes):
            raise CorruptRecord(f"a payload of {head.payload_bytes} bytes cannot be of shape {head.shape}")
        return head.shape


def _codecs(name: str, dtype: torch.dtype, format_name: str) -> dict[str, Codec | None]:
    """Return codecs by their names in records: first the one for writing, then others that give back the same bytes."""
    fmt: Literal["vllm", "huggingface"] = "vllm" if format_name == "vllm" else "huggingface"
    raw = str(dtype).removeprefix("torch.")
    written = None if name == "raw" else get_codec(name, dtype, fmt)
    if written is not None and not written.is_lossless:
        return {written.name: written}
    codecs: dict[str, Codec | None] = {raw if written is None else written.name: written, raw: None}
    for other in LOSSLESS:
        try:
            codec = get_codec(other, dtype, fmt)
        except (ImportError, ValueError):  # not for this dtype, or its records cannot be read here
            continue
        codecs.setdefault(codec.name, codec)
    return codecs


class KnownDtype:
    """The dtype of a store's K and V, known from the start or learnt from the first of them. Thread-safe.

    Keys name the dtype, so that no record of another dtype is ever found. An unknown dtype costs a look for each one.

    metadata: with the dtype as soon as it is known. kinds: None until then. sought: the kinds of each possible dtype;
    empty where it was known from the start. chunk_size: in tokens. codec: its name.

    Raises ValueError or ImportError for a codec that cannot be made.
    """

    def __init__(self, metadata: KVStoreMetadata, chunk_size: int, codec: str) -> None:
        self.metadata = metadata
        self.kinds: RecordKinds | None = None
        self.chunk_size, self.codec = chunk_size, codec
        self._lock = threading.Lock()
        self.sought: list[tuple[torch.dtype, RecordKinds]] = []
        if metadata.kv_dtype is not None:
            self.kinds = RecordKinds(metadata, chunk_size, codec)
        else:
            self.sought = [(dtype, kinds) for dtype in SOUGHT if (kinds := self._kinds_of(dtype)) is not None]

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

    def keys(self, tokens: Tokens, namespace: bytes) -> list[Key]:
        """Return the keys that the tokens' chunks may have, of every dtype that is possible."""
        kinds = [kinds for _, kinds in self.sought] if self.kinds is None else [self.kinds]
        return [key for candidate in kinds for key in candidate.keys.of(tokens, namespace)]

    def _kinds_of(self, dtype: torch.dtype) -> RecordKinds | None:
        """Return None for a dtype that the codec does not take. Raises the errors of the codec itself."""
        try:
            return RecordKinds(replace(self.metadata, kv_dtype=dtype), self.chunk_size, self.codec)
        except ValueError:
            if dtype is SOUGHT[0]:
                raise
            return None
