"""HeldBlocks: cached blocks of one prefix in all groups, held where they are while a thread reads them.

full layers     7    2    9    4       all of the prefix
a window        .    .    5    1       those that are still there
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvpage._C import Match, PrefixTree
from kvpage.blocks.groups.window_group import HeldWindow, WindowGroup
from kvpage.blocks.sequence_state import Ids
from kvpage.checks.interrupts import uninterrupted


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


def hold(tree: PrefixTree, match: Match, windows: Sequence[WindowGroup]) -> HeldBlocks:
    """Return the blocks of a match, which is released with them, and those that windows have cached beside them."""
    held_windows = [window.hold(match.tier_block_ids()) for window in windows]

    @uninterrupted
    def release() -> None:
        tree.release(match)
        for window, blocks in zip(windows, held_windows, strict=True):
            window.let_go(blocks)

    return HeldBlocks(match.num_tokens, match.block_ids.copy(), held_windows, release)
