"""TierCalls: the calls of several tiers, each counted. A tier in trouble is counted and logged, and is a miss."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvpage.store.stack.placed import Placed
from kvpage.store.stack.tier_use import TierUses
from kvpage.store.stack.time_limit import NO_LIMIT, TimeLimit
from kvpage.store.tiers.tier import Key, Reader, RecordGone, RecordInfo, TierError, TierRests, TierStats

logger = logging.getLogger(__name__)
T = TypeVar("T")


class TierCalls:
    """Thread-safe. tiers: the fastest first. counts: events by name. uses: of each tier."""

    def __init__(self, tiers: Sequence[Placed]) -> None:
        self.tiers = list(tiers)
        self.counts: Counter[str] = Counter()
        self.uses = TierUses(len(self.tiers))
        self._lock = threading.Lock()

    def locate(self, keys: Sequence[Key], limit: TimeLimit = NO_LIMIT) -> list[int | None]:
        """Return for each key the number of the first tier that has it; None if none has it."""
        located: list[int | None] = [None] * len(keys)
        for at, placed in enumerate(self.tiers):
            left = [index for index, tier in enumerate(located) if tier is None]
            if not left:
                break
            for index, is_there in zip(
                left, self.contains(placed, [keys[index] for index in left], limit), strict=True
            ):
                if is_there:
                    located[index] = at
        return located

    def contains(self, placed: Placed, keys: Sequence[Key], limit: TimeLimit = NO_LIMIT) -> list[bool]:
        """Return for each key whether the tier has it."""
        there = (
            [] if limit.is_over else self.ask(placed, placed.tier.contains, keys, limit.timeout(placed.deadline)) or []
        )
        return there if len(there) == len(keys) else [False] * len(keys)

    def touch(self, keys: Sequence[Key], limit: TimeLimit = NO_LIMIT) -> list[bool]:
        """Return for each key whether some tier noted a use of it."""
        is_noted = [False] * len(keys)
        for placed in self.tiers:
            noted = (
                [] if limit.is_over else self.ask(placed, placed.tier.touch, keys, limit.timeout(placed.deadline)) or []
            )
            is_noted = [before or now for before, now in zip(is_noted, noted or is_noted, strict=True)]
        return is_noted

    def open(
        self, keys: Sequence[Key], located: Sequence[int | None], limit: TimeLimit = NO_LIMIT
    ) -> list[Reader | None]:
        """Return a reader of each key in its tier; None if it is gone."""
        readers: list[Reader | None] = [None] * len(keys)
        for at, placed in enumerate(self.tiers):
            indices = [index for index, tier in enumerate(located) if tier == at]
            opened = self._open(placed, [keys[index] for index in indices], limit) if indices else []
            for index, reader in zip(indices, opened, strict=True):
                readers[index] = reader
        return readers

    def infos(self) -> list[list[RecordInfo]]:
        """Return the records of each tier; none of a tier that cannot list them."""
        return [self.ask(placed, lambda placed=placed: list(placed.tier.infos())) or [] for placed in self.tiers]

    def stats(self) -> tuple[TierStats | None, ...]:
        """Return the statistics of each tier; None for a tier in trouble."""
        return tuple(self.ask(placed, placed.tier.stats) for placed in self.tiers)

    def count(self, **counts: int) -> None:
        with self._lock:
            self.counts.update(counts)

    def count_reads(self, placed_tiers: Sequence[Placed]) -> None:
        """Count a chunk that each of these tiers has given; a tier may be there several times."""
        for placed in placed_tiers:
            self.uses.hit(self.tiers.index(placed))

    def reads(self) -> tuple[int, ...]:
        """Return how many chunks each tier has given."""
        return tuple(use.hits for use in self.uses.of_tiers())

    def ask(self, placed: Placed, call: Callable[..., T], *args: object) -> T | None:
        """Return the result of a call of the tier; None when it is in trouble."""
        try:
            return call(*args)
        except TierError as error:
            self._count_trouble(placed, error)
            return None

    # --- inside ---

    def _count_trouble(self, placed: Placed, error: TierError) -> None:
        if isinstance(error, RecordGone):
            return
        if not isinstance(error, TierRests):
            logger.warning("%s: %s", placed.tier.name, error)
        self.count(tier_errors=1)

    def _open(self, placed: Placed, keys: Sequence[Key], limit: TimeLimit = NO_LIMIT) -> list[Reader | None]:
        opened = [] if limit.is_over else self.ask(placed, placed.tier.open, keys, limit.timeout(placed.deadline)) or []
        return opened if len(opened) == len(keys) else [None] * len(keys)
