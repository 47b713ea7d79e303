"""BlockMoves: copies of blocks between and within the tiers, in the order in which they have to be done.

    swap_out  (device, host)      what leaves the device, before its place is written
    swap_in   (host, device)      what comes back
    copy      (device, device)    a part of a block that another sequence goes on from

A later move may read or overwrite what an earlier one has written; so they are done one after the other, before the
next step writes anything. One that fails is done again, before all else: the tree counts on it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Kind = Literal["swap_out", "swap_in", "copy"]
Pairs = npt.NDArray[np.int64]  # [num_pairs, 2]: (from, to)
_NONE: Pairs = np.zeros((0, 2), np.int64)


class BlockMove(NamedTuple):
    """Pairs of blocks that can be copied in any order, or at once."""

    kind: Kind
    pairs: Pairs


@dataclass(slots=True)
class _Added:
    kind: Kind
    pairs: Pairs


class BlockMoves:
    """An ordered list of moves; neighbours of one kind that do not depend on each other are one."""

    def __init__(self) -> None:
        self._added: list[_Added] = []

    def add(self, kind: Kind, pairs: Pairs | Iterable[tuple[int, int]]) -> None:
        """Puts pairs behind what is there. They must not depend on each other."""
        array = np.asarray(pairs if isinstance(pairs, np.ndarray) else list(pairs), np.int64).reshape(-1, 2)
        if len(array):
            self._added.append(_Added(kind, array))

    def add_from(self, kind: Kind, change: Callable[[], Pairs]) -> int:
        """Puts the pairs behind that `change` returns, and returns how many. What it has changed would be wrong without
        their moves, so they have their place before it is called: none are lost for lack of memory.
        """
        added = _Added(kind, _NONE)
        self._added.append(added)
        try:
            added.pairs = change()
        finally:
            if not len(added.pairs):
                self._added.pop()
        return len(added.pairs)

    def num_blocks(self, kind: Kind) -> int:
        return sum(len(added.pairs) for added in self._added if added.kind == kind)

    def due(self) -> Iterator[BlockMove]:
        """Yield the moves in their order. Each counts as done when the next is asked for.

        A loop over it that ends early, for example by an exception, leaves its last move due, whole, and those after
        it. Until they are done, blocks that they read or write do not hold what they are taken for.
        """
        while self._added:
            move, num_added = self._first(0)
            yield move
            del self._added[:num_added]

    def do(self, each: Callable[[BlockMove], object]) -> None:
        """Call `each` for the moves that are due; see `due`."""
        for move in self.due():
            each(move)

    def __iter__(self) -> Iterator[BlockMove]:
        begin = 0
        while begin < len(self._added):
            move, num_added = self._first(begin)
            yield move
            begin += num_added

    def _first(self, begin: int) -> tuple[BlockMove, int]:
        """What can be done at once from there on, and how many were added for it."""
        move = BlockMove(self._added[begin].kind, self._added[begin].pairs)
        for end in range(begin + 1, len(self._added)):
            added = self._added[end]
            if added.kind != move.kind or not _are_independent(move, added.pairs):
                return move, end - begin
            move = BlockMove(move.kind, np.concatenate([move.pairs, added.pairs]))
        return move, len(self._added) - begin

    def __bool__(self) -> bool:
        return bool(self._added)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _are_independent(before: BlockMove, pairs: Pairs) -> bool:
    written = set(before.pairs[:, 1].tolist())
    if not written.isdisjoint(pairs[:, 1].tolist()):
        return False
    if before.kind != "copy":  # sources and destinations are ids of different tiers
        return True
    return written.isdisjoint(pairs[:, 0].tolist()) and set(before.pairs[:, 0].tolist()).isdisjoint(
        pairs[:, 1].tolist()
    )
