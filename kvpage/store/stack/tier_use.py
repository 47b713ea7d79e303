"""TierUse: how the calls on a store have used one tier."""

import threading
from dataclasses import dataclass, replace


@dataclass(slots=True)
class TierUse:
    """Records that a store read from a tier and wrote to it, since the store was made.

    Attributes:
        hits: records that the tier gave.
        misses: records that a read asked the tier for, and that it did not have or could not give.
        read_bytes: bytes of the records that it gave.
        read_seconds: seconds that reading them took, verification included, summed over threads.
        written: records that it took.
        written_bytes: bytes of the records that it took.
        write_seconds: seconds that writing took, failed tries included, summed over threads.
    """

    hits: int = 0
    misses: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    written: int = 0
    written_bytes: int = 0
    write_seconds: float = 0.0


class TierUses:
    """The use of each of a number of tiers. Thread-safe."""

    def __init__(self, num_tiers: int) -> None:
        self._lock = threading.Lock()
        self._of_tiers = [TierUse() for _ in range(num_tiers)]

    def of_tiers(self) -> tuple[TierUse, ...]:
        """Return copies of the use of each tier until now."""
        with self._lock:
            return tuple(map(replace, self._of_tiers))

    def hit(self, at: int, num_bytes: int = 0, seconds: float = 0.0) -> None:
        """Count a record that the tier of this number gave."""
        with self._lock:
            use = self._of_tiers[at]
            use.hits, use.read_bytes = use.hits + 1, use.read_bytes + num_bytes
            use.read_seconds += seconds

    def miss(self, at: int, count: int = 1) -> None:
        """Count records that the tier did not give."""
        with self._lock:
            use = self._of_tiers[at]
            use.misses += count

    def write(self, at: int, num_bytes: int, seconds: float, is_written: bool) -> None:
        """Count a record that the tier was to take."""
        with self._lock:
            use = self._of_tiers[at]
            use.write_seconds += seconds
            if is_written:
                use.written, use.written_bytes = use.written + 1, use.written_bytes + num_bytes
