"""LayeredMoves: due moves of blocks, made beside the computation a few layers at a time.

    moves         swap_out a ─► swap_in b ─► copy c                 in each layer they keep this order
    the stream    a b c of layer 0 ●   a b c of layers 1, 2 ●   a b c of layers 3 to 6 ● ...
    computation                    layer 0 ...              layer 1, layer 2 ...       each waits for its own event

A move touches a block of one layer only where it touches the block at all. So all moves of one layer can come before
those of the next.
"""

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from kvpage.blocks.moves import BlockMove, Kind
from kvpage.cache.copiers import Copier

MIN_PIECE_BYTES = 4 << 20  # of one move's layers that are worth a call and an event of their own: 0.1 ms of a bus

CopierOf = Callable[[Kind, int, int], Copier]
"""Returns the copier of a kind of move for the layers [first, last)."""


def layer_pieces(num_layers: int, layer_bytes: int) -> list[tuple[int, int]]:
    """Divide layers into runs [first, last): a small one first, so that the computation begins soon.

    Each run has twice as many as the one before, up to an eighth of all. All have MIN_PIECE_BYTES at least, but for the
    last.

    Args:
        num_layers: Layers in all.
        layer_bytes: Bytes that are moved in each.

    Returns:
        The runs, in order.
    """
    least = 1
    while least < num_layers and least * layer_bytes < MIN_PIECE_BYTES:
        least *= 2  # few different runs: their copiers are kept
    pieces, begin, size = [], 0, least
    while begin < num_layers:
        end = min(begin + size, num_layers)
        pieces.append((begin, end))
        begin, size = end, min(2 * size, max(least, -(-num_layers // 8)))
    return pieces


class PieceCopiers:
    """The copiers of some layers by kind, each made once.

    Args:
        make: By kind, makes the copier of a slice of the layers.
    """

    def __init__(self, make: dict[Kind, Callable[[slice], Copier]]) -> None:
        self._make = make
        self._made: dict[tuple[Kind, int, int], Copier] = {}

    def get(self, kind: Kind, first: int, last: int) -> Copier:
        """Return the copier of a kind for the layers [first, last).

        Args:
            kind: The kind of move.
            first: The first layer.
            last: The layer after the last one.
        """
        key = kind, first, last
        if key not in self._made:
            self._made[key] = self._make[kind](slice(first, last))
        return self._made[key]


class LayeredMoves:
    """Moves, and how far they are made. The next start makes a move that raises again, then the later ones.

    Args:
        moves: In their order.
        num_layers: Layers of the caches.
        block_bytes: Bytes of a block in all layers.
        copier_of: The copiers.

    Attributes:
        num_blocks: Blocks by kind.
        num_bytes: Bytes of all moves.
        pieces: Runs of layers [first, last), in order.
    """

    def __init__(self, moves: Sequence[BlockMove], num_layers: int, block_bytes: int, copier_of: CopierOf) -> None:
        self.num_blocks = Counter[Kind]()
        for kind, pairs in moves:
            self.num_blocks[kind] += len(pairs)
        self.num_bytes = self.num_blocks.total() * block_bytes
        self.pieces = layer_pieces(num_layers, self.num_bytes // max(num_layers, 1))
        pairs_by_kind = [(kind, torch.from_numpy(pairs)) for kind, pairs in moves]
        self._left = [
            deque((copier_of(kind, *piece), pairs) for kind, pairs in pairs_by_kind) for piece in self.pieces
        ]  # of each piece

    def steps(self) -> list[Callable[[], None]]:
        """Return the moves that are left.

        Returns:
            One function for each piece.
        """
        return [partial(_make_all, left) for left in self._left]

    @property
    def is_made(self) -> bool:
        """Whether nothing is left."""
        return not any(self._left)


def _make_all(left: deque[tuple[Copier, torch.Tensor]]) -> None:
    while left:
        copier, pairs = left[0]
        copier.run(pairs)
        left.popleft()


class LayerEvents(Protocol):
    """Copies under way, of which each layer has an event; a Transfer made by_layer is one."""

    def wait_layer(self, layer: int) -> None:
        """Order the current stream's further work after the copies of a layer.

        Args:
            layer: Its index in the caches.

        Raises:
            Exception: The error of the copies.
        """

    def wait_stream(self) -> None:
        """Order the current stream's further work after all copies.

        Raises:
            Exception: The error of the copies.
        """


class Arrival:
    """Blocks under way, for which each layer of the computation waits by itself.

    Args:
        transfer: Its events.
        layer_ids: The layer in the whole model of each layer of the caches.
        pieces: Of the moves.
    """

    def __init__(self, transfer: LayerEvents, layer_ids: Sequence[int], pieces: Sequence[tuple[int, int]]) -> None:
        self.transfer = transfer
        self._index_of = {layer: index for index, layer in enumerate(layer_ids)}
        self._ends = [last for _, last in pieces]
        self._num_ready = 0  # layers that the current stream has waited for

    @property
    def is_over(self) -> bool:
        """Whether the computation has waited for every layer."""
        return self._num_ready == len(self._index_of)

    def wait_layer(self, layer: int) -> None:
        """Order the current stream's further work after the moves of a layer, and of all before it.

        Args:
            layer: Its number in the whole model.

        Raises:
            Exception: The error of the moves.
        """
        index = self._index_of[layer]
        if index >= self._num_ready:
            self.transfer.wait_layer(index)
            self._num_ready = self._ends[bisect_right(self._ends, index)]

    def wait(self) -> None:
        """Order the current stream's further work after all of the moves.

        Raises:
            Exception: The error of the moves.
        """
        if not self.is_over:
            self.transfer.wait_stream()
            self._num_ready = len(self._index_of)
