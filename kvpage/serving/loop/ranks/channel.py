"""Channel: messages from rank 0 to all others, in order, and numbers of all for all, over a group of gloo.

    broadcast   [ size | the first bytes ........ ]     always of one length
    broadcast   [ the rest ]                            only of a long message

Each operation ends by itself, with an error after its timeout. None is left pending: a process could not end then.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from kvpage.serving.loop.ranks.message import HEADER, Bytes, Kind, Message, Part
from kvpage.serving.loop.ranks.rank_lost import RankLost

FIRST = 1 << 14  # bytes: a decode step of 64 sequences with 48 blocks each
MAX_BYTES = 1 << 32
JOIN_SECONDS = 300.0
"""For how long a rank waits for the others to make their engines."""


def connected_group(seconds: float) -> Any:
    """Return a group of gloo of all ranks. All call it at once. RankLost if not all come within `seconds`."""
    try:
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
    except RuntimeError as error:
        raise RankLost(f"not all ranks have come, or one has gone: {error}") from error


class Channel:
    """One way of messages and answers, for one thread of each rank at a time."""

    def __init__(self, seconds: float) -> None:
        """Connect. All ranks call it at once. seconds: after which an operation fails."""
        self._seconds, self._number = seconds, 0
        self._group: Any = connected_group(JOIN_SECONDS)
        self._first = np.zeros(8 + FIRST, np.uint8)

    def send(self, kind: Kind, *parts: Part, seconds: float | None = None) -> None:
        """Send a message to all others; return when they take it. Raises RankLost, also if they take too long."""
        data = Message(kind, self._number, parts).encode()
        self._first[:8].view(np.int64)[0] = len(data)
        self._first[8 : 8 + len(data)] = data[:FIRST]
        self._broadcast(self._first, seconds)
        if len(data) > FIRST:
            self._broadcast(data[FIRST:], seconds)
        self._number += 1

    def receive(self, seconds: float | None = None) -> Message:
        """Wait for rank 0's next message. Raises RankLost if none comes, ValueError for one that is no message."""
        self._broadcast(self._first, seconds)
        size = int(self._first[:8].view(np.int64)[0])
        if not HEADER <= size <= MAX_BYTES:
            raise ValueError(f"a message must have {HEADER} to {MAX_BYTES} bytes, got {size}")
        data = np.empty(size, np.uint8)
        data[:FIRST] = self._first[8 : 8 + size]
        if size > FIRST:
            self._broadcast(data[FIRST:], seconds)
        message = Message.decode(data)
        if message.number != self._number:
            raise ValueError(f"messages must come in order, got number {message.number} after {self._number}")
        self._number += 1
        return message

    def gather(self, values: list[int], seconds: float | None = None) -> list[list[int]]:
        """Return the values of all ranks, by rank. All call it at once, with equally many."""
        options = dist.AllreduceOptions()
        rows = torch.zeros(dist.get_world_size(), len(values), dtype=torch.int64)
        rows[dist.get_rank()] = torch.tensor(values, dtype=torch.int64)
        options.timeout = self._timeout(seconds)
        self._run(lambda group: group.allreduce([rows], options))  # their sum
        gathered: list[list[int]] = rows.tolist()
        return gathered

    def drop(self) -> None:
        """Let go of the group: its sockets are closed."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized() and group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)

    def _broadcast(self, data: Bytes, seconds: float | None) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = self._timeout(seconds)
        self._run(lambda group: group.broadcast([torch.from_numpy(data)], options))

    def _timeout(self, seconds: float | None) -> timedelta:
        return timedelta(seconds=self._seconds if seconds is None else seconds)

    def _run(self, start: Callable[[Any], Any]) -> None:
        """Run a collective to its end."""
        group = self._group
        if group is None:
            raise RankLost("the ranks have been let go")
        try:
            start(group).wait()
        except RuntimeError as error:  # gloo's, for a closed socket or a timeout
            raise RankLost(f"a rank is gone, or does not answer: {error}") from error
