"""The serving loop: continuous batching over paged blocks, for Hugging Face decoders. It needs the extra `serve`."""

from kvpage.serving.beam_params import BeamSearchParams
from kvpage.serving.beam_search import Beam, BeamSearchOutput
from kvpage.serving.branches import Branch, Branches
from kvpage.serving.cache_pool import KVPageCachePool
from kvpage.serving.engine import Engine
from kvpage.serving.kv_page_cache import KVPageCache
from kvpage.serving.logits_check import LogitsNotFinite
from kvpage.serving.paged_token_trie import PagedTokenTrie
from kvpage.serving.requests import RequestOutput, Sample, StepOutput
from kvpage.serving.sampling_params import SamplingParams
from kvpage.serving.stats import EngineStats
from kvpage.serving.token_stream import TokenStream

__all__ = [
    "Beam",
    "BeamSearchOutput",
    "BeamSearchParams",
    "Branch",
    "Branches",
    "Engine",
    "EngineStats",
    "KVPageCache",
    "KVPageCachePool",
    "LogitsNotFinite",
    "PagedTokenTrie",
    "RequestOutput",
    "Sample",
    "SamplingParams",
    "StepOutput",
    "TokenStream",
]
