"""The serving loop: continuous batching over paged blocks, for Hugging Face decoders. It needs the extra `engine`."""

from kvpage.serving.config import EngineConfig
from kvpage.serving.engine import Engine
from kvpage.serving.generate.cache_pool import KVPageCachePool
from kvpage.serving.generate.kv_page_cache import KVPageCache
from kvpage.serving.live.async_engine import AsyncEngine, AsyncEngineStats
from kvpage.serving.live.config import AsyncEngineConfig
from kvpage.serving.live.errors import EngineClosed, QueueFull
from kvpage.serving.live.live_request import LiveRequest
from kvpage.serving.loop.outputs import RequestOutput, Sample, StepOutput
from kvpage.serving.loop.ranks.rank_lost import RankLost
from kvpage.serving.loop.token_stream import TokenStream
from kvpage.serving.params.beam import BeamSearchParams
from kvpage.serving.params.guide import Guide
from kvpage.serving.params.sampling import SamplingParams
from kvpage.serving.params.states import StateConfig
from kvpage.serving.sampling.logits_check import LogitsNotFinite
from kvpage.serving.sessions.branch import BranchAdapter
from kvpage.serving.sessions.config import SessionConfig
from kvpage.serving.sessions.retention import Retention
from kvpage.serving.sessions.session import BranchState, Session, SessionState
from kvpage.serving.stats import EngineStats, RequestState
from kvpage.serving.steer.beam_search import Beam, BeamSearchOutput
from kvpage.serving.steer.branches import Branch, Branches
from kvpage.serving.steer.paged_token_trie import PagedTokenTrie
from kvpage.serving.text.detokenizer import Detokenizer
from kvpage.serving.text.token_logprobs import TokenLogprobs
from kvpage.serving.weights.watch import WeightsChanged

__all__ = [
    "AsyncEngine",
    "AsyncEngineConfig",
    "AsyncEngineStats",
    "Beam",
    "BeamSearchOutput",
    "BeamSearchParams",
    "Branch",
    "BranchAdapter",
    "BranchState",
    "Branches",
    "Detokenizer",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineStats",
    "Guide",
    "KVPageCache",
    "KVPageCachePool",
    "LiveRequest",
    "LogitsNotFinite",
    "PagedTokenTrie",
    "QueueFull",
    "RankLost",
    "RequestOutput",
    "RequestState",
    "Retention",
    "Sample",
    "SamplingParams",
    "Session",
    "SessionConfig",
    "SessionState",
    "StateConfig",
    "StepOutput",
    "TokenLogprobs",
    "TokenStream",
    "WeightsChanged",
]
