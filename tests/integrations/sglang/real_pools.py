"""SGLang itself, as far as it runs without a GPU: its host pools, over device pools of a few tensors on the CPU."""

import importlib.machinery
import sys
import types
from typing import Any
from unittest.mock import MagicMock

import torch

PAGE, LAYERS, HEADS, SIZE, NUM_PAGES = 4, 3, 2, 8, 300
PATIENCE = 300
"""Seconds for an answer of SGLang's threads; they compile a part of theirs before the first one."""
UNUSED = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional", "torchvision.io")


def without_images() -> None:
    """Let SGLang be imported where torchvision is not: its configurations of image models name it."""
    import transformers  # looks for torchvision itself, and must not find these

    assert transformers.AutoProcessor and transformers.ProcessorMixin
    for name in UNUSED:
        if name not in sys.modules:
            module = types.ModuleType(name)
            module.__path__, module.__spec__ = [], importlib.machinery.ModuleSpec(name, None)
            module.__getattr__ = lambda _: MagicMock()  # type: ignore[method-assign]
            sys.modules[name] = module


def without_reserve() -> None:
    """Let SGLang make its small pools where less than 10 GB are free, which it leaves alone."""
    from sglang.srt.mem_cache.pool_host import base

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


def sizes() -> dict[str, Any]:
    return dict(host_to_device_ratio=1.0, host_size=0, page_size=PAGE, pin_memory=False)


def mha_pool(layout: str, v_size: int | None = None) -> Any:
    """K and V of heads. v_size: of V, where it is another one than K's."""
    from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
    from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost, MHATokenToKVPoolHost

    tokens, device, v_size = NUM_PAGES * PAGE, torch.device("cpu"), v_size or SIZE
    k = tuple(torch.zeros(tokens, HEADS, SIZE, dtype=torch.bfloat16) for _ in range(LAYERS))
    v = tuple(torch.zeros(tokens, HEADS, v_size, dtype=torch.bfloat16) for _ in range(LAYERS))
    buffers = KVBuffers(k=k, v=v, k_data_ptrs=addresses(k), v_data_ptrs=addresses(v), layout=KVBufferLayout.NHD)
    info = MHABufferInfo(
        buffers=buffers, page_size=PAGE, head_num=HEADS, head_dim=SIZE, v_head_dim=v_size, dtype=torch.bfloat16,
        device=device,
    )  # fmt: skip
    kind = MHATokenToKVPoolHost if v_size == SIZE else AsymmetricMHATokenToKVPoolHost
    return filled(kind(info, layout=layout, device_capacity_tokens=tokens, start_layer=0, end_layer=LAYERS, **sizes()))


def mla_pool(layout: str) -> Any:
    """Latents."""
    from sglang.srt.mem_cache.device_pool_info import MLABufferInfo
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    tokens = NUM_PAGES * PAGE
    rows = tuple(torch.zeros(tokens, 1, 16 + 8, dtype=torch.bfloat16) for _ in range(LAYERS))
    info = MLABufferInfo(
        buffers=rows, data_ptrs=addresses(rows), layer_indices=tuple(range(LAYERS)), device_layer_num=LAYERS,
        page_size=PAGE, kv_lora_rank=16, qk_rope_head_dim=8, kv_cache_dim=24, dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )  # fmt: skip
    return filled(
        MLATokenToKVPoolHost(
            info, layout=layout, device_capacity_tokens=tokens, start_layer=0, end_layer=LAYERS,
            target_layer_num=LAYERS, **sizes(),
        )
    )  # fmt: skip


def mamba_pool(layout: str = "page_first") -> Any:
    """States; a page is one of them."""
    from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

    info = MambaStateBufferInfo(
        temporal=torch.zeros(LAYERS, NUM_PAGES, 5, 7), conv=(torch.zeros(LAYERS, NUM_PAGES, 6, dtype=torch.bfloat16),)
    )
    made = MambaPoolHost(
        info, host_to_device_ratio=1.0, host_size=0, device_capacity=NUM_PAGES, pin_memory=False, layout=layout
    )
    return filled(made)


def addresses(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.tensor([one.data_ptr() for one in tensors], dtype=torch.uint64)


def filled(pool: Any, seed: int = 1) -> Any:
    """Write other bytes everywhere, and return the pool."""
    made = torch.Generator().manual_seed(seed)
    for buffer in buffers_of(pool):
        memory = buffer.view(torch.uint8)
        memory.copy_(torch.randint(0, 256, memory.shape, generator=made, dtype=torch.uint8))
    return pool


def buffers_of(pool: Any) -> list[torch.Tensor]:
    """Return the tensors of a pool."""
    if hasattr(pool, "temporal_buffer"):
        return [pool.temporal_buffer, *pool.conv_buffer]
    return list(pool.kv_buffer) if isinstance(pool.kv_buffer, (list, tuple)) else [pool.kv_buffer]


def page_of(pool: Any, page: int) -> bytes:
    """Return a copy of a page's bytes, in an order of its own. It does not ask the pool for addresses."""
    if getattr(pool, "v_head_dim", None) != getattr(pool, "head_dim", None):
        rows = slice(page * PAGE, (page + 1) * PAGE)  # this pool has no flat pages
        flat = torch.cat([pool.k_buffer[rows].flatten(), pool.v_buffer[rows].flatten()])
    else:
        flat = pool.get_data_page(page * pool.page_size, flat=True)
    return flat.contiguous().view(torch.uint8).numpy().tobytes()


def tokens_of(pool: Any, pages: list[int]) -> torch.Tensor:
    """Return the indices of the pages' tokens."""
    return torch.cat([torch.arange(one * pool.page_size, (one + 1) * pool.page_size) for one in pages])


class EngineSide:
    """SGLang's HiCacheController with its threads, over a made-up device: what a scheduler calls, without a scheduler.

    Args:
        pool: A host pool.
        extra: The extra config of the storage, as --hicache-storage-backend-extra-config gives it.
        backend: The storage, as --hicache-storage-backend gives it.
        ranks: Ranks and sizes of groups.
    """

    def __init__(self, pool: Any, extra: dict[str, Any], backend: str = "dynamic", **ranks: int) -> None:
        from sglang.srt.managers import cache_controller
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
        from sglang.srt.runtime_context import get_parallel

        is_mla = type(pool).__name__.startswith("MLA")
        device: Any = MLATokenToKVPool.__new__(MLATokenToKVPool) if is_mla else types.SimpleNamespace()
        device.device, device.layer_num = "cpu", LAYERS
        device.register_layer_transfer_counter = lambda counter: None
        self.pool, self._parallel = pool, get_parallel().override(**{**ONE_RANK, **ranks})
        self._parallel.__enter__()
        cache_controller.device_module = MagicMock()  # streams and events of a GPU
        allocator = types.SimpleNamespace(get_kvcache=lambda: device)
        self.controller = self._kind()(
            allocator, self._host(), PAGE, None, None, storage_backend=backend, model_name="model",
            prefetch_threshold=PAGE, storage_backend_extra_config=extra, enable_storage_metrics=True,
        )  # fmt: skip

    def _kind(self) -> Any:
        from sglang.srt.managers.cache_controller import HiCacheController

        return HiCacheController

    def _host(self) -> Any:
        return self.pool

    def keep(self, pages: list[int], keys: list[str]) -> int:
        """Have SGLang store these pages, and return how many tokens it says are there."""
        self.controller.write_storage(tokens_of(self.pool, pages), [], hash_value=keys)
        return self.controller.ack_backup_queue.get(timeout=PATIENCE).completed_tokens

    def hit(self, tokens: list[int]) -> Any:
        """Have SGLang look these tokens up, and return its operation."""
        self.controller.prefetch("request", tokens)
        return self.controller.prefetch_hit_queue.get(timeout=PATIENCE)

    def fetch(self, operation: Any, pages: list[int]) -> int:
        """Have SGLang read what it found into these pages, and return how many tokens it takes as read."""
        operation.host_indices = tokens_of(self.pool, pages)
        self.controller.prefetch_buffer.put(operation)
        done = 0
        while True:
            ack = self.controller.ack_prefetch_queue.get(timeout=PATIENCE)
            if ack.completed_req:
                return done
            done = ack.completed_tokens

    def close(self) -> None:
        self.controller.detach_storage_backend()
        self._parallel.__exit__(None, None, None)


class HybridSide(EngineSide):
    """The same with SGLang's HybridCacheController: pools of K and V and of states, which one prompt needs both.

    Args:
        pool: Of K and V.
        states: The other pool.
        extra: As of EngineSide.
    """

    def __init__(self, pool: Any, states: Any, extra: dict[str, Any]) -> None:
        self.states = states
        super().__init__(pool, extra)

    def _kind(self) -> Any:
        from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

        return HybridCacheController

    def _host(self) -> Any:
        from sglang.srt.mem_cache.hicache_storage import PoolName
        from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry

        kv = PoolEntry(PoolName.KV, self.pool, None, lambda layer: layer, is_primary_index_anchor=True)
        return HostPoolGroup([kv, PoolEntry(PoolName.MAMBA, self.states, None, lambda layer: layer)])

    def move(self, state: int | None = None, key: str = "end") -> Any:
        """Return SGLang's move of a state, or the question whether there is one at the end."""
        from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

        indices = None if state is None else tokens_of(self.states, [state])
        return PoolTransfer(PoolName.MAMBA, indices, keys=[key], hit_policy=PoolHitPolicy.TRAILING_PAGES)

    def keep_with_state(self, pages: list[int], keys: list[str], state: int) -> int:
        """Have SGLang store these pages and the state at their end; return how many tokens it says are there."""
        moves = [self.move(state, keys[-1])]
        self.controller.write_storage(tokens_of(self.pool, pages), [], hash_value=keys, extra_pools=moves)
        return self.controller.ack_backup_queue.get(timeout=PATIENCE).completed_tokens

    def hit_with_state(self, tokens: list[int]) -> Any:
        """Have SGLang look up how far pages and a state at their end reach."""
        self.controller.prefetch(types.SimpleNamespace(rid="request"), tokens, extra_pools=[self.move()])
        return self.controller.prefetch_hit_queue.get(timeout=PATIENCE)

    def fetch_with_state(self, operation: Any, pages: list[int], state: int) -> tuple[int, int]:
        """Have SGLang read what it found; return the tokens and the states that it takes as read."""
        operation.host_indices = tokens_of(self.pool, pages)
        operation.pool_transfers[0].host_indices = tokens_of(self.states, [state])
        self.controller.prefetch_buffer.put(operation)
        done, states = 0, 0
        while True:
            ack = self.controller.ack_prefetch_queue.get(timeout=PATIENCE)
            if ack.completed_req:
                return done, states
            done = done if ack.completed_tokens is None else ack.completed_tokens
            states = states if ack.pool_hits is None else ack.pool_hits["mamba"]


ONE_RANK = dict(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_dcp_size=1, attn_dcp_rank=0)
