"""CacheEngine: its making, and maps of blocks of every kind."""

import contextlib
import random
from typing import Any

import torch
from fuzz_caches import LAYOUTS
from fuzz_case import Case, World

from kvpage import CacheConfig, CacheEngine, ModelConfig


class EngineWorld(World):
    """CacheEngine: swaps and copies with maps of every kind, and its making."""

    covers = ("kvpage.CacheEngine", "kvpage.Transfer", "kvpage.CacheLayout")

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        backend, kv_layout = rng.choice(LAYOUTS)
        self.model = ModelConfig(8, 1, ("full_attention",) * 2, torch.float32, backend == "mla")
        self.config = CacheConfig(4, 5, 3, "auto", backend, kv_layout, rng.choice(("separate", "packed")))
        self.engine = CacheEngine(self.config, self.model)
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        for cache in (*self.engine.gpu_cache, *self.engine.cpu_cache):
            cache.copy_(torch.randn(cache.shape, generator=generator))

    def snapshot(self) -> object:
        tiers = (*self.engine.gpu_cache, *self.engine.cpu_cache)
        return [cache.contiguous().numpy().tobytes() for cache in tiers], self.engine.poll()

    def check(self) -> None:
        assert all(bool(cache.isfinite().all()) for cache in (*self.engine.gpu_cache, *self.engine.cpu_cache))

    def case(self, rng: random.Random) -> Case:
        name = rng.choice(("swap_in", "swap_out", "copy", "swap_in", "swap_out", "copy", "block_size", "make"))
        if name == "block_size":
            args = {"cache_config": self.config, "model_config": self.model, "parallel_config": None}
            return Case("CacheEngine.get_cache_block_size", CacheEngine.get_cache_block_size, args)
        if name == "make":
            args = {
                "cache_config": self.config,
                "model_config": self.model,
                "parallel_config": None,
                "device_config": None,
            }
            return Case("CacheEngine", CacheEngine, args | {"calibration": None, "kv_scales": None})
        return self._move(name)

    def _move(self, name: str) -> Case:
        num_src, num_dst = {"swap_in": (3, 5), "swap_out": (5, 3), "copy": (2, 3)}[name]
        count = self.rng.randrange(min(num_src, num_dst) + 1)
        first = 2 if name == "copy" else 0
        pairs = [self.rng.sample(range(num_src), count), self.rng.sample(range(first, first + num_dst), count)]
        mapping = torch.tensor(pairs, dtype=torch.int64).t().contiguous()
        args: dict[str, Any] = {"src_to_dsts" if name == "copy" else "src_to_dst": mapping}
        if name != "copy" and self.rng.random() < 0.4:
            args |= {"non_blocking": True, "pools": (None, None), "on_done": None, "by_layer": self.rng.random() < 0.5}
        return Case(f"CacheEngine.{name}", getattr(self.engine, name), args, done=wait)


def wait(transfer: Any) -> None:
    if transfer is not None:
        with contextlib.suppress(TypeError):  # on_done's own, where it takes no transfer
            transfer.wait()
