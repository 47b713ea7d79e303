"""Saves: committed tokens on their way into a store, in a thread, while their blocks are kept where they are."""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import NamedTuple

from kvpage.cache.side_stream import side_stream
from kvpage.checks.started_pool import started_pool
from kvpage.serving.loop.moves.stored_group import Hold, StoredGroup
from kvpage.serving.loop.moves.written_layers import Growth, WrittenLayers
from kvpage.store.block_store import TokenIds


class _Save(NamedTuple):
    hold: Hold
    future: "Future[int]"


class Saves:
    """Saves under way. All methods are for the engine's thread.

    group: what is saved, and where it is held meanwhile. seconds: spent by the thread so far.
    """

    def __init__(self, group: StoredGroup) -> None:
        self.seconds = 0.0
        self._group = group
        self._saves: list[_Save] = []
        self._thread = started_pool(1, "kvpage-save")

    def __len__(self) -> int:
        return len(self._saves)

    @property
    def futures(self) -> "list[Future[int]]":
        """The saves under way, the oldest first."""
        return [save.future for save in self._saves]

    def begin(self, tokens: TokenIds, namespace: bytes) -> Hold | None:
        """Store tokens that are committed, as far as they are cached on the device; return what is held for that."""
        hold = self._group.hold(tokens, namespace)
        if hold is None:
            return None
        try:
            self._submit(hold, self._call(hold, tokens[: hold.num_tokens].copy(), namespace))
        except BaseException:
            hold.release()
            raise
        return hold

    def take_done(self) -> "list[Future[int]]":
        """Let go of the blocks of those that are done; return these."""
        done = [save for save in self._saves if save.future.done()]
        for save in done:
            self._saves.remove(save)
            save.hold.release()
        return [save.future for save in done]

    # --- a step's own saves, which LayerSaves has ---------------------------------------------------------------------

    def begin_step(self, prompts: Iterable[Growth], num_places: int) -> WrittenLayers | None:
        """Begin to store what a step computes, before it ends; None where saves begin after it."""
        return None

    def end_step(self) -> None:
        """End what `begin_step` has begun."""

    def has_begun(self, tokens: TokenIds, namespace: bytes) -> bool:
        """Return whether the step under way has begun to store these tokens: then they have a place."""
        return False

    def take_failures(self) -> int:
        """Return how many exceptions came besides those of the saves, since the last call."""
        return 0

    def close(self) -> None:
        """End the thread; nothing is under way."""
        self._thread.shutdown()

    def _call(self, hold: Hold, tokens: TokenIds, namespace: bytes) -> Callable[[], int]:
        """Return what the thread does for a save."""
        return lambda: hold.store(tokens, namespace)

    def _submit(self, hold: Hold, save: Callable[[], int]) -> None:
        """Begin a save after all that the device does now."""
        stream = side_stream(self._group.device)

        def timed() -> int:
            begin = time.perf_counter()
            with stream():
                num_stored = save()
            self.seconds += time.perf_counter() - begin
            return num_stored

        self._saves.append(_Save(hold, self._thread.submit(timed)))
