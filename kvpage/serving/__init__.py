"""The serving loop: continuous batching over paged blocks, for Hugging Face decoders. It needs the extra `serve`."""

from kvpage.serving.cache_pool import KVPageCachePool
from kvpage.serving.engine import Engine
from kvpage.serving.kv_page_cache import KVPageCache
from kvpage.serving.requests import RequestOutput, StepOutput
from kvpage.serving.sampling_params import SamplingParams
from kvpage.serving.stats import EngineStats

__all__ = ["Engine", "EngineStats", "KVPageCache", "KVPageCachePool", "RequestOutput", "SamplingParams", "StepOutput"]
