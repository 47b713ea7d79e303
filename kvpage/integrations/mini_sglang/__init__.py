"""kvpage as the prefix cache of mini-sglang, by the registry in which it looks for one.

register()      before an engine is made; then its option is cache_type="kvpage"
"""

from typing import Any

from kvpage.integrations.mini_sglang.prefix_handle import PrefixHandle
from kvpage.integrations.mini_sglang.prefix_slots import InsertResult, MatchResult, PrefixSlots, SizeInfo

__all__ = ["InsertResult", "MatchResult", "PrefixHandle", "PrefixSlots", "SizeInfo", "register"]


def register(name: str = "kvpage", num_pages: int | None = None) -> None:
    """Give mini-sglang's registry of prefix caches one more. The engine's process calls it, before it makes an engine.

    Args:
        name: the engine's `cache_type`.
        num_pages: pages of the engine's pool; None for the pages of the pool that the engine has made.

    Raises:
        ImportError: there is no package `minisgl` that has the registry, or its prefix caches have another interface.
        KeyError: the name is taken.
    """
    from minisgl.core import get_global_ctx
    from minisgl.kvcache import SUPPORTED_CACHE_MANAGER, BaseCacheHandle, BasePrefixCache

    def make(device: Any) -> PrefixSlots:
        context = get_global_ctx()
        return PrefixSlots(num_pages or num_pages_of(context.kv_cache), context.page_size, device)

    SUPPORTED_CACHE_MANAGER.register(name)(make)
    BasePrefixCache.register(PrefixSlots)  # whoever asks finds them to be instances
    BaseCacheHandle.register(PrefixHandle)


def num_pages_of(pool: Any) -> int:
    """Return the number of pages in mini-sglang's pool of K and V, whose layers are [pages, page_size, ...]."""
    return int(pool.k_cache(0).shape[0])
