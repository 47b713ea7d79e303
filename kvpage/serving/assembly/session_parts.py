"""The sessions of an engine, over its blocks, its moves and its store."""

from collections.abc import Callable

from kvpage.blocks.manager import BlockManager
from kvpage.serving.loop.connectors import Connectors
from kvpage.serving.loop.moves.block_transfers import BlockTransfers
from kvpage.serving.sessions.branch import BranchAdapter
from kvpage.serving.sessions.config import SessionConfig
from kvpage.serving.sessions.session_blocks import SessionBlocks
from kvpage.serving.sessions.sessions import Sessions
from kvpage.serving.sessions.stored_records import StoredRecords
from kvpage.serving.weights.engine_weights import EngineWeights
from kvpage.store import KVStore


def make_sessions(
    manager: BlockManager,
    transfers: BlockTransfers,
    connectors: Connectors,
    config: SessionConfig,
    weights: EngineWeights,
    check_between_steps: Callable[[str], object],
) -> Sessions:
    """Return the sessions of an engine.

    Args:
        manager: The engine's.
        transfers: Make its moves.
        connectors: Have its store.
        config: The limits.
        weights: Name the blocks.
        check_between_steps: Of the engine's loop.
    """

    def adapter_of(name: str) -> BranchAdapter:
        return BranchAdapter(name, weights.digest(weights.adapter(name)))

    blocks = SessionBlocks(
        manager, transfers.run, lambda: connectors.store, weights.namespace_by, check_between_steps, adapter_of
    )
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
