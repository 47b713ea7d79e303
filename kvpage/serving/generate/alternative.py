"""Name KVPageCache in the error by which Engine refuses a model, where the pool's own checks accept the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from transformers import PreTrainedModel

from kvpage.checks.errors import OptionError
from kvpage.layout.config import CacheConfig
from kvpage.serving.generate.cache_pool import KVPageCachePool

NUM_PROBE_BLOCKS = 16


@contextmanager
def names_alternative(model: PreTrainedModel, cache_config: CacheConfig) -> Iterator[None]:
    """Inside, a ValueError that refuses the model also says that KVPageCache serves it, if it does."""
    try:
        yield
    except OptionError:
        raise  # without the option, Engine serves it
    except ValueError as error:
        if not _is_servable_by_pool(model, cache_config):
            raise
        raise ValueError(
            f"{error}. KVPageCache serves this model, with model.generate: see KVPageCachePool.from_model"
        ) from error


def _is_servable_by_pool(model: PreTrainedModel, cache_config: CacheConfig) -> bool:
    if not isinstance(cache_config, CacheConfig):
        return False  # the config was refused, not the model
    small = replace(cache_config, num_gpu_blocks=NUM_PROBE_BLOCKS, num_cpu_blocks=0, cache_dtype="auto")
    try:
        KVPageCachePool.from_model(model, small)
    except Exception:  # an unknown model's forward may raise anything: the answer is no
        return False
    return True
