"""States of a sequence in a BlockManager, on the device and off it.

table    [ 17   4   9 | 30  12 ]     17, 4, 9: match, the tree's; 30, 12: own
window   [  .   .   . |  .  12 ]     num_left own blocks have been given back: their entries mean nothing
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from kvpage._C import Match
from kvpage.blocks.table import Ids

SeqId = Hashable


class Allocation(NamedTuple):
    """The blocks that a sequence was given.

    Attributes:
        num_cached_tokens: Leading tokens whose K and V are in the blocks already, once the moves are done. At least
            one token is left to compute unless `allocate` was told otherwise.
        block_ids: All blocks of the sequence, int32 [num_blocks].
    """

    num_cached_tokens: int
    block_ids: Ids


@dataclass(slots=True)
class SequenceState:
    """A sequence on the device."""

    row: int  # in BlockTables
    match: Match  # pins the cached part
    num_tokens: int  # that there is room for
    num_written: int  # cached or committed
    pending: Ids  # committed tokens of the last, not yet full block
    is_forked: bool  # its last own block may be shared
    namespace: bytes
    priority: int
    num_left: int = 0  # first own blocks that are given back, before a sliding window
    is_private: bool = False  # no other sequence finds the blocks that it commits


@dataclass(slots=True)
class SwappedState:
    """A sequence off the device. Its own blocks are on the host; its cached blocks may be found again in the tree."""

    first_block: int  # the place in the table of the first of host_ids
    host_ids: Ids
    num_written: int
    pending: Ids
    namespace: bytes
    priority: int
    num_left: int  # own blocks before them that had been given back
    is_private: bool
