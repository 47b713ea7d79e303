"""PrefixIndex: which replica holds how many leading blocks of a prompt, as far as a router knows.

reported     by the replica, some seconds ago: true then
routed       prompts that were sent there since: they will be cached soon
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence

from kvpage.checks.values import check_at_least
from kvpage.integrations.routing.cache_digest import DigestReport

GRACE = 30.0
"""Seconds after which a routed prompt must be in a report."""


class _Known:
    """The blocks of one replica."""

    def __init__(self) -> None:
        self.reported: frozenset[int] = frozenset()
        self.routed: OrderedDict[int, float] = OrderedDict()  # when each was sent there, the latest last


class PrefixIndex:
    """The blocks that each replica is known to hold. For one thread.

    Args:
        max_routed: Blocks that are remembered of the prompts routed to a replica, at most.
        clock: Returns seconds.

    Raises:
        ValueError: `max_routed` is negative.
    """

    def __init__(self, max_routed: int = 65_536, clock: Callable[[], float] = time.monotonic) -> None:
        check_at_least("max_routed", max_routed, 0)
        self._max_routed, self._clock = max_routed, clock
        self._known: dict[Hashable, _Known] = {}

    def keep_only(self, replicas: Iterable[Hashable]) -> None:
        """Forget all replicas but these.

        Args:
            replicas: Names of replicas.
        """
        remaining = set(replicas)
        for replica in [name for name in self._known if name not in remaining]:
            del self._known[replica]

    def take_report(self, replica: Hashable, report: DigestReport) -> None:
        """Take a replica's report. Routed prompts that a whole report lacks are forgotten after a while.

        Args:
            replica: Its name.
            report: Its latest report.
        """
        known = self._known.setdefault(replica, _Known())
        known.reported = report.hashes
        if report.stride > 1:
            return
        oldest = self._clock() - GRACE
        while known.routed and next(iter(known.routed.values())) < oldest:
            known.routed.popitem(last=False)

    def note_routed(self, replica: Hashable, hashes: Sequence[int]) -> None:
        """Note that a prompt was sent to a replica.

        Args:
            replica: Its name.
            hashes: Of the prompt's blocks, from the first one on.
        """
        routed, now = self._known.setdefault(replica, _Known()).routed, self._clock()
        for block in hashes:
            routed[block] = now
            routed.move_to_end(block)
        while len(routed) > self._max_routed:
            routed.popitem(last=False)

    def num_matched(self, replica: Hashable, hashes: Sequence[int]) -> int:
        """Return how many leading blocks of a prompt a replica holds.

        A block's hash stands for all blocks before it, so the last known one decides.

        Args:
            replica: Its name.
            hashes: Of the prompt's blocks, from the first one on.
        """
        known = self._known.get(replica)
        if known is None:
            return 0
        for index in range(len(hashes), 0, -1):
            if hashes[index - 1] in known.reported or hashes[index - 1] in known.routed:
                return index
        return 0
