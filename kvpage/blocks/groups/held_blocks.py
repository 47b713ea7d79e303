"""HeldBlocks: cached blocks of one prefix in all groups, held where they are while a thread reads them.

full layers     7    2    9    4       all of the prefix
a window        .    .    5    1       those that are still there
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpage._C import Match
from kvpage.blocks.groups.window_blocks import WindowBlocks
from kvpage.blocks.states import Ids
from kvpage.checks.interrupts import uninterrupted


@dataclass(frozen=True, slots=True, eq=False)
class HeldWindow:
    """The blocks of one window.

    Attributes:
        block_ids: By place, int32 [num_blocks], with 0 where there is none.
        has: Whether one is held, bool [num_blocks].
    """

    block_ids: Ids
    has: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class HeldBlocks:
    """Blocks of a prefix, until `release`.

    Attributes:
        num_tokens: Tokens of the prefix: whole blocks.
        block_ids: Those of full layers, int32 [num_blocks].
        windows: Those of each window.
        release: Let go of all of them; to be called once, in the manager's thread.
    """

    num_tokens: int
    block_ids: Ids
    windows: Sequence[HeldWindow]
    release: Callable[[], object]


def hold(match: Match, groups: Sequence[WindowBlocks], release_match: Callable[[], object]) -> HeldBlocks:
    """Return the blocks of a match, and those that windows have cached beside them, see WindowBlocks.to_hold.

    match: of the prefix tree; its blocks are the caller's until `release`. groups: the windows. release_match: lets go
    of the match.
    """
    path = match.tier_block_ids()
    masks = [blocks.to_hold(path) for blocks in groups]
    used = [blocks.use(np.ascontiguousarray(path[:, has])) for blocks, has in zip(groups, masks, strict=True)]

    @uninterrupted
    def release() -> None:
        release_match()
        for blocks, ids in zip(groups, used, strict=True):
            blocks.release(ids)

    windows = [_held(has, ids) for has, ids in zip(masks, used, strict=True)]
    return HeldBlocks(match.num_tokens, match.block_ids.copy(), windows, release)


def _held(has: npt.NDArray[np.bool_], ids: Sequence[int]) -> HeldWindow:
    table = np.zeros(len(has), np.int32)
    table[has] = ids
    return HeldWindow(table, has)
