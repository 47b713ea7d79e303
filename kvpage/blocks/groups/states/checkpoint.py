"""Checkpoint: a state slot that stands for an exact prefix. Anchor: what it stands on. MarkKind: why it was taken."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from kvpage.blocks.sequence_state import Ids


class MarkKind(IntEnum):
    """Why a position is marked. Where slots are short, the lowest comes first."""

    CALLER = 0  # named by `cache_at`
    SPLIT = 1  # the prompt diverged here from a cached one
    END = 2  # the end of a prompt
    ANSWER = 3  # the end of an answer
    REGULAR = 4  # every n tokens

    @property
    def is_branch(self) -> bool:
        """Whether several prompts are expected to go on from here."""
        return self in (MarkKind.CALLER, MarkKind.SPLIT)


PER_USE = 256
TOKEN_BYTES = 4


@dataclass(slots=True)
class UseRate:
    """How often checkpoints of one kind are used. It begins as if one of two had been."""

    num: int = 2
    num_uses: int = 1

    def count_one(self) -> int:
        """Count one more of them. Return how often it is expected to be used, times PER_USE."""
        self.num += 1
        return PER_USE * self.num_uses // self.num

    def count_use(self) -> None:
        """Count a use of one of them."""
        self.num_uses += 1


@dataclass(eq=False, slots=True)
class Anchor:
    """A cached block, or the start of a namespace, with the checkpoints on it by their tails.

    Attributes:
        companion: The block's number in the tree; -1 for the start of a namespace.
        namespace: Whose prefix it is.
        num_blocks: The block's place in the prefix, counted from 1; 0 for the start of the namespace.
        tails: The checkpoints.
    """

    companion: int
    namespace: bytes
    num_blocks: int
    tails: dict[bytes, "Checkpoint"] = field(default_factory=dict)

    def longest(self, tokens: Ids, block_size: int, most: int) -> "Checkpoint | None":
        """Return the checkpoint with the longest tail that `tokens` go on with, of at most `most` tokens in all."""
        start = self.num_blocks * block_size
        rest = tokens[start : min(most, start + block_size)].tobytes()
        longest = -1
        best: Checkpoint | None = None
        for tail, checkpoint in self.tails.items():
            if len(tail) > longest and rest.startswith(tail):
                longest, best = len(tail), checkpoint
        return best

    def nearest(self, rest: bytes) -> bytes:
        """Return the tail that has most leading tokens in common with `rest`; an empty one if there are none.

        rest: The tokens of a prompt after the anchor, int32 as bytes.
        """
        # In the order of bytes, the tail that has most in common stands right before or right after `rest`.
        before = max((tail for tail in self.tails if tail <= rest), default=b"")
        after = min((tail for tail in self.tails if tail > rest), default=b"")
        return max((before, after), key=lambda tail: (num_common(tail, rest), len(tail)))


def num_common(some: bytes, others: bytes) -> int:
    """Return how many tokens both begin with. Both are int32 as bytes."""
    length = min(len(some), len(others)) // TOKEN_BYTES
    differ = np.frombuffer(some, np.int32, length) != np.frombuffer(others, np.int32, length)
    return int(differ.argmax()) if differ.any() else length


@dataclass(eq=False, slots=True)
class Checkpoint:
    """A slot with the state after exactly `num_tokens` tokens. The anchor and the tail are these tokens.

    Attributes:
        anchor: The last whole block of the prefix, or the start of its namespace.
        tail: The tokens after that block, int32 as bytes. The slot's tail block has their K and V.
        num_tokens: The position.
        slot: A slot of the tier.
        is_on_host: The tier.
        kind: Why it was taken.
        priority: 0 to 7, of the sequence that made it.
        parent: The checkpoint that it goes on from, if that is still there.
        children: Those that go on from it, in order, so that evictions do not depend on addresses.
        floor: What the last evicted one was worth when this one was last used.
        num_uses: How often it was used, and how often its kind is, times PER_USE.
        is_dropped: Whether it is gone.
    """

    anchor: Anchor
    tail: bytes
    num_tokens: int
    slot: int
    kind: MarkKind
    priority: int
    is_on_host: bool = False
    parent: "Checkpoint | None" = None
    children: dict["Checkpoint", None] = field(default_factory=dict)
    floor: int = 0
    num_uses: int = 0
    is_dropped: bool = False

    @property
    def is_passed_by(self) -> bool:
        """Whether one checkpoint goes on from it, and no other prompt is expected to."""
        return len(self.children) == 1 and not self.kind.is_branch

    @property
    def num_saved(self) -> int:
        """Tokens that it saves over the checkpoint before it."""
        return self.num_tokens - (self.parent.num_tokens if self.parent is not None else 0)

    @property
    def worth(self) -> int:
        """What evicting it is expected to cost, beside the others: tokens, times PER_USE.

        What is not used any more is worth less and less, since the floors of the others rise.
        """
        return self.floor + self.num_uses * self.num_saved

    def go_on_from(self, parent: "Checkpoint | None") -> None:
        """Set the checkpoint before it."""
        self.parent = parent
        if parent is not None:
            parent.children[self] = None

    def leave(self) -> None:
        """Take it out of the family: those after it go on from the one before it."""
        if self.parent is not None:
            self.parent.children.pop(self, None)
        for child in self.children:
            child.go_on_from(self.parent)
        self.children.clear()
        self.parent = None


class Prefix(NamedTuple):
    """What a slot is to stand for: the first `num_tokens` tokens of a sequence, by the blocks that hold them.

    Attributes:
        namespace: The sequence's namespace.
        num_tokens: The position.
        num_blocks: How many whole blocks that is. They are in the tree.
        tail: The tokens after them, int32 as bytes.
        tail_blocks: The device blocks with the tail's K and V, of each group with blocks; none without a tail.
        companion: That of the last whole block; -1 without one.
        kind: Why the state is kept.
        priority: 0 to 7.
    """

    namespace: bytes
    num_tokens: int
    num_blocks: int
    tail: bytes
    tail_blocks: Sequence[int]
    companion: int
    kind: MarkKind
    priority: int
