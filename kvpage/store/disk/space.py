"""Space: who has which slots of a segment. Drive: what the segments of one directory have in common.

    slot    1        9            40       52                     64
            | entry  | free       | entry  | entry                |       entries and free runs make up the segment

Nothing here touches the disk, and nothing is thread-safe: the tier holds its lock.
"""

import time
from collections.abc import Callable
from pathlib import Path

from kvpage.store.disk.segment import Run, Segment
from kvpage.store.tiers.extents import Extents
from kvpage.store.tiers.tier import Key


class Drive:
    """Whether it is in trouble, and how many calls are at its files: nothing is closed until they leave."""

    def __init__(self, path: Path, retry_seconds: float) -> None:
        self.path = path
        self.num_users = 0
        self._retry_seconds = retry_seconds
        self._rests_until = 0.0
        self._when_unused: Callable[[], None] | None = None

    @property
    def is_resting(self) -> bool:
        return time.monotonic() < self._rests_until

    def rest(self) -> None:
        """After an error: others are preferred for a while."""
        self._rests_until = time.monotonic() + self._retry_seconds

    def enter(self) -> None:
        self.num_users += 1

    def leave(self) -> None:
        self.num_users -= 1
        if self.num_users == 0 and self._when_unused is not None:
            self._when_unused()

    def retire(self, when_unused: Callable[[], None]) -> None:
        """Calls it as soon as nobody uses the drive, at once if nobody does."""
        self._when_unused = when_unused
        if self.num_users == 0:
            when_unused()


class Entry:
    """A run that is in use. It is released when its header says that it is free and nobody reads or writes it.

        writing     num_users 1     marked free       from create on; the header becomes a record's when it is committed
        findable    num_users 0..   a record's        the tier's index leads to it
        forgotten   num_users 0..   a record's        its header is to be marked free as soon as the disk takes it
                    num_users 1..   marked free       its readers keep it

    last_used: seconds of time.time().
    """

    __slots__ = ("space", "run", "num_users", "is_findable", "is_marked_free", "last_used")

    def __init__(self, space: "Space", run: Run) -> None:
        self.space, self.run = space, run
        self.num_users = 0
        self.is_findable = False
        self.is_marked_free = run.key is None
        self.last_used = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether it could be evicted."""
        return self.is_findable and self.num_users == 0

    @property
    def key(self) -> Key:
        assert self.run.key is not None, "only an entry of a record has one"
        return self.run.key

    @property
    def is_over(self) -> bool:
        return self.is_marked_free and self.num_users == 0

    def release_if_over(self) -> None:
        if self.is_over:
            self.space.release(self)


class Space:
    """A segment's entries and free runs. Slot 0 is the segment's header, so that extents begin at 1 of its slots."""

    def __init__(self, segment: Segment, drive: Drive) -> None:
        self.segment, self.drive = segment, drive
        self.is_lost = False  # somebody has deleted the file
        self.untold: list[Run] = []  # what no header told of when it was found: somebody has damaged one
        self._extents = Extents(segment.num_slots - 1)
        self._entries: dict[int, Entry] = {}  # by their first slot
        self._ends: dict[int, Entry] = {}  # by the slot behind them

    @classmethod
    def found(cls, segment: Segment, drive: Drive) -> "Space":
        """With an entry for each record that the segment's headers tell of. OSError."""
        space, free = cls(segment, drive), []
        for run in segment.runs():
            space._extents.take(run.slot - 1, run.num_slots)  # each at the beginning of what is left: O(log n)
            if run.key is None:
                free.append(run.slot)
                space.untold += [] if run.is_told else [run]
            else:
                space._put(Entry(space, run))
        for slot in free:
            space._extents.release(slot - 1)
        return space

    @property
    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    @property
    def num_free(self) -> int:
        return self._extents.num_free

    def allocate(self, num_slots: int) -> Entry | None:
        """The smallest free run that is long enough, as an entry without a record; None if there is none."""
        begin = self._extents.allocate(num_slots)
        if begin is None:
            return None
        entry = Entry(self, Run(begin + 1, num_slots))
        self._put(entry)
        return entry

    def rest_behind(self, entry: Entry) -> Run | None:
        """The free run behind an entry, which was cut from it."""
        num_slots = self._extents.free_at(entry.run.end - 1)
        return Run(entry.run.end, num_slots) if num_slots else None

    def release(self, entry: Entry) -> None:
        del self._entries[entry.run.slot]
        del self._ends[entry.run.end]
        self._extents.release(entry.run.slot - 1)

    def room_around(self, entry: Entry, num_slots: int) -> list[Entry] | None:
        """The entries that would have to go for a run of so many slots that includes this one: its neighbours, the one
        that was not used for longer first. None if something that is in use is in the way, or the segment too short.
        """
        going, first, last = [entry], entry.run.slot, entry.run.end
        while num_slots < self.segment.num_slots:
            first -= self._extents.free_before(first - 1)
            last += self._extents.free_at(last - 1)
            if last - first >= num_slots:
                return going
            sides = [side for side in (self._ends.get(first), self._entries.get(last)) if side and side.is_idle]
            if not sides:
                return None
            side = min(sides, key=lambda side: side.last_used)
            going.append(side)
            first, last = min(first, side.run.slot), max(last, side.run.end)
        return None

    def check(self) -> None:
        """RuntimeError unless entries and free runs make up the segment, and its headers tell of the findable entries,
        and at most of those besides that are still to be marked free.
        """
        self._extents.check()
        num_used = sum(entry.run.num_slots for entry in self._entries.values())
        if num_used + self.num_free != self.segment.num_slots - 1 or len(self._ends) != len(self._entries):
            raise RuntimeError(f"{num_used} slots in use and {self.num_free} free ones of {self.segment.num_slots - 1}")
        lost = [entry.run for entry in self._entries.values() if entry.is_over]
        findable = {entry.run for entry in self._entries.values() if entry.is_findable}
        marked = {entry.run for entry in self._entries.values() if not entry.is_marked_free}
        told = {run for run in self.segment.runs() if run.key is not None}
        if lost or not findable <= told <= marked:
            raise RuntimeError(f"{self.segment.path}: lost {lost}, headers tell {told}, not {findable} to {marked}")

    def _put(self, entry: Entry) -> None:
        self._entries[entry.run.slot] = self._ends[entry.run.end] = entry
