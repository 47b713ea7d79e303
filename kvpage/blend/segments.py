"""Segments: K and V of runs of tokens, kept to be reused where the same tokens come again.

    keep(tokens, segment) ─► [ namespace | tokens ] ─► find(tokens): the segment, or None
                               exactly these, compared token by token

A segment that was computed with nothing before it (standalone) depends on no other context. It replaces one that was
computed in a prompt, and is not replaced by one. Of two of a kind, one with known sensitivity is better.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvpage.checks.tensors import as_floats, as_indices, as_numbers
from kvpage.checks.tokens import as_tokens
from kvpage.checks.values import as_integer, check_flag, check_namespace

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SegmentKV:
    """K and V of a segment's tokens as they were computed.

    Attributes:
        k: [num_layers, num_tokens, num_kv_heads, head_size], on any device; it must not be written to.
        v: likewise.
        positions: int64 [num_tokens] on the CPU, to which each token's K was rotated.
        is_standalone: nothing came before its first token.
        sensitivity: fp32 [num_tokens] on the CPU, finite and not negative: the change of each token's V with the text
            before the segment, see measure_sensitivity. None if unknown, and for segments that are not standalone.

    Raises:
        ValueError: shapes do not fit together, or the sensitivity breaks a rule.
        TypeError: a field is of the wrong type.
    """

    k: torch.Tensor
    v: torch.Tensor
    positions: torch.Tensor
    is_standalone: bool
    sensitivity: torch.Tensor | None = None

    def __post_init__(self) -> None:
        k, v = as_numbers("k", self.k, 4), as_numbers("v", self.v, 4)
        positions = as_indices("positions", self.positions)
        check_flag("is_standalone", self.is_standalone)
        for name, tensor in (("k", k), ("v", v), ("positions", positions)):
            object.__setattr__(self, name, tensor)
        num_tokens = self.k.shape[1]
        if self.v.shape[:2] != self.k.shape[:2] or self.positions.shape != (num_tokens,):
            raise ValueError(
                f"k, v and positions must be of the same layers and tokens, got shapes {list(self.k.shape)}, "
                f"{list(self.v.shape)} and {list(self.positions.shape)}"
            )
        check_measurable(self.is_standalone, self.sensitivity is not None)
        if self.sensitivity is not None:
            object.__setattr__(self, "sensitivity", check_sensitivity(self.sensitivity, num_tokens))

    def is_better_than(self, other: "SegmentKV") -> bool:
        """Return whether this segment should replace another one of the same tokens.

        Args:
            other: the one that is there.

        Returns:
            True if only this one is standalone, or, of a kind, only this one's sensitivity is known.
        """
        rank, other_rank = ((segment.is_standalone, segment.sensitivity is not None) for segment in (self, other))
        return rank > other_rank

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens."""
        return len(self.positions)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of K and V."""
        return self.k.nbytes + self.v.nbytes


def check_sensitivity(sensitivity: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return the sensitivity in fp32 on the CPU.

    Raises TypeError unless it is a tensor, ValueError unless it has a finite number for each token, not negative.
    """
    values = as_floats("sensitivity", sensitivity, 1).to("cpu", torch.float32)
    if len(values) != num_tokens:
        raise ValueError(f"sensitivity must be of {num_tokens} tokens, got {len(values)}")
    if not is_sensitivity(values):
        raise ValueError("sensitivity must be finite and not negative")
    return values


def is_sensitivity(values: torch.Tensor) -> bool:
    """Return whether all values are finite and not negative."""
    return bool((values.isfinite() & (values >= 0)).all())


def check_measurable(is_standalone: bool, is_measured: bool) -> None:
    """Raise ValueError for the sensitivity of a segment in a context: it cannot be measured there."""
    if is_measured and not is_standalone:
        raise ValueError("sensitivity must be None of a segment that is not standalone")


class Reuse(NamedTuple):
    """The positions [start, start + num_tokens) of a sequence take K and V of a segment's tokens from `begin` on.

    Attributes:
        segment: the segment.
        begin: its first token that is used.
        start: the position of that token in the sequence.
        num_tokens: tokens that are used.
    """

    segment: SegmentKV
    begin: int
    start: int
    num_tokens: int

    def rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of the tokens in one layer, K not rotated.

        Args:
            layer: its number, from 0.

        Returns:
            Views, [num_tokens, num_kv_heads, head_size] each.
        """
        span = slice(self.begin, self.begin + self.num_tokens)
        return self.segment.k[layer, span], self.segment.v[layer, span]

    @property
    def is_exact(self) -> bool:
        """Return whether the rows equal a prefill's rows: nothing is before the segment, as when it was computed."""
        return self.segment.is_standalone and self.start == self.begin

    def sensitivity(self) -> torch.Tensor | None:
        """Return the tokens' sensitivity, fp32 [num_tokens]; 0 if they are exact; None if unknown. See SegmentKV."""
        if self.is_exact:
            return torch.zeros(self.num_tokens)
        known = self.segment.sensitivity
        return None if known is None else known[self.begin : self.begin + self.num_tokens]

    def after(self, position: int) -> "Reuse | None":
        """Return the part from `position` on; None if there is none.

        Args:
            position: in the sequence.

        Returns:
            The part.
        """
        num_cut = max(position - self.start, 0)
        if num_cut >= self.num_tokens:
            return None
        return Reuse(self.segment, self.begin + num_cut, self.start + num_cut, self.num_tokens - num_cut)


def check_segment(segment: SegmentKV, num_tokens: int) -> None:
    """Raise TypeError unless it is a SegmentKV, ValueError unless it has `num_tokens`."""
    if not isinstance(segment, SegmentKV):
        raise TypeError(f"segment must be a SegmentKV, got {type(segment).__name__}")
    if segment.num_tokens != num_tokens:
        raise ValueError(f"segment must be of {num_tokens} tokens, got {segment.num_tokens}")


class SegmentCache(Protocol):
    """A place that keeps segments. Called in other threads; its own trouble is a miss, never an error."""

    def find(self, tokens: TokenIds, namespace: bytes) -> SegmentKV | None:
        """Return the segment of exactly these tokens, or of the leading ones.

        Args:
            tokens: int32 [num_tokens].
            namespace: the tenant's name; segments of different namespaces never meet.

        Returns:
            The segment; None if there is none.
        """

    def wants(self, tokens: TokenIds, is_standalone: bool, is_measured: bool, namespace: bytes) -> bool:
        """Return whether `keep` would keep such a segment: there is none, or a lesser one.

        Args:
            tokens: int32 [num_tokens].
            is_standalone: whether nothing came before the segment when it was computed.
            is_measured: whether its sensitivity is known.
            namespace: the tenant's name.
        """

    def keep(self, tokens: TokenIds, segment: SegmentKV, namespace: bytes) -> None:
        """Keep the segment if there is none, or a lesser one.

        Args:
            tokens: int32 [num_tokens].
            segment: their K and V.
            namespace: the tenant's name.
        """


class _Key(NamedTuple):
    namespace: bytes
    tokens: bytes


def _key(tokens: TokenIds, namespace: bytes) -> _Key:
    check_namespace(namespace)
    return _Key(namespace, as_tokens(tokens).tobytes())


class MemorySegments:
    """Segments in host memory; the least recently found one goes first. Not thread-safe.

    Args:
        max_bytes: of their K and V together.

    Raises:
        ValueError: max_bytes is not positive.
    """

    def __init__(self, max_bytes: int) -> None:
        max_bytes = as_integer("max_bytes", max_bytes)
        if max_bytes < 1:
            raise ValueError(f"max_bytes must be positive, got {max_bytes}")
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._segments: OrderedDict[_Key, SegmentKV] = OrderedDict()

    def __len__(self) -> int:
        return len(self._segments)

    def clear(self) -> None:
        """Forget all segments."""
        self._segments.clear()
        self.num_bytes = 0

    def find(self, tokens: TokenIds, namespace: bytes = b"") -> SegmentKV | None:
        """Return the segment of exactly these tokens.

        Args:
            tokens: int32 [num_tokens].
            namespace: the tenant's name; segments of different namespaces never meet.

        Returns:
            The segment; None if there is none.
        """
        key = _key(tokens, namespace)
        segment = self._segments.get(key)
        if segment:
            self._segments.move_to_end(key)
        return segment

    def wants(self, tokens: TokenIds, is_standalone: bool, is_measured: bool, namespace: bytes = b"") -> bool:
        """Return whether `keep` would keep such a segment: there is none, or a lesser one.

        Args:
            tokens: int32 [num_tokens].
            is_standalone: whether nothing came before the segment when it was computed.
            is_measured: whether its sensitivity is known.
            namespace: the tenant's name.

        Raises:
            ValueError: a segment that is not standalone cannot be measured.
        """
        check_flag("is_standalone", is_standalone)
        check_flag("is_measured", is_measured)
        check_measurable(is_standalone, is_measured)
        before = self._segments.get(_key(tokens, namespace))
        return before is None or (is_standalone, is_measured) > (before.is_standalone, before.sensitivity is not None)

    def keep(self, tokens: TokenIds, segment: SegmentKV, namespace: bytes = b"") -> None:
        """Keep the segment if there is none, or a lesser one. A segment larger than max_bytes is not kept.

        Args:
            tokens: int32 [num_tokens].
            segment: their K and V.
            namespace: the tenant's name.

        Raises:
            TypeError: `segment` is not a SegmentKV.
            ValueError: it has another number of tokens.
        """
        key = _key(tokens, namespace)
        check_segment(segment, len(key.tokens) // 4)
        before = self._segments.get(key)
        if segment.num_bytes > self.max_bytes or (before and not segment.is_better_than(before)):
            return
        self._segments.pop(key, None)
        self.num_bytes += segment.num_bytes - (before.num_bytes if before else 0)
        self._segments[key] = segment
        while self.num_bytes > self.max_bytes:
            self.num_bytes -= self._segments.popitem(last=False)[1].num_bytes
