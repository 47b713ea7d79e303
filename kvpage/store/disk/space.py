"""Space: the entries and free runs of one segment.

    slot    1        9            40       52                     64
            | entry  | free       | entry  | entry                |       entries and free runs make up the segment

Nothing here touches the disk. Nothing is thread-safe: the tier holds its lock.
"""

from kvpage.store.disk.drive import Drive
from kvpage.store.disk.segment import Run, Segment
from kvpage.store.tiers.extents import Extents
from kvpage.store.tiers.tier import Key


class Entry:
    """A run in use. It is released when its header marks it free and it has no reader or writer.

        writing     num_users 1     marked free       from `create` on; commit turns the header into a record's
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
        """Return whether it could be evicted."""
        return self.is_findable and self.num_users == 0

    @property
    def key(self) -> Key:
        assert self.run.key is not None, "only an entry of a record has one"
        return self.run.key

    @property
    def is_over(self) -> bool:
        """Return whether its slots can be given to others."""
        return self.is_marked_free and self.num_users == 0


class Space:
    """The entries and free runs of a segment.

    Slot 0 is the segment's header, so that unit 0 of the extents is slot 1.
    is_lost: whether the file was deleted from outside.
    unclaimed: runs that no header described when the segment was opened, since one was damaged.
    """

    def __init__(self, segment: Segment, drive: Drive) -> None:
        self.segment, self.drive = segment, drive
        self.is_lost = False
        self.unclaimed: list[Run] = []
        self._extents = Extents(segment.num_slots - 1)
        self._entries: dict[int, Entry] = {}  # by their first slot
        self._ends: dict[int, Entry] = {}  # by the slot after them

    @classmethod
    def found(cls, segment: Segment, drive: Drive) -> "Space":
        """Return a space with an entry for each record in the segment's headers. Raises OSError."""
        space, free = cls(segment, drive), []
        for run in segment.runs():
            space._extents.take(run.slot - 1, run.num_slots)  # each at the beginning of the rest: O(log n)
            if run.key is None:
                free.append(run.slot)
                space.unclaimed += [] if run.has_header else [run]
            else:
                space._put(Entry(space, run))
        for slot in free:
            space._extents.release(slot - 1)
        return space

    @property
    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    @property
    def num_free_bytes(self) -> int:
        """Return the bytes that are free, or that the segment may grow by."""
        return (self._extents.num_free + self.num_growable) * self.segment.slot_bytes

    @property
    def num_growable(self) -> int:
        """Return the slots that the segment may grow by; 0 for a while after the disk refused some."""
        return 0 if self.drive.is_full else self.segment.max_slots - 1 - self._extents.num_units

    def num_lacking(self, num_slots: int) -> int:
        """Return the slots that the segment lacks for a run of `num_slots` at its end."""
        return num_slots - self._extents.free_before(self._extents.num_units)

    def extend(self) -> None:
        """Take up the slots that the segment has grown by."""
        self._extents.extend(self.segment.num_slots - 1 - self._extents.num_units)

    def allocate(self, num_slots: int) -> Entry | None:
        """Return the smallest free run that is long enough, as an entry without a record; None if there is none."""
        begin = self._extents.allocate(num_slots)
        if begin is None:
            return None
        entry = Entry(self, Run(begin + 1, num_slots))
        self._put(entry)
        return entry

    def remainder(self, entry: Entry) -> Run | None:
        """Return the free run after an entry, which was cut from it."""
        num_slots = self._extents.free_at(entry.run.end - 1)
        return Run(entry.run.end, num_slots) if num_slots else None

    def release(self, entry: Entry) -> None:
        del self._entries[entry.run.slot]
        del self._ends[entry.run.end]
        self._extents.release(entry.run.slot - 1)

    def victims_around(self, entry: Entry, num_slots: int) -> list[Entry] | None:
        """Return the entries to evict for a run of `num_slots` that includes this one.

        They are its neighbours, the least recently used side first. At the end the segment may have to grow, too. None
        if an entry in use is in the way, or the segment is too short.
        """
        victims, first, last = [entry], entry.run.slot, entry.run.end
        end, num_growable = self._extents.num_units + 1, self.num_growable
        while num_slots < end + num_growable:
            first -= self._extents.free_before(first - 1)
            last += self._extents.free_at(last - 1)
            if last - first + (num_growable if last == end else 0) >= num_slots:
                return victims
            sides = [side for side in (self._ends.get(first), self._entries.get(last)) if side and side.is_idle]
            if not sides:
                return None
            side = min(sides, key=lambda side: side.last_used)
            victims.append(side)
            first, last = min(first, side.run.slot), max(last, side.run.end)
        return None

    def check(self) -> None:
        """Compare entries, free runs and headers.

        Raises RuntimeError unless entries and free runs make up the segment. Its headers must describe the findable
        entries, and at most the entries besides that are still to be marked free.
        """
        self._extents.check()
        num_used = sum(entry.run.num_slots for entry in self._entries.values())
        num_free, num_slots = self._extents.num_free, self._extents.num_units
        if num_used + num_free != num_slots or len(self._ends) != len(self._entries):
            raise RuntimeError(f"{num_used} slots in use and {num_free} free ones of {num_slots}")
        lost = [entry.run for entry in self._entries.values() if entry.is_over]
        findable = {entry.run for entry in self._entries.values() if entry.is_findable}
        marked = {entry.run for entry in self._entries.values() if not entry.is_marked_free}
        records = {run for run in self.segment.runs() if run.key is not None}
        if lost or not findable <= records <= marked:
            raise RuntimeError(f"{self.segment.path}: lost {lost}, headers have {records}, not {findable} to {marked}")

    def _put(self, entry: Entry) -> None:
        self._entries[entry.run.slot] = self._ends[entry.run.end] = entry
