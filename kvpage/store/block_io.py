"""BlockChunks: an engine's blocks as chunks, a few layers at a time, straight from and to the records' bytes."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from kvpage.chunk_ops import load_chunk, store_chunk
from kvpage.layout import SCALE_BYTES
from kvpage.store.chunk_io import Part
from kvpage.store.keys import KVStoreMetadata, scales_digest
from kvpage.store.record import Shape
from kvpage.tensors import check_plain
from kvpage.tokens import as_tokens

if TYPE_CHECKING:
    from kvpage.cache_engine import CacheEngine


def metadata_of(
    engine: "CacheEngine", model_name: str, world_size: int = 1, worker_id: int = 0, fmt: str = "vllm"
) -> KVStoreMetadata:
    """What a store of the engine's blocks has to be told: their dtype, what their rows look like, and their scales."""
    if not hasattr(engine, "gpu_cache"):
        raise TypeError(f"engine must be a CacheEngine, got {type(engine).__name__}")
    layout = engine.layout
    return KVStoreMetadata(
        model_name, world_size, worker_id, fmt, layout.dtype, _row_layout(engine), scales_digest(engine.kv_scales)
    )


def _block_ids(block_table: npt.ArrayLike | torch.Tensor) -> torch.Tensor:
    """int32 on the CPU. ValueError for what are no integers of 32 bits: another block would be meant."""
    if isinstance(block_table, torch.Tensor):
        check_plain("block_table", block_table)
        block_table = block_table.cpu() if block_table.is_cuda else block_table
    return torch.from_numpy(as_tokens(block_table, "block_table").copy())


RUN_BYTES = 4 << 20  # larger ones leave the cache before they are hashed, smaller ones cost more calls


class BlockChunks:
    """The blocks of one sequence. ValueError unless the engine is the one that `metadata` tells of."""

    def __init__(
        self, engine: "CacheEngine", block_table: npt.ArrayLike | torch.Tensor, metadata: KVStoreMetadata
    ) -> None:
        expected = metadata_of(engine, metadata.model_name, metadata.world_size, metadata.worker_id, metadata.fmt)
        for name in ("kv_dtype", "row_layout", "scales_digest"):
            if getattr(expected, name) != getattr(metadata, name):
                raise ValueError(
                    f"{name} of the store must be the engine's, {getattr(expected, name)!r}, "
                    f"got {getattr(metadata, name)!r}; kvpage.store.metadata_of tells it"
                )
        self._ids = _block_ids(block_table)
        self._engine, self._fmt = engine, metadata.fmt
        self._num_parts = sum(view is not None for view in engine.layout.views(engine.gpu_cache[0]))

    @property
    def num_tokens(self) -> int:
        """That there is room for."""
        return len(self._ids) * self._engine.layout.block_size

    def check_room(self, num_tokens: int, is_written: bool = False) -> None:
        """ValueError if so many tokens need more blocks, or one that the engine has not; if they are written, for a
        block that is named twice, too.
        """
        if num_tokens > self.num_tokens:
            raise ValueError(f"block_table must have room for {num_tokens} tokens, got {self.num_tokens}")
        layout = self._engine.layout
        needed, num_blocks = self._ids[: -(-num_tokens // layout.block_size)], self._engine.num_gpu_blocks
        if len(needed) and not (int(needed.min()) >= 0 and int(needed.max()) < num_blocks):
            raise ValueError(f"block_table must name blocks in [0, {num_blocks}), got {needed.tolist()}")
        if is_written and len(needed.unique()) < len(needed):
            raise ValueError(f"block_table must name a block once where it is written, got {needed.tolist()}")

    def shape(self, num_tokens: int) -> Shape:
        """Of a chunk of so many tokens."""
        layout, num_layers = self._engine.layout, len(self._engine.gpu_cache)
        tokens_heads = (num_tokens, layout.num_kv_heads)
        rows, columns = tokens_heads if self._fmt == "vllm" else tokens_heads[::-1]
        return num_layers, self._num_parts, rows, columns, self._row_size

    def sizes(self, num_tokens: int) -> list[int]:
        """The bytes of each run of such a chunk: some layers, so many that a run stays in the CPU's cache."""
        shape = self.shape(num_tokens)
        layer_bytes = math.prod(shape[1:]) * self._item_size
        step = self._layers_a_run(layer_bytes)
        return [layer_bytes * min(step, shape[0] - first) for first in range(0, shape[0], step)]

    def chunk(self, begin: int, end: int) -> tuple[Shape, list[Part]]:
        """The tokens [begin, end) as the runs of a payload."""
        shape = self.shape(end - begin)

        def part(index: int, num_bytes: int) -> Part:
            def fill(buffer: memoryview) -> None:
                rows = self._rows(buffer, shape)
                caches = self._caches(index, shape)
                self._between(rows, lambda chunk: self._store(caches, chunk, begin), is_read=False)

            return Part(num_bytes, fill)

        return shape, [part(index, size) for index, size in enumerate(self.sizes(end - begin))]

    def taker(self, begin: int, end: int, first: int, last: int) -> Callable[[int, memoryview], None]:
        """Writes of a chunk's tokens [begin, end) those in [first, last) into the blocks, a run at a time."""
        shape = self.shape(end - begin)
        dim = 2 if self._fmt == "vllm" else 3

        def take(index: int, piece: memoryview) -> None:
            rows = self._rows(piece, shape).narrow(dim, first - begin, last - first)
            caches = self._caches(index, shape)
            self._between(rows, lambda chunk: self._load(caches, chunk, first), is_read=True)

        return take

    def finish(self) -> None:
        """Waits for what a GPU still does."""
        if self._engine.device.type == "cuda":
            torch.cuda.current_stream(self._engine.device).synchronize()

    # --- inside ---

    @property
    def _row_size(self) -> int:
        layout = self._engine.layout
        return layout.padded_head_size + SCALE_BYTES if layout.has_token_scales else layout.head_size

    @property
    def _item_size(self) -> int:
        return torch.empty(0, dtype=self._engine.layout.dtype).element_size()

    def _rows(self, buffer: memoryview, shape: Shape) -> torch.Tensor:
        """[layers, parts, ...]: a view of some layers' bytes."""
        array = np.frombuffer(buffer, np.uint8)
        if not array.flags.writeable:  # torch has no read-only tensors, and nobody writes to this one
            array = np.asarray(_Unlocked(array))
        return torch.from_numpy(array).view(self._engine.layout.dtype).view(-1, *shape[1:])

    def _between(self, rows: torch.Tensor, move: Callable[[torch.Tensor], None], is_read: bool) -> None:
        """Moves between blocks and rows on the host; by way of the device where these are not pinned."""
        if self._engine.device.type == "cpu":
            move(rows)
            return
        chunk = rows.to(self._engine.device) if is_read else torch.empty_like(rows, device=self._engine.device)
        move(chunk)
        if not is_read:
            rows.copy_(chunk)

    def _store(self, caches: list[torch.Tensor], chunk: torch.Tensor, start: int) -> None:
        store_chunk(caches, self._ids, chunk, self._engine.layout, start, self._fmt, num_threads=1)

    def _load(self, caches: list[torch.Tensor], chunk: torch.Tensor, start: int) -> None:
        load_chunk(caches, self._ids, chunk, self._engine.layout, start, self._fmt, num_threads=1)

    def _layers_a_run(self, layer_bytes: int) -> int:
        return max(RUN_BYTES // layer_bytes, 1)

    def _caches(self, index: int, shape: Shape) -> list[torch.Tensor]:
        """Of a run's layers."""
        step = self._layers_a_run(math.prod(shape[1:]) * self._item_size)
        return self._engine.gpu_cache[index * step : (index + 1) * step]


class _Unlocked:
    """Lets torch see read-only bytes; see BlockChunks._rows."""

    def __init__(self, array: npt.NDArray[np.uint8]) -> None:
        self.__array_interface__ = {**array.__array_interface__, "data": (array.__array_interface__["data"][0], False)}
        self._array = array


def _row_layout(engine: "CacheEngine") -> str:
    """What the bytes of a row mean, beyond its dtype: nothing but where a scale stands behind it."""
    layout = engine.layout
    return f"int8[{layout.padded_head_size}] + fp32 scale" if layout.has_token_scales else ""
