"""What examples/mini_sglang.py takes from mini-sglang: a registry, and managers of slots and requests, in a few words.

parts = fake_mini_sglang.installed(monkeypatch)      as `load` of the example returns them
"""

import contextlib
import sys
from abc import ABC
from collections.abc import Iterator
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


class BasePrefixCache(ABC):  # noqa: B024
    """The class that prefix caches are asked for."""


class BaseCacheHandle(ABC):  # noqa: B024
    """The class that handles are asked for."""


class NoCache:
    """A prefix cache that keeps nothing, by the name `radix`."""

    size_info = SimpleNamespace(evictable_size=0, total_size=0)

    def match_prefix(self, input_ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(cuda_handle=SimpleNamespace(cached_len=0))  # no slots: nobody may ask for them

    def insert_prefix(self, input_ids: torch.Tensor, indices: torch.Tensor) -> tuple[int, Any]:
        return 0, self.match_prefix(input_ids).cuda_handle

    def lock_handle(self, handle: Any, unlock: bool = False) -> None: ...

    def check_integrity(self) -> None: ...


class Request:
    """A request under way: its tokens have K and V up to `cached_len`, and are to have it up to `device_len`."""

    def __init__(self, sent: Any, row: int, handle: Any) -> None:
        self.uid, self.input_ids, self.table_idx, self.cache_handle = sent.uid, sent.input_ids, row, handle
        self.cached_len, self.device_len = handle.cached_len, len(sent.input_ids)
        self.last_len = self.device_len + sent.sampling_params.max_tokens

    @property
    def can_decode(self) -> bool:
        return self.device_len < self.last_len

    def complete_one(self) -> None:
        self.cached_len, self.device_len = self.device_len, self.device_len + 1

    def append_host(self, token: torch.Tensor) -> None:
        self.input_ids = torch.cat([self.input_ids, token])


class Portion(Request):
    """A beginning of a prompt. No fake makes one."""


class Slots:
    """Hands out pages of slots, and gives those of computed tokens to the prefix cache."""

    def __init__(self, num_pages: int, page_size: int, table: torch.Tensor, kind: str) -> None:
        self.free, self.page_size, self.table, self.num_pages = list(range(num_pages)), page_size, table, num_pages
        self.cache = sys.modules["minisgl.kvcache"].SUPPORTED_CACHE_MANAGER.made[kind](table.device)

    @property
    def available_size(self) -> int:
        return self.cache.size_info.evictable_size + len(self.free) * self.page_size

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
        self.cache.lock_handle(request.cache_handle, unlock=True)
        self.give_back(slots[request.cache_handle.cached_len : num_there])
        if finished:
            self.give_back(slots[handle.cached_len :])
        else:
            self.cache.lock_handle(handle)
            request.cache_handle = handle

    def give_back(self, slots: torch.Tensor) -> None:
        self.free += [slot // self.page_size for slot in slots[:: self.page_size].tolist()]

    @contextlib.contextmanager
    def lazy_free_region(self) -> Iterator[None]:
        yield

    def check_integrity(self) -> None:
        self.cache.check_integrity()
        assert len(set(self.free)) == len(self.free)
        assert len(self.free) + self.cache.size_info.total_size // self.page_size == self.num_pages


class Rows:
    """Rows of the table, one for each request."""

    def __init__(self, num: int, table: torch.Tensor) -> None:
        self.left = list(range(num))

    def free(self, row: int) -> None:
        self.left.append(row)


class Decodes:
    """Requests that get a token a step."""

    def __init__(self, page_size: int) -> None:
        self.under_way: dict[int, Request] = {}

    def filter_reqs(self, requests: list[Request]) -> None:
        every = self.under_way | {one.uid: one for one in requests}
        self.under_way = {uid: one for uid, one in every.items() if one.can_decode}

    def schedule_next_batch(self) -> SimpleNamespace | None:
        return SimpleNamespace(reqs=list(self.under_way.values()), is_prefill=False) if self.under_way else None

    @property
    def runnable(self) -> bool:
        return bool(self.under_way)


class Prompts:
    """Prompts that wait. One is computed a step, whole."""

    def __init__(self, slots: Slots, rows: Rows, decodes: Decodes) -> None:
        self.slots, self.rows, self.decodes, self.sent = slots, rows, decodes, []

    def add_one_req(self, sent: Any) -> None:
        self.sent.append(sent)

    @property
    def runnable(self) -> bool:
        return bool(self.sent)

    def schedule_next_batch(self, most: int) -> SimpleNamespace | None:
        if not self.sent or not self.rows.left:
            return None
        tokens, cache = self.sent[0].input_ids, self.slots.cache
        handle = cache.match_prefix(tokens[:-1]).cuda_handle
        cache.lock_handle(handle)
        if sum(one.last_len + 32 for one in self.decodes.under_way.values()) + len(tokens) + 52 > (
            self.slots.available_size + sum(one.cached_len for one in self.decodes.under_way.values())
        ):
            cache.lock_handle(handle, unlock=True)
            return None
        request = Request(self.sent.pop(0), self.rows.left.pop(), handle)
        if handle.cached_len:
            self.slots.table[request.table_idx, : handle.cached_len] = handle.get_matched_indices()
        return SimpleNamespace(reqs=[request], is_prefill=True)


def installed(monkeypatch: Any) -> SimpleNamespace:
    """Put in the modules that are asked for by name, for one test."""
    registry, core, kvcache = Registry(), ModuleType("minisgl.core"), ModuleType("minisgl.kvcache")
    registry.register("radix")(lambda device: NoCache())
    vars(core)["get_global_ctx"] = lambda: vars(core)["_GLOBAL_CTX"]
    vars(kvcache).update(
        SUPPORTED_CACHE_MANAGER=registry, BasePrefixCache=BasePrefixCache, BaseCacheHandle=BaseCacheHandle
    )
    for module in (ModuleType("minisgl"), core, kvcache):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return SimpleNamespace(
        core=core,
        Context=lambda page_size: SimpleNamespace(page_size=page_size),
        SamplingParams=SimpleNamespace,
        CacheManager=Slots,
        TableManager=Rows,
        DecodeManager=Decodes,
        PrefillManager=Prompts,
        ChunkedReq=Portion,
    )
