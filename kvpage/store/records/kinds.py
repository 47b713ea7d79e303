"""RecordKinds: what the records of one store must be, and under which keys they lie.

metadata, codec ─► keys of tokens
key, shape      ─► RecordKind (kvpage.store.load.chunk_io)
a record        ─► the shape that it says it has
"""

import math
from typing import Literal

import torch

from kvpage.store.load.chunk_io import Codec, RecordKind, read_head
from kvpage.store.records.keys import ChunkKeys, KVStoreMetadata
from kvpage.store.records.record import CorruptRecord, Shape, UnreadableRecord
from kvpage.store.tier import Key, Reader


class RecordKinds:
    """Of one metadata, chunk size (tokens) and codec, by name. ValueError, ImportError for a codec that cannot be."""

    def __init__(self, metadata: KVStoreMetadata, chunk_size: int, codec: str) -> None:
        if metadata.kv_dtype is None:
            raise ValueError("kv_dtype must be known to read and write records, got None")
        self.dtype = metadata.kv_dtype
        self._codecs = _codecs(codec, self.dtype, metadata.fmt)
        written = next(iter(self._codecs.values()))
        lossy = written.name if written and not written.is_lossless else ""
        self.keys = ChunkKeys(metadata, chunk_size, lossy)

    def of(self, key: Key, shape: Shape, namespace: bytes) -> RecordKind:
        num_bytes = math.prod(shape) * self.dtype.itemsize
        return RecordKind(key, self.keys.meta(namespace), shape, num_bytes, self._codecs)

    def shape_in(self, reader: Reader, namespace: bytes) -> Shape:
        """What a record says of its payload. CorruptRecord if that cannot be; UnreadableRecord."""
        head, _ = read_head(reader, self.keys.meta(namespace))
        if head.codec not in self._codecs:
            raise UnreadableRecord(f"the codec must be one of {', '.join(self._codecs)}, got {head.codec}")
        num_bytes = math.prod(head.shape) * self.dtype.itemsize
        is_raw = self._codecs[head.codec] is None
        if num_bytes != head.raw_bytes or num_bytes == 0 or (is_raw and num_bytes != head.payload_bytes):
            raise CorruptRecord(f"a payload of {head.payload_bytes} bytes cannot be of shape {head.shape}")
        return head.shape


def _codecs(name: str, dtype: torch.dtype, wanted: str) -> dict[str, Codec | None]:
    """By the name in records: what is written first, and what else can be read: all that gives back the same bytes."""
    from kvpage.store.records.codec import LOSSLESS, get_codec

    fmt: Literal["vllm", "huggingface"] = "vllm" if wanted == "vllm" else "huggingface"
    raw = str(dtype).removeprefix("torch.")
    written = None if name == "raw" else get_codec(name, dtype, fmt)
    if written is not None and not written.is_lossless:
        return {written.name: written}
    codecs: dict[str, Codec | None] = {raw if written is None else written.name: written, raw: None}
    for other in LOSSLESS:
        try:
            codec = get_codec(other, dtype, fmt)
        except (ImportError, ValueError):  # not for this dtype, or what it wrote elsewhere cannot be read here
            continue
        codecs.setdefault(codec.name, codec)
    return codecs
