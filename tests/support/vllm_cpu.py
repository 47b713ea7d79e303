"""A copy worker for vLLM's tiering on a CPU, where vLLM has none: device blocks that lie in host memory.

    "spec_name": "CpuTieringSpec", "spec_module_path": "support.vllm_cpu"

vLLM's scheduler, its keys, its host memory and its tiers are those of a GPU. Only the copies of blocks are here.
"""

import time
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyWorker(OffloadingWorker):
    """Copies blocks between the device's tensors and the shared host memory, when it is asked to."""

    def __init__(self, caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._device = [one.tensor for one in caches.tensors]
        self._host = [region.create_next_worker_view(tensor.shape[1]) for tensor in self._device]
        self._groups, self._region, self._done = caches.group_data_refs, region, []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, to_host=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        return self._copy(job_id, dst_spec, src_spec, to_host=False)

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        return

    def shutdown(self) -> None:
        self._host.clear()
        self._region.cleanup()

    def _copy(self, job_id: int, device_spec: Any, host_spec: Any, to_host: bool) -> bool:
        began, num_bytes = time.perf_counter(), 0
        device_ids = np.asarray(device_spec.block_ids, np.int64)
        host_ids = np.asarray(getattr(host_spec, "chunk_ids", host_spec.block_ids), np.int64)
        ends = np.cumsum(device_spec.group_sizes)
        for refs, end, size in zip(self._groups, ends, device_spec.group_sizes, strict=True):
            device, host = torch.from_numpy(device_ids[end - size : end]), torch.from_numpy(host_ids[end - size : end])
            for ref in refs:
                one, other = self._device[ref.tensor_idx], self._host[ref.tensor_idx]
                if to_host:
                    other[host] = one[device]
                else:
                    one[device] = other[host]
                num_bytes += int(size) * ref.page_size_bytes
        self._done.append(TransferResult(job_id, True, num_bytes, time.perf_counter() - began))
        return True


class CpuTieringSpec(TieringOffloadingSpec):
    """vLLM's tiering with the copy worker above."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self.blocks_per_chunk != 1:
            raise ValueError(f"blocks_per_chunk must be 1, got {self.blocks_per_chunk}")
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyWorker(kv_caches, region)
        return self._worker
