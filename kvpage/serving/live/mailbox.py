"""Mailbox: the outputs of one request, between the stepping thread, which puts them, and its reader.

    stepping thread: put ─► items ─► take :the reader
                      └───► waiter        the reader, if it waits

Neither takes a lock. The reader announces itself, then looks at the items once more; the stepping thread puts, then
looks for the reader. So one of them sees the other.
"""

from collections import deque

from kvpage.serving.live.waiter import Waiter, Wakeups
from kvpage.serving.loop.outputs import RequestOutput, StepOutput
from kvpage.serving.loop.request import Request


class Mailbox:
    """The outputs of one request that its reader has not taken yet.

    request: the engine's own record of it; None after its end. keeps_tokens: whether any output but the last is kept.
    output: the outcome, after the end.
    """

    __slots__ = ("_items", "_num_put", "_num_taken", "_waiter", "deadline", "keeps_tokens", "output", "request",
                 "request_id")  # fmt: skip

    def __init__(self, request: Request, keeps_tokens: bool, deadline: float | None) -> None:
        self.request: Request | None = request
        self.request_id, self.keeps_tokens, self.deadline = request.request_id, keeps_tokens, deadline
        self.output: RequestOutput | None = None
        self._items: deque[StepOutput] = deque()
        self._waiter: Waiter | None = None
        self._num_put = self._num_taken = 0  # tokens and log-probabilities; each has one thread that counts

    # --- the stepping thread -----------------------------------------------------------------------------------------

    def put(self, item: StepOutput, wakeups: Wakeups) -> int:
        """Keep an output, and wake the reader if it waits; return how many tokens and log-probabilities are kept."""
        if item.output is None and not self.keeps_tokens:
            return 0
        self._num_put += _size_of(item)
        self._items.append(item)
        if item.output is not None:
            self.output, self.request = item.output, None
        waiter = self._waiter
        if waiter is not None and not waiter.is_called:
            wakeups.add(waiter)
        return self._num_put - self._num_taken

    # --- the reader --------------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether the request has ended; its last outputs may be here still."""
        return self.output is not None

    @property
    def has_news(self) -> bool:
        """Whether there is something to take, or nothing will come."""
        return bool(self._items) or self.output is not None

    def take(self) -> list[StepOutput]:
        """Return all that is here, in order."""
        items = self._items
        taken = [items.popleft() for _ in range(len(items))]
        self._num_taken += sum(map(_size_of, taken))
        return taken

    def announce(self, waiter: Waiter) -> None:
        """Have the reader woken. RuntimeError if another one waits."""
        if self._waiter is not None:
            raise RuntimeError(f"request {self.request_id!r} must have one reader at a time, another one waits")
        self._waiter = waiter

    def leave(self) -> None:
        """Have the reader woken no more."""
        self._waiter = None


def _size_of(item: StepOutput) -> int:
    """Return a token with its log-probabilities as a number of tokens that take as much memory."""
    return 1 if item.logprobs is None else 2 + len(item.logprobs.top)
