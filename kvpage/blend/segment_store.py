"""SegmentStore: K and V of segments with their original positions, found by their tokens alone.

    put(tokens, kv, positions)                                get(tokens) ─► Segment(kv, positions)
        │                                                          ▲
        ▼                                                          │ every token compared
    a record    layer 0 .. n - 1    K and V, as computed
                layer n             of each token: its position, its id, and its sensitivity

Segments are kept in a KVStore, in all of its tiers. Each is a token sequence of its own, in one of three namespaces of
the tenant, one for each kind: measured (standalone, with known sensitivity), standalone (nothing before it), and
computed in a context, which is an approximation anywhere else. The first kind that exists is preferred. Blended K and V
are an approximation already, and must never be put here.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt
import torch

from kvpage.blend.segments import check_measurable, check_sensitivity, is_sensitivity
from kvpage.checks.tensors import as_device, as_numbers
from kvpage.checks.tokens import Tokens, as_array, as_tokens
from kvpage.checks.values import check_flag, check_namespace
from kvpage.store import KVStore
from kvpage.store.records.codec import get_codec
from kvpage.store.records.kv_tensors import KVTensors, Parts, as_parts, token_dim
from kvpage.store.stack.chunk_threads import done

NAMESPACE = b"blend"
TAG_BYTES = 16
"""Bytes for each token: position int64, id int32, sensitivity fp32, 0 if unknown."""


class Kind(Enum):
    """Kinds of segments, the best first. The value is part of the records' namespace."""

    MEASURED = b"measured"
    STANDALONE = b"standalone"
    CONTEXT = b"context"

    @classmethod
    def of(cls, is_standalone: bool, is_measured: bool) -> "Kind":
        """Return the kind. Raises ValueError for measured without standalone, TypeError unless both are flags."""
        check_flag("is_standalone", is_standalone)
        check_flag("is_measured", is_measured)
        check_measurable(is_standalone, is_measured)
        return cls.MEASURED if is_measured else cls.STANDALONE if is_standalone else cls.CONTEXT

    def better(self) -> "list[Kind]":
        """Return the kinds before this one."""
        kinds = list(Kind)
        return kinds[: kinds.index(self)]


@dataclass(frozen=True, slots=True)
class Segment:
    """The leading tokens of a segment, as far as they were found, in memory of their own.

    Attributes:
        kv: [layers, parts, num_tokens, heads, size], or [layers, parts, heads, num_tokens, size] in a store of the
            format "huggingface"; K as rotated when it was computed.
        positions: int64 [num_tokens] on kv's device, at which K was computed.
        is_standalone: computed with nothing before it.
        sensitivity: fp32 [num_tokens] on the CPU, see SegmentKV; None if unknown.
    """

    kv: torch.Tensor
    positions: torch.Tensor
    is_standalone: bool
    sensitivity: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that were found."""
        return len(self.positions)


class SegmentStore:
    """Segments in a KVStore, which it does not close. Thread-safe.

    Args:
        store: the store.

    Raises:
        ValueError: the store's codec is lossy: positions and tokens would not come back.
        TypeError: store is not a KVStore.
    """

    def __init__(self, store: KVStore) -> None:
        if not isinstance(store, KVStore):
            raise TypeError(f"store must be a KVStore, got {type(store).__name__}")
        config, metadata = store.config, store.metadata
        if config.codec != "raw" and not get_codec(config.codec, metadata.kv_dtype or torch.float32).is_lossless:
            raise ValueError(f"store's codec must be lossless to keep positions, got {config.codec!r}")
        self.store = store
        self._token_dim = token_dim(metadata.fmt)

    def put(
        self,
        tokens: Tokens,
        kv: KVTensors,
        positions: Sequence[int] | npt.ArrayLike | torch.Tensor,
        is_standalone: bool,
        namespace: bytes = b"",
        blocking: bool = True,
        sensitivity: torch.Tensor | None = None,
    ) -> "Future[int]":
        """Keep a segment that was computed in full.

        Args:
            tokens: int [num_tokens].
            kv: of all layers, as for KVStore.store; a head's row has at least 16 bytes.
            positions: int [num_tokens], at which K was computed.
            is_standalone: whether nothing was before it.
            namespace: the tenant's.
            blocking: as in KVStore.store.
            sensitivity: of each token of a standalone segment, see SegmentKV.

        Returns:
            A future of the number of records that were written; 0 if a better segment is there already.

        Raises:
            ValueError, TypeError: arguments do not fit together; nothing is written.
        """
        kind = Kind.of(is_standalone, sensitivity is not None)
        array, kind_namespace = as_tokens(tokens), segment_namespace(namespace, kind)
        at = _as_positions(positions)
        if len(at) != len(array):
            raise ValueError(f"positions must be of {len(array)} tokens, got {len(at)}")
        if sensitivity is not None:
            sensitivity = check_sensitivity(sensitivity, len(array))
        parts = as_parts(kv, self.store.metadata.fmt, self.store.metadata.kv_dtype)
        tag = _tag(parts, at, array, sensitivity, self._token_dim)
        if self._has_any(array, kind.better(), namespace):
            return done(0)
        return self.store.store(array, [*parts, tag], blocking=blocking, namespace=kind_namespace)

    def get(self, tokens: Tokens, namespace: bytes = b"", device: torch.device | str = "cpu") -> Segment | None:
        """Return the longest leading run of the tokens that is there; of several the one of the best kind.

        Runs end where chunks of the store do. Every token is compared.

        Args:
            tokens: int [num_tokens].
            namespace: the tenant's.
            device: of the result.

        Returns:
            The segment; None if there is none.
        """
        array, device = as_tokens(tokens), as_device("device", device)
        for kind in self._by_preference(array, namespace):
            segment = self._get(array, namespace, kind, device)
            if segment is not None:
                return segment
        return None

    def lookup(self, tokens: Tokens, namespace: bytes = b"") -> int:
        """Return the number of leading tokens that `get` would find.

        Args:
            tokens: int [num_tokens].
            namespace: the tenant's.
        """
        array = as_tokens(tokens)
        return max(self._counts(array, namespace).values())

    def wants(self, tokens: Tokens, is_standalone: bool, is_measured: bool, namespace: bytes = b"") -> bool:
        """Return whether there is no segment of all these tokens, of this kind or a better one.

        Args:
            tokens: int [num_tokens].
            is_standalone: of the segment that could be put.
            is_measured: whether its sensitivity is known.
            namespace: the tenant's.
        """
        kind = Kind.of(is_standalone, is_measured)
        return not self._has_any(as_tokens(tokens), [*kind.better(), kind], namespace)

    def remove(self, tokens: Tokens, namespace: bytes = b"") -> None:
        """Remove the segment of every kind from every tier.

        Args:
            tokens: int [num_tokens].
            namespace: the tenant's.
        """
        for kind in Kind:
            self.store.remove(as_tokens(tokens), segment_namespace(namespace, kind))

    # --- inside ------------------------------------------------------------------------------------------------------

    def _counts(self, tokens: npt.NDArray[np.int32], namespace: bytes) -> dict[Kind, int]:
        """Return the number of leading tokens of each kind, the best first, up to the first that has all."""
        counts: dict[Kind, int] = {}
        for kind in Kind:
            counts[kind] = self.store.lookup(tokens, segment_namespace(namespace, kind))
            if counts[kind] == len(tokens):
                break
        return counts

    def _by_preference(self, tokens: npt.NDArray[np.int32], namespace: bytes) -> list[Kind]:
        counts = self._counts(tokens, namespace)
        return sorted((kind for kind, count in counts.items() if count), key=lambda kind: -counts[kind])

    def _has_any(self, tokens: npt.NDArray[np.int32], kinds: Iterable[Kind], namespace: bytes) -> bool:
        namespaces = (segment_namespace(namespace, kind) for kind in kinds)
        return any(self.store.lookup(tokens, kind_namespace) == len(tokens) for kind_namespace in namespaces)

    def _get(
        self, tokens: npt.NDArray[np.int32], namespace: bytes, kind: Kind, device: torch.device | str
    ) -> Segment | None:
        kv, _ = self.store.retrieve(tokens, return_tuple=False, namespace=segment_namespace(namespace, kind))
        return self._opened(kv, tokens, kind, device) if len(kv) > 1 else None

    def _opened(
        self, kv: torch.Tensor, tokens: npt.NDArray[np.int32], kind: Kind, device: torch.device | str
    ) -> Segment | None:
        tags = kv[-1, 0].movedim(self._token_dim, 0)[:, 0].contiguous().view(torch.uint8)
        words = tags[:, :TAG_BYTES].contiguous().view(torch.int32)
        equal = words[:, 2].numpy() == tokens[: len(words)]
        count = len(equal) if equal.all() else int(equal.argmin())
        if not count:
            return None
        rows = kv[:-1].narrow(2 + self._token_dim, 0, count)
        positions = words[:count, :2].contiguous().view(torch.int64)[:, 0]
        known = words[:count, 3].contiguous().view(torch.float32) if kind is Kind.MEASURED else None
        if known is not None and not is_sensitivity(known):
            known = None
        return Segment(rows.to(device), positions.to(device, copy=True), kind is not Kind.CONTEXT, known)


def segment_namespace(namespace: bytes, kind: Kind) -> bytes:
    """Return the KVStore's namespace of a tenant's segments of a kind. Raises TypeError unless it is bytes."""
    check_namespace(namespace)
    return NAMESPACE + b"\0" + kind.value + b"\0" + namespace


def _as_positions(positions: Sequence[int] | npt.ArrayLike | torch.Tensor) -> npt.NDArray[np.int64]:
    array = as_array(
        as_numbers("positions", positions).cpu() if isinstance(positions, torch.Tensor) else positions, "positions"
    )
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"positions must be integers [num_tokens], got {array.dtype} {list(array.shape)}")
    if array.size and array.min() < 0:
        raise ValueError(f"positions must not be negative, got {int(array.min())}")
    return array.astype(np.int64)


def _tag(
    parts: Parts,
    positions: npt.NDArray[np.int64],
    tokens: npt.NDArray[np.int32],
    sensitivity: torch.Tensor | None,
    dim: int,
) -> list[torch.Tensor]:
    """Return one more layer, whose first head holds each token's position, id and sensitivity."""
    like = parts[0][0]
    row_bytes = like.shape[-1] * like.element_size()
    if row_bytes < TAG_BYTES or like.shape[1 - dim] < 1:
        raise ValueError(f"kv must have heads of at least {TAG_BYTES} bytes, got shape {list(like.shape)}")
    if like.shape[dim] != len(tokens):
        raise ValueError(f"kv must be of {len(tokens)} tokens, got {like.shape[dim]}")
    layer = [torch.zeros(like.shape, dtype=like.dtype) for _ in parts[0]]
    tags = np.zeros(len(tokens), [("position", np.int64), ("token", np.int32), ("sensitivity", np.float32)])
    tags["position"], tags["token"] = positions, tokens
    if sensitivity is not None:
        tags["sensitivity"] = sensitivity.numpy()
    tag_rows = torch.from_numpy(tags.view(np.uint8)).view(len(tokens), TAG_BYTES)
    layer[0].view(torch.uint8).movedim(dim, 0)[:, 0, :TAG_BYTES] = tag_rows
    return layer
