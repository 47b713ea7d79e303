"""BlockChunks: an engine's blocks as chunks, copied straight from and to the records' bytes.

blocks of every layer ◄──► payload [ layer 0: K, V of the tokens | layer 1 | ... ]      a layer is a stretch

Layers of unlike shapes are several stretches each: as many bytes as divide them all.
"""

import functools
import itertools
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvpage.checks.tensors import check_plain
from kvpage.checks.tokens import as_tokens
from kvpage.ops.chunks import load_chunk, store_chunk
from kvpage.store.load.device.device_lanes import LanePool
from kvpage.store.load.device.device_pipeline import DevicePipeline, DeviceRun
from kvpage.store.load.layer_units import LayerUnit, row_layout_of, stretch_bytes_of, units_of
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

    Raises:
        TypeError: engine is not a CacheEngine.
        ValueError: another argument breaks a rule of KVStoreMetadata.
    """
    if not hasattr(engine, "gpu_cache"):
        raise TypeError(f"engine must be a CacheEngine, got {type(engine).__name__}")
    numerics = getattr(engine, "numerics", "")
    extra = ((NUMERICS, numerics),) if numerics else ()
    if not engine.gpu_cache:
        return KVStoreMetadata(model_name, world_size, worker_id, fmt, None, extra=extra)
    layout, digest = engine.layout, scales_digest(engine.kv_scales)
    return KVStoreMetadata(model_name, world_size, worker_id, fmt, layout.dtype, row_layout_of(engine), digest, extra)


def check_numerics(metadata: KVStoreMetadata, numerics: str) -> None:
    """Check that records of a store are those of one arithmetic.

    Args:
        metadata: the store's.
        numerics: that of a CacheEngine.

    Raises:
        ValueError: the metadata name another arithmetic, or none, or one where the cache has none.
    """
    written = dict(metadata.extra).get(NUMERICS, "")
    if written != numerics:
        raise ValueError(
            f"{NUMERICS} of the store must be the engine's, {numerics!r}, got {written!r}; see kvpage.store.metadata_of"
        )


RUN_BYTES = 8 << 20  # copied from or to a GPU at once: longer than it takes the host to start the next copy
MIN_RUN_BYTES = 4096  # of memory that is written directly; shorter runs are copied into one piece first
MAX_FORMS = 64
NUMERICS = "numerics"


def _block_ids(block_table: npt.ArrayLike | torch.Tensor) -> torch.Tensor:
    """Return the ids as int32 on the CPU. Raises ValueError for values that are not integers of 32 bits."""
    if isinstance(block_table, torch.Tensor):
        check_plain("block_table", block_table)
        block_table = block_table.cpu() if block_table.is_cuda else block_table
    return torch.from_numpy(as_tokens(block_table, "block_table").copy())


def move_padding(engine: "LayerCaches", fmt: str) -> None:
    """Store and load a chunk of one block, in memory of its own: it asks for the kernels that an engine's chunks need.

    The engine's blocks are neither read nor written. fmt: of the store, see KVStoreMetadata.
    """
    ids, device = torch.zeros(1, dtype=torch.int32), engine.device
    caches = [layout.allocate(1, 1, device)[0] for layout in engine.layouts]
    for unit in units_of(engine.layouts, caches):
        shape = unit.shape(unit.layout.block_size, fmt)
        chunk = torch.zeros(shape, dtype=unit.layout.dtype, device=device)
        store_chunk(unit.caches, ids, chunk, unit.layout, 0, fmt)
        load_chunk(unit.caches, ids, chunk, unit.layout, 0, fmt)


class ChunkForm:
    """The sizes of the chunks of one number of tokens, the same for all blocks of an engine.

    shape: with units of several shapes, that of one long row a token. piece_ends: the bytes at which pieces of the
    payload may end; None for each stretch's end. layer_bytes, unit_ends: bytes of a layer, and to its end, of each
    unit. layer_ends: to the end of each layer. plans: of the units, for blocks in host memory.
    """

    def __init__(self, units: Sequence[LayerUnit], num_layers: int, fmt: str, num_tokens: int, on_host: bool) -> None:
        self.num_tokens, self.shape = num_tokens, _shape(units, num_tokens, fmt)
        self.stretch_bytes = stretch_bytes_of(units, num_tokens)
        self.layer_bytes = [unit.layer_bytes(num_tokens) for unit in units]
        sizes = [0] * num_layers
        for unit, size in zip(units, self.layer_bytes, strict=True):
            for layer in range(unit.first, unit.first + len(unit.caches)):
                sizes[layer] += size
        self.layer_ends = list(itertools.accumulate(sizes))
        unit_bytes = (size * len(unit.caches) for size, unit in zip(self.layer_bytes, units, strict=True))
        self.unit_ends = list(itertools.accumulate(unit_bytes))
        self.piece_ends = None if len(units) == 1 else self.layer_ends
        self.plans = [unit.plan(num_tokens, fmt, self.stretch_bytes) for unit in units if on_host]


def _shape(units: Sequence[LayerUnit], num_tokens: int, fmt: str) -> Shape:
    if len(units) == 1:
        return units[0].shape(num_tokens, fmt)
    size = sum(unit.token_size for unit in units)
    return (1, 1, num_tokens, 1, size) if fmt == "vllm" else (1, 1, 1, num_tokens, size)


class EngineRows:
    """The facts about an engine's caches that a chunk of its blocks depends on, derived once. Thread-safe.

    metadata: as of `metadata_of`, without the store's part. units: of its layers. num_blocks: of each cache.
    """

    def __init__(self, engine: "LayerCaches") -> None:
        self.metadata = metadata_of(engine, "")
        self.units = units_of(engine.layouts, engine.gpu_cache)
        layout = engine.layout
        self.dtype, self.block_size, self.num_layers = layout.dtype, layout.block_size, len(engine.gpu_cache)
        self.num_blocks = layout.num_blocks(engine.gpu_cache[0])
        self.is_on_device = engine.device.type != "cpu"
        self._forms: dict[tuple[str, int], ChunkForm] = {}
        self._lock = threading.Lock()

    def check(self, metadata: KVStoreMetadata) -> None:
        """Raise ValueError unless a store's metadata equal the rows'. A dtype of None matches any."""
        for name in ("kv_dtype", "row_layout", "scales_digest"):
            if getattr(metadata, name) not in (None, getattr(self.metadata, name)):
                raise ValueError(
                    f"{name} of the store must be the engine's, {getattr(self.metadata, name)!r}, "
                    f"got {getattr(metadata, name)!r}; see kvpage.store.metadata_of"
                )
        check_numerics(metadata, dict(self.metadata.extra).get(NUMERICS, ""))

    def form(self, fmt: str, num_tokens: int) -> ChunkForm:
        """Return the form of chunks of `num_tokens`. Making it takes a fifth of the time of copying 32 MiB."""
        form = self._forms.get((fmt, num_tokens))
        if form is not None:
            return form
        with self._lock:  # the threads of a call need the same one
            if (fmt, num_tokens) not in self._forms:
                if len(self._forms) >= MAX_FORMS:  # last chunks are of any length
                    self._forms = {}
                on_host = not self.is_on_device
                self._forms[fmt, num_tokens] = ChunkForm(self.units, self.num_layers, fmt, num_tokens, on_host)
            return self._forms[fmt, num_tokens]


class KnownRows:
    """The rows of engines, each as long as the engine lives and has the same caches. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: weakref.WeakKeyDictionary[LayerCaches, tuple[tuple[int, ...], EngineRows]] = (
            weakref.WeakKeyDictionary()
        )

    def of(self, engine: "LayerCaches") -> EngineRows:
        """Return the rows, derived if need be. Raises as `metadata_of`, and ValueError for an engine without layers."""
        if not hasattr(engine, "gpu_cache"):
            return EngineRows(engine)  # which tells the error
        addresses = tuple(map(torch.Tensor.data_ptr, engine.gpu_cache))
        with self._lock:
            known = self._rows.get(engine)
            if known is None or known[0] != addresses:
                known = self._rows[engine] = addresses, EngineRows(engine)
            return known[1]


class BlockChunks:
    """The blocks of one sequence, as they are after the work of the caller's current stream.

    Raises ValueError unless the engine matches the metadata. Metadata without a dtype match any dtype.
    """

    def __init__(
        self,
        engine: "LayerCaches",
        block_table: npt.ArrayLike | torch.Tensor,
        metadata: KVStoreMetadata,
        rows: EngineRows | None = None,
        lanes: LanePool | None = None,
        layer_lanes: LanePool | None = None,
    ) -> None:
        self.rows = rows or EngineRows(engine)
        self.rows.check(metadata)
        self.ids = _block_ids(block_table)
        self.engine, self.fmt, self.units = engine, metadata.fmt, self.rows.units
        self.num_layers, self.is_on_device = self.rows.num_layers, self.rows.is_on_device
        self.num_tokens = len(self.ids) * self.rows.block_size  # that fit
        if self.is_on_device:  # threads that copy have other current streams than the caller
            device, pool = engine.gpu_cache[0].device, lanes or LanePool()
            ready = pool.mark(device)
            self.pipeline = DevicePipeline(pool, device, ready)
            self.layer_pipeline = DevicePipeline(layer_lanes or LanePool(), device, ready)

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
        return _shape(self.units, num_tokens, self.fmt)

    def chunk(self, begin: int, end: int, first: int | None = None, last: int | None = None) -> "BlockChunk":
        """Return the tokens [begin, end) as a payload, of which [first, last) are loaded; by default all."""
        loaded = begin if first is None else first, end if last is None else last
        kind = DeviceBlockChunk if self.is_on_device else HostBlockChunk
        return kind(self, begin, end, *loaded)

    def _check_there(self, begin: int, end: int) -> torch.Tensor:
        """Return the ids of the blocks of the tokens [begin, end). Raises ValueError for one that the engine lacks."""
        size, num_blocks = self.rows.block_size, self.rows.num_blocks
        ids = self.ids[begin // size : -(-end // size)]
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < num_blocks:
            raise ValueError(f"block_table must be in [0, {num_blocks}), got {int(ids.min())} to {int(ids.max())}")
        return ids


class UnitSpan(NamedTuple):
    """Whole layers of one unit in a run of a payload's bytes.

    unit: its number. first: layer, counted in the unit. begin, end: bytes, counted from the beginning of the run.
    """

    unit: int
    first: int
    begin: int
    end: int


class BlockChunk(ABC):
    """The tokens [begin, end) of a sequence's blocks as a payload of whole layers, each of one stretch or several."""

    def __init__(self, blocks: BlockChunks, begin: int, end: int, first: int, last: int) -> None:
        self._form = form = blocks.rows.form(blocks.fmt, end - begin)
        self.shape, self.stretch_bytes, self.num_layers = form.shape, form.stretch_bytes, blocks.num_layers
        self.num_bytes, self.piece_ends = form.unit_ends[-1], form.piece_ends
        self._blocks, self._begin = blocks, begin
        self._first, self._last = first - begin, last - begin  # the taken tokens, counted in the chunk

    def layer_span(self, layer: int) -> tuple[int, int]:
        """Return the bytes [begin, end) of a layer in the payload."""
        ends = self._form.layer_ends
        return (ends[layer - 1] if layer else 0), ends[layer]

    def _spans(self, begin: int, num_bytes: int) -> list[UnitSpan]:
        """Return the layers of each unit in the payload's bytes from `begin` on."""
        spans, unit_begin = list[UnitSpan](), 0
        for index, unit_end in enumerate(self._form.unit_ends):
            low, high = max(begin, unit_begin), min(begin + num_bytes, unit_end)
            if low < high:
                first = (low - unit_begin) // self._form.layer_bytes[index]
                spans.append(UnitSpan(index, first, low - begin, high - begin))
            unit_begin = unit_end
        return spans

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
        target, address, digests = self._target(num_threads, streaming), address_of(buffer), []
        for unit, first, low, high in self._spans(begin, len(buffer)):
            digests.append(self._form.plans[unit].store(target, first, address + low, high - low))
        return b"".join(digests)

    def runs(self) -> Runs | None:
        if self._last - self._first < self._form.num_tokens:
            return None
        target = self._target(1, streaming=False)
        parts = [plan.runs(target) for plan in self._form.plans]
        if not all(map(len, parts)):
            return None
        runs = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return runs if len(runs) * MIN_RUN_BYTES <= self.num_bytes else None

    def take(self, begin: int, piece: memoryview, num_threads: int) -> bytes:
        target, address, digests = self._target(num_threads, streaming=True), address_of(piece), []
        tokens = self._first, self._last
        for unit, first, low, high in self._spans(begin, len(piece)):
            digests.append(self._form.plans[unit].load(target, first, address + low, high - low, *tokens))
        return b"".join(digests)

    def _target(self, num_threads: int, streaming: bool) -> tuple[int, int, int, int, bool]:
        """Return the blocks as native plans take them."""
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
        begin, end = self.layer_span(first)[0], self.layer_span(last - 1)[1]
        return self._runs(begin, payload[begin:end], self._scatter)

    def _runs(self, begin: int, data: memoryview, move: "Move") -> list[DeviceRun]:
        """Return runs of a few layers each. move: takes a unit, some of its caches, and their rows as bytes."""
        runs = []
        for index, first, low, high in self._spans(begin, len(data)):
            unit, size = self._blocks.units[index], self._form.layer_bytes[index]
            step = max(RUN_BYTES // size, 1)
            for at in range(0, (high - low) // size, step):
                run = data[low + at * size : min(low + (at + step) * size, high)]
                caches = unit.caches[first + at :][: len(run) // size]
                runs.append(DeviceRun(run, functools.partial(move, unit, caches)))
        return runs

    def _gather(self, unit: LayerUnit, caches: list[torch.Tensor], data: torch.Tensor) -> None:
        blocks = self._blocks
        store_chunk(caches, blocks.ids, self._rows(unit, data), unit.layout, self._begin, blocks.fmt)

    def _scatter(self, unit: LayerUnit, caches: list[torch.Tensor], data: torch.Tensor) -> None:
        blocks, dim = self._blocks, 2 if self._blocks.fmt == "vllm" else 3
        chunk = self._rows(unit, data).narrow(dim, self._first, self._last - self._first)
        load_chunk(caches, blocks.ids, chunk, unit.layout, self._begin + self._first, blocks.fmt)

    def _rows(self, unit: LayerUnit, data: torch.Tensor) -> torch.Tensor:
        """Return a view of some layers' bytes: [layers, parts, ...]."""
        return data.view(unit.layout.dtype).view(-1, *unit.shape(self._form.num_tokens, self._blocks.fmt)[1:])


Move = Callable[[LayerUnit, list[torch.Tensor], torch.Tensor], None]
