"""A secondary tier of vLLM's KV offloading over a ByteStore. It needs vLLM 0.32 or 0.33.

    vLLM's blocks ── chunks ─► vLLM's host memory ── StoreTier ─► ByteStore: memory, disk, Redis, S3
                  ◄───────────                   ◄────────────  verified, or a miss

vLLM loads the class by its configuration: "type": "KVPageTier", "module_path": "kvpage.integrations.vllm".
"""

from typing import TYPE_CHECKING, Any

from kvpage.integrations.vllm.config import StoreTierConfig
from kvpage.integrations.vllm.interface import check_interface

if TYPE_CHECKING:
    from kvpage.integrations.vllm.tier import KVPageTier

__all__ = ["KVPageTier", "StoreTierConfig"]


def __getattr__(name: str) -> Any:
    """Return KVPageTier: it is a subclass of a class of vLLM's, so it is made when it is asked for.

    Raises:
        ImportError: vLLM is missing, or its interface is not the one that was tested.
        AttributeError: `name` is another one.
    """
    if name != "KVPageTier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_interface()
    from kvpage.integrations.vllm.tier import KVPageTier

    return KVPageTier
