"""MemoryTier: records in one slab of host memory, which is pinned if a GPU reads and writes it."""

import threading
import time
from collections.abc import Iterator, Sequence

import torch

from kvpage.checks.values import check_flag
from kvpage.layout.host_memory import touch, zeros
from kvpage.layout.pinned_memory import pinned_zeros
from kvpage.store.tiers.extents import Extents
from kvpage.store.tiers.policy import VictimOrder
from kvpage.store.tiers.tier import Key, Note, Reader, RecordInfo, Tier, TierError, TierStats, Writer

UNIT = 4096
PINNED_PIECE_BYTES = 4 << 30  # that are registered with CUDA in one call; no record lies across the border of two


class _Entry:
    """A record's place. It is freed when it has no reader and no key leads to it."""

    def __init__(self, key: Key, begin: int, num_bytes: int) -> None:
        self.key, self.begin, self.num_bytes = key, begin, num_bytes
        self.num_units = -(-num_bytes // UNIT)
        self.num_readers = 0
        self.is_findable = False
        self.last_used = time.time()


class _MemoryReader(Reader):
    """Pieces are views of the slab."""

    is_in_memory = True

    def __init__(self, tier: "MemoryTier", entry: _Entry) -> None:
        self._tier, self._entry = tier, entry
        self.num_bytes = entry.num_bytes
        self._is_open = True

    def piece(self, begin: int, end: int) -> memoryview:
        if not self._is_open:
            raise ValueError("a reader must not be closed, this one is")
        return self._tier._bytes(self._entry, begin, end)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._tier._let_go(self._entry)


class _MemoryWriter(Writer):
    """Pieces are where the record stays."""

    is_in_memory = True

    def __init__(self, tier: "MemoryTier", entry: _Entry) -> None:
        self.tier, self.entry = tier, entry
        self.key, self.num_bytes = entry.key, entry.num_bytes
        self.is_open = True
        self._end = 0  # of the pieces

    def piece(self, begin: int, end: int) -> memoryview:
        if not self.is_open:
            raise ValueError("a writer must not be closed, this one is")
        if not self._end == begin <= end <= self.num_bytes:
            raise ValueError(f"a piece must begin at {self._end} and end by {self.num_bytes}, got [{begin}, {end}]")
        view = self.tier._bytes(self.entry, begin, end)
        self._end = end
        return view

    def check_whole(self) -> None:
        """Raise ValueError if pieces are missing."""
        if self._end != self.num_bytes:
            raise ValueError(f"a record must be written to its end, {self._end} of {self.num_bytes} bytes are")

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.tier._give_up(self.entry)


class MemoryTier(Tier):
    """Records in a slab of host memory of `capacity` bytes. policy: one of POLICIES.

    pin_memory: pin the slab, so that a GPU's copies run beside the computation; by default if there is a GPU. prefault:
    have the system give the whole slab when the tier is made, which takes about 0.1 s for a GiB. Otherwise it gives
    each page when it is first written, and the first stores are slow. A pinned slab is always given, in its true size:
    nothing is rounded up to a power of two. In a slab beyond 4 GiB a pinned record has at most 4 GiB, and 4 KiB of each
    4 GiB stay unused.

    Raises ValueError for a wrong capacity or policy; OSError if the system has less memory, or cannot pin it.
    """

    is_in_memory = True

    def __init__(
        self,
        capacity: int,
        policy: str = "lru",
        pin_memory: bool | None = None,
        name: str = "memory",
        prefault: bool = True,
    ) -> None:
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < UNIT:
            raise ValueError(f"capacity must be an integer of at least {UNIT} bytes, got {capacity!r}")
        check_flag("prefault", prefault)
        self.name = name
        self._order = VictimOrder(policy)
        self._extents = Extents(capacity // UNIT)
        pin = torch.cuda.is_available() if pin_memory is None else pin_memory
        self._busy: dict[int, int] = {}  # units that cannot be evicted, by the first one: of writers, readers, borders
        self._slab = self._pinned_slab() if pin else zeros((capacity // UNIT * UNIT,), torch.uint8)
        if prefault and not pin:
            touch([self._slab], name)
        self._view: memoryview | None = self._slab.numpy().data
        self._entries: dict[Key, _Entry] = {}
        self._num_bytes = self._num_evicted = 0
        self._lock = threading.Lock()
        self._note: Note | None = None

    def watch(self, note: Note | None) -> None:
        with self._lock:
            self._note = note

    def contains(self, keys: Sequence[Key], timeout: float | None = None) -> list[bool]:
        with self._lock:
            self._check_open()
            return [key in self._entries for key in keys]

    def touch(self, keys: Sequence[Key], timeout: float | None = None) -> list[bool]:
        with self._lock:
            self._check_open()
            return [self._use(key) is not None for key in keys]

    def open(self, keys: Sequence[Key], timeout: float | None = None) -> list[Reader | None]:
        with self._lock:
            self._check_open()
            return [self._open(key) for key in keys]

    def create(self, key: Key, num_bytes: int) -> Writer | None:
        with self._lock:
            self._check_open()
            begin = self._make_room(-(-num_bytes // UNIT))
            if begin is None:
                return None
            entry = _Entry(key, begin, num_bytes)
            self._busy[begin] = entry.num_units
            return _MemoryWriter(self, entry)

    def commit(self, writers: Sequence[Writer], timeout: float | None = None) -> list[bool]:
        with self._lock:
            self._check_open()
            open_writers = [
                writer
                for writer in writers
                if isinstance(writer, _MemoryWriter) and writer.tier is self and writer.is_open
            ]
            if len(open_writers) != len(writers) or len(set(map(id, open_writers))) != len(open_writers):
                raise ValueError("writers must be this tier's, not closed, each given once")
            for writer in open_writers:
                writer.check_whole()
            return [self._commit(writer) for writer in open_writers]

    def remove(self, keys: Sequence[Key], timeout: float | None = None) -> int:
        with self._lock:
            self._check_open()
            return sum(self._forget(key, "removed") for key in keys)

    def infos(self) -> Iterator[RecordInfo]:
        with self._lock:
            self._check_open()
            infos = [RecordInfo(entry.key, entry.num_bytes, entry.last_used) for entry in self._entries.values()]
        return iter(infos)

    def clear(self) -> None:
        with self._lock:
            self._check_open()
            for key in list(self._entries):
                self._forget(key, "removed")

    def flush(self, sync: bool = False) -> None:
        """Do nothing: no write is ever under way, and no record outlives the process."""
        self._check_open()

    def stats(self) -> TierStats:
        with self._lock:
            capacity = self._extents.num_units * UNIT
            return TierStats(self.name, len(self._entries), self._num_bytes, capacity, self._num_evicted)

    def close(self) -> None:
        with self._lock:
            self._view = None
            self._entries.clear()

    def check(self) -> None:
        """Raise RuntimeError if places overlap, or are lost."""
        with self._lock:
            self._extents.check()
            if set(self._order.victims()) != set(self._entries):
                raise RuntimeError(f"the order of eviction does not have the {len(self._entries)} records")

    def _pinned_slab(self) -> torch.Tensor:
        """Return the slab. A unit is left out at each border of its pieces: CUDA refuses copies across one."""
        num_units, units_each = self._extents.num_units, PINNED_PIECE_BYTES // UNIT
        (slab,) = pinned_zeros([(num_units * UNIT,)], torch.uint8, self.name, PINNED_PIECE_BYTES)
        for border in range(units_each, num_units, units_each):
            self._extents.take(border, 1)
            self._busy[border] = 1
        return slab

    # --- inside, with the lock held ---

    def _check_open(self) -> None:
        if self._view is None:
            raise TierError(f"{self.name} is closed")

    def _open(self, key: Key) -> Reader | None:
        entry = self._use(key)
        if entry is None:
            return None
        entry.num_readers += 1
        self._busy[entry.begin] = entry.num_units
        return _MemoryReader(self, entry)

    def _use(self, key: Key) -> "_Entry | None":
        entry = self._entries.get(key)
        if entry is not None:
            entry.last_used = time.time()
            self._order.use(key)
        return entry

    def _make_room(self, num_units: int) -> int | None:
        """Evict until a run is free; return None, with nothing evicted, if that would not be enough."""
        begin = self._extents.allocate(num_units)
        if begin is None and not self._may_have_room(num_units):
            return None
        while begin is None:
            victim = next(key for key in self._order.victims() if self._entries[key].num_readers == 0)
            self._forget(victim, "evicted")
            self._num_evicted += 1
            begin = self._extents.allocate(num_units)
        return begin

    def _may_have_room(self, num_units: int) -> bool:
        """Return whether there is a run between those that cannot be evicted."""
        end = 0
        for begin, num_busy in sorted(self._busy.items()):
            if begin - end >= num_units:
                return True
            end = begin + num_busy
        return self._extents.num_units - end >= num_units

    def _commit(self, writer: _MemoryWriter) -> bool:
        writer.is_open = False
        self._forget(writer.key)
        entry = writer.entry
        entry.is_findable = True
        del self._busy[entry.begin]
        self._entries[writer.key] = entry
        self._order.add(writer.key)
        self._num_bytes += entry.num_bytes
        if self._note is not None:
            self._note(writer.key, "written")
        return True

    def _forget(self, key: Key, reason: str | None = None) -> bool:
        """Return whether there was a record. reason: of its going, to be noted; None for one that is replaced."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self._order.remove(key, is_evicted=reason == "evicted")
        self._num_bytes -= entry.num_bytes
        entry.is_findable = False
        if entry.num_readers == 0:
            self._extents.release(entry.begin)
        if reason is not None and self._note is not None:
            self._note(key, reason)
        return True

    # --- for readers and writers ---

    def _bytes(self, entry: _Entry, begin: int, end: int) -> memoryview:
        if not 0 <= begin <= end <= entry.num_bytes:
            raise ValueError(f"a piece must be in [0, {entry.num_bytes}], got [{begin}, {end}]")
        view = self._view
        if view is None:
            raise TierError(f"{self.name} is closed")
        first = entry.begin * UNIT
        return view[first + begin : first + end]

    def _let_go(self, entry: _Entry) -> None:
        with self._lock:
            entry.num_readers -= 1
            if entry.num_readers > 0:
                return
            del self._busy[entry.begin]
            if not entry.is_findable:
                self._extents.release(entry.begin)

    def _give_up(self, entry: _Entry) -> None:
        with self._lock:
            del self._busy[entry.begin]
            self._extents.release(entry.begin)
