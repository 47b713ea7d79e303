"""Checkpoint: a state slot that stands for an exact prefix. Anchor: what it stands on. MarkKind: why it was taken."""

from dataclasses import dataclass, field
from enum import IntEnum

from kvpage.blocks.states import Ids


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


@dataclass(eq=False, slots=True)
class Anchor:
    """A cached block, or the start of a namespace, with the checkpoints on it by their tails.

    Attributes:
        index: Its place in the table of ids.
        namespace: Whose prefix it is.
        num_blocks: The block's place in the prefix, counted from 1; 0 for the start of the namespace.
        tails: The checkpoints.
    """

    index: int
    namespace: bytes
    num_blocks: int
    tails: dict[bytes, "Checkpoint"] = field(default_factory=dict)

    def longest(self, tokens: Ids, block_size: int, most: int) -> "Checkpoint | None":
        """Return the checkpoint with the longest tail that `tokens` go on with, of at most `most` tokens in all."""
        start = self.num_blocks * block_size
        rest = tokens[start : min(most, start + block_size)].tobytes()
        for size in sorted({len(tail) for tail in self.tails}, reverse=True):
            if size <= len(rest) and (found := self.tails.get(rest[:size])) is not None:
                return found
        return None


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
        children: Those that go on from it.
        used_at: When it was last used.
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
    children: set["Checkpoint"] = field(default_factory=set)
    used_at: int = 0
    is_dropped: bool = False

    @property
    def is_passed_by(self) -> bool:
        """Whether it no longer helps: one checkpoint goes on from it, and no other prompt is expected to."""
        return len(self.children) == 1 and not self.kind.is_branch

    def go_on_from(self, parent: "Checkpoint | None") -> None:
        """Set the checkpoint before it."""
        self.parent = parent
        if parent is not None:
            parent.children.add(self)

    def leave(self) -> None:
        """Take it out of the family: those after it go on from the one before it."""
        if self.parent is not None:
            self.parent.children.discard(self)
        for child in self.children:
            child.go_on_from(self.parent)
        self.children.clear()
        self.parent = None
