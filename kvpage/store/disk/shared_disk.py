"""SharedDisk: the records of disk tiers that other processes have open, kept up with as they write.

    contains, open ─► new places in each journal ─► the headers there ─► is it still the record?
                                    └── another id: a new owner ─► walk through all headers

Nothing is locked, made or written, and no owner is asked: look-ups read the files. Each record's header is read again
before it counts as found, and after each piece that is read. A record that its owner evicts or
replaces meanwhile is a miss.
"""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvpage.store.disk.disk_view import DiskView
from kvpage.store.disk.journal import JournalTail
from kvpage.store.tiers.tier import Key, Reader, ReadOnlyTier, RecordInfo, TierError, TierStats

EVERY = "*"
SETTLED_SECONDS = 1.0  # after which a directory's time of change tells of the next change for sure


class _Peer:
    """One directory. view: None while there is none that can be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.view: DiskView | None = None
        self._tail = JournalTail(path)

    def refresh(self) -> None:
        """Add the records that its owner has written. Raises OSError or ValueError: the old view stays."""
        try:
            positions = self._tail.poll()
        except FileNotFoundError:  # no owner has written here yet, or it was deleted
            self._tail.close()
            self.view = None
            return
        try:
            if positions is None or self.view is None:
                self.view = DiskView([self.path])  # readers of the old one keep it
            else:
                for position in positions:
                    self.view.look_at(self.path, position)
        except BaseException:
            self._tail.close()  # the next time all is looked at
            raise

    def close(self) -> None:
        """Let go of the directory. Readers keep its files until they are closed."""
        self._tail.close()
        self.view = None


class SharedDisk(ReadOnlyTier):
    """Directories of disk tiers that other processes write, for reading. They may come and go.

    A reader does not keep its record: one evicted during a read is a miss. Reads are no uses for the owner. A path
    whose last part is * stands for all directories beside each other there. Raises ValueError if there is no path.
    """

    def __init__(self, paths: Sequence[str | Path], name: str = "disk-view") -> None:
        places = [Path(path).absolute() for path in paths]
        if not places:
            raise ValueError("paths must be at least one, got none")
        self.name = name
        self._lock = threading.Lock()
        self._peers = {path: _Peer(path) for path in places if path.name != EVERY}
        self._parents: dict[Path, int | None] = {path.parent: None for path in places if path.name == EVERY}
        self._num_errors, self._is_closed = 0, False

    def contains(self, keys: Sequence[Key], timeout: float | None = None) -> list[bool]:
        views = self._views(timeout)
        return [any(view.holds(key) for view in views) for key in keys]

    def open(self, keys: Sequence[Key], timeout: float | None = None) -> list[Reader | None]:
        views = self._views(timeout)
        return [next((reader for view in views for reader in view.open([key]) if reader), None) for key in keys]

    def infos(self) -> Iterator[RecordInfo]:
        return iter([info for view in self._views(None) for info in view.infos()])

    def stats(self) -> TierStats:
        states = [view.stats() for view in self._views(None)]
        counts = sum(state.num_records or 0 for state in states), sum(state.num_bytes or 0 for state in states)
        return TierStats(
            self.name, *counts, None, corrupted=sum(state.corrupted for state in states), errors=self._num_errors
        )

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for peer in self._peers.values():
                peer.close()

    # --- inside ---

    def _views(self, timeout: float | None) -> list[DiskView]:
        """Return a view of each directory, as it is now."""
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            raise TierError(f"{self.name}: other calls took too long")
        try:
            if self._is_closed:
                raise TierError(f"{self.name} is closed")
            for parent in self._parents:
                self._list(parent)
            for peer in self._peers.values():
                self._refresh(peer)
            return [peer.view for peer in self._peers.values() if peer.view is not None]
        finally:
            self._lock.release()

    def _refresh(self, peer: _Peer) -> None:
        """Take up a directory's changes. One in trouble is counted, and the others go on."""
        try:
            peer.refresh()
        except (OSError, ValueError, TierError):
            self._num_errors += 1

    def _list(self, parent: Path) -> None:
        """Find the directories there, if some came or went since the last time."""
        try:
            changed = os.stat(parent).st_mtime_ns
            if changed == self._parents[parent]:
                return
            directories = {Path(entry.path) for entry in os.scandir(parent) if _is_trusted(entry, parent)}
        except OSError:
            return
        for path in sorted(directories - self._peers.keys()):
            self._peers[path] = _Peer(path)
        for path in [path for path in self._peers if path.parent == parent and path not in directories]:
            self._peers.pop(path).close()
        is_settled = time.time() - changed / 1e9 > SETTLED_SECONDS
        self._parents[parent] = changed if is_settled else None


def _is_trusted(entry: "os.DirEntry[str]", parent: Path) -> bool:
    """Return whether it is a directory of this user, or of the parent's owner: others could forge records."""
    owners = os.geteuid(), os.stat(parent).st_uid
    return entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid in owners
