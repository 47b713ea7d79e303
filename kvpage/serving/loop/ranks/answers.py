"""Answers: what the ranks' stores say to a call, a call at a time.

    rank 0    not yet │ not yet │ 96 tokens │ 96 tokens ─► 64: the least
    rank 1    not yet │ 64      │ 64        │ 64        ─► 64
              round 1   round 2   ...                       seconds apart, or as soon as all have answered

A store may take its time. So the ranks say from time to time that they still work: one that hangs is noticed, and
nobody waits for it until its store would have been given up.
"""

from concurrent.futures import Future, wait
from typing import Any

from kvpage.serving.loop.ranks.channel import Channel
from kvpage.store.block_store import is_count

OwnAnswer = Future[int]


class Answers:
    """One way of answers, for one thread of each rank at a time."""

    def __init__(self, channel: Channel, beat: float) -> None:
        """Answer by a channel, whose timeout is that of a rank. beat: seconds between two rounds."""
        self._channel, self._beat = channel, beat

    def least(self, answer: OwnAnswer) -> int:
        """Wait for this rank's answer and for all others'; return the least. All call it at once.

        answer: A count. An error counts as 0, and so does what is no count. Raises RankLost.
        """
        while True:
            wait([answer], self._beat)
            rows = self._channel.gather([answer.done(), _count(answer)])
            if all(is_done for is_done, _ in rows):
                return min(count for _, count in rows)

    def drop(self) -> None:
        """Let go of the channel."""
        self._channel.drop()


def _count(answer: OwnAnswer) -> int:
    if not answer.done() or answer.exception() is not None:
        return 0
    value: Any = answer.result()
    return int(value) if is_count(value) else 0
