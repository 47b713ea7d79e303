"""The connector between an engine and its store, with the engine's settings."""

from collections.abc import Sequence
from typing import Any

from kvpage.blocks.load_or_compute import LoadOrCompute
from kvpage.blocks.manager import BlockManager
from kvpage.cache.cache_engine import CacheEngine
from kvpage.cache.state_cache import StateCache
from kvpage.serving.assembly.state_store_connector import StateStoreConnector
from kvpage.serving.assembly.window_store_connector import WindowStoreConnector
from kvpage.serving.config import EngineConfig
from kvpage.serving.loop.moves.block_transfers import BlockTransfers
from kvpage.serving.loop.store_connector import BlockStore, StoreConnector
from kvpage.store import KVStore


def check_keeps_states(store: BlockStore) -> None:
    """Raise ValueError for a store that keeps K and V alone: a model with states could use nothing of it."""
    if not hasattr(store, "states"):
        raise ValueError(
            "store must keep states for a model whose layers have some, as a KVStore does, got "
            f"{type(store).__name__}: its chunks hold K and V alone"
        )


def check_keeps_layers(store: BlockStore) -> None:
    """Raise ValueError for a store whose chunks are of all layers: with windows apart, none would be whole."""
    if not hasattr(store, "layers"):
        raise ValueError(
            "store must keep groups of layers apart with num_window_blocks, as a KVStore does, got "
            f"{type(store).__name__}: its chunks are of all layers"
        )


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

    states: the slots of a model with states, which the manager gives out. windows: the caches of the
        manager's windows.
    """
    save_generated = config.save_generated
    if save_generated is None:
        save_generated = bool(getattr(getattr(store, "config", None), "save_decode_cache", False))
    settings: dict[str, Any] = {
        "deadline": config.store_deadline,
        "save_generated": save_generated,
        "save_portions": config.save_portions,
    }
    if isinstance(store, KVStore) and cache.gpu_cache and not manager.windows:
        store.check_blocks(cache)  # else each save and load would fail, one by one
    if states is not None:
        return StateStoreConnector(store, cache, states, manager, transfers, rule, **settings)
    if manager.windows:
        return WindowStoreConnector(store, cache, windows, manager, transfers, rule, **settings)
    return StoreConnector(store, cache, manager, transfers, rule, **settings)
