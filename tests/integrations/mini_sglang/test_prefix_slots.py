"""PrefixSlots against a naive oracle: sets of prefixes, a slot for each, and how often each is locked.

What an engine asks of its prefix cache, in short: a match names slots that hold these very tokens; an insertion takes
the slots of what is new, and of nothing else; a locked prefix stays; an evicted slot is returned once.
"""

import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol, runtime_checkable

import pytest
import torch
from support.fake_mini_sglang import BaseCacheHandle, BasePrefixCache, Registry

from kvpage.integrations.mini_sglang import PrefixHandle, PrefixSlots, num_pages_of, register

NUM_PAGES = 24


@runtime_checkable
class PrefixCache(Protocol):
    """The calls of the engine. Tokens and slots are tensors of integers."""

    def match_prefix(self, input_ids: torch.Tensor) -> Any: ...
    def insert_prefix(self, input_ids: torch.Tensor, indices: torch.Tensor) -> Any: ...
    def lock_handle(self, handle: Any, unlock: bool = False) -> None: ...
    def evict(self, size: int) -> torch.Tensor: ...
    def reset(self) -> None: ...
    @property
    def size_info(self) -> Any: ...
    def check_integrity(self) -> None: ...


def ids(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def cached(cache: PrefixSlots, tokens: torch.Tensor, slots: torch.Tensor) -> PrefixHandle:
    return cache.insert_prefix(tokens, slots).handle


class Engine:
    """Owns slots, and knows by itself what is cached: the slots of each cached page, by all tokens to its end."""

    def __init__(self, page_size: int, seed: int) -> None:
        self.page_size, self.rng = page_size, random.Random(seed)
        self.cache = PrefixSlots(NUM_PAGES, page_size)
        self.free = list(range(NUM_PAGES))
        self.slots: dict[tuple[int, ...], list[int]] = {}
        self.locked: list[tuple[PrefixHandle, tuple[int, ...]]] = []

    def prompt(self) -> tuple[int, ...]:
        whole = [[self.rng.randrange(2)] * self.page_size for _ in range(self.rng.randrange(5))]
        return (*sum(whole, []), *[self.rng.randrange(2)] * self.rng.randrange(self.page_size))

    def pages(self, tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [tokens[:end] for end in range(self.page_size, len(tokens) + 1, self.page_size)]

    def cached_len(self, prompt: tuple[int, ...]) -> int:
        return max((len(page) for page in self.pages(prompt) if page in self.slots), default=0)

    def slots_of(self, tokens: tuple[int, ...]) -> list[int]:
        return sum((self.slots[page] for page in self.pages(tokens)), [])

    def match(self) -> None:
        prompt = self.prompt()
        handle = self.cache.match_prefix(ids(*prompt)).cuda_handle
        found = prompt[: handle.cached_len]
        assert len(found) == self.cached_len(prompt)
        assert handle.get_matched_indices().tolist() == self.slots_of(found)
        self.cache.lock_handle(handle)
        self.locked.append((handle, found))

    def insert(self) -> None:
        """Insert a prompt with the slots that it has found, or with fewer of them: it was computed at the same time."""
        prompt = self.prompt()
        num_new, had = len(prompt) // self.page_size, self.cached_len(prompt) // self.page_size
        num_common = had if self.rng.random() < 0.7 else self.rng.randrange(had + 1)
        if num_new - num_common > len(self.free):
            return
        pages = [self.free.pop() for _ in range(num_new - num_common)]
        slots = self.slots_of(prompt[: num_common * self.page_size])
        slots += [page * self.page_size + n for page in pages for n in range(self.page_size)]
        rest = [7] * (len(prompt) - len(slots))
        was, handle = self.cache.insert_prefix(ids(*prompt), ids(*slots, *rest))
        assert was == num_common * self.page_size
        assert handle.cached_len == (len(slots) if num_common == had else was)
        assert handle.get_matched_indices().tolist() == slots[: handle.cached_len]
        if num_common < had:
            self.free += pages
            return
        for n, page in enumerate(self.pages(prompt)):
            self.slots.setdefault(page, slots[n * self.page_size :][: self.page_size])

    def unlock(self) -> None:
        if self.locked:
            handle, found = self.locked.pop(self.rng.randrange(len(self.locked)))
            assert handle.get_matched_indices().tolist() == self.slots_of(found)
            self.cache.lock_handle(handle, unlock=True)

    def evict(self) -> None:
        size, can = self.rng.randrange(3 * self.page_size), self.cache.size_info.evictable_size
        if size > can:
            with pytest.raises(RuntimeError, match=f"at most the {can} evictable tokens, got {size}"):
                self.cache.evict(size)
            return
        slots = self.cache.evict(size).tolist()
        assert size <= len(slots) < size + self.page_size
        gone = [page for page, its in self.slots.items() if its[0] in slots]
        assert sorted(slots) == sorted(sum((self.slots.pop(page) for page in gone), []))
        self.free += [slot // self.page_size for slot in slots[:: self.page_size]]

    def check(self) -> None:
        protected = {page for _, found in self.locked for page in self.pages(found)}
        assert protected <= self.slots.keys()
        num_cached, sizes = len(self.slots) * self.page_size, self.cache.size_info
        assert sizes.protected_size == len(protected) * self.page_size and sizes.total_size == num_cached
        assert len(self.free) + len(self.slots) == NUM_PAGES
        self.cache.check_integrity()


@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("seed", range(5))
def test_a_random_life_is_that_of_the_oracle(page_size, seed):
    engine = Engine(page_size, seed)
    for _ in range(200):
        engine.rng.choice([engine.match, engine.insert, engine.insert, engine.unlock, engine.evict])()
        engine.check()


def test_it_is_such_a_cache():
    assert isinstance(PrefixSlots(4, 1), PrefixCache)


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 5])
def test_only_whole_pages_are_cached(num_tokens):
    cache, tokens = PrefixSlots(4, 4), torch.arange(num_tokens)
    was, handle = cache.insert_prefix(tokens, torch.arange(8, 8 + num_tokens))
    assert (was, handle.cached_len) == (0, num_tokens // 4 * 4)
    assert cache.match_prefix(torch.arange(9)).cuda_handle.cached_len == handle.cached_len
    assert handle.get_matched_indices().dtype == torch.int32


def test_the_least_recently_found_goes_first_and_what_goes_on_before_its_beginning():
    cache = PrefixSlots(8, 1)
    cached(cache, ids(1, 2), ids(0, 1))
    cached(cache, ids(5, 6), ids(2, 3))
    cache.match_prefix(ids(1, 2))
    assert [cache.evict(1).tolist() for _ in range(3)] == [[3], [2], [1]]
    assert cache.evict(0).tolist() == []


def test_a_handle_is_locked_as_often_as_it_is_asked():
    cache = PrefixSlots(2, 1)
    handle = cached(cache, ids(1, 2), ids(0, 1))
    cache.lock_handle(handle)
    cache.lock_handle(handle)
    cache.lock_handle(handle, unlock=True)
    assert cache.size_info == (0, 2)
    cache.lock_handle(handle, unlock=True)
    assert cache.size_info == (2, 0)
    with pytest.raises(ValueError, match="must be locked before it is unlocked"):
        cache.lock_handle(handle, unlock=True)


def test_a_handle_outlived_by_others_names_no_slot_of_theirs():
    cache = PrefixSlots(2, 1)
    handle = cached(cache, ids(1, 2), ids(0, 1))
    cache.evict(1)
    cached(cache, ids(3), ids(1))
    for use in (handle.get_matched_indices, lambda: cache.lock_handle(handle)):
        with pytest.raises(RuntimeError, match="handle must have its 2 tokens cached, got 1"):
            use()
    cache.check_integrity()


def test_what_the_engine_did_not_own_is_not_taken():
    cache = PrefixSlots(4, 2)
    cached(cache, ids(1, 2), ids(0, 1))
    before = cache.size_info
    for tokens, slots, message in (
        (ids(3, 4), ids(0, 1), "belongs to a prefix tree"),
        (ids(3, 4, 5, 6), ids(2, 3, 2, 3), "belongs to a prefix tree"),
        (ids(3, 4), ids(8, 9), "range|must be"),
        (ids(3, 4), ids(3, 4), "whole pages of 2 slots"),
        (ids(3, 4), ids(3, 2), "whole pages of 2 slots"),
        (ids(3, 4), ids(2), "one a token, got 1 for 2 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.insert_prefix(tokens, slots)
        assert cache.size_info == before
        cache.check_integrity()


def test_slots_of_tokens_that_another_has_cached_first_stay_their_requests():
    cache = PrefixSlots(8, 1)
    shared = cached(cache, ids(1, 2), ids(0, 1))
    was, handle = cache.insert_prefix(ids(1, 2, 3), ids(0, 5, 6))
    assert (was, handle.cached_len, handle.get_matched_indices().tolist()) == (1, 1, [0])
    assert shared.get_matched_indices().tolist() == [0, 1]
    assert cache.size_info.total_size == 2
    assert cached(cache, ids(9, 8), ids(5, 6)).cached_len == 2  # nobody has taken them
    cache.check_integrity()


def test_handles_of_others_are_refused():
    cache, other = PrefixSlots(4, 1), PrefixSlots(4, 1)
    with pytest.raises(ValueError, match="of this cache"):
        cache.lock_handle(cached(other, ids(1), ids(0)))
    with pytest.raises(TypeError, match="must be a PrefixHandle, got int"):
        cache.lock_handle(3)


def test_a_reset_forgets_all_but_not_what_is_locked():
    cache = PrefixSlots(4, 1)
    handle = cached(cache, ids(1, 2), ids(0, 1))
    cache.lock_handle(handle)
    with pytest.raises(RuntimeError, match="unlocked before a reset, got 1 locks"):
        cache.reset()
    cache.lock_handle(handle, unlock=True)
    cache.reset()
    assert cache.size_info.total_size == 0
    assert cached(cache, ids(9, 8, 7, 6), ids(3, 2, 1, 0)).cached_len == 4
    cache.check_integrity()


@pytest.fixture
def registry(monkeypatch):
    pool = SimpleNamespace(k_cache=lambda layer: torch.empty(6, 4, 2, 8))
    parts = {
        "minisgl": {},
        "minisgl.kvcache": {
            "SUPPORTED_CACHE_MANAGER": Registry(),
            "BaseCacheHandle": BaseCacheHandle,
            "BasePrefixCache": BasePrefixCache,
        },
        "minisgl.core": {"get_global_ctx": lambda: SimpleNamespace(page_size=4, kv_cache=pool)},
    }
    for name, values in parts.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    return sys.modules["minisgl.kvcache"].SUPPORTED_CACHE_MANAGER


def test_the_registry_makes_a_cache_of_the_engines_pool(registry):
    register()
    cache = registry.made["kvpage"](torch.device("cpu"))
    assert cached(cache, torch.arange(4), torch.arange(20, 24)).cached_len == 4  # the last of six pages
    with pytest.raises(ValueError):
        cache.insert_prefix(torch.arange(4, 8), torch.arange(24, 28))
    with pytest.raises(KeyError):
        register()
    register("small", num_pages=1)
    with pytest.raises(ValueError):
        registry.made["small"]("cpu").insert_prefix(torch.arange(4), torch.arange(4, 8))
    assert num_pages_of(SimpleNamespace(k_cache=lambda layer: torch.empty(3, 1))) == 3


def test_what_is_registered_is_a_cache_of_mini_sglang(registry):
    register()
    cache = registry.made["kvpage"](torch.device("cpu"))
    assert isinstance(cache, BasePrefixCache)
    assert isinstance(cache.match_prefix(ids(1)).cuda_handle, BaseCacheHandle)


@pytest.mark.parametrize("name", ["SUPPORTED_CACHE_MANAGER", "BaseCacheHandle", "BasePrefixCache"])
def test_a_version_without_the_registry_or_its_interface_is_refused(registry, monkeypatch, name):
    monkeypatch.delattr(sys.modules["minisgl.kvcache"], name)
    with pytest.raises(ImportError, match=name):
        register()
    assert not registry.made
