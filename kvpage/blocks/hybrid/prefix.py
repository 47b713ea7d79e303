"""Prefix: what a slot is to stand for: a position of a sequence, by the blocks that hold it."""

from typing import NamedTuple

from kvpage.blocks.hybrid.checkpoint import MarkKind


class Prefix(NamedTuple):
    """The first `num_tokens` tokens of a sequence.

    Attributes:
        namespace: The sequence's namespace.
        num_tokens: The position.
        num_blocks: How many whole blocks that is. They are in the tree.
        tail: The tokens after them, int32 as bytes.
        tail_block: The device block with the tail's K and V; -1 without a tail.
        device_id: The last whole block's id; -1 without one.
        host_id: Its id on the host; -1 where it is not there.
        kind: Why the state is kept.
        priority: 0 to 7.
    """

    namespace: bytes
    num_tokens: int
    num_blocks: int
    tail: bytes
    tail_block: int
    device_id: int
    host_id: int
    kind: MarkKind
    priority: int
