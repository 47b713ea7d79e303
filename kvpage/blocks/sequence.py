"""What a BlockManager keeps of a sequence, on the device and off it.

table    [ 17   4   9 | 30  12 ]     17, 4, 9: match, the tree's; 30, 12: own
window   [  .   .   . |  .  12 ]     num_left own blocks have been given back: their entries mean nothing
"""

from dataclasses import dataclass

from kvpage._C import Match
from kvpage.blocks.table import Ids


@dataclass(slots=True)
class SequenceState:
    row: int  # in BlockTables
    match: Match  # pins the cached part
    num_tokens: int  # that there is room for
    num_written: int  # cached or committed
    pending: Ids  # committed tokens of the last, not yet full block
    is_forked: bool  # its last own block may be shared
    namespace: bytes
    priority: int
    num_left: int = 0  # first own blocks that are given back, behind a sliding window
    is_private: bool = False  # what it commits is found by nobody


@dataclass(slots=True)
class SwappedState:
    """A sequence that is off the device: what it had cached may be found again, its own blocks are on the host."""

    first_block: int  # the place in the table of the first of host_ids
    host_ids: Ids
    num_written: int
    pending: Ids
    namespace: bytes
    priority: int
    num_left: int  # own blocks before them that had been given back
    is_private: bool
