"""CopyWorker: copies blocks between the caches of vLLM's build for CPUs and its host memory.

caches   [block][block][block] ..            a tensor a layer, or one for several
chunk    [ tensor 0: block | block ][ tensor 1: block | block ] ..        blocks_per_chunk of each tensor, in a row

vLLM numbers the blocks of a request. So a job may begin and end within a chunk.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from kvpage.integrations.vllm_ops.registered_memory import RegisteredMemory

_Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Pages:
    """The pages of one tensor of the caches, and their places in the chunks.

    Attributes:
        device: int8, [blocks, bytes of a page].
        host: int8, [chunks, bytes of all pages of a chunk].
    """

    device: torch.Tensor
    host: torch.Tensor

    def device_addresses(self, blocks: _Integers) -> _Integers:
        return self.device.data_ptr() + blocks * self.device.stride(0)

    def host_addresses(self, chunks: _Integers, places: _Integers) -> _Integers:
        return self.host.data_ptr() + chunks * self.host.stride(0) + places * self.device.shape[1]


class CopyWorker(OffloadingWorker):  # type: ignore[misc, unused-ignore]  # vLLM has no types for mypy
    """Copies at once, in the thread that asks: device blocks are host memory here, and the model runs in this thread.

    Args:
        caches: vLLM's CanonicalKVCaches.
        region: vLLM's host memory, a SharedOffloadRegion of this worker. It belongs to the worker.
        blocks_per_chunk: Blocks that vLLM offloads together.
    """

    def __init__(self, caches: Any, region: Any, blocks_per_chunk: int) -> None:
        self._region, self._blocks_per_chunk = region, blocks_per_chunk
        self._tensors = [self._pages_of(cache.tensor, cache.page_size_bytes) for cache in caches.tensors]
        self._groups = [_bytes_of_tensors(refs) for refs in caches.group_data_refs]
        self._memory = RegisteredMemory()
        self._memory.register([tensor for pages in self._tensors for tensor in (pages.device, pages.host)])
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy blocks to chunks."""
        return self._copy(job_id, src_spec, dst_spec.block_ids, is_store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        """Copy chunks to blocks. All are expedited."""
        return self._copy(job_id, dst_spec, src_spec.block_ids, is_store=False)

    def get_finished(self) -> list[Any]:
        """Return the jobs since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Do nothing: a job is over when it was submitted."""

    def shutdown(self) -> None:
        """Let go of the memory."""
        self._tensors, self._memory = [], RegisteredMemory()
        self._region.cleanup()

    def _pages_of(self, tensor: torch.Tensor, page_bytes: int) -> _Pages:
        device = tensor.view(torch.int8).view(-1, page_bytes)
        return _Pages(device, self._region.create_next_worker_view(page_bytes * self._blocks_per_chunk))

    def _copy(self, job_id: int, spec: Any, chunk_ids: Sequence[int], *, is_store: bool) -> bool:
        """Copy between the blocks that the spec names and the chunks; return that it went well."""
        began = time.perf_counter()
        blocks, hosts, sizes = self._extents(spec, np.asarray(chunk_ids, np.int64))
        self._memory.copy(*((blocks, hosts) if is_store else (hosts, blocks)), sizes)
        self._finished.append(TransferResult(job_id, True, int(sizes.sum()), time.perf_counter() - began))
        return True

    def _extents(self, spec: Any, chunk_ids: _Integers) -> tuple[_Integers, _Integers, _Integers]:
        """Return the addresses of pages in the caches and in chunks, and their bytes."""
        blocks, made, first_block, first_chunk = np.asarray(spec.block_ids, np.int64), [], 0, 0
        for tensors, size, number in zip(self._groups, spec.group_sizes, spec.block_indices, strict=True):
            offsets = number % self._blocks_per_chunk + np.arange(size, dtype=np.int64)
            chunks, places = np.divmod(offsets, self._blocks_per_chunk)
            group_blocks, chunks = blocks[first_block : first_block + size], chunk_ids[first_chunk + chunks]
            for index, page_bytes in tensors.items():
                pages, sizes = self._tensors[index], np.full(size, page_bytes, np.int64)
                made.append((pages.device_addresses(group_blocks), pages.host_addresses(chunks, places), sizes))
            first_block += size
            first_chunk += -(-(number % self._blocks_per_chunk + size) // self._blocks_per_chunk) if size else 0
        if first_chunk != len(chunk_ids):
            raise ValueError(f"chunks must be those of the blocks, {first_chunk}, got {len(chunk_ids)}")
        empty = [np.empty(0, np.int64)]
        blocks, hosts, sizes = (np.concatenate([*column, *empty]) for column in zip(*made, strict=True))
        return blocks, hosts, sizes


def _bytes_of_tensors(refs: Sequence[Any]) -> dict[int, int]:
    """Return the bytes of a page by the number of its tensor. Layers that share one have one page."""
    sizes: dict[int, int] = {}
    for ref in refs:
        sizes[ref.tensor_idx] = max(ref.page_size_bytes, sizes.get(ref.tensor_idx, 0))
    return sizes
