"""The connector between an engine and its store, with the engine's settings."""

from kvpage.blocks.load_or_compute import LoadOrCompute
from kvpage.blocks.manager import BlockManager
from kvpage.cache.cache_engine import CacheEngine
from kvpage.serving.config import EngineConfig
from kvpage.serving.loop.moves.block_transfers import BlockTransfers
from kvpage.serving.loop.moves.layer_saves import LayerSaves
from kvpage.serving.loop.moves.loads.prompt_loads import PromptLoads
from kvpage.serving.loop.moves.saves import Saves
from kvpage.serving.loop.moves.stored_blocks import StoredBlocks
from kvpage.serving.loop.moves.stored_group import StoredGroup
from kvpage.serving.loop.moves.stored_states import StoredStates
from kvpage.serving.loop.moves.stored_windows import StoredWindows
from kvpage.serving.loop.ranks.rank_caches import RankCaches
from kvpage.serving.loop.store_connector import StoreConnector
from kvpage.store.block_store import BlockStore, check_store
from kvpage.store.load.block_chunks import check_numerics
from kvpage.store.records.codec import get_codec


def make_store_connector(
    config: EngineConfig,
    store: BlockStore,
    caches: RankCaches,
    manager: BlockManager,
    transfers: BlockTransfers,
    rule: LoadOrCompute | None,
) -> StoreConnector:
    """Return the connector. caches: of the manager's blocks and slots.

    Raises TypeError for no BlockStore. ValueError for one that cannot keep what the engine has.
    """
    check_store(store)
    cache, states, windows = caches.full, caches.states, caches.windows
    _check_bits(config, store, cache)
    group: StoredGroup
    if states is not None and windows:
        raise ValueError("num_window_blocks must be None beside a store, for a model whose layers keep states")
    if states is not None:
        group = StoredStates(store, cache, states, manager, transfers)
    elif windows:
        group = StoredWindows(store, cache, windows, manager, transfers)
    else:
        group = StoredBlocks(store, cache, manager, transfers)
    waits, save_generated = store.waits_for_others, config.save_generated
    if save_generated is None:
        save_generated = store.config is not None and store.config.save_decode_cache
    return StoreConnector(
        store,
        cache,
        PromptLoads(group, manager, transfers, rule, deadline=config.store_deadline, waits_for_others=waits),
        LayerSaves(group, store, manager, cache) if store.groups else Saves(group),
        chunk_size=manager.block_size if store.config is None else store.config.chunk_size,
        save_generated=save_generated,
        save_portions=config.save_portions,
    )


def _check_bits(config: EngineConfig, store: BlockStore, cache: CacheEngine) -> None:
    """Raise ValueError for a store whose records may hold other bits than the engine would compute."""
    if store.metadata is not None:
        check_numerics(store.metadata, cache.numerics)
    elif config.same_bits:
        raise ValueError("store must have metadata with same_bits, which tell whose bits its records hold, got none")
    if (
        config.same_bits
        and store.config is not None
        and cache.layer_ids  # records of states are raw
        and not get_codec(store.config.codec, cache.layout.dtype).is_lossless
    ):
        raise ValueError(f"codec of the store must be lossless with same_bits, got {store.config.codec!r}")
