"""ResponseTurns: of which branch of which session each kept response is a turn.

    r1 ◄── r2 ◄── r3      session "r1"     main  r1 r2 r3     its tip is r3
            ▲
            └──── r4                       r4    r4           r2 is no tip: another path begins

A response after r4 goes on in the branch "r4", one after r1 begins a branch of its own. K and V of other salts and
adapters are others', so these go on in branches of their own.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvpage.serving.sessions.session import MAIN


@dataclass(frozen=True, slots=True)
class Line:
    """A branch of a session.

    Attributes:
        namespace: The session's: a tenant and a salt.
        session_id: The session's id.
        branch: The branch's name.
    """

    namespace: bytes
    session_id: str
    branch: str


@dataclass(frozen=True, slots=True)
class ResponseTurn:
    """What a response is a turn of.

    Attributes:
        line: The branch.
        adapter: The adapter that computes it; None for none.
        owns_session: Whether the chain of responses has made the session, and no client has named it.
        owns_branch: The same of the branch.
        is_first: Whether the chain begins with it: its answer makes the session.
    """

    line: Line
    adapter: str | None = None
    owns_session: bool = False
    owns_branch: bool = False
    is_first: bool = False


@dataclass(frozen=True, slots=True)
class Leaving:
    """What becomes of a session when a response is deleted, or is not kept.

    Attributes:
        line: The branch of which the response was the tip.
        closes: Whether the session ends: no response of it is left.
        num_tokens: Tokens of the branch as the response has left it.
        num_left: Tokens of the branch as the response before it has left it; 0 where there is none.
        has_record: Whether the session may have a record: a client has named it.
    """

    line: Line
    closes: bool
    num_tokens: int = 0
    num_left: int = 0
    has_record: bool = False


class ResponseTurns:
    """The turns of all kept responses. Whoever keeps these has a lock."""

    def __init__(self) -> None:
        self._lines: dict[Line, dict[str, int]] = {}  # of each response the tokens of its path; the tip last
        self._claims: dict[Line, str] = {}  # by which response under way
        self._old_tips: dict[Line, int] = {}  # of claimed branches whose tips are gone: the tokens of these
        self._uses = Counter[tuple[bytes, str]]()  # of each session: its responses, kept or under way

    def begin(
        self,
        response_id: str,
        earlier: Sequence[tuple[str, ResponseTurn]],
        namespace: bytes,
        adapter: str | None,
    ) -> ResponseTurn:
        """Return the turn of a response that begins. Until `end`, no other one goes on in its branch.

        Args:
            response_id: Its id.
            earlier: Those before it that are turns, the nearest one first.
            namespace: Of its request.
            adapter: That computes it.
        """
        turn = self._placed(response_id, earlier, namespace, adapter)
        self._claims[turn.line] = response_id
        self._use(turn.line, 1)
        return turn

    def end(self, response_id: str, turn: ResponseTurn) -> Leaving | None:
        """Note that a response of `begin` has ended; where it is not kept, return what the session loses.

        That is what it has lost by deletions meanwhile, and itself where no other response is left.

        Args:
            response_id: Its id.
            turn: Its turn.
        """
        if self._claims.get(turn.line) != response_id:
            return None
        del self._claims[turn.line]
        self._use(turn.line, -1)
        return self._leaving(turn, self._old_tips.pop(turn.line, None))

    def add(self, response_id: str, turn: ResponseTurn, num_tokens: int) -> None:
        """Note that a response is kept: the tip of its branch, in which others may go on.

        Args:
            response_id: Its id.
            turn: Its turn.
            num_tokens: Tokens of its path: its prompt and its answer.
        """
        self._lines.setdefault(turn.line, {})[response_id] = num_tokens
        self._use(turn.line, 1)
        self.end(response_id, turn)

    def remove(self, response_id: str, turn: ResponseTurn) -> Leaving | None:
        """Forget a response; return what the session loses by it, None for nothing.

        Args:
            response_id: Its id.
            turn: Its turn.
        """
        line = turn.line
        path_lengths = self._lines[line]
        was_tip, num_tokens = response_id == next(reversed(path_lengths)), path_lengths.pop(response_id)
        self._use(line, -1)
        if not path_lengths:
            del self._lines[line]
        if was_tip and line in self._claims:
            self._old_tips.setdefault(line, num_tokens)
        return self._leaving(turn, num_tokens if was_tip else None)

    def _leaving(self, turn: ResponseTurn, num_tokens: int | None) -> Leaving | None:
        """Return what a session loses by a response that is gone. num_tokens: of a tip; None for another response."""
        line = turn.line
        if turn.owns_session and (line.namespace, line.session_id) not in self._uses:
            return Leaving(line, closes=True)
        if num_tokens is None or not turn.owns_branch or line in self._claims:
            return None
        num_left = next(reversed(self._lines.get(line, {}).values()), 0)
        return Leaving(line, False, num_tokens, min(num_left, num_tokens), not turn.owns_session)

    def _placed(
        self,
        response_id: str,
        earlier: Sequence[tuple[str, ResponseTurn]],
        namespace: bytes,
        adapter: str | None,
    ) -> ResponseTurn:
        if not earlier:
            return ResponseTurn(Line(namespace, response_id, MAIN), adapter, True, True, is_first=True)
        _, last = earlier[0]
        session_id, owns_session = last.line.session_id, last.owns_session
        for other_id, turn in earlier:
            if (turn.line.namespace, turn.line.session_id, turn.adapter) == (namespace, session_id, adapter):
                if self._is_tip(other_id, turn.line):
                    return ResponseTurn(turn.line, adapter, turn.owns_session, turn.owns_branch)
                break
        branch = response_id if (namespace, session_id) in self._uses else MAIN
        owns_branch = owns_session or branch != MAIN
        return ResponseTurn(Line(namespace, session_id, branch), adapter, owns_session, owns_branch)

    def _is_tip(self, response_id: str, line: Line) -> bool:
        return line not in self._claims and next(reversed(self._lines.get(line, {})), None) == response_id

    def _use(self, line: Line, number: int) -> None:
        """Count more responses of a session, or fewer."""
        key = line.namespace, line.session_id
        self._uses[key] += number
        if not self._uses[key]:
            del self._uses[key]
