"""Engines over tiny random models, with blocks that hold NaN where nobody has written."""

from support.models import make_model
from transformers import PreTrainedModel

from kvpage import CacheConfig
from kvpage.serving import Engine, EngineConfig

B = 4
PATIENCE = {"store_deadline": 600.0}  # seconds: a machine that does much else is no reason for a miss


def make_engine(
    num_blocks: int = 128,
    num_host_blocks: int = 0,
    *,
    kind: str = "llama",
    model: PreTrainedModel | None = None,
    store: object | None = None,
    layout: dict[str, str] | None = None,
    **options: object,
) -> Engine:
    """Return an engine: what is read without being owned shows. options: fields of EngineConfig."""
    cache = CacheConfig(B, num_blocks, num_host_blocks, **(layout or {}))
    engine = Engine.from_model(model or make_model(kind), EngineConfig(cache, **{**PATIENCE, **options}), store=store)
    for layer in (*engine.cache.gpu_cache, *engine.cache.cpu_cache):
        layer.fill_(float("nan"))
    return engine
