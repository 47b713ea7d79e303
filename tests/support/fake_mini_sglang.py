"""What examples/mini_sglang.py takes from mini-sglang: a request, a registry, and a manager of slots, in a few words.

parts = fake_mini_sglang.installed(monkeypatch)      as `load` of the example returns them
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


class Registry:
    """Creators by name, each name once."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}

    def register(self, name: str) -> Any:
        if name in self.made:
            raise KeyError(name)
        return lambda creator: self.made.__setitem__(name, creator)


class NoCache:
    """A prefix cache that keeps nothing, by the name `radix`."""

    size_info = SimpleNamespace(evictable_size=0, total_size=0)

    def match_prefix(self, input_ids: torch.Tensor) -> SimpleNamespace:
        nothing = SimpleNamespace(cached_len=0, get_matched_indices=lambda: torch.zeros(0, dtype=torch.int32))
        return SimpleNamespace(cuda_handle=nothing)

    def insert_prefix(self, input_ids: torch.Tensor, indices: torch.Tensor) -> tuple[int, Any]:
        return 0, self.match_prefix(input_ids).cuda_handle

    def lock_handle(self, handle: Any, unlock: bool = False) -> None: ...

    def check_integrity(self) -> None: ...


class Request:
    """A request under way: its tokens have K and V up to `cached_len`, and are to have it up to `device_len`."""

    def __init__(self, tokens: torch.Tensor, row: int, cached_len: int, num_new: int, uid: int, _: Any, handle: Any):
        self.input_ids, self.table_idx, self.cached_len, self.cache_handle = tokens, row, cached_len, handle
        self.device_len, self.max_device_len = len(tokens), len(tokens) + num_new

    @property
    def extend_len(self) -> int:
        return self.device_len - self.cached_len

    @property
    def can_decode(self) -> bool:
        return self.device_len < self.max_device_len

    def complete_one(self) -> None:
        self.cached_len, self.device_len = self.device_len, self.device_len + 1

    def append_host(self, token: torch.Tensor) -> None:
        self.input_ids = torch.cat([self.input_ids, token])


class Manager:
    """Hands out pages of slots, and gives those of computed tokens to the prefix cache."""

    def __init__(self, num_pages: int, page_size: int, table: torch.Tensor, kind: str) -> None:
        self.free, self.page_size, self.table, self.num_pages = list(range(num_pages)), page_size, table, num_pages
        self.cache = sys.modules["minisgl.kvcache"].SUPPORTED_CACHE_MANAGER.made[kind](table.device)

    @property
    def available_size(self) -> int:
        return self.cache.size_info.evictable_size + len(self.free) * self.page_size

    def match_req(self, waiting: Any) -> Any:
        return self.cache.match_prefix(waiting.input_ids[: waiting.input_len - 1])

    def lock(self, handle: Any) -> None:
        self.cache.lock_handle(handle)

    def unlock(self, handle: Any) -> None:
        self.cache.lock_handle(handle, unlock=True)

    def allocate_paged(self, requests: list[Request]) -> None:
        for request in requests:
            for page in range(-(-request.cached_len // self.page_size), -(-request.device_len // self.page_size)):
                if not self.free:
                    self.give_back(self.cache.evict(self.page_size))
                first = self.free.pop() * self.page_size
                place = slice(page * self.page_size, (page + 1) * self.page_size)
                self.table[request.table_idx, place] = torch.arange(first, first + self.page_size)

    def cache_req(self, request: Request, *, finished: bool) -> None:
        slots = self.table[request.table_idx, : request.cached_len]
        num_there, handle = self.cache.insert_prefix(request.input_ids[: request.cached_len], slots)
        self.unlock(request.cache_handle)
        self.give_back(slots[request.cache_handle.cached_len : num_there])
        if finished:
            self.give_back(slots[handle.cached_len :])
        else:
            self.lock(handle)
            request.cache_handle = handle

    def give_back(self, slots: torch.Tensor) -> None:
        self.free += [slot // self.page_size for slot in slots[:: self.page_size].tolist()]

    def check_integrity(self) -> None:
        self.cache.check_integrity()
        assert len(set(self.free)) == len(self.free)
        assert len(self.free) + self.cache.size_info.total_size // self.page_size == self.num_pages


def installed(monkeypatch: Any) -> SimpleNamespace:
    """Put in the modules that are asked for by name, for one test."""
    registry, core = Registry(), ModuleType("minisgl.core")
    registry.register("radix")(lambda device: NoCache())
    vars(core).update(
        Context=lambda page_size: SimpleNamespace(page_size=page_size), get_global_ctx=lambda: vars(core)["_GLOBAL_CTX"]
    )
    kvcache = ModuleType("minisgl.kvcache")
    vars(kvcache)["SUPPORTED_CACHE_MANAGER"] = registry
    for module in (ModuleType("minisgl"), core, kvcache):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    vars(core)["Req"] = Request
    return SimpleNamespace(core=core, CacheManager=Manager)
