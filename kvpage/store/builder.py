"""KVStoreBuilder: one store for each instance id, so that separate parts of a process can share it."""

import threading

from kvpage.store.config import KVStoreConfig
from kvpage.store.kv_store import KVStore
from kvpage.store.records.keys import KVStoreMetadata


class KVStoreBuilder:
    """The stores of this process by instance id. Thread-safe."""

    _stores: dict[str, KVStore] = {}
    _lock = threading.Lock()

    @classmethod
    def get_or_create(cls, instance_id: str, config: KVStoreConfig, metadata: KVStoreMetadata) -> KVStore:
        """Return the instance's store, which is made if there is none.

        Args:
            instance_id: any text.
            config: as in KVStore.
            metadata: as in KVStore.

        Returns:
            The store.

        Raises:
            ValueError: there is one of another configuration or metadata.
        """
        with cls._lock:
            store = cls._stores.get(instance_id)
            if store is None:
                store = cls._stores[instance_id] = KVStore(config, metadata)
            elif (store.config, store.given_metadata) != (config, metadata):
                raise ValueError(f"instance {instance_id!r} must keep its configuration and metadata, got others")
            return store

    @classmethod
    def get(cls, instance_id: str) -> KVStore | None:
        """Return the instance's store; None if there is none.

        Args:
            instance_id: as given to `get_or_create`.

        Returns:
            The store or None.
        """
        with cls._lock:
            return cls._stores.get(instance_id)

    @classmethod
    def destroy(cls, instance_id: str) -> None:
        """Close the instance's store and forget it. Without one, nothing happens.

        Args:
            instance_id: as given to `get_or_create`.
        """
        with cls._lock:
            store = cls._stores.pop(instance_id, None)
        if store is not None:
            store.close()
