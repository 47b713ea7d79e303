"""The serving loop: continuous batching over paged blocks, for Hugging Face decoders. It needs the extra `serve`."""

from kvpage.serving.config import EngineConfig
from kvpage.serving.engine import Engine
from kvpage.serving.generate.cache_pool import KVPageCachePool
from kvpage.serving.generate.kv_page_cache import KVPageCache
from kvpage.serving.loop.outputs import RequestOutput, Sample, StepOutput
from kvpage.serving.loop.ranks.rank_lost import RankLost
from kvpage.serving.loop.token_stream import TokenStream
from kvpage.serving.params.beam import BeamSearchParams
from kvpage.serving.params.sampling import SamplingParams
from kvpage.serving.sampling.logits_check import LogitsNotFinite
from kvpage.serving.stats import EngineStats
from kvpage.serving.steer.beam_search import Beam, BeamSearchOutput
from kvpage.serving.steer.branches import Branch, Branches
from kvpage.serving.steer.paged_token_trie import PagedTokenTrie

__all__ = [
    "Beam",
    "BeamSearchOutput",
    "BeamSearchParams",
    "Branch",
    "Branches",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "KVPageCache",
    "KVPageCachePool",
    "LogitsNotFinite",
    "PagedTokenTrie",
    "RankLost",
    "RequestOutput",
    "Sample",
    "SamplingParams",
    "StepOutput",
    "TokenStream",
]
