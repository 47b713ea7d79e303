"""SessionEngine: the side of an engine that keeps sessions."""

from kvpage.serving.sessions.session import Session
from kvpage.serving.sessions.sessions import Sessions


class SessionEngine:
    """An engine with sessions; `kvpage.serving.Engine` is one.

    Attributes:
        sessions: All sessions.
    """

    sessions: Sessions

    def session(
        self, session_id: str, namespace: bytes = b"", owner: bytes | None = None, *, has_record: bool = True
    ) -> Session:
        """Return the session of an id: the state of a conversation between its requests.

        Beside a KVStore a session survives a restart: its tokens and terms are read from there. A record that is
        damaged is none, and the session is new.

        Args:
            session_id: The id, 1 to 256 characters.
            namespace: Of its requests; ids of different namespaces are different sessions.
            owner: To whom a new session's retained blocks are counted; None for the namespace.
            has_record: Whether a new session is read from a store, and written there.

        Returns:
            The session, a new one if there is none. It stays until it is closed, or makes room for others.

        Raises:
            ValueError, TypeError: An argument is out of range, or of another type.
        """
        return self.sessions.open(session_id, namespace, owner, has_record=has_record)
