"""BlockChunks: an engine's blocks as chunks, copied straight from and to the records' bytes.

blocks of every layer ◄──► payload [ layer 0: K, V of the tokens | layer 1 | ... ]      a layer is a stretch
"""

import functools
import math
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy.typing as npt
import torch

import kvpage._C as _C
from kvpage.checks.tensors import check_plain
from kvpage.checks.tokens import as_tokens
from kvpage.layout.cache_layout import SCALE_BYTES, CacheLayout
from kvpage.ops.chunks import load_chunk, native_chunk_parts, store_chunk
from kvpage.store.load.device.device_lanes import LanePool
from kvpage.store.load.device.device_pipeline import DevicePipeline, DeviceRun
from kvpage.store.records.keys import KVStoreMetadata, scales_digest
from kvpage.store.records.record import Shape
from kvpage.store.tiers.stretches import Runs, address_of

if TYPE_CHECKING:
    from kvpage.cache.layer_slice import LayerCaches


def metadata_of(
    engine: "LayerCaches", model_name: str, world_size: int = 1, worker_id: int = 0, fmt: str = "vllm"
) -> KVStoreMetadata:
    """Return the metadata of a store of an engine's blocks: their dtype, layout of rows, and scales.

    An engine of a model without attention has no blocks to store. Its metadata have no dtype.

    Args:
        engine: the engine.
        model_name: any text that tells models, revisions and adapters apart.
        world_size: ranks that K and V are split over.
        worker_id: the number of this rank.
        fmt: "vllm" or "huggingface", see KVStoreMetadata.

    Returns:
        The metadata.

    Raises:
        TypeError: engine is not a CacheEngine.
        ValueError: another argument breaks a rule of KVStoreMetadata.
    """
    if not hasattr(engine, "gpu_cache"):
        raise TypeError(f"engine must be a CacheEngine, got {type(engine).__name__}")
    if not engine.gpu_cache:
        return KVStoreMetadata(model_name, world_size, worker_id, fmt, None)
    layout = engine.layout
    return KVStoreMetadata(
        model_name, world_size, worker_id, fmt, layout.dtype, _row_layout(engine), scales_digest(engine.kv_scales)
    )


RUN_BYTES = 8 << 20  # copied from or to a GPU at once: longer than it takes the host to start the next copy
MIN_RUN_BYTES = 4096  # of memory that is written directly; shorter runs are copied into one piece first
MAX_PLANS = 64


def _block_ids(block_table: npt.ArrayLike | torch.Tensor) -> torch.Tensor:
    """Return the ids as int32 on the CPU. Raises ValueError for values that are not integers of 32 bits."""
    if isinstance(block_table, torch.Tensor):
        check_plain("block_table", block_table)
        block_table = block_table.cpu() if block_table.is_cuda else block_table
    return torch.from_numpy(as_tokens(block_table, "block_table").copy())


def move_padding(engine: "LayerCaches", fmt: str) -> None:
    """Store and load a chunk of one block, in memory of its own: it asks for the kernels that an engine's chunks need.

    Args:
        engine: the engine. Its blocks are neither read nor written.
        fmt: of the store, see KVStoreMetadata.
    """
    if not engine.gpu_cache:
        return
    layout, device, num_layers = engine.layout, engine.device, len(engine.gpu_cache)
    caches, ids = layout.allocate(1, num_layers, device), torch.zeros(1, dtype=torch.int32)
    shape = _shape(layout, (num_layers, _num_parts(engine)), layout.block_size, fmt)
    chunk = torch.zeros(shape, dtype=layout.dtype, device=device)
    store_chunk(caches, ids, chunk, layout, 0, fmt)
    load_chunk(caches, ids, chunk, layout, 0, fmt)


def _num_parts(engine: "LayerCaches") -> int:
    return sum(view is not None for view in engine.layout.views(engine.gpu_cache[0]))


def _shape(layout: CacheLayout, parts: tuple[int, int], num_tokens: int, fmt: str) -> Shape:
    """Return the shape of a chunk. parts: numbers of layers, and of a layer's parts."""
    rows, columns = (num_tokens, layout.num_kv_heads)[:: 1 if fmt == "vllm" else -1]
    row_size = layout.padded_head_size + SCALE_BYTES if layout.has_token_scales else layout.head_size
    return *parts, rows, columns, row_size


class ChunkPlans:
    """Plans that were made, a few for each engine, as long as it lives. Thread-safe.

    Making one takes a fifth of the time of copying a chunk of 32 MiB.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plans: weakref.WeakKeyDictionary[LayerCaches, dict[object, _C.ChunkPlan]] = weakref.WeakKeyDictionary()

    def get(self, engine: "LayerCaches", fmt: str, num_tokens: int, make: Callable[[], _C.ChunkPlan]) -> _C.ChunkPlan:
        """Return the plan for chunks of `num_tokens`, made if need be."""
        key = fmt, num_tokens, tuple(cache.data_ptr() for cache in engine.gpu_cache)
        with self._lock:
            plans = self._plans.setdefault(engine, {})
            if key not in plans:
                if len(plans) >= MAX_PLANS:  # last chunks are of any length
                    plans.clear()
                plans[key] = make()
            return plans[key]


class BlockChunks:
    """The blocks of one sequence, as they are after the work of the caller's current stream.

    Raises ValueError unless the engine matches the metadata. Metadata without a dtype match any dtype.
    """

    def __init__(
        self,
        engine: "LayerCaches",
        block_table: npt.ArrayLike | torch.Tensor,
        metadata: KVStoreMetadata,
        plans: "ChunkPlans | None" = None,
        lanes: LanePool | None = None,
        layer_lanes: LanePool | None = None,
    ) -> None:
        expected = metadata_of(engine, metadata.model_name, metadata.world_size, metadata.worker_id, metadata.fmt)
        for name in ("kv_dtype", "row_layout", "scales_digest"):
            if getattr(metadata, name) not in (None, getattr(expected, name)):
                raise ValueError(
                    f"{name} of the store must be the engine's, {getattr(expected, name)!r}, "
                    f"got {getattr(metadata, name)!r}; see kvpage.store.metadata_of"
                )
        self.ids = _block_ids(block_table)
        self.engine, self.fmt = engine, metadata.fmt
        self._num_parts = _num_parts(engine)
        self._plans = plans or ChunkPlans()
        self._mine: dict[int, _C.ChunkPlan] = {}  # by number of tokens
        self.is_on_device = engine.device.type != "cpu"
        if self.is_on_device:  # threads that copy have other current streams than the caller
            device, pool = engine.gpu_cache[0].device, lanes or LanePool()
            ready = pool.mark(device)
            self.pipeline = DevicePipeline(pool, device, ready)
            self.layer_pipeline = DevicePipeline(layer_lanes or LanePool(), device, ready)

    @property
    def num_layers(self) -> int:
        return len(self.engine.gpu_cache)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that fit into the blocks."""
        return len(self.ids) * self.engine.layout.block_size

    def check_room(self, num_tokens: int) -> None:
        """Raise ValueError if the tokens need more blocks, or one that the engine lacks."""
        if num_tokens > self.num_tokens:
            raise ValueError(f"block_table must have room for {num_tokens} tokens, got {self.num_tokens}")
        self._check_there(0, num_tokens)

    def check_writable(self, begin: int, end: int) -> None:
        """Raise ValueError unless the blocks of the tokens [begin, end) exist, and each is named once."""
        ids = self._check_there(begin, end)
        if len(torch.unique(ids)) < len(ids):
            raise ValueError("block_table must name a block once where it is written, got one twice")

    def shape(self, num_tokens: int) -> Shape:
        """Return the shape of a chunk of `num_tokens`."""
        return _shape(self.engine.layout, (self.num_layers, self._num_parts), num_tokens, self.fmt)

    def chunk(self, begin: int, end: int, first: int | None = None, last: int | None = None) -> "BlockChunk":
        """Return the tokens [begin, end) as a payload, of which [first, last) are loaded; by default all."""
        wanted = begin if first is None else first, end if last is None else last
        kind = DeviceBlockChunk if self.is_on_device else HostBlockChunk
        return kind(self, begin, end, *wanted)

    def plan(self, num_tokens: int) -> _C.ChunkPlan:
        """Return the plan for chunks of `num_tokens` in host memory."""
        if num_tokens not in self._mine:
            make = functools.partial(self._make_plan, num_tokens)
            self._mine[num_tokens] = self._plans.get(self.engine, self.fmt, num_tokens, make)
        return self._mine[num_tokens]

    # --- inside ---

    def _check_there(self, begin: int, end: int) -> torch.Tensor:
        """Return the ids of the blocks of the tokens [begin, end). Raises ValueError for one that the engine lacks."""
        size, num_blocks = self.engine.layout.block_size, self.engine.layout.num_blocks(self.engine.gpu_cache[0])
        ids = self.ids[begin // size : -(-end // size)]
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < num_blocks:
            raise ValueError(f"block_table must be in [0, {num_blocks}), got {int(ids.min())} to {int(ids.max())}")
        return ids

    def _make_plan(self, num_tokens: int) -> _C.ChunkPlan:
        layout, caches, shape = self.engine.layout, self.engine.gpu_cache, self.shape(num_tokens)
        payload = torch.empty(shape, dtype=layout.dtype, device="meta")  # whose addresses count from 0
        parts = native_chunk_parts(caches, payload if self.fmt == "vllm" else payload.transpose(2, 3), layout)
        moves_per_part = len(parts) // (shape[0] * shape[1])
        layer_bytes = math.prod(shape[1:]) * layout.dtype.itemsize
        sizes = layout.num_kv_heads, layout.num_blocks(caches[0]), layout.block_size, layer_bytes
        return _C.ChunkPlan(parts, (shape[0], moves_per_part, num_tokens, *sizes))


class BlockChunk(ABC):
    """The tokens [begin, end) of a sequence's blocks as a payload, whose stretches are layers."""

    def __init__(self, blocks: BlockChunks, begin: int, end: int, first: int, last: int) -> None:
        self.shape = blocks.shape(end - begin)
        self.stretch_bytes = math.prod(self.shape[1:]) * blocks.engine.layout.dtype.itemsize
        self._blocks, self._begin = blocks, begin
        self._first, self._last = first - begin, last - begin  # of the chunk's tokens those that are taken

    @abstractmethod
    def fill(self, begin: int, buffer: memoryview, num_threads: int, streaming: bool) -> bytes:
        """Write the stretches from the byte `begin` on into the buffer, and return their digests."""

    def runs(self) -> Runs | None:
        """Return the memory of the whole payload, all of it wanted; None for blocks that need a buffer in between."""
        return None

    @abstractmethod
    def take(self, begin: int, piece: memoryview, num_threads: int) -> bytes:
        """Write wanted tokens of the stretches from the byte `begin` on to the blocks; return all digests."""


class HostBlockChunk(BlockChunk):
    """Blocks in host memory: every byte is read once."""

    def fill(self, begin: int, buffer: memoryview, num_threads: int, streaming: bool) -> bytes:
        place, first = self._place(num_threads, streaming), begin // self.stretch_bytes
        return self._plan.store(place, first, address_of(buffer), len(buffer))

    def runs(self) -> Runs | None:
        if self._last - self._first < self.shape[2 if self._blocks.fmt == "vllm" else 3]:
            return None
        runs = self._plan.runs(self._place(1, streaming=False))
        return runs if 0 < len(runs) * MIN_RUN_BYTES <= self.stretch_bytes * self.shape[0] else None

    def take(self, begin: int, piece: memoryview, num_threads: int) -> bytes:
        place, first = self._place(num_threads, streaming=True), begin // self.stretch_bytes
        return self._plan.load(place, first, address_of(piece), len(piece), self._first, self._last)

    @property
    def _plan(self) -> _C.ChunkPlan:
        return self._blocks.plan(self.shape[2 if self._blocks.fmt == "vllm" else 3])

    def _place(self, num_threads: int, streaming: bool) -> tuple[int, int, int, int, bool]:
        ids = self._blocks.ids
        return ids.data_ptr(), len(ids), self._begin, num_threads, streaming


class DeviceBlockChunk(BlockChunk):
    """Blocks on a GPU, a few layers at a time: see DevicePipeline."""

    def fill(self, begin: int, buffer: memoryview, num_threads: int, streaming: bool) -> bytes:
        return self._blocks.pipeline.store(
            self._runs(begin, buffer, self._gather), self.stretch_bytes, num_threads, streaming
        )

    def take(self, begin: int, piece: memoryview, num_threads: int) -> bytes:
        return self._blocks.pipeline.load(self._runs(begin, piece, self._scatter), self.stretch_bytes, num_threads)

    def runs_of_layers(self, payload: memoryview, first: int, last: int) -> list[DeviceRun]:
        """Return what `take` would copy of the layers [first, last), out of the whole payload."""
        begin, end = first * self.stretch_bytes, last * self.stretch_bytes
        return self._runs(begin, payload[begin:end], self._scatter)

    def _runs(
        self, begin: int, data: memoryview, move: Callable[[list[torch.Tensor], torch.Tensor], None]
    ) -> list[DeviceRun]:
        """Return runs of a few layers each. move: takes their caches, and their rows on the device as bytes."""
        step, first = max(RUN_BYTES // self.stretch_bytes, 1), begin // self.stretch_bytes
        runs = []
        for at in range(0, len(data) // self.stretch_bytes, step):
            run = data[at * self.stretch_bytes : (at + step) * self.stretch_bytes]
            caches = self._blocks.engine.gpu_cache[first + at :][: len(run) // self.stretch_bytes]
            runs.append(DeviceRun(run, functools.partial(move, caches)))
        return runs

    def _gather(self, caches: list[torch.Tensor], data: torch.Tensor) -> None:
        blocks = self._blocks
        store_chunk(caches, blocks.ids, self._rows(data), blocks.engine.layout, self._begin, blocks.fmt)

    def _scatter(self, caches: list[torch.Tensor], data: torch.Tensor) -> None:
        blocks, dim = self._blocks, 2 if self._blocks.fmt == "vllm" else 3
        chunk = self._rows(data).narrow(dim, self._first, self._last - self._first)
        load_chunk(caches, blocks.ids, chunk, blocks.engine.layout, self._begin + self._first, blocks.fmt)

    def _rows(self, data: torch.Tensor) -> torch.Tensor:
        """Return a view of some layers' bytes: [layers, parts, ...]."""
        return data.view(self._blocks.engine.layout.dtype).view(-1, *self.shape[1:])


def _row_layout(engine: "LayerCaches") -> str:
    """Return the meaning of a row's bytes beyond its dtype; empty unless it is a latent or a scale follows it."""
    layout = engine.layout
    parts = ["latent"] if layout.backend == "mla" else []
    if layout.has_token_scales:
        parts.append(f"int8[{layout.padded_head_size}] + fp32 scale")
    return " ".join(parts)
