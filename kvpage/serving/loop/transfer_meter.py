"""TransferMeter: does the moves of blocks, and knows how many bytes they were and how long they took."""

import time
from collections import deque
from dataclasses import dataclass

import torch

from kvpage.blocks.moves import BlockMove, Kind
from kvpage.cache.cache_engine import CacheEngine

KINDS: tuple[Kind, ...] = ("swap_out", "swap_in", "copy")


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Moves of one kind since the engine was made. On a GPU, seconds lack those that are still under way."""

    num_blocks: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    def plus(self, num_blocks: int, num_bytes: int, seconds: float) -> "TransferStats":
        return TransferStats(self.num_blocks + num_blocks, self.num_bytes + num_bytes, self.seconds + seconds)


class TransferMeter:
    """Of one cache. On a GPU nothing is waited for: events on the stream take the time, and are read when due."""

    def __init__(self, cache: CacheEngine) -> None:
        self._cache = cache
        num_bytes = sum(layer.numel() * layer.element_size() for layer in cache.gpu_cache)
        self._block_bytes = num_bytes // max(cache.num_gpu_blocks, 1)
        self._stats = {kind: TransferStats() for kind in KINDS}
        self._under_way: deque[tuple[Kind, torch.cuda.Event, torch.cuda.Event]] = deque()

    def stats(self) -> dict[Kind, TransferStats]:
        return dict(self._stats)

    def move(self, move: BlockMove) -> None:
        """What CacheEngine.move does, and raises."""
        self._read_due()
        kind, pairs = move
        seconds = self._timed(kind, torch.from_numpy(pairs))
        self._stats[kind] = self._stats[kind].plus(len(pairs), len(pairs) * self._block_bytes, seconds)

    def _timed(self, kind: Kind, pairs: torch.Tensor) -> float:
        do = getattr(self._cache, kind)
        if self._cache.device.type != "cuda":
            begin = time.perf_counter()
            do(pairs)
            return time.perf_counter() - begin
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(self._cache.device)
        events[0].record(stream)
        do(pairs)
        events[1].record(stream)
        self._under_way.append((kind, *events))
        return 0.0

    def _read_due(self) -> None:
        while self._under_way and self._under_way[0][2].query():
            kind, begin, end = self._under_way.popleft()
            self._stats[kind] = self._stats[kind].plus(0, 0, begin.elapsed_time(end) / 1e3)
