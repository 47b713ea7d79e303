"""OwnerShares: how many sessions, and tokens of sessions, each owner has."""

from collections import Counter

from kvpage.serving.sessions.session import Session


class OwnerShares:
    """The shares of all owners, kept as sessions change: a turn does not read all sessions for them.

    Attributes:
        num_tokens: Tokens of all sessions.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._tokens: dict[Session, int] = {}
        self._sessions_of, self._tokens_of = Counter[bytes](), Counter[bytes]()

    def __len__(self) -> int:
        return len(self._tokens)

    def note(self, session: Session, num_tokens: int) -> None:
        """Note how many tokens a session has, which may be a new one.

        Args:
            session: The session.
            num_tokens: Its tokens.
        """
        before = self._tokens.get(session)
        self._sessions_of[session.owner] += before is None
        self._tokens_of[session.owner] += num_tokens - (before or 0)
        self.num_tokens += num_tokens - (before or 0)
        self._tokens[session] = num_tokens

    def forget(self, session: Session) -> None:
        """Count a session no more. One that is not counted is no error.

        Args:
            session: The session.
        """
        num_tokens = self._tokens.pop(session, None)
        if num_tokens is None:
            return
        self.num_tokens -= num_tokens
        self._tokens_of[session.owner] -= num_tokens
        self._sessions_of[session.owner] -= 1
        if not self._sessions_of[session.owner]:
            del self._sessions_of[session.owner], self._tokens_of[session.owner]

    def tokens_of(self, session: Session) -> int:
        """Return the tokens of a session as they were noted; 0 for one that is not counted.

        Args:
            session: The session.
        """
        return self._tokens.get(session, 0)

    def of_owners(self, by_tokens: bool) -> Counter[bytes]:
        """Return a copy of the shares, by owner.

        Args:
            by_tokens: Whether tokens count, and not sessions.
        """
        return Counter(self._tokens_of if by_tokens else self._sessions_of)
