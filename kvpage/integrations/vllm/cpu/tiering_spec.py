"""CpuTieringSpec: vLLM's offloading to tiers in its build for CPUs, which has no worker that copies."""

from typing import Any

from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvpage.integrations.vllm.cpu.copy_worker import CopyWorker


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc, unused-ignore]  # vLLM has no types for mypy
    """vLLM's own TieringOffloadingSpec, with a worker that copies between caches and host memory of a CPU.

    Args:
        config: vLLM's OffloadingConfig.

    Raises:
        ValueError: It asks for the canonical layout of chunks, which this worker does not write.
    """

    def __init__(self, config: Any) -> None:
        if config.canonical_layout:
            raise ValueError("canonical_layout must be off in CpuTieringSpec, got on")
        super().__init__(config)
        self._copy_worker: CopyWorker | None = None

    def get_worker(self, kv_caches: Any) -> Any:
        """Return the worker, made at the first call.

        Args:
            kv_caches: vLLM's CanonicalKVCaches.
        """
        if self._copy_worker is None:
            self._copy_worker = self.create_worker(kv_caches)
        return self._copy_worker

    def create_worker(self, kv_caches: Any) -> CopyWorker:
        """Return a worker over these caches, with host memory that vLLM's scheduler sees, too."""
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        try:
            return CopyWorker(kv_caches, region, self.blocks_per_chunk)
        except BaseException:
            region.cleanup()
            raise
