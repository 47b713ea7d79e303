"""EngineCollector: an engine's numbers for Prometheus. It needs the extra `metrics`.

    registry.register(EngineCollector(engine))      # a registry of yours; nothing registers itself, nothing listens

It reads `Engine.stats()` whenever the registry is asked, in any thread.
"""

from kvpage.serving.stats.prometheus import EngineCollector, HasStats

__all__ = ["EngineCollector", "HasStats"]
