"""The connector between an engine and its store, with the engine's settings."""

from collections.abc import Sequence
from typing import Any

from kvpage.blocks.groups.windowed_manager import WindowedManager
from kvpage.blocks.hybrid.manager import HybridManager
from kvpage.blocks.load_or_compute import LoadOrCompute
from kvpage.blocks.manager import BlockManager
from kvpage.cache.cache_engine import CacheEngine
from kvpage.cache.state_cache import StateCache
from kvpage.serving.assembly.state_store_connector import StateStoreConnector
from kvpage.serving.assembly.window_store_connector import WindowStoreConnector
from kvpage.serving.config import EngineConfig
from kvpage.serving.loop.moves.block_transfers import BlockTransfers
from kvpage.serving.loop.store_connector import StoreConnector
from kvpage.store.block_store import BlockStore, check_store


def make_store_connector(
    config: EngineConfig,
    store: BlockStore,
    cache: CacheEngine,
    manager: BlockManager,
    transfers: BlockTransfers,
    rule: LoadOrCompute | None,
    states: StateCache | None,
    windows: Sequence[CacheEngine],
) -> StoreConnector:
    """Return the connector.

    states: the slots of a model with states, whose manager is a HybridManager. windows: the caches of windows whose
        manager is a WindowedManager.
    """
    check_store(store)
    save_generated = config.save_generated
    if save_generated is None:
        save_generated = store.config is not None and store.config.save_decode_cache
    settings: dict[str, Any] = {
        "deadline": config.store_deadline,
        "save_generated": save_generated,
        "save_portions": config.save_portions,
    }
    if cache.gpu_cache and not isinstance(manager, WindowedManager):
        store.check_engine(cache)
    if states is not None and isinstance(manager, HybridManager):
        return StateStoreConnector(store, cache, states, manager, transfers, rule, **settings)
    if isinstance(manager, WindowedManager):
        return WindowStoreConnector(store, cache, windows, manager, transfers, rule, **settings)
    return StoreConnector(store, cache, manager, transfers, rule, **settings)
