"""TierFeed: tells listeners which records come into the tiers and leave them, in order, in a thread of its own.

    a tier, with its lock held ─► note ─► queue ─► thread ─► listeners, with no lock of a tier or a call

A tier notes a change while it makes it. So the notes of one tier are in the order of its changes. A tier never waits
for a listener: a note that finds a full queue is lost, and counted.
"""

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import NamedTuple

from kvpage.store.stack.placed import Placed
from kvpage.store.tiers.tier import Key

MOST_AT_ONCE = 1024
MAX_WAITING = 1 << 16  # notes; about 300 bytes each with their keys
logger = logging.getLogger(__name__)


class TierNote(NamedTuple):
    """A change of one record. at: the tier's number. reason: as in `Tier.watch`."""

    at: int
    key: Key
    reason: str


TierListener = Callable[[list[TierNote]], None]


class TierFeed:
    """Thread-safe. Until the first listener comes, no tier notes anything, and there is no thread.

    num_lost: notes that no listener was told, since max_waiting others waited.
    """

    def __init__(self, tiers: Sequence[Placed], max_waiting: int = MAX_WAITING) -> None:
        self._tiers, self._max_waiting, self.num_lost = tiers, max_waiting, 0
        self._counting = threading.Lock()
        self._notes: SimpleQueue[TierNote | threading.Event | None] = SimpleQueue()
        self._listeners: list[TierListener] = []
        self._telling = threading.RLock()  # held while listeners are called
        self._thread: threading.Thread | None = None

    def add(self, listener: TierListener) -> None:
        """Tell the listener from now on."""
        with self._telling:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="kvpage-store-events", daemon=True)
                thread.start()  # may fail: then nothing has changed
                self._thread = thread
                for at, placed in enumerate(self._tiers):
                    placed.tier.watch(functools.partial(self._note, at))
            self._listeners.append(listener)

    def drop(self, listener: TierListener) -> None:
        """Return when the listener is told nothing any more; at once in the listener itself."""
        with self._telling:
            if listener in self._listeners:
                self._listeners.remove(listener)

    @property
    def is_telling_here(self) -> bool:
        """Whether this is a listener's thread."""
        return threading.current_thread() is self._thread

    def flush(self) -> None:
        """Wait until the listeners were told of everything that has happened; not in a listener itself."""
        if self._thread is not None and not self.is_telling_here:
            told = threading.Event()
            self._notes.put(told)
            told.wait()

    def close(self) -> None:
        """Tell the waiting notes, and end the thread; not in a listener itself."""
        for placed in self._tiers if self._thread is not None else ():
            placed.tier.watch(None)
        self._notes.put(None)
        if self._thread is not None:
            self._thread.join()

    def _note(self, at: int, key: Key, reason: str) -> None:
        if self._notes.qsize() < self._max_waiting:
            self._notes.put(TierNote(at, key, reason))
        else:
            with self._counting:
                self.num_lost += 1

    def _run(self) -> None:
        is_open = True
        while is_open:
            batch = [self._notes.get()]
            try:
                while len(batch) < MOST_AT_ONCE:
                    batch.append(self._notes.get_nowait())
            except Empty:
                pass
            is_open = None not in batch
            self._tell([note for note in batch if isinstance(note, TierNote)])
            for marker in batch:
                if isinstance(marker, threading.Event):
                    marker.set()

    def _tell(self, notes: list[TierNote]) -> None:
        with self._telling:
            for listener in list(self._listeners) if notes else ():
                try:
                    listener(notes)
                except (
                    BaseException
                ):  # the border of this thread, which ends by `close` alone: the other listeners go on
                    logger.exception("a listener of a store failed")
