"""CopyWorker beside a naive copy, block by block: groups that share tensors, jobs that begin and end within chunks."""

import random
from types import SimpleNamespace

import pytest
import torch
from support import fake_vllm

PAGES, LAYERS = (64, 48), ((0, 1), (1,))  # bytes of a page by tensor; tensors by group
NUM_BLOCKS, NUM_CHUNKS, POISON = 20, 24, 0x5A


class Region:
    """Host memory as vLLM's: a view of each tensor's bytes in every chunk, beside bytes that nobody owns."""

    def __init__(self, blocks_per_chunk: int) -> None:
        self.memory = torch.full((NUM_CHUNKS, sum(PAGES) * blocks_per_chunk + 32), POISON, dtype=torch.int8)
        self.end, self.is_open = 0, True

    def create_next_worker_view(self, num_bytes: int) -> torch.Tensor:
        view = self.memory[:, self.end : self.end + num_bytes]
        self.end += num_bytes
        return view

    def cleanup(self) -> None:
        self.is_open = False


@pytest.fixture(params=[1, 2, 3])
def made(request, monkeypatch):
    """A worker of so many blocks a chunk, its region, and tensors of caches: the second one's pages are padded."""
    fake_vllm.installed(monkeypatch)
    from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

    from kvpage.integrations.vllm.cpu.copy_worker import CopyWorker

    tensors = [torch.randint(-128, 128, (NUM_BLOCKS, size), dtype=torch.int8) for size in PAGES]
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, size) for tensor, size in zip(tensors, PAGES, strict=True)],
        [[CanonicalKVCacheRef(index, PAGES[index] - 8 * index) for index in group] for group in LAYERS],
    )
    region = Region(request.param)
    return CopyWorker(caches, region, request.param), region, tensors, request.param


def job(rng: random.Random, blocks_per_chunk: int):
    """Blocks of both groups, where they begin in their requests, and chunks for them."""
    from vllm.v1.kv_offload.base import GPULoadStoreSpec

    sizes, begins = [rng.choice((0, 1, 2, 5)) for _ in LAYERS], [rng.randrange(7) for _ in LAYERS]
    numbers = [begin % blocks_per_chunk + size for begin, size in zip(begins, sizes, strict=True)]
    num_chunks = sum(-(-n // blocks_per_chunk) for n, size in zip(numbers, sizes, strict=True) if size)
    chunks = SimpleNamespace(block_ids=rng.sample(range(NUM_CHUNKS), num_chunks))
    return GPULoadStoreSpec(rng.sample(range(NUM_BLOCKS), sum(sizes)), sizes, begins), chunks


def places(spec, chunks, blocks_per_chunk: int):
    """Walk over (tensor, block, chunk, first byte in the chunk, bytes), one block at a time."""
    blocks, first = list(spec.block_ids), 0
    for group, size, begin in zip(LAYERS, spec.group_sizes, spec.block_indices, strict=True):
        offset = begin % blocks_per_chunk
        for number in range(size):
            block, at = blocks.pop(0), offset + number
            for index in group:
                before = sum(PAGES[:index]) * blocks_per_chunk
                begin_byte = before + at % blocks_per_chunk * PAGES[index]
                yield (
                    index,
                    block,
                    chunks.block_ids[first + at // blocks_per_chunk],
                    begin_byte,
                    PAGES[index] - 8 * index,
                )
        first += -(-(offset + size) // blocks_per_chunk) if size else 0


def test_stores_and_loads_copy_the_bytes_of_their_blocks_alone(made):
    worker, region, tensors, blocks_per_chunk = made
    rng = random.Random(blocks_per_chunk)
    for number in range(60):
        spec, chunks = job(rng, blocks_per_chunk)
        host, device = region.memory.clone(), [tensor.clone() for tensor in tensors]
        is_store, num_bytes = bool(rng.randrange(2)), 0
        for index, block, chunk, begin, size in places(spec, chunks, blocks_per_chunk):
            one, other = host[chunk, begin : begin + size], device[index][block, :size]
            (one if is_store else other).copy_(other if is_store else one)
            num_bytes += size
        assert worker.submit_store(number, spec, chunks) if is_store else worker.submit_load(number, chunks, spec)
        assert torch.equal(region.memory, host) and all(map(torch.equal, tensors, device))
        (result,) = worker.get_finished()
        assert (result.job_id, result.success, result.transfer_size) == (number, True, num_bytes)
        assert worker.get_finished() == []


def test_chunks_that_are_not_those_of_the_blocks_are_refused_and_nothing_is_copied(made):
    worker, region, tensors, blocks_per_chunk = made
    spec, chunks = next(job for job in (job(random.Random(n), blocks_per_chunk) for n in range(9)) if job[1].block_ids)
    host, device = region.memory.clone(), [tensor.clone() for tensor in tensors]
    with pytest.raises(ValueError, match="chunks must be those of the blocks"):
        worker.submit_store(0, spec, SimpleNamespace(block_ids=[*chunks.block_ids, 0]))
    assert torch.equal(region.memory, host) and all(map(torch.equal, tensors, device)) and worker.get_finished() == []
    worker.shutdown()
    assert not region.is_open
