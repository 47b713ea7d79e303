"""CacheGroup: layers of a model that keep their cache in one way, and StateLayout, the place of every byte of a state.

    full        K and V of all tokens, in blocks                    attention over everything
    window      K and V of the last tokens, in blocks               attention over a window
    state       a few tensors of fixed size, at one token position  Mamba, gated delta nets, short convolutions
    successor   K and V that depend on the next token, too          the cache of a model that drafts

A state slot holds all states of all layers of one sequence, one after the other:

    | layer 0 conv | layer 0 recurrent | layer 1 conv | ...         each part begins at a multiple of 64 bytes
"""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import torch

from kvpage.checks.values import check_at_least

ALIGNMENT = 64
"""Bytes: the parts of a state, and the slots, begin at multiples of it."""


class GroupKind(str, Enum):
    """How the layers of a group keep their cache. Each is also its word."""

    FULL = "full"
    WINDOW = "window"
    STATE = "state"
    SUCCESSOR = "successor"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a sequence's state.

    Args:
        layer_id: The layer in the whole model.
        name: "conv" or "recurrent", as transformers' caches call the two.
        index: The number of the state of this name in its layer.
        shape: The sizes for one sequence.
        dtype: The dtype. It may differ from the model's.

    Raises:
        ValueError: A field is out of range or of another type.
    """

    layer_id: int
    name: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        check_at_least("layer_id", self.layer_id, 0)
        check_at_least("index", self.index, 0)
        if self.name not in ("conv", "recurrent"):
            raise ValueError(f"name must be 'conv' or 'recurrent', got {self.name!r}")
        object.__setattr__(self, "shape", tuple(self.shape))
        for size in self.shape:
            check_at_least("a size of shape", size, 1)
        if not isinstance(self.dtype, torch.dtype):
            raise ValueError(f"dtype must be a torch.dtype, got {self.dtype!r}")

    @property
    def key(self) -> tuple[int, str, int]:
        """Layer, name and index: they tell the part from all others of the model."""
        return self.layer_id, self.name, self.index

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor of one sequence."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def spec(self) -> str:
        """The part as a word, such as "3.conv.0:bfloat16[64,4]"."""
        sizes = ",".join(map(str, self.shape))
        return f"{self.layer_id}.{self.name}.{self.index}:{str(self.dtype).removeprefix('torch.')}[{sizes}]"


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers of a model that keep their cache in one way.

    Args:
        kind: The way.
        layer_ids: The layers in the whole model, ascending. A layer with attention and a state is in two groups.
        window: Tokens that the attention of a group WINDOW sees, the newest included; None for all other groups.
        parts: The tensors of a group STATE, for one sequence; empty for all other groups.

    Raises:
        ValueError: Fields do not fit together.
        TypeError: A part is no StatePart.
    """

    kind: GroupKind
    layer_ids: tuple[int, ...]
    window: int | None = None
    parts: tuple[StatePart, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.kind, GroupKind):
            raise ValueError(f"kind must be a GroupKind, got {self.kind!r}")
        object.__setattr__(self, "layer_ids", tuple(self.layer_ids))
        object.__setattr__(self, "parts", _as_parts(self.parts))
        for layer_id in self.layer_ids:
            check_at_least("a layer of layer_ids", layer_id, 0)
        if not self.layer_ids or list(self.layer_ids) != sorted(set(self.layer_ids)):
            raise ValueError(f"layer_ids must be some layers in ascending order, got {self.layer_ids}")
        if (self.kind == GroupKind.WINDOW) != (self.window is not None):
            raise ValueError(f"window must be given exactly for a group 'window', {self.kind} got {self.window}")
        if self.window is not None:
            check_at_least("window", self.window, 1)
        if (self.kind == GroupKind.STATE) != bool(self.parts):
            raise ValueError(f"parts must be given exactly for a group 'state', {self.kind} got {len(self.parts)}")
        if self.parts and {part.layer_id for part in self.parts} != set(self.layer_ids):
            raise ValueError(f"parts must be of the layers {self.layer_ids}, and of each of them")


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The place of every part in a state slot.

    Args:
        parts: The parts, in the order in which they lie. `of_parts` sorts them.

    Raises:
        ValueError: There are no parts, or two have one layer, name and index.
        TypeError: One is no StatePart.
    """

    parts: tuple[StatePart, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", _as_parts(self.parts))
        if not self.parts:
            raise ValueError("parts must be one or more, got 0")
        if len({part.key for part in self.parts}) < len(self.parts):
            raise ValueError("parts must differ in layer_id, name or index")

    @classmethod
    def of_parts(cls, parts: Iterable[StatePart]) -> "StateLayout":
        """Return the layout of these parts. The parts of a layer are side by side.

        Args:
            parts: In any order.

        Raises:
            ValueError: As for StateLayout.
            TypeError: One is no StatePart.
        """
        return cls(tuple(sorted(_as_parts(parts), key=lambda part: part.key)))

    @classmethod
    def of_groups(cls, groups: Iterable[CacheGroup]) -> "StateLayout | None":
        """Return the layout of all states of a model; None if it has none.

        Args:
            groups: All groups of the model.

        Raises:
            TypeError: One is no CacheGroup.
            ValueError: As for StateLayout.
        """
        parts: list[StatePart] = []
        for group in groups:
            if not isinstance(group, CacheGroup):
                raise TypeError(f"groups must be CacheGroups, got {type(group).__name__}")
            parts += group.parts
        return cls.of_parts(parts) if parts else None

    @property
    def offsets(self) -> tuple[int, ...]:
        """The first byte of each part, in a slot."""
        offsets, end = [], 0
        for part in self.parts:
            offsets.append(end)
            end = _aligned(end + part.num_bytes)
        return tuple(offsets)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, a multiple of ALIGNMENT."""
        return _aligned(self.offsets[-1] + self.parts[-1].num_bytes)

    @property
    def digest(self) -> str:
        """32 hex digits that name all layers, shapes and dtypes, for keys. Slots of other digests are never shared."""
        words = ";".join(part.spec for part in self.parts)
        return hashlib.sha256(f"kvpage state 1;{ALIGNMENT};{words}".encode()).hexdigest()[:32]


def _as_parts(parts: Iterable[StatePart]) -> tuple[StatePart, ...]:
    parts = tuple(parts)
    for part in parts:
        if not isinstance(part, StatePart):
            raise TypeError(f"parts must be StateParts, got {type(part).__name__}")
    return parts


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
