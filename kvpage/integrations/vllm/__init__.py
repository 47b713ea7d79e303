"""A secondary tier of vLLM's KV offloading over a ByteStore. It needs vLLM 0.32 or 0.33.

    vLLM's blocks ── chunks ─► vLLM's host memory ── StoreTier ─► ByteStore: memory, disk, Redis, S3
                  ◄───────────                   ◄────────────  verified, or a miss

vLLM loads the class by its configuration: "type": "KVPageTier", "module_path": "kvpage.integrations.vllm". In its build
for CPUs, which does not copy between device and host, "spec_name": "CpuTieringSpec" is here, too.
"""

from typing import TYPE_CHECKING, Any

from kvpage.integrations.vllm.config import StoreTierConfig
from kvpage.integrations.vllm.interface import check_interface, check_worker_interface

if TYPE_CHECKING:
    from kvpage.integrations.vllm.cpu.tiering_spec import CpuTieringSpec
    from kvpage.integrations.vllm.tier import KVPageTier

__all__ = ["CpuTieringSpec", "KVPageTier", "StoreTierConfig"]


def __getattr__(name: str) -> Any:
    """Return KVPageTier or CpuTieringSpec: subclasses of classes of vLLM's, so they are made when they are asked for.

    Raises:
        ImportError: vLLM is missing, or its interface is not the one that was tested.
        AttributeError: `name` is another one.
    """
    if name == "KVPageTier":
        check_interface()
        from kvpage.integrations.vllm.tier import KVPageTier

        return KVPageTier
    if name == "CpuTieringSpec":
        check_worker_interface()
        from kvpage.integrations.vllm.cpu.tiering_spec import CpuTieringSpec

        return CpuTieringSpec
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
