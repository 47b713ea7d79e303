"""What the cache holds, told to KV-aware routers: events in vLLM's schema over ZeroMQ. It needs the extra `events`.

    tree ─► TreeWatch ─► BlockEvents ─► EventPublisher ─► PUB, and ROUTER for what was missed
            ids          hashes         batches, numbered

Nothing is recorded, hashed or listened to unless `EngineConfig(..., events=EventConfig(...))` asks for it.
EventConfig itself needs no extra.
"""

from kvpage.observe.events.config import EventConfig

__all__ = ["EventConfig"]
