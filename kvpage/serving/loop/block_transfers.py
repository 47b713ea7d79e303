"""BlockTransfers: carries out the moves of blocks that a manager asks for, and measures them.

manager.due_moves() ─► CacheEngine.swap_out, swap_in, copy ─► the bytes are moved
                       num_blocks, num_bytes and seconds by kind; the speed, for LoadOrCompute
"""

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvpage.blocks.load_or_compute import LoadOrCompute
from kvpage.blocks.manager import BlockManager
from kvpage.blocks.moves import Kind, Pairs
from kvpage.cache.cache_engine import CacheEngine

KINDS: tuple[Kind, ...] = ("swap_out", "swap_in", "copy")


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Moves of one kind since the engine was made.

    Attributes:
        num_blocks: Blocks that were moved.
        num_bytes: Their bytes in all layers.
        seconds: Time that the moves took. On a GPU those that are still under way are not in it.
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

    rule: learns how fast the host is, from moves of a CPU's cache; None if nothing asks. On a GPU nothing waits for a
    move: events on the stream take its time, and are read at a later call.
    tell: called with each move that was made, for other ranks; None if there are none.
    """

    def __init__(
        self,
        cache: CacheEngine,
        manager: BlockManager,
        rule: LoadOrCompute | None = None,
        tell: Callable[[Kind, Pairs], object] | None = None,
    ) -> None:
        self._cache, self._manager, self._rule, self._tell = cache, manager, rule, tell
        num_bytes = sum(layer.numel() * layer.element_size() for layer in cache.gpu_cache)
        self._block_bytes = num_bytes // max(cache.num_gpu_blocks, 1)
        self._stats = {kind: TransferStats() for kind in KINDS}
        self._under_way: deque[tuple[Kind, torch.cuda.Event, torch.cuda.Event]] = deque()

    def stats(self) -> dict[Kind, TransferStats]:
        """Return the moves so far, by kind."""
        return dict(self._stats)

    def run(self) -> None:
        """Carry out all moves that are due, in their order.

        A move that raises stays due with those after it, and comes first the next time.
        """
        if not self._manager.space.has_moves:
            return
        start, moved = time.monotonic(), Counter[Kind]()
        for kind, pairs in self._manager.due_moves():
            self._read_events()
            begin = self._begin()
            getattr(self._cache, kind)(torch.from_numpy(pairs))
            self._count(kind, len(pairs), begin)
            if self._tell is not None:
                self._tell(kind, pairs)
            moved[kind] += len(pairs)
        if self._rule and self._cache.device.type == "cpu" and moved["swap_in"]:
            self._rule.saw_transfer(moved.total() * self._rule.block_bytes, time.monotonic() - start)

    def _begin(self) -> "float | torch.cuda.Event":
        return self._event() if self._cache.device.type == "cuda" else time.perf_counter()

    def _count(self, kind: Kind, num_blocks: int, begin: "float | torch.cuda.Event") -> None:
        seconds = 0.0
        if isinstance(begin, float):
            seconds = time.perf_counter() - begin
        else:
            self._under_way.append((kind, begin, self._event()))
        self._stats[kind] = self._stats[kind].plus(num_blocks, num_blocks * self._block_bytes, seconds)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call, unused-ignore]  # not annotated
        event.record(torch.cuda.current_stream(self._cache.device))
        return event

    def _read_events(self) -> None:
        # torch does not annotate query
        while self._under_way and self._under_way[0][2].query():  # type: ignore[no-untyped-call, unused-ignore]
            kind, begin, end = self._under_way.popleft()
            self._stats[kind] = self._stats[kind].plus(0, 0, begin.elapsed_time(end) / 1e3)
