"""StoreSaves: committed tokens on their way into a store, in a thread, while their blocks are kept where they are."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvpage.blocks.manager import BlockManager
from kvpage.blocks.states import Ids
from kvpage.cache.side_stream import side_stream
from kvpage.checks.started_pool import started_pool

__all__ = ["Saves", "StoreSaves"]

TokenIds = npt.NDArray[np.int32]


@dataclass(slots=True)
class _Save:
    release: Callable[[], object]  # lets go of the blocks
    future: "Future[int]"


class Saves(ABC):
    """Saves under way. All methods are for the engine's thread.

    device: of the blocks. seconds: spent by the thread so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0
        self._device = device
        self._saves: list[_Save] = []
        self._thread = started_pool(1, "kvpage-save")

    def __len__(self) -> int:
        return len(self._saves)

    @property
    def futures(self) -> "list[Future[int]]":
        """What is under way, the oldest first."""
        return [save.future for save in self._saves]

    @abstractmethod
    def begin(self, tokens: TokenIds, namespace: bytes) -> None:
        """Store tokens that are committed, as far as they are cached in whole blocks on the device."""

    def take_done(self) -> "list[Future[int]]":
        """Let go of the blocks of those that are done; return these."""
        done = [save for save in self._saves if save.future.done()]
        for save in done:
            self._saves.remove(save)
            save.release()
        return [save.future for save in done]

    def has_begun(self, tokens: TokenIds, namespace: bytes) -> bool:
        """Return whether the step under way has begun to store these tokens: then they have a place."""
        return False

    def take_failures(self) -> int:
        """Return how many exceptions came besides those of the saves, since the last call."""
        return 0

    def close(self) -> None:
        """End the thread; nothing is under way."""
        self._thread.shutdown()

    def _submit(self, release: Callable[[], object], save: Callable[[], int]) -> None:
        """Begin a save after all that the device does now. `release` is called once it is done."""
        stream = side_stream(self._device)

        def timed() -> int:
            begin = time.perf_counter()
            with stream():
                num_stored = save()
            self.seconds += time.perf_counter() - begin
            return num_stored

        self._saves.append(_Save(release, self._thread.submit(timed)))


class StoreSaves(Saves):
    """Saves of blocks that all layers share.

    store_blocks: called in the thread with tokens, block ids and a namespace; returns how many tokens the store holds.
    manager: of the blocks. device: theirs.
    """

    def __init__(
        self, store_blocks: Callable[[TokenIds, Ids, bytes], int], manager: BlockManager, device: torch.device
    ) -> None:
        super().__init__(device)
        self._store_blocks, self._manager = store_blocks, manager

    def begin(self, tokens: TokenIds, namespace: bytes) -> None:
        """Store tokens that are committed, as far as they are cached in whole blocks on the device."""
        tree = self._manager.tree
        match = tree.match(tokens, namespace, num_left_over=0, is_hit=False)
        if match.num_device_blocks < match.num_blocks:
            tree.trim(match)
        if match.num_blocks == 0:
            tree.release(match)
            return
        try:
            block_ids, stored = match.block_ids.copy(), tokens[: match.num_tokens].copy()
            self._submit(lambda: tree.release(match), self._storing(stored, block_ids, namespace))
        except BaseException:
            tree.release(match)
            raise
        self._note_held(block_ids)

    def _storing(self, tokens: TokenIds, block_ids: Ids, namespace: bytes) -> Callable[[], int]:
        """Return what the thread does for a save."""
        return lambda: self._store_blocks(tokens, block_ids, namespace)

    def _note_held(self, block_ids: Ids) -> None:
        """Note that a save holds these blocks from now on."""
