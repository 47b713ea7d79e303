"""States of a sequence in a BlockManager, on the device and off it.

table    [ 17   4   9 | 30  12 ]     17, 4, 9: cached, the tree's; 30, 12: own
window   [  .   .   . |  .  12 ]     num_left own blocks have been given back: their entries mean nothing

On the device the state is in a row of kvpage._C.SequenceRows. SequenceState is a copy of it.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

SeqId = Hashable
Ids = npt.NDArray[np.int32]
Slots = npt.NDArray[np.int64]
PathIds = npt.NDArray[np.int32]
"""[3, num_blocks]: of cached blocks the ids on the device and on the host, and companions; NO_BLOCK for none."""
DEVICE, HOST, COMPANION = 0, 1, 2
NO_BLOCK = -1


class Allocation(NamedTuple):
    """The blocks that a sequence was given.

    Attributes:
        num_cached_tokens: Leading tokens whose K and V are in the blocks already, once the moves are done. At least
            one token is left to compute unless `allocate` was told otherwise.
        block_ids: All blocks of the sequence, int32 [num_blocks].
    """

    num_cached_tokens: int
    block_ids: Ids


class SequenceState(NamedTuple):
    """A sequence on the device."""

    num_tokens: int  # that there is room for
    num_written: int  # cached or committed
    num_cached_blocks: int  # whose owner is the tree; a match pins them
    num_left: int  # first own blocks that are given back, before a sliding window
    priority: int
    pending: Ids  # committed tokens of the last, not yet full block
    namespace: bytes
    is_private: bool  # no other sequence finds the blocks that it commits

    @property
    def first_own(self) -> int:
        """The place in the table of the first block to which the sequence itself holds a reference."""
        return self.num_cached_blocks + self.num_left


@dataclass(slots=True)
class SwappedState:
    """A sequence off the device. Its own blocks are on the host; its cached blocks may be found again in the tree."""

    first_block: int  # the place in the table of the first of host_ids
    host_ids: Ids
    num_written: int
    namespace: bytes
    priority: int
    num_left: int  # own blocks before them that had been given back
    is_private: bool
