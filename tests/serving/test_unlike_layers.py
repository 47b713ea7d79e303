"""Models whose layers have heads and sizes of their own, or share K and V: released ones scaled down, over blocks."""

import functools

import pytest
import torch
import transformers as tf
from support.family import make_family_model
from support.generate_pools import WINDOW as _WINDOW  # noqa: F401
from support.state_engines import greedy, own_tokens, random_prompt

from kvpage import CacheConfig
from kvpage.serving import BlendConfig, Engine, EngineConfig, KVPageCache, KVPageCachePool
from kvpage.store import KVStore, KVStoreConfig, metadata_of
from kvpage.store.tiers.memory_tier import MemoryTier
