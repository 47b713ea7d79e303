"""BlockMoves: copies of blocks between and within the tiers, in the order in which they have to be done.

    swap_out  (device, host)      what leaves the device, before its place is written
    swap_in   (host, device)      what comes back
    copy      (device, device)    a part of a block that another sequence goes on from

A later move may read or overwrite what an earlier one has written; so they are done one after the other, before the
next step writes anything.
"""

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Kind = Literal["swap_out", "swap_in", "copy"]
Pairs = npt.NDArray[np.int64]  # [num_pairs, 2]: (from, to)


class BlockMove(NamedTuple):
    """Pairs of blocks that can be copied in any order, or at once."""

    kind: Kind
    pairs: Pairs


class BlockMoves:
    """An ordered list of moves; neighbours of one kind that do not depend on each other are one."""

    def __init__(self) -> None:
        self._moves: list[BlockMove] = []

    def add(self, kind: Kind, pairs: Pairs | Iterable[tuple[int, int]]) -> None:
        """Puts pairs behind what is there. They must not depend on each other."""
        array = np.asarray(pairs if isinstance(pairs, np.ndarray) else list(pairs), np.int64).reshape(-1, 2)
        if len(array) == 0:
            return
        last = self._moves[-1] if self._moves else None
        if last and last.kind == kind and _are_independent(last, array):
            self._moves[-1] = BlockMove(kind, np.concatenate([last.pairs, array]))
        else:
            self._moves.append(BlockMove(kind, array))

    def num_blocks(self, kind: Kind) -> int:
        return sum(len(move.pairs) for move in self._moves if move.kind == kind)

    def __iter__(self) -> Iterator[BlockMove]:
        return iter(self._moves)

    def __len__(self) -> int:
        return len(self._moves)


def _are_independent(before: BlockMove, pairs: Pairs) -> bool:
    written = set(before.pairs[:, 1].tolist())
    if not written.isdisjoint(pairs[:, 1].tolist()):
        return False
    if before.kind != "copy":  # sources and destinations are ids of different tiers
        return True
    return written.isdisjoint(pairs[:, 0].tolist()) and set(before.pairs[:, 0].tolist()).isdisjoint(
        pairs[:, 1].tolist()
    )
