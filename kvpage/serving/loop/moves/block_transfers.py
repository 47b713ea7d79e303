"""BlockTransfers: carries out the moves of blocks that a manager asks for, and measures them.

manager.due_moves() ─► CacheEngine.swap_out, swap_in, copy ─► the bytes are moved         on a CPU
manager.take_moves() ─► CacheEngine.start_moves ─► Arrival: each layer waits for its own   on a GPU
                       num_blocks, num_bytes and seconds by kind; the speed, for LoadOrCompute
a store's load ─► expected: blocks that are cached before their bytes are there; moves and readers wait for them
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from kvpage.blocks.load_or_compute import LoadOrCompute
from kvpage.blocks.manager import BlockManager
from kvpage.blocks.moves import BlockMove, Kind, Pairs
from kvpage.cache.cache_engine import CacheEngine
from kvpage.cache.layered_moves import Arrival, LayeredMoves
from kvpage.cache.transfer import Transfer
from kvpage.serving.loop.moves.expected_blocks import ExpectedBlocks

KINDS: tuple[Kind, ...] = ("swap_out", "swap_in", "copy")


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Moves of one kind since the engine was made.

    Attributes:
        num_blocks: Blocks that were moved.
        num_bytes: Their bytes in all layers.
        seconds: Time that the moves took. On a GPU those that are still under way are not in it, and moves that ran
            together share their time by their bytes.
    """

    num_blocks: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    def plus(self, num_blocks: int, num_bytes: int, seconds: float) -> "TransferStats":
        """Add one more move.

        Args:
            num_blocks: Its blocks.
            num_bytes: Its bytes.
            seconds: Its time.

        Returns:
            The sum of both.
        """
        return TransferStats(self.num_blocks + num_blocks, self.num_bytes + num_bytes, self.seconds + seconds)


class BlockTransfers:
    """The moves between the blocks of one cache, which `manager` gives out.

    rule: learns how fast the host is, from moves of a CPU's cache; None if nothing asks.
    is_beside: whether moves run beside the computation; by default on a GPU. There nothing waits for a move: events on
        the stream take its time, and are read at a later call.
    tell: called with each move that was made, for other ranks, and not beside the computation; None if there are none.
    expected: blocks that a store fills beside the computation. No move begins before they are full.
    """

    def __init__(
        self,
        cache: CacheEngine,
        manager: BlockManager,
        rule: LoadOrCompute | None = None,
        is_beside: bool | None = None,
        tell: Callable[[Kind, Pairs], object] | None = None,
    ) -> None:
        self._cache, self._manager, self._rule, self._tell = cache, manager, rule, tell
        num_bytes = sum(layer.numel() * layer.element_size() for layer in cache.gpu_cache)
        self._block_bytes = num_bytes // max(cache.num_gpu_blocks, 1)
        self._stats = {kind: TransferStats() for kind in KINDS}
        self.expected = ExpectedBlocks()
        self._is_beside = (cache.device.type == "cuda" and tell is None) if is_beside is None else is_beside
        self._taken: list[BlockMove] = []  # from the manager, not begun
        self._begun: LayeredMoves | None = None  # with a move that has raised
        self._arrival: Arrival | None = None  # the last one

    @property
    def is_beside(self) -> bool:
        """Whether blocks are moved beside the computation."""
        return self._is_beside

    def stats(self) -> dict[Kind, TransferStats]:
        """Return the moves so far, by kind."""
        return dict(self._stats)

    def run(self) -> None:
        """Carry out all moves that are due, in their order, before the current stream's further work.

        A move that raises stays due with those after it, and comes first the next time.
        """
        if self._is_beside:
            arrival = self.start()
            if arrival is not None:
                arrival.wait()
            return
        if not self._manager.space.has_moves:
            return
        self.expected.wait()
        start, moved = time.monotonic(), Counter[Kind]()
        for kind, pairs in self._manager.due_moves():
            begin = time.perf_counter()
            getattr(self._cache, kind)(torch.from_numpy(pairs))
            self._count(kind, len(pairs), time.perf_counter() - begin)
            if self._tell is not None:
                self._tell(kind, pairs)
            moved[kind] += len(pairs)
        if self._rule and moved["swap_in"]:
            self._rule.saw_transfer(moved.total() * self._rule.block_bytes, time.monotonic() - start)

    def start(self) -> Arrival | None:
        """Begin all moves that are due; return what each layer waits for before it touches a block.

        None says that there is nothing to wait for: on a CPU they are made on return. Errors are as of `run`.
        """
        if not self._is_beside:
            self.run()
            return None
        if self._arrival is not None:
            self._arrival.wait()  # for what a step that ended early has not
            self._arrival = None
        while self._begun is not None or self._taken or self._manager.space.has_moves:
            self.expected.wait()
            if self._arrival is not None:
                self._arrival.wait()
            self._arrival = self._start_due()
        return self._arrival

    def _start_due(self) -> Arrival:
        if self._begun is None:
            self._taken += self._manager.take_moves()
            self._begun, self._taken = self._cache.layered_moves(self._taken), []
        arrival = self._cache.start_moves(self._begun, partial(self._note_done, self._begun.num_blocks))
        for kind, num_blocks in self._begun.num_blocks.items():
            self._count(kind, num_blocks, 0.0)
        self._begun = None
        return arrival

    def _note_done(self, num_blocks: Counter[Kind], transfer: Transfer) -> None:
        """Add the time of moves that ran together, shared by their bytes."""
        for kind, count in num_blocks.items():
            self._stats[kind] = self._stats[kind].plus(0, 0, (transfer.seconds or 0.0) * count / num_blocks.total())

    def _count(self, kind: Kind, num_blocks: int, seconds: float) -> None:
        self._stats[kind] = self._stats[kind].plus(num_blocks, num_blocks * self._block_bytes, seconds)
