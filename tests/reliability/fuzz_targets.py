"""What is fuzzed, and how often: a world each, made anew for each episode."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fuzz_blend
import fuzz_bound
import fuzz_branches
import fuzz_bytes
import fuzz_configs
import fuzz_copier
import fuzz_engine
import fuzz_lives
import fuzz_native_ops
import fuzz_ops
import fuzz_products
import fuzz_sampling
import fuzz_serving
import fuzz_slots
import fuzz_states
import fuzz_store
import fuzz_vllm


@dataclass(frozen=True, slots=True)
class Target:
    """make: a context manager that gives a World. weight: how often it has an episode; calls: of how many calls."""

    name: str
    make: Callable[[random.Random], Any]
    weight: float = 1.0
    calls: int = 60


TARGETS = [
    Target("ops", fuzz_ops.OpsWorld, 3),
    Target("torch.ops", fuzz_ops.TorchOpsWorld),
    Target("native ops", fuzz_native_ops.NativeOpsWorld, 2),
    Target("products", fuzz_products.ProductWorld, 2),
    Target("sampling", fuzz_sampling.SamplingWorld, 2),
    Target("bound ops", fuzz_bound.BoundWorld),
    Target("copier", fuzz_copier.CopierWorld),
    Target("tree", fuzz_lives.TreeLives, 4, 100),
    Target("manager", fuzz_lives.ManagerLives, 3, 100),
    Target("manager of groups", fuzz_lives.GroupLives, 6, 100),
    Target("sessions", fuzz_lives.SessionLives, 2, 100),
    Target("states", fuzz_states.StateCacheWorld),
    Target("state slots", fuzz_slots.StateSlotWorld),
    Target("engine's caches", fuzz_engine.EngineWorld),
    Target("vllm", fuzz_vllm.VllmWorld, 2),
    Target("configs", fuzz_configs.ConfigWorld, 2, 100),
    Target("tries", fuzz_configs.TrieWorld),
    Target("serving", fuzz_serving.ServingWorld, 0.1, 50),
    Target("store", fuzz_lives.StoreLives),
    Target("parts of stores", fuzz_store.StoreWorld),
    Target("bytes", fuzz_bytes.ByteWorld),
    Target("slots", fuzz_lives.SlotLives, 2, 100),
    Target("blending", fuzz_blend.BlendMathWorld, 2),
    Target("blended rows", fuzz_blend.BlendRowsWorld, 2),
    Target("segments", fuzz_blend.SegmentWorld),
    Target("branches", fuzz_branches.BranchWorld, 0.1, 50),
    Target("caches of generate", fuzz_branches.CacheWorld, 0.1, 50),
]
