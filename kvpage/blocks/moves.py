"""BlockMoves: copies of blocks between and within the tiers, in the order in which they have to be made.

    swap_out  (device, host)      blocks that leave the device, before their place is written
    swap_in   (host, device)      blocks that come back
    copy      (device, device)    a part of a block that another sequence goes on from

A later move may read or overwrite blocks that an earlier one has written. So they are made one after the other, before
the next step writes anything. A move that fails is made again before all others: the tree counts on it.

Words: `add_move` puts one into the list, `take_moves` hands the list over, `do_move` makes one, `do_moves` makes all.
`due_moves` yields them to a loop that makes them.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Kind = Literal["swap_out", "swap_in", "copy"]
Pairs = npt.NDArray[np.int64]  # [num_pairs, 2]: (from, to)
_NONE: Pairs = np.zeros((0, 2), np.int64)


class BlockMove(NamedTuple):
    """Pairs of blocks that can be copied in any order, or at once.

    Attributes:
        kind: "swap_out", "swap_in" or "copy".
        pairs: int64 [num_pairs, 2], (from, to). The kind says in which tier each of the two is.
    """

    kind: Kind
    pairs: Pairs


class BlockMoves:
    """An ordered list of moves. Neighbours of one kind that do not depend on each other are one move.

    Attributes:
        added: [kind, pairs] each, to which native calls add theirs.
    """

    def __init__(self) -> None:
        self.added: list[list[Any]] = []

    def add(self, kind: Kind, pairs: Pairs | Iterable[tuple[int, int]]) -> None:
        """Put pairs at the end of the list.

        Args:
            kind: "swap_out", "swap_in" or "copy".
            pairs: (from, to) each. They must not depend on each other.
        """
        array = np.asarray(pairs if isinstance(pairs, np.ndarray) else list(pairs), np.int64).reshape(-1, 2)
        if len(array):
            self.added.append([kind, array])

    def add_from(self, kind: Kind, change: Callable[[], Pairs]) -> int:
        """Put the pairs that `change` returns at the end of the list.

        The state that `change` has altered would be wrong without these moves. So their place in the list is made
        before the call: no pair is lost for lack of memory.

        Args:
            kind: "swap_out", "swap_in" or "copy".
            change: Returns pairs, int64 [num_pairs, 2].

        Returns:
            The number of pairs.
        """
        entry = [kind, _NONE]
        self.added.append(entry)
        try:
            entry[1] = change()
        finally:
            if not len(entry[1]):
                self.added.pop()
        return len(entry[1])

    def num_blocks(self, kind: Kind) -> int:
        """Return the number of pairs of one kind."""
        return sum(len(pairs) for name, pairs in self.added if name == kind)

    def do(self, do_move: Callable[[BlockMove], object]) -> None:
        """Make the moves in their order.

        Args:
            do_move: Makes one move. If it raises, that whole move and those after it stay in the list. Until they are
                made, their blocks must be neither read nor written.
        """
        for move in self.due():
            do_move(move)

    def due(self) -> Iterator[BlockMove]:
        """Yield the moves in their order. Each counts as made when the next one is asked for.

        A loop over it that ends early, as by an exception, leaves its last move, whole, and those after it in the list.
        """
        while self.added:
            move, num_added = self._first(0)
            yield move
            del self.added[:num_added]

    def __iter__(self) -> Iterator[BlockMove]:
        begin = 0
        while begin < len(self.added):
            move, num_added = self._first(begin)
            yield move
            begin += num_added

    def _first(self, begin: int) -> tuple[BlockMove, int]:
        """Return the pairs that can be copied at once from `begin` on, and the number of their entries."""
        move = BlockMove(*self.added[begin])
        for end in range(begin + 1, len(self.added)):
            kind, pairs = self.added[end]
            if kind != move.kind or not _are_independent(move, pairs):
                return move, end - begin
            move = BlockMove(move.kind, np.concatenate([move.pairs, pairs]))
        return move, len(self.added) - begin

    def __bool__(self) -> bool:
        return bool(self.added)

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
