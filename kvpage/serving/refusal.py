"""What to tell of a model that Engine refuses: whether KVPageCache serves it, found out by the pool's own check."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from transformers import PreTrainedModel

from kvpage.layout.config import CacheConfig
from kvpage.serving.generate.cache_pool import KVPageCachePool

NUM_PROBE_BLOCKS = 16


@contextmanager
def names_alternative(model: PreTrainedModel, cache_config: CacheConfig) -> Iterator[None]:
    """A ValueError inside, by which the model is refused, says as well if KVPageCache serves the model."""
    try:
        yield
    except ValueError as error:
        if not _is_servable_by_pool(model, cache_config):
            raise
        raise ValueError(
            f"{error}. KVPageCache serves this model, with model.generate: see KVPageCachePool.from_model"
        ) from error


def _is_servable_by_pool(model: PreTrainedModel, cache_config: CacheConfig) -> bool:
    if not isinstance(cache_config, CacheConfig) or cache_config.num_gpu_blocks == 0:
        return False  # it is not the model that was refused
    small = replace(cache_config, num_gpu_blocks=NUM_PROBE_BLOCKS, num_cpu_blocks=0, cache_dtype="auto")
    try:
        KVPageCachePool.from_model(model, small)
    except Exception:  # whatever an unknown model's forward raises: the answer is no
        return False
    return True
