"""SessionEngine: the side of an engine that keeps sessions."""

from collections.abc import Callable

from kvpage.blocks.manager import BlockManager
from kvpage.serving.loop.connectors import Connectors
from kvpage.serving.loop.moves.block_transfers import BlockTransfers
from kvpage.serving.sessions.config import SessionConfig
from kvpage.serving.sessions.session import Session
from kvpage.serving.sessions.session_blocks import SessionBlocks
from kvpage.serving.sessions.sessions import Sessions
from kvpage.serving.sessions.stored_records import StoredRecords
from kvpage.store import KVStore


class SessionEngine:
    """An engine with sessions; `kvpage.serving.Engine` is one.

    Attributes:
        sessions: All sessions.
    """

    sessions: Sessions

    def session(self, session_id: str, namespace: bytes = b"", owner: bytes | None = None) -> Session:
        """Return the session of an id: the state of a conversation between its requests.

        Beside a KVStore a session survives a restart: its tokens and terms are read from there. A record that is
        damaged is none, and the session is new.

        Args:
            session_id: The id, 1 to 256 characters.
            namespace: Of its requests; ids of different namespaces are different sessions.
            owner: To whom a new session's retained blocks are counted; None for the namespace.

        Returns:
            The session, a new one if there is none. It stays until it is closed, or makes room for others.

        Raises:
            ValueError, TypeError: An argument is out of range, or of another type.
        """
        return self.sessions.open(session_id, namespace, owner)


def make_sessions(
    manager: BlockManager, transfers: BlockTransfers, connectors: Connectors, config: SessionConfig
) -> Sessions:
    """Return the sessions of an engine.

    Args:
        manager: The engine's.
        transfers: Make its moves.
        connectors: Have its store.
        config: The limits.
    """
    blocks = SessionBlocks(manager, transfers.run, lambda: connectors.store)
    return Sessions(blocks, config, _records_in(connectors, config))


def _records_in(connectors: Connectors, config: SessionConfig) -> Callable[[], StoredRecords | None]:
    """Return a function that returns the records in the engine's store; None while there is no KVStore."""
    made: list[StoredRecords] = []

    def records() -> StoredRecords | None:
        connector = connectors.store
        if connector is None or not config.keeps_records or not isinstance(connector.store, KVStore):
            return made[0] if made else None
        if not made:
            made.append(StoredRecords(connector.store, config.record_deadline))
        return made[0]

    return records
