"""Lookups: which chunks the store has, asked in batches beside the scheduler. RequestLog: what requests were told.

a step:   ask(key) ─► not known: remembered          ... the end of the step: send() ─► one call of the store
later:    ask(key) ─► True, False, or None: no answer yet

An answer that does not come in time is False: the engine computes. From then on nothing waits until the store has
answered: all that is not known is False. A chunk whose load has failed is False for all
requests that asked for it; a later request asks anew. So a request loads a chunk in vain at most once.
"""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

LOGGER = "vllm.kvpage"
"""Below vLLM's logger, which alone writes lines of the level INFO in its processes."""
logger = logging.getLogger(LOGGER)
Contains: TypeAlias = Callable[[Sequence[bytes]], "Future[list[bool]]"]
Outcome: TypeAlias = Literal["there", "absent", "unanswered", "failed"]


class Asked(NamedTuple):
    """Chunks that a request has asked for, by what it was told. failed: they were there, and could not be loaded."""

    there: int = 0
    absent: int = 0
    unanswered: int = 0
    failed: int = 0


@dataclass(slots=True)
class _Entry:
    """A chunk's answer, as far as it is known. since: when it was asked for; None if it is to be asked for."""

    answer: bool | None = None
    since: float | None = None
    askers: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class Lookups:
    """The scheduler's look-ups. For one thread."""

    def __init__(self, contains: Contains, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Make it.

        Args:
            contains: Asks the store for keys, and returns at once a future of a flag for each.
            patience: Seconds after which a look-up without an answer is a miss.
            clock: Returns seconds.
        """
        self._contains, self._patience, self._clock = contains, patience, clock
        self._entries: dict[bytes, _Entry] = {}
        self._keys_of: defaultdict[str, dict[bytes, Outcome]] = defaultdict(dict)
        self._unsent: dict[bytes, None] = {}
        self._sent: list[tuple[list[bytes], Future[list[bool]]]] = []
        self._is_late = False
        self.num_given_up = 0
        """Look-ups that were misses because no answer came in time."""

    def ask(self, key: bytes, request_id: str) -> bool | None:
        """Return whether the store has a chunk.

        Args:
            key: Its key.
            request_id: Who wants to load it.

        Returns:
            True or False; None if the answer is still to come.
        """
        self._take_answers()
        entry = self._entries.setdefault(key, _Entry())
        entry.askers.add(request_id)
        outcomes = self._keys_of[request_id]
        if request_id in entry.failed:
            return False
        outcomes[key] = "unanswered" if entry.answer is None else "there" if entry.answer else "absent"
        if entry.answer is None and self._is_late:
            self.num_given_up += 1
            return False
        if entry.answer is None and entry.since is None:
            entry.since, self._unsent[key] = self._clock(), None
        elif entry.answer is None and self._clock() - (entry.since or 0.0) > self._patience:
            entry.failed.add(request_id)
            self._is_late = bool(self._sent)
            self.num_given_up += 1
            return False
        return entry.answer

    def send(self) -> None:
        """Ask the store for this step's lookups. At most one call is under way."""
        self._take_answers()
        if self._unsent and not self._sent:
            keys, self._unsent = list(self._unsent), {}
            self._sent.append((keys, self._contains(keys)))

    def mark_failed(self, keys: Iterable[bytes]) -> None:
        """Tell that chunks were not loaded although the store seemed to have them.

        Args:
            keys: Their keys.
        """
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None:
                for request_id in entry.askers - entry.failed:
                    self._keys_of[request_id][key] = "failed"
                entry.failed |= entry.askers
                entry.answer = entry.since = None

    def mark_stored(self, keys: Iterable[bytes]) -> None:
        """Tell that the store has chunks now.

        Args:
            keys: Their keys.
        """
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None:
                entry.answer = True

    def asked(self, request_id: str) -> Asked:
        """Return what a request was told of the chunks that it has asked for.

        Args:
            request_id: The request.
        """
        counts = Counter[str](self._keys_of.get(request_id, {}).values())
        return Asked(**counts)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended, and chunks that no other one asked for.

        Args:
            request_id: The request.
        """
        for key in self._keys_of.pop(request_id, ()):
            entry = self._entries[key]
            entry.askers.discard(request_id)
            entry.failed.discard(request_id)
            if not entry.askers:
                del self._entries[key]
                self._unsent.pop(key, None)

    def __len__(self) -> int:
        """Return how many chunks are remembered."""
        return len(self._entries)

    def _take_answers(self) -> None:
        for keys, future in [sent for sent in self._sent if sent[1].done()]:
            self._sent.remove((keys, future))
            self._is_late = False
            failed = future.cancelled() or future.exception() is not None
            answers = [False] * len(keys) if failed else future.result()
            for key, answer in zip(keys, answers, strict=True):
                entry = self._entries.get(key)
                if entry is not None and entry.answer is None and entry.since is not None:
                    entry.answer = answer


class RequestLog:
    """Writes the lines. For the scheduler's thread.

    Args:
        chunk_tokens: Tokens of a chunk.
        refused: Returns how many records were refused until now, by reason.
    """

    def __init__(self, chunk_tokens: int, refused: Callable[[], Mapping[str, int]]) -> None:
        self._chunk_tokens, self._refused = chunk_tokens, refused
        self._told = Counter(refused())

    def tell(self, request_id: str, asked: Asked) -> None:
        """Write the line of a request that has ended. Without look-ups there is none.

        Args:
            request_id: The request.
            asked: What it was told.
        """
        if not any(asked):
            return
        now = Counter(self._refused())
        refused, self._told = now - self._told, now
        logger.info(
            "request %s: the store had %d of the %d chunks asked for, of %d tokens each; %s; "
            "refused since the last line: %s",
            request_id, asked.there, sum(asked), self._chunk_tokens, _ending(asked), dict(refused) or "none",
        )  # fmt: skip


def _ending(asked: Asked) -> str:
    """Return why there were no more."""
    if asked.failed:
        return f"{asked.failed} could not be loaded"
    if asked.unanswered:
        return f"{asked.unanswered} had no answer in time"
    return f"{asked.absent} are not there" if asked.absent else "all that were asked for are there"
