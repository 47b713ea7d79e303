"""Configurations, parameters, keys and URLs: what validates itself, and token tries."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from fuzz_case import Case, World

from kvpage import (
    BlockConfig,
    BlockManager,
    BlockPool,
    CacheConfig,
    CacheGroup,
    CacheLayout,
    DeviceConfig,
    GroupKind,
    HostPolicy,
    KVScales,
    LayerShape,
    LoadOrCompute,
    ModelConfig,
    ParallelConfig,
    PrefixTree,
    StateLayout,
    StatePart,
    States,
    Window,
)
from kvpage.blocks.namespaces import Content, keyed_tokens, namespace_of
from kvpage.extras.slots import PrefixCacheManager, SlotAllocator
from kvpage.extras.token_trie import DynamicTokenTrie, OutputCache, TokenTrie
from kvpage.observe.events import EventConfig
from kvpage.ops import Attention, Rotation
from kvpage.serving import BeamSearchParams, EngineConfig, Retention, SamplingParams, SessionConfig, StateConfig
from kvpage.store import KVStoreConfig, KVStoreMetadata, SealKeys
from kvpage.store.config import TierURL, parse_size
from kvpage.store.records.keys import ChunkKeys


def small(make: Callable[..., Any]) -> Callable[..., Any]:
    """Sizes that are allowed and do not fit into the machine are no finding."""

    def call(**given: Any) -> Any:
        sizes = [value for value in given.values() if isinstance(value, (int, np.integer))]
        return None if any(10**6 < size < 2**31 for size in sizes) else make(**given)

    return call


ROWS = torch.ones(3, 2, 4)
PARTS = (StatePart(1, "conv", 0, (5, 3), torch.bfloat16), StatePart(1, "recurrent", 0, (2, 4), torch.float32))
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "CacheConfig": (CacheConfig, {"block_size": 4, "num_gpu_blocks": 3, "num_cpu_blocks": 2, "cache_dtype": "auto"}
                    | {"backend": "flash", "kv_layout": "NHD", "layer_layout": "packed"}),
    "CacheConfig.for_memory": (CacheConfig.for_memory, {
        "gpu_bytes": 1 << 20, "model_config": ModelConfig(8, 1, ("full_attention",)), "parallel_config": None,
        "cpu_bytes": 1 << 10, "block_size": 4,
    }),
    "LayerShape": (LayerShape, {"num_kv_heads": 2, "head_size": 8, "value_size": None}),
    "ModelConfig": (ModelConfig, {"head_size": 8, "num_kv_heads": 1, "layer_types": ("full_attention", "mamba")}
                    | {"dtype": torch.float16, "use_mla": False}),
    "ParallelConfig": (ParallelConfig, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "pipeline_rank": 1}),
    "DeviceConfig": (DeviceConfig, {"device": "cpu"}),
    "CacheLayout": (CacheLayout, {"block_size": 4, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float16}
                    | {"backend": "flash", "kv_layout": "NHD", "layer_layout": "packed"}),
    "CacheLayout.from_spec": (CacheLayout.from_spec, {"spec": "flash:NHD:separate:16:8:128:bfloat16"}),
    "StatePart": (StatePart, {"layer_id": 3, "name": "conv", "index": 0, "shape": (4, 2), "dtype": torch.float32}),
    "CacheGroup": (CacheGroup, {"kind": GroupKind.STATE, "layer_ids": (1,), "window": None, "parts": PARTS}),
    "CacheGroup, window": (CacheGroup, {"kind": GroupKind.WINDOW, "layer_ids": (0, 2), "window": 8, "parts": ()}),
    "Window": (Window, {"num_tokens": 8, "num_blocks": 3}),
    "GroupKind": (GroupKind, {"value": "full"}),
    "StateLayout": (StateLayout, {"parts": PARTS}),
    "StateLayout.of_parts": (StateLayout.of_parts, {"parts": PARTS}),
    "StateLayout.of_groups": (StateLayout.of_groups, {"groups": [CacheGroup(GroupKind.STATE, (1,), parts=PARTS)]}),
    "StateConfig": (StateConfig, {"checkpoint_bytes": 1 << 20, "host_checkpoint_bytes": 0, "checkpoint_every": 64}),
    "SessionConfig": (SessionConfig, {"max_sessions": 2, "max_tokens": 64, "max_branches": 3, "owner_quota": 4}
                      | {"return_lead": 0.5, "keeps_records": True, "record_deadline": 0.5}),
    "Retention": (Retention, {"ttl": 5.0, "tier": "host", "priority": 1}),
    "KVScales": (KVScales, {"key": torch.ones(2), "value": torch.ones(1)}),
    "KVScales.of": (KVScales.of, {"key": 0.5, "value": [1.0, 2.0], "device": "cpu"}),
    "KVScales.from_rows": (KVScales.from_rows,
                           {"key": ROWS, "value": ROWS, "dtype": torch.float8_e5m2, "per_head": True}),
    "Rotation": (Rotation, {"cos": torch.ones(3, 2), "sin": torch.zeros(3, 2), "head_size": 8, "first": 2}
             | {"is_interleaved": True}),
    "BlockConfig": (BlockConfig, {"num_blocks": 8, "block_size": 4, "enable_prefix_caching": True, "num_host_blocks": 2}
                    | {"share_parts": True, "host_policy": HostPolicy(), "pin_quota": 1}),
    "BlockConfig.of_cache": (BlockConfig.of_cache, {"cache": CacheConfig(4, 8), "pin_quota": 1}),
    "HostPolicy": (HostPolicy, {"after_hits": 2}),
    "LoadOrCompute": (LoadOrCompute, {"block_bytes": 1 << 16, "block_size": 4, "bytes_per_second": 1e9}
                      | {"tokens_per_second": 1e3, "latency": 1e-5}),
    "SamplingParams": (SamplingParams, {"max_tokens": 3, "temperature": 0.5, "top_k": 2, "top_p": 0.5, "seed": 1}
                       | {"stop_token_ids": (1, 2), "ignore_eos": False, "retain_priority": 1, "n": 2}),
    "BeamSearchParams": (BeamSearchParams, {"num_beams": 2, "max_tokens": 3}),
    "Attention": (Attention, {"scale": 0.5, "sliding_window": 3, "softcap": 5.0, "sinks": torch.zeros(2)}
                  | {"value_size": 8, "query_positions": torch.arange(3)}),
    "EngineConfig": (EngineConfig, {"cache_config": CacheConfig(4, 3, 2), "max_num_seqs": 2, "max_model_len": 32}
                     | {"max_num_batched_tokens": 8, "enable_prefix_caching": True, "share_parts": False}
                     | {"host_policy": HostPolicy(), "load_or_compute": True, "pin_quota": 1, "store_deadline": 0.5}
                     | {"kv_scales": (KVScales.of(0.5, 1.0),), "calibration_tokens": None, "save_generated": True}
                     | {"residency_sample_rate": 0.5, "blend": None, "generation_config": "served"}
                     | {"states": StateConfig()}),
    "EngineConfig, windows": (EngineConfig, {"cache_config": CacheConfig(4, 3), "num_window_blocks": 5}
                              | {"pin_quota": 0, "blend": None, "attention_backend": "auto"}),
    "EngineConfig, open": (EngineConfig, {"num_window_blocks": "auto", "kv_cache_memory": 1 << 20, "max_num_seqs": 2}
                           | {"states": StateConfig(None, 0, None)}),
    "EngineConfig, calibrated": (EngineConfig, {"cache_config": CacheConfig(4, 3, 2), "kv_scales": "calibrate"}
                                 | {"calibration_tokens": [1, 2, 3]}),
    "EventConfig": (EventConfig, {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": None, "topic": "", "window": 1}
                    | {"high_water_mark": 5, "encoding": "map", "connect": False, "data_parallel_rank": 0}),
    "KVStoreConfig": (KVStoreConfig, {"chunk_size": 4, "tiers": ("memory://?size=1MiB",), "codec": "raw"}
                      | {"save_decode_cache": False, "deadline": 0.5, "num_threads": 1}),
    "KVStoreConfig.from_dict": (KVStoreConfig.from_dict, {"values": {"chunk_size": 4, "tiers": ["memory://"]}}),
    "KVStoreConfig.from_env": (KVStoreConfig.from_env, {"environ": {"KVPAGE_CHUNK_SIZE": "4", "KVPAGE_TIERS": "memory://"}}),
    "TierURL.parse": (TierURL.parse, {"url": "disk://user:pass@host/a,/b?size=1GiB&policy=lru"}),
    "parse_size": (parse_size, {"text": "1.5 GiB"}),
    "SealKeys": (SealKeys, {"keys": (("a", b"A" * 32), ("b", b"B" * 32))}),
    "KVStoreMetadata": (KVStoreMetadata, {"model_name": "m", "world_size": 2, "worker_id": 1, "fmt": "vllm"}
                        | {"kv_dtype": torch.float16, "row_layout": "", "scales_digest": b"", "extra": (("a", "b"),)}),
    "ChunkKeys.of": (lambda tokens, namespace: ChunkKeys(KVStoreMetadata("m"), 4).of(tokens, namespace),
                     {"tokens": [1, 2, 3, 4, 5], "namespace": b"a"}),
    "Content": (Content, {"start": 1, "num_tokens": 2, "data": b"xyz"}),
    "namespace_of": (namespace_of, {"salt": b"s", "lora": "l", "contents": [b"d"]}),
    "keyed_tokens": (keyed_tokens,
                     {"tokens": [1, 2, 3, 4], "contents": [Content(1, 2, b"x")], "salt": b"", "lora": ""}),
    "OutputCache": (OutputCache, {"maxsize": 3, "move_to_cpu": False}),
    "BlockPool": (small(BlockPool), {"num_blocks": 9}),
    "PrefixTree": (PrefixTree, {"pool": BlockPool(4), "block_size": 4, "host_pool": BlockPool(2)}),
    "BlockManager": (small(BlockManager), {"num_blocks": 10, "block_size": 4, "enable_prefix_caching": True}
                     | {"num_host_blocks": 3, "share_parts": True, "host_policy": None, "rule": None, "pin_quota": 0}),
    "BlockManager, groups": (small(BlockManager), {"num_blocks": 10, "block_size": 4, "num_host_blocks": 3}
                             | {"groups": [Window(4, 3), Window(2, 1), States(2)]}),
    "SlotAllocator": (small(SlotAllocator), {"max_slots": 10}),
    "PrefixCacheManager": (PrefixCacheManager, {"max_capacity": 10}),
}  # fmt: skip


class ConfigWorld(World):
    """Calls that leave nothing behind, so there is nothing to compare: only their errors."""

    covers = tuple(
        f"kvpage.{name}"
        for name in [
            "CacheConfig",
            "LayerShape",
            "ModelConfig",
            "ParallelConfig",
            "DeviceConfig",
            "KVScales",
            "HostPolicy",
            "BlockConfig",
            "LoadOrCompute",
            "CacheGroup",
            "GroupKind",
            "StateLayout",
            "StatePart",
            "Window",
        ]
    )
    covers += ("kvpage.serving.SamplingParams", "kvpage.serving.BeamSearchParams", "kvpage.observe.events.EventConfig")
    covers += ("kvpage.ops.Attention", "kvpage.ops.Rotation", "kvpage.serving.EngineConfig")
    covers += ("kvpage.serving.StateConfig", "kvpage.serving.SessionConfig", "kvpage.serving.Retention")
    covers += ("kvpage.store.KVStoreConfig", "kvpage.store.KVStoreMetadata", "kvpage.store.SealKeys")

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def case(self, rng: random.Random) -> Case:
        name = rng.choice(sorted(CALLS))
        function, args = CALLS[name]
        return Case(name, function, dict(args))


class TrieWorld(World):
    """Tries of tokens with logprobs and K and V."""

    covers = (
        "kvpage.extras.token_trie.TokenTrie",
        "kvpage.extras.token_trie.DynamicTokenTrie",
        "kvpage.extras.token_trie.OutputCache",
    )

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.root, self.plain, self.cache = rng, DynamicTokenTrie(), TokenTrie(), OutputCache(3)

    def snapshot(self) -> object:
        nodes = [(id(node), node._kv is None, node.logprobs is None) for node in self.root._nodes()]
        plain = sum(1 for _ in self.plain._nodes())
        return nodes, plain, self.root.count_kv_size(), len(self.cache), self.cache.num_bytes

    def check(self) -> None:
        assert self.root.count_kv_size() == len(self.root.collect_nodes_with_kv())

    def case(self, rng: random.Random) -> Case:
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 5))]
        start = rng.randrange(len(tokens) + 1)
        kv = rng.choice((torch.zeros, np.zeros))((1, 2, 1, len(tokens) - start, 2))
        logits = torch.zeros(len(tokens), 5)
        missing = (KeyError,)
        makers = (
            lambda: Case("trie.extend_cache", self.root.extend_cache, {"next_token_index": start, "token_ids": tokens}
                         | {"logprobs": torch.zeros(5), "kv": kv}),
            lambda: Case("plain.extend_cache", self.plain.extend_cache, {"next_token_index": start, "token_ids": tokens}
                         | {"logits": logits, "base": 0}),
            lambda: Case("trie.add_token", self.root.add_token, {"token_id": 1, "logprobs": None}),
            lambda: Case("trie.evict_lru_kv", self.root.evict_lru_kv, {"max_kv": 2}),
            lambda: Case("trie.get_token", self.root.get_token, {"token_id": 1}, errors=missing, may_raise=missing),
            lambda: Case("trie.has_token", self.root.has_token, {"token_id": 1}),
            lambda: Case("cache.set", self.cache.__setitem__, {"key": rng.randrange(5), "tensor": torch.zeros(4)}, 2),
            lambda: Case("cache.get", self.cache.__getitem__, {"key": 1}, 1, errors=(KeyError,), may_raise=(KeyError,)),
        )  # fmt: skip
        return rng.choice(makers)()
