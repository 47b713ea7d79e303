"""WrittenLayers: how far a step has come, for a thread that stores its first layers while it computes the next ones."""

import threading
from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from kvpage.cache.side_stream import side_stream
from kvpage.store.block_store import TokenIds


class Growth(NamedTuple):
    """A prompt of which a step computes a portion.

    tokens: The prompt so far, that portion included. start: the number before it. is_whole: whether nothing follows.
    """

    seq_id: Hashable
    tokens: TokenIds
    start: int
    is_whole: bool
    namespace: bytes


class WrittenLayers:
    """Groups of layers, each written when all its layers are, and the groups before it.

    The engine's thread tells, another thread waits. groups: the layers of each.
    has_failed: whether the step has failed.
    """

    def __init__(self, groups: Sequence[Iterable[int]], device: torch.device) -> None:
        self._left = [set(group) for group in groups]  # layers that are not written yet, of each group
        self._device = device
        self._streams: list[Any] = []  # of the groups that are written: each begins after the group
        self._is_over = self.has_failed = False
        self._changed = threading.Condition()

    def note(self, layer: int) -> None:
        """Note that a layer's K and V are written, or will be once the device has done its work up to now."""
        for group in self._left[len(self._streams) :]:
            group.discard(layer)
        while len(self._streams) < len(self._left) and not self._left[len(self._streams)]:
            with self._changed:
                self._streams.append(side_stream(self._device))
                self._changed.notify_all()

    def end(self) -> None:
        """Note that the step has computed: groups that are not written by now never will be."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def fail(self) -> None:
        """Note that the step has failed: nothing of it is to be stored any more."""
        with self._changed:
            self._is_over = self.has_failed = True
            self._changed.notify_all()

    def wait(self, group: int) -> AbstractContextManager[Any] | None:
        """Wait for a group; return a context in which it can be read, or None if it will never be written."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._streams) > group or self._is_over)
            if self.has_failed or len(self._streams) <= group:
                return None
            stream: AbstractContextManager[Any] = self._streams[group]()
            return stream
