"""Events of the cache for KV-aware routers, in vLLM's schema over ZeroMQ. They need the extra `events`.

    tree ─► TreeWatch ─► BlockEvents ─► EventPublisher ─► PUB, and ROUTER for missed batches
            ids          hashes         batches, numbered

Nothing is recorded, hashed or sent unless `EngineConfig(..., events=EventConfig(...))` asks for it. EventConfig
itself needs no extra.
"""

from kvpage.observe.events.config import EventConfig

__all__ = ["EventConfig"]
