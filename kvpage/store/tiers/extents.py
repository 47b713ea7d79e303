"""Extents: runs of a slab's units, which are given out and taken back.

[ used 3 | free 2 | used 1 | free 6 ]      allocate(2): the smallest run that is large enough, the second
                                           release(used 1): joins its neighbours to one run of 9
"""

from bisect import bisect_left, insort


class Extents:
    """Best fit, with neighbours joined. A call takes O(log n) in the number of free runs, and shifts a list of them."""

    def __init__(self, num_units: int) -> None:
        self.num_units = num_units
        self.num_free = num_units
        self._by_size: list[tuple[int, int]] = []  # (units, begin), sorted
        self._by_begin: dict[int, int] = {}
        self._by_end: dict[int, int] = {}
        self._used: dict[int, int] = {}
        if num_units:
            self._add(0, num_units)

    def allocate(self, num_units: int) -> int | None:
        """Return the begin of a run of `num_units`; None if no free run is as long."""
        if num_units < 1:
            raise ValueError(f"num_units must be positive, got {num_units}")
        at = bisect_left(self._by_size, (num_units, -1))
        if at == len(self._by_size):
            return None
        size, begin = self._by_size[at]
        self._take(begin, size)
        if size > num_units:
            self._add(begin + num_units, size - num_units)
        self._used[begin] = num_units
        self.num_free -= num_units
        return begin

    def release(self, begin: int) -> None:
        """Take a run back. Raises ValueError if no run in use begins there."""
        if begin not in self._used:
            raise ValueError(f"begin must be that of a run in use, got {begin}")
        size = self._used.pop(begin)
        self.num_free += size
        if begin in self._by_end:
            before = self._by_end[begin]
            size += begin - before
            self._take(before, begin - before)
            begin = before
        if begin + size in self._by_begin:
            after = self._by_begin[begin + size]
            self._take(begin + size, after)
            size += after
        self._add(begin, size)

    def take(self, begin: int, num_units: int) -> None:
        """Give out exactly this run. Raises ValueError unless all of it is free."""
        at = begin if begin in self._by_begin else max((at for at in self._by_begin if at < begin), default=None)
        if num_units < 1 or at is None or at + self._by_begin[at] < begin + num_units:
            raise ValueError(f"a run of {num_units} units at {begin} must be free")
        size = self._by_begin[at]
        self._take(at, size)
        if begin > at:
            self._add(at, begin - at)
        if at + size > begin + num_units:
            self._add(begin + num_units, at + size - begin - num_units)
        self._used[begin] = num_units
        self.num_free -= num_units

    def extend(self, num_units: int) -> None:
        """Add free units to the end."""
        if num_units:
            self._used[self.num_units] = num_units
            self.num_units += num_units
            self.release(self.num_units - num_units)

    def free_at(self, begin: int) -> int:
        """Return the length of the free run that begins there; 0 if none does."""
        return self._by_begin.get(begin, 0)

    def free_before(self, end: int) -> int:
        """Return the length of the free run that ends there; 0 if none does."""
        return end - self._by_end.get(end, end)

    def check(self) -> None:
        """Raise RuntimeError unless runs in use and free ones make up the slab, and no two free ones touch."""
        runs = sorted([(begin, size, True) for begin, size in self._used.items()] + [
            (begin, size, False) for begin, size in self._by_begin.items()
        ])  # fmt: skip
        at, was_free = 0, False
        for begin, size, is_used in runs:
            if begin != at or (was_free and not is_used):
                raise RuntimeError(f"a run of {size} units begins at {begin}, not at {at}")
            at, was_free = begin + size, not is_used
        free = sum(self._by_begin.values())
        listed = sorted((size, begin) for begin, size in self._by_begin.items())
        if at != self.num_units or free != self.num_free or listed != self._by_size:
            raise RuntimeError(f"{free} free units, {self.num_free} counted, runs end at {at} of {self.num_units}")

    def _add(self, begin: int, size: int) -> None:
        insort(self._by_size, (size, begin))
        self._by_begin[begin] = size
        self._by_end[begin + size] = begin

    def _take(self, begin: int, size: int) -> None:
        del self._by_size[bisect_left(self._by_size, (size, begin))]
        del self._by_begin[begin]
        del self._by_end[begin + size]
