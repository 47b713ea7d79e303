"""StoredSegments: the segments of a serving loop in a KVStore, in all of its tiers.

find(tokens) ─► SegmentStore.get ─► K and V by layer, in the store's format ─► views of them by token
keep(...)    ─► SegmentStore.put, in the background
"""

import torch

from kvpage.blend.segment_store import SegmentStore
from kvpage.blend.segments import SegmentKV, TokenIds, check_segment
from kvpage.checks.tokens import as_tokens
from kvpage.store import KVStore


class StoredSegments:
    """A SegmentCache over a KVStore of the engine's shape and dtype, which it does not close.

    Args:
        store: the store.

    Raises:
        ValueError: the store's codec is lossy.
    """

    def __init__(self, store: KVStore) -> None:
        self._segments = SegmentStore(store)
        self._is_by_head = store.metadata.fmt == "huggingface"

    def find(self, tokens: TokenIds, namespace: bytes = b"") -> SegmentKV | None:
        """Return the longest leading run of the tokens that the store has.

        Args:
            tokens: int32 [num_tokens].
            namespace: the tenant's name; segments of different namespaces never meet.

        Returns:
            The segment of these leading tokens; None if the store has none of them.
        """
        segment = self._segments.get(tokens, namespace)
        if segment is None:
            return None
        rows = segment.kv.transpose(2, 3) if self._is_by_head else segment.kv
        return SegmentKV(rows[:, 0], rows[:, 1], segment.positions, segment.is_standalone, segment.sensitivity)

    def wants(self, tokens: TokenIds, is_standalone: bool, is_measured: bool, namespace: bytes = b"") -> bool:
        """Return whether `keep` would keep such a segment: there is none, or a lesser one.

        Args:
            tokens: int32 [num_tokens].
            is_standalone: whether nothing came before the segment when it was computed.
            is_measured: whether its sensitivity is known.
            namespace: the tenant's name.
        """
        return self._segments.wants(tokens, is_standalone, is_measured, namespace)

    def keep(self, tokens: TokenIds, segment: SegmentKV, namespace: bytes = b"") -> None:
        """Keep the segment if there is none, or a lesser one. Trouble of a tier loses it without an error.

        Args:
            tokens: int32 [num_tokens].
            segment: their K and V.
            namespace: the tenant's name.

        Raises:
            TypeError: `segment` is not a SegmentKV.
            ValueError: it has another number of tokens, or does not fit the store.
        """
        check_segment(segment, len(as_tokens(tokens)))
        rows = torch.stack([segment.k, segment.v], dim=1)
        kv = rows.transpose(2, 3).contiguous() if self._is_by_head else rows
        future = self._segments.put(
            tokens, kv, segment.positions, segment.is_standalone, namespace, sensitivity=segment.sensitivity
        )
        future.result()
