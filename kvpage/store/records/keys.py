"""Keys: the names of records, made from a model's metadata and from tokens.

    seed    SHA-256 over the metadata, canonically encoded: model, dtype, layout, ranks, namespace, ...
    key 0   SHA-256 over seed  | how many tokens | tokens of chunk 0, int64
    key 1   SHA-256 over key 0 | how many tokens | tokens of chunk 1          and so on

A key determines a chunk: its tokens and all before them. The last chunk may be shorter than the others.
"""

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvpage.checks.tokens import Tokens, as_tokens
from kvpage.checks.values import MAX_NAMESPACE_BYTES, check_at_least, check_namespace
from kvpage.layout.kv_scales import KVScales
from kvpage.ops.chunks import FORMATS
from kvpage.store.records.record import MAX_META_BYTES

ENCODING = b"kvpage-meta-2"
LENGTH = struct.Struct("<Q")
KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class KVStoreMetadata:
    """The facts besides the tokens that K and V depend on. Two stores share records exactly if all fields are equal.

    Attributes:
        model_name: any text; it should tell revisions and adapters apart.
        world_size: ranks that K and V are split over.
        worker_id: the number of this rank; any numbering will do.
        fmt: "vllm" ([tokens, heads, size] a layer) or "huggingface" ([heads, tokens, size]).
        kv_dtype: of the elements. None: a KVStore learns it from the first K and V that it is given, or finds.
        row_layout: the layout of a quantised cache's rows.
        scales_digest: of the scales of 8-bit floats.
        extra: pairs of name and text for any other fact that tells caches apart.

    Raises:
        ValueError: a field breaks a rule.
        TypeError: a field is of the wrong type.
    """

    model_name: str
    world_size: int = 1
    worker_id: int = 0
    fmt: str = "vllm"
    kv_dtype: torch.dtype | None = torch.bfloat16
    row_layout: str = ""
    scales_digest: bytes = b""
    extra: tuple[tuple[str, str], ...] = field(default=())

    def __post_init__(self) -> None:
        if not isinstance(self.model_name, str):
            raise TypeError(f"model_name must be a str, got {type(self.model_name).__name__}")
        for name, least in (("world_size", 1), ("worker_id", 0)):
            check_at_least(name, getattr(self, name), least)
        if self.fmt not in FORMATS:
            raise ValueError(f"fmt must be one of {', '.join(FORMATS)}, got {self.fmt!r}")
        if self.kv_dtype is not None and not isinstance(self.kv_dtype, torch.dtype):
            raise TypeError(f"kv_dtype must be a torch.dtype or None, got {type(self.kv_dtype).__name__}")

    def encode(self, chunk_size: int, namespace: bytes, lossy_codec: str = "") -> bytes:
        """Return the canonical encoding, the record's `meta`: names and values, each after its length.

        Args:
            chunk_size: tokens of a chunk.
            namespace: of the tokens.
            lossy_codec: the name of a codec that does not give back the same bytes; its records have keys of their own.

        Raises:
            ValueError: no dtype is known: K and V of several would have one key.
        """
        if self.kv_dtype is None:
            raise ValueError("kv_dtype must be known before there are keys, got None")
        fields = {
            "chunk_size": str(chunk_size).encode(),
            "codec": lossy_codec.encode(),
            "extra": _encode([(name.encode(), value.encode()) for name, value in self.extra]),
            "fmt": self.fmt.encode(),
            "kv_dtype": str(self.kv_dtype).removeprefix("torch.").encode(),
            "model_name": self.model_name.encode("utf-8", "surrogatepass"),
            "namespace": namespace,
            "row_layout": self.row_layout.encode(),
            "scales_digest": self.scales_digest,
            "worker_id": str(self.worker_id).encode(),
            "world_size": str(self.world_size).encode(),
        }
        return ENCODING + _encode([(name.encode(), value) for name, value in fields.items()])


def checked_tokens(tokens: Tokens, namespace: bytes) -> npt.NDArray[np.int32]:
    """Return the tokens as int32. Raises ValueError or TypeError for wrong tokens, or a wrong namespace."""
    check_namespace(namespace)
    return as_tokens(tokens)


def scales_digest(kv_scales: Iterable[KVScales] | None) -> bytes:
    """Return the SHA-256 of the scales of all layers; empty for None."""
    if kv_scales is None:
        return b""
    parts = [part.cpu().numpy().tobytes() for scales in kv_scales for part in (scales.key, scales.value)]
    return hashlib.sha256(_encode((b"", part) for part in parts)).digest()


def decode_meta(meta: bytes) -> dict[str, Any]:
    """Return the fields of `KVStoreMetadata.encode`: text, or bytes for some. Raises ValueError for other bytes."""
    if not meta.startswith(ENCODING):
        raise ValueError("meta must begin as this version writes it")
    fields = dict(_decode(meta[len(ENCODING) :]))
    raw = {b"namespace", b"scales_digest", b"extra"}
    return {
        name.decode(): value if name in raw else value.decode("utf-8", "surrogatepass")
        for name, value in fields.items()
    }


class ChunkKeys:
    """Makes keys for one metadata and chunk size, and for a codec that loses something: see KVStoreMetadata.encode."""

    def __init__(self, metadata: KVStoreMetadata, chunk_size: int, lossy_codec: str = "") -> None:
        """Raise ValueError for metadata too long for a record."""
        num_bytes = len(metadata.encode(chunk_size, b"", lossy_codec)) + MAX_NAMESPACE_BYTES
        if num_bytes > MAX_META_BYTES:
            raise ValueError(f"metadata and a namespace must be at most {MAX_META_BYTES} bytes, got {num_bytes}")
        self.metadata = metadata
        self.chunk_size, self.lossy_codec = chunk_size, lossy_codec
        self._seeds: dict[bytes, tuple[bytes, bytes]] = {}

    def meta(self, namespace: bytes) -> bytes:
        """Return the meta of the namespace's records."""
        return self._seed(namespace)[0]

    def of(self, tokens: Tokens, namespace: bytes = b"") -> list[bytes]:
        """Return a key for each chunk of the tokens, the last, shorter one included."""
        return chain_keys(self._seed(namespace)[1], self.chunk_size, as_tokens(tokens))

    def _seed(self, namespace: bytes) -> tuple[bytes, bytes]:
        seed = self._seeds.get(namespace)
        if seed is None:
            meta = self.metadata.encode(self.chunk_size, namespace, self.lossy_codec)
            seed = meta, hashlib.sha256(meta).digest()
            if len(self._seeds) >= 1024:  # namespaces come from outside
                self._seeds.clear()
            self._seeds[namespace] = seed
        return seed


def chain_keys(seed: bytes, chunk_size: int, tokens: npt.NDArray[np.int32]) -> list[bytes]:
    """Return a key for each chunk of the `tokens`. seed: SHA-256 of the meta. chunk_size: in tokens."""
    num_whole = len(tokens) - len(tokens) % chunk_size
    keys = [seed]
    for chunks in (tokens[:num_whole].reshape(-1, chunk_size), tokens[num_whole:].reshape(1, -1)):
        for message in _messages(chunks) if chunks.size else ():
            message[:KEY_BYTES] = keys[-1]
            keys.append(hashlib.sha256(message).digest())
    return keys[1:]


def _messages(chunks: npt.NDArray[np.int32]) -> list[memoryview]:
    """Return the bytes to hash for each chunk, with space in front for the key before it. chunks: [chunks, tokens].

    All in one array: pieces of a hundred bytes would take longer to hand over than to hash.
    """
    rows = np.empty((len(chunks), KEY_BYTES // 8 + 1 + chunks.shape[1]), "<i8")
    rows[:, KEY_BYTES // 8] = chunks.shape[1]
    rows[:, KEY_BYTES // 8 + 1 :] = chunks
    data, step = rows.data.cast("B"), rows.strides[0]
    return [data[begin : begin + step] for begin in range(0, len(data), step)]


def _encode(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join([LENGTH.pack(len(part)) + part for pair in fields for part in pair])


def _decode(data: bytes) -> list[tuple[bytes, bytes]]:
    parts, at = [], 0
    while at < len(data):
        if at + LENGTH.size > len(data):
            raise ValueError("meta ends within a length")
        (length,) = LENGTH.unpack_from(data, at)
        at += LENGTH.size
        if length > len(data) - at:
            raise ValueError("meta ends within a field")
        parts.append(data[at : at + length])
        at += length
    if len(parts) % 2:
        raise ValueError("meta must be names and values")
    return list(zip(parts[0::2], parts[1::2], strict=True))
