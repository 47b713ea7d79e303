"""SegmentStore: K and V of segments with the positions they were computed at, found by their tokens alone.

    put(tokens, kv, positions)                                get(tokens) ─► Segment(kv, positions)
        │                                                          ▲
        ▼                                                          │ every token compared
    a record    layer 0 .. n - 1    K and V, as computed
                layer n             of each token: its position, its id, and its sensitivity

It sits on a KVStore, all its tiers included. There each segment is a token sequence of its own, in one of two
namespaces of the tenant's: computed standalone (nothing stood before it), or in a context. What was computed in a
context is an approximation anywhere else, so a standalone one is preferred. What was blended is an approximation
already: it must never be put here.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvpage.blend.segments import check_sensitivity
from kvpage.sequence_args import check_flag, check_namespace
from kvpage.store import KVStore
from kvpage.store.codec import get_codec
from kvpage.store.kv_tensors import KVTensors, Parts, as_parts, token_dim
from kvpage.tensor_args import as_device, as_numbers
from kvpage.tokens import Tokens, as_array, as_tokens

NAMESPACE = b"blend"
TAG_BYTES = 16
"""Of a token: position int64, id int32, and -sensitivity fp32, its sign set for 0, too. Without a sign it is not known:
records of before there was one have 0 there, where the id was an int64."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The leading tokens of a segment, as far as they were found: its own memory.

    kv: [layers, parts, num_tokens, heads, size], or [layers, parts, heads, num_tokens, size] in a store of the format
        "huggingface"; K as it was turned when it was computed. positions: int64 [num_tokens] on kv's device, where that
        was. is_standalone: computed with nothing before it. sensitivity: fp32 [num_tokens] on the CPU, see SegmentKV;
        None where that is not known.
    """

    kv: torch.Tensor
    positions: torch.Tensor
    is_standalone: bool
    sensitivity: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.positions)


class SegmentStore:
    """Thread-safe, as the store below it, which it does not close.

    ValueError for a store whose codec is lossy: positions and tokens would not come back.
    """

    def __init__(self, store: KVStore) -> None:
        if not isinstance(store, KVStore):
            raise TypeError(f"store must be a KVStore, got {type(store).__name__}")
        config, metadata = store.config, store.metadata
        if config.codec != "raw" and not get_codec(config.codec, metadata.kv_dtype).is_lossless:
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
        """Keeps a segment that was computed in full. The result of what it returns: how many records were written; none
        where a standalone one is there already.

        kv: of all layers, as KVStore.store takes it: for each layer (K, V), or one tensor, a token's row of a head at
            least 16 bytes. positions: integers [num_tokens], at which K was computed. is_standalone: whether nothing
            stood before it. namespace: the tenant's. blocking: as of KVStore.store.
        sensitivity: of each token, see SegmentKV. It is written over what is there without one, of the same kind.

        ValueError or TypeError for what does not fit together, before anything is written.
        """
        check_flag("is_standalone", is_standalone)
        array, place = as_tokens(tokens), segment_namespace(namespace, is_standalone)
        at = _as_positions(positions)
        if len(at) != len(array):
            raise ValueError(f"positions must be of {len(array)} tokens, got {len(at)}")
        if sensitivity is not None:
            sensitivity = check_sensitivity(sensitivity, len(array))
        parts = as_parts(kv, self.store.metadata.fmt, self.store.metadata.kv_dtype)
        standalone = segment_namespace(namespace, True)
        if not is_standalone and self.store.lookup(array, standalone) == len(array):
            return _done(0)
        tagged = [*parts, _tag(parts, at, array, sensitivity, self._token_dim)]
        is_better = sensitivity is not None and self._lacks_sensitivity(array, namespace, is_standalone)
        return self.store.store(array, tagged, skip_existing=not is_better, blocking=blocking, namespace=place)

    def get(self, tokens: Tokens, namespace: bytes = b"", device: torch.device | str = "cpu") -> Segment | None:
        """The longest leading run of the tokens that is there, of equals the standalone one; None for nothing.

        Runs end where chunks of the store do. Only tokens that equal those asked for count.
        """
        array, device = as_tokens(tokens), as_device("device", device)
        for is_standalone in self._by_preference(array, namespace):
            segment = self._get(array, namespace, is_standalone, device)
            if segment is not None:
                return segment
        return None

    def lookup(self, tokens: Tokens, namespace: bytes = b"") -> int:
        """How many leading tokens `get` would find, or would have a moment ago."""
        array = as_tokens(tokens)
        return max(self._counts(array, namespace).values())

    def remove(self, tokens: Tokens, namespace: bytes = b"") -> None:
        """Forgets the segment in every tier, however it was computed."""
        for is_standalone in (True, False):
            self.store.remove(as_tokens(tokens), segment_namespace(namespace, is_standalone))

    # --- inside ------------------------------------------------------------------------------------------------------

    def _counts(self, tokens: npt.NDArray[np.int32], namespace: bytes) -> dict[bool, int]:
        return {kind: self.store.lookup(tokens, segment_namespace(namespace, kind)) for kind in (True, False)}

    def _by_preference(self, tokens: npt.NDArray[np.int32], namespace: bytes) -> list[bool]:
        counts = self._counts(tokens, namespace)
        found = [is_standalone for is_standalone, count in counts.items() if count]
        return sorted(found, key=lambda is_standalone: (-counts[is_standalone], not is_standalone))

    def _lacks_sensitivity(self, tokens: npt.NDArray[np.int32], namespace: bytes, is_standalone: bool) -> bool:
        if not self.store.lookup(tokens, segment_namespace(namespace, is_standalone)):
            return False
        segment = self._get(tokens, namespace, is_standalone, "cpu")
        return segment is not None and segment.sensitivity is None

    def _get(
        self, tokens: npt.NDArray[np.int32], namespace: bytes, is_standalone: bool, device: torch.device | str
    ) -> Segment | None:
        place = segment_namespace(namespace, is_standalone)
        kv, _ = self.store.retrieve(tokens, return_tuple=False, namespace=place)
        return self._opened(kv, tokens, is_standalone, device) if len(kv) > 1 else None

    def _opened(
        self, kv: torch.Tensor, tokens: npt.NDArray[np.int32], is_standalone: bool, device: torch.device | str
    ) -> Segment | None:
        tags = kv[-1, 0].movedim(self._token_dim, 0)[:, 0].contiguous().view(torch.uint8)
        words = tags[:, :TAG_BYTES].contiguous().view(torch.int32)
        equal = words[:, 2].numpy() == tokens[: len(words)]
        count = len(equal) if equal.all() else int(equal.argmin())
        if not count:
            return None
        kept = kv[:-1].narrow(2 + self._token_dim, 0, count)
        positions = words[:count, :2].contiguous().view(torch.int64)[:, 0]
        negated = words[:count, 3].contiguous().view(torch.float32)
        is_known = bool((negated.signbit() & negated.isfinite()).all())
        return Segment(kept.to(device), positions.to(device, copy=True), is_standalone, -negated if is_known else None)


def segment_namespace(namespace: bytes, is_standalone: bool) -> bytes:
    """Of the KVStore, for the segments of a tenant. TypeError unless it is bytes."""
    check_namespace(namespace)
    return NAMESPACE + (b"\0standalone\0" if is_standalone else b"\0context\0") + namespace


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
    """One more layer, whose first head holds each token's position, id and sensitivity."""
    like = parts[0][0]
    row_bytes = like.shape[-1] * like.element_size()
    if row_bytes < TAG_BYTES or like.shape[1 - dim] < 1:
        raise ValueError(f"kv must have heads of at least {TAG_BYTES} bytes, got shape {list(like.shape)}")
    if like.shape[dim] != len(tokens):
        raise ValueError(f"kv must be of {len(tokens)} tokens, got {like.shape[dim]}")
    layer = [torch.zeros(like.shape, dtype=like.dtype) for _ in parts[0]]
    tags = np.zeros(len(tokens), [("position", np.int64), ("token", np.int32), ("negated", np.float32)])
    tags["position"], tags["token"] = positions, tokens
    if sensitivity is not None:
        tags["negated"] = np.copysign(sensitivity.numpy(), -1.0)
    some = torch.from_numpy(tags.view(np.uint8)).view(len(tokens), TAG_BYTES)
    layer[0].view(torch.uint8).movedim(dim, 0)[:, 0, :TAG_BYTES] = some
    return layer


def _done(result: int) -> "Future[int]":
    future: Future[int] = Future()
    future.set_result(result)
    return future
