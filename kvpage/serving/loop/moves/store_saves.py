"""StoreSaves: committed tokens on their way into a store, in a thread, while their blocks are kept where they are."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvpage._C import Match
from kvpage.blocks.manager import BlockManager
from kvpage.blocks.states import Ids
from kvpage.cache.side_stream import side_stream
from kvpage.checks.started_pool import started_pool

__all__ = ["StoreSaves"]

TokenIds = npt.NDArray[np.int32]


@dataclass(slots=True)
class _Save:
    match: Match  # keeps the blocks
    future: "Future[int]"


class StoreSaves:
    """Saves under way. All methods are for the engine's thread.

    store_blocks: called in the thread with tokens, block ids and a namespace; returns how many tokens the store holds.
    manager: of the blocks. device: theirs. seconds: spent by the thread so far.
    """

    def __init__(
        self, store_blocks: Callable[[TokenIds, Ids, bytes], int], manager: BlockManager, device: torch.device
    ) -> None:
        self.seconds = 0.0
        self._store_blocks, self._manager, self._device = store_blocks, manager, device
        self._saves: list[_Save] = []
        self._thread = started_pool(1, "kvpage-save")

    def __len__(self) -> int:
        return len(self._saves)

    @property
    def futures(self) -> "list[Future[int]]":
        """What is under way, the oldest first."""
        return [save.future for save in self._saves]

    def begin(self, tokens: TokenIds, namespace: bytes) -> None:
        """Store tokens that are committed, as far as they are cached in whole blocks on the device."""
        tree = self._manager.tree
        match = tree.match(tokens, namespace, num_left_over=0)
        if match.num_device_blocks < match.num_blocks:
            tree.trim(match)
        if match.num_blocks == 0:
            tree.release(match)
            return
        try:
            self._saves.append(_Save(match, self._start(tokens[: match.num_tokens].copy(), match, namespace)))
        except BaseException:
            tree.release(match)
            raise

    def take_done(self) -> "list[Future[int]]":
        """Let go of the blocks of those that are done; return these."""
        done = [save for save in self._saves if save.future.done()]
        for save in done:
            self._saves.remove(save)
            self._manager.tree.release(save.match)
        return [save.future for save in done]

    def close(self) -> None:
        """End the thread; nothing is under way."""
        self._thread.shutdown()

    def _start(self, tokens: TokenIds, match: Match, namespace: bytes) -> "Future[int]":
        block_ids, stream = match.block_ids.copy(), side_stream(self._device)

        def store() -> int:
            begin = time.perf_counter()
            with stream():
                num_stored = self._store_blocks(tokens, block_ids, namespace)
            self.seconds += time.perf_counter() - begin
            return num_stored

        return self._thread.submit(store)
