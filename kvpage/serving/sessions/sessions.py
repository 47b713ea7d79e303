"""Sessions: the sessions of one engine, or of one BlockManager, by namespace and id.

open ─► Session ─► its calls ─► changed ─► a record in the store       after a restart: open ─► the record
a step ─► tend ─► sessions whose pauses end bring their blocks back
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from kvpage.blocks.explain import Explanation
from kvpage.blocks.sequence_state import Ids
from kvpage.checks.values import MAX_CALLER_NAMESPACE_BYTES, check_namespace
from kvpage.serving.sessions.branch import num_common
from kvpage.serving.sessions.config import SessionConfig
from kvpage.serving.sessions.owner_shares import OwnerShares
from kvpage.serving.sessions.record import SessionRecord
from kvpage.serving.sessions.session import Session, SessionState, check_name
from kvpage.serving.sessions.session_blocks import SessionBlocks
from kvpage.serving.sessions.stats import SessionStats

Key = tuple[bytes, str]
"""A session's namespace and id."""
NEVER = float("inf")
DEFAULT = SessionConfig()


class SessionRecords(Protocol):
    """Where records of sessions are kept."""

    def read(self, namespace: bytes, session_id: str) -> SessionRecord | None:
        """Return a session's record; None where there is none, or it is damaged."""

    def write(self, namespace: bytes, session_id: str, record: SessionRecord) -> None:
        """Keep a record soon."""

    def remove(self, namespace: bytes, session_id: str) -> None:
        """Forget a record soon."""

    def close(self) -> None:
        """Wait for all that is to be written."""


class Sessions:
    """The sessions of one manager. For its thread.

    Args:
        blocks: What is done with blocks.
        config: The limits.
        records: Returns where records are kept; it returns None while there is no such place.
        clock: Returns seconds.

    Attributes:
        next_due: Seconds of the clock at which `tend` has something to do.
        owner_quota: Of the configuration.
    """

    def __init__(
        self,
        blocks: SessionBlocks,
        config: SessionConfig = DEFAULT,
        records: Callable[[], SessionRecords | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._blocks, self._config, self._records, self._clock = blocks, config, records, clock
        self._sessions: OrderedDict[Key, Session] = OrderedDict()  # those that were used last at the end
        self._paused: dict[Session, None] = {}  # in the order in which they began
        self._shares = OwnerShares()
        self._counts = SessionStats()
        self.next_due, self.owner_quota = NEVER, config.owner_quota

    # --- by id -------------------------------------------------------------------------------------------------------

    def open(
        self, session_id: str, namespace: bytes = b"", owner: bytes | None = None, *, has_record: bool = True
    ) -> Session:
        """Return the session of an id, a new one if there is none.

        Where there are too many, the owner with the most of them loses one: of those that keep no blocks, if there are
        such, the one that was not used for longest.

        Args:
            session_id: The id, 1 to 256 characters.
            namespace: Of its blocks: ids of different namespaces are different sessions.
            owner: To whom a new one's retained blocks are counted; None for the namespace.
            has_record: Whether a new one is read from a record, and written down.

        Raises:
            ValueError, TypeError: An argument is out of range, or of another type.
        """
        session = self.find(session_id, namespace, owner, has_record=has_record)
        if session is None:
            session = self._added(self._new(session_id, namespace, owner, has_record), 0)
        return session

    def find(
        self, session_id: str, namespace: bytes = b"", owner: bytes | None = None, *, has_record: bool = True
    ) -> Session | None:
        """Return the session of an id, also one that a record brings back; None if there is none.

        Args:
            session_id: See `open`.
            namespace: See `open`.
            owner: See `open`.
            has_record: Whether records are asked for one that is not here.

        Raises:
            ValueError, TypeError: As `open`.
        """
        self._blocks.check_between_steps("session")
        check_name("session_id", session_id)
        check_namespace(namespace, MAX_CALLER_NAMESPACE_BYTES)
        session = self._sessions.get((namespace, session_id))
        if session is not None:
            self._sessions.move_to_end((namespace, session_id))
            return session
        records = self._records() if has_record else None
        record = None if records is None else records.read(namespace, session_id)
        return None if record is None else self._restored(session_id, namespace, owner, record)

    def __len__(self) -> int:
        return len(self._sessions)

    def states(self, namespaces: Sequence[bytes], limit: int) -> list[SessionState]:
        """Return the sessions of some namespaces as they are now, those that were used last first.

        Args:
            namespaces: Whose.
            limit: Sessions at most.
        """
        keys = [key for key in reversed(self._sessions) if key[0] in namespaces]
        return [self._sessions[key].state() for key in keys[:limit]]

    def stats(self) -> SessionStats:
        """Return the counters, and the state now. Another thread may ask; then they are not all of one moment."""
        sessions = list(self._sessions.values())
        return replace(
            self._counts,
            num_sessions=len(sessions),
            num_tokens=self._shares.num_tokens,
            num_paused=len(self._paused),
            num_retained_blocks=sum(session.num_retained_blocks for session in sessions),
        )

    def explained(self, explanation: Explanation, tokens: Ids, namespace: bytes, kv_namespace: bytes) -> Explanation:
        """Return the explanation of a prompt, with the edits of sessions whose spans it has.

        Args:
            explanation: Of the prompt.
            tokens: The prompt.
            namespace: Its namespace.
            kv_namespace: That of its K and V.
        """
        sessions = [session for key, session in self._sessions.items() if key[0] == namespace and session.edits]
        edits = [
            cost
            for session in sessions
            for cost in session.edits.values()
            if session.kv_namespace(cost.branch) == kv_namespace
            and num_common(tokens, session.tokens(cost.branch)) > cost.start
        ]
        return replace(explanation, edits=tuple(edits)) if edits else explanation

    # --- the engine's steps ------------------------------------------------------------------------------------------

    def tend(self) -> None:
        """Bring back the blocks of sessions whose pauses are about to end."""
        now = self._clock()
        if now < self.next_due:
            return
        try:
            for session in list(self._paused):
                session.tend(now)
        finally:
            self._paused = {session: None for session in self._paused if session.return_at is not None}
            self._find_next()

    def close(self) -> None:
        """Wait for the records that are to be written. The sessions go on without them."""
        records = self._records()
        self._records = lambda: None
        if records is not None:
            records.close()

    # --- what sessions ask: SessionKeeper -----------------------------------------------------------------------------

    def check_growth(self, session: Session, num_tokens: int, num_branches: int) -> None:
        """ValueError unless the session may have so many more tokens and branches. Others are closed for it."""
        most, count = self._config.max_branches, len(session.branches) + num_branches
        if count > most:
            raise ValueError(f"branches of a session must be at most {most}, got {count}")
        count = session.num_tokens + num_tokens
        if count > self._config.max_tokens:
            raise ValueError(f"tokens of all branches must be at most {self._config.max_tokens}, got {count}")
        self._make_room(session, num_tokens)

    def changed(self, session: Session) -> None:
        """Note what has changed, and that it was used, and write it down."""
        self._sessions.move_to_end((session.namespace, session.session_id))
        self._shares.note(session, session.num_tokens)
        if session.return_at is None:
            self._paused.pop(session, None)
        else:
            self._paused.setdefault(session)
        self._find_next()
        self._write(session)

    def closed(self, session: Session) -> None:
        """Forget a session that is closed, and its record."""
        self._leave(session)
        records = self._records()
        if records is not None and session.has_record:
            records.remove(session.namespace, session.session_id)

    def refused(self, num_branches: int) -> None:
        """Count branches whose blocks no quota had room for."""
        if num_branches:
            self._counts = replace(self._counts, num_refused=self._counts.num_refused + num_branches)

    def lead(self, num_blocks: int) -> float:
        """Return the seconds before the end of a pause at which so many blocks come back."""
        return max(self._config.return_lead, 2 * self._blocks.load_seconds(num_blocks))

    def now(self) -> float:
        """Return the seconds of the clock."""
        return self._clock()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _new(self, session_id: str, namespace: bytes, owner: bytes | None, has_record: bool) -> Session:
        owner = namespace if owner is None else owner
        return Session(session_id, namespace, owner, self._blocks, self, has_record=has_record)

    def _added(self, session: Session, num_tokens: int) -> Session:
        self._make_room(session, num_tokens)
        self._sessions[session.namespace, session.session_id] = session
        self._shares.note(session, num_tokens)
        self._counts = replace(self._counts, num_opened=self._counts.num_opened + 1)
        return session

    def _restored(
        self, session_id: str, namespace: bytes, owner: bytes | None, record: SessionRecord
    ) -> Session | None:
        num_tokens = sum(map(len, record.branches.values()))
        if num_tokens > self._config.max_tokens or len(record.branches) > self._config.max_branches:
            return None
        session = self._new(session_id, namespace, owner, has_record=True)
        session.restore(record.branches, record.retention, record.num_turns, record.adapters)
        try:
            self._added(session, num_tokens)
        except ValueError:  # others would have to go for it
            return None
        self._counts = replace(self._counts, num_restored=self._counts.num_restored + 1)
        return session

    def _make_room(self, session: Session, num_tokens: int) -> None:
        """Close sessions until one more fits, with its new tokens. ValueError where others' would have to go for it."""
        for other in self._in_the_way(session, num_tokens):
            other.forget()
            self._leave(other)
            self._counts = replace(self._counts, num_forgotten=self._counts.num_forgotten + 1)

    def _in_the_way(self, session: Session, num_tokens: int) -> list[Session]:
        """Return the sessions that go for one with so many new tokens."""
        key, shares, config = (session.namespace, session.session_id), self._shares, self._config
        num_sessions, num_all = len(shares) + (key not in self._sessions), shares.num_tokens + num_tokens
        victims: list[Session] = []
        while num_sessions > config.max_sessions or num_all > config.max_tokens:
            by_tokens = num_sessions <= config.max_sessions
            grown = num_tokens if by_tokens else int(key not in self._sessions)
            victims.append(self._victim(session, grown, by_tokens, victims))
            num_sessions -= 1
            num_all -= shares.tokens_of(victims[-1])
        return victims

    def _victim(self, session: Session, grown: int, by_tokens: bool, gone: Sequence[Session]) -> Session:
        """Return the first session, not the given one, of the owner who has most.

        That is the own one, if others have no more. A session that keeps no blocks comes first: it loses only tokens.

        grown: by how much the given one's owner has more. by_tokens: whether tokens count, and not sessions.
        gone: those that go already.
        """
        shares = self._shares.of_owners(by_tokens)
        shares[session.owner] += grown
        for other in gone:
            shares[other.owner] -= self._shares.tokens_of(other) if by_tokens else 1
        ranks = {owner: (share, owner == session.owner) for owner, share in shares.items()}
        victim: Session | None = None
        for rank in sorted(set(ranks.values()), reverse=True):
            candidates = (
                other
                for other in self._sessions.values()
                if ranks[other.owner] == rank and other is not session and other not in gone
            )
            victim = _first_to_go(other for other in candidates if not by_tokens or self._shares.tokens_of(other))
            if victim is not None:
                break
        assert victim is not None, "the session alone fits"
        if shares[victim.owner] < shares[session.owner]:
            raise ValueError(
                f"tokens of an owner must be at most those of another one whose sessions would go for them, "
                f"{shares[victim.owner]}, got {shares[session.owner]}"
            )
        return victim

    def _leave(self, session: Session) -> None:
        self._sessions.pop((session.namespace, session.session_id), None)
        self._shares.forget(session)
        self._paused.pop(session, None)
        self._find_next()

    def _find_next(self) -> None:
        times = [session.return_at for session in self._paused if session.return_at is not None]
        self.next_due = min(times, default=NEVER)

    def _write(self, session: Session) -> None:
        records = self._records()
        if records is not None and session.has_record:
            record = SessionRecord.of(session)
            records.write(session.namespace, session.session_id, record)


def _first_to_go(candidates: Iterable[Session]) -> Session | None:
    """Return the first session that keeps no blocks; without such the first one; None without any."""
    first: Session | None = None
    for session in candidates:
        if not session.keeps:
            return session
        first = first or session
    return first
