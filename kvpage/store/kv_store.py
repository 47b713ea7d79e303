"""KVStore: K and V of token sequences, in chunks, over tiers; each chunk found by its tokens and all before them.

    store(tokens, kv)   ─► chunks ─► keys ─► which are missing? ─► records ─► every tier
    retrieve(tokens)    ─► keys ─► the longest run of leading chunks that tiers have ─► verified, copied out
                                          ▲                                  │
                                          └── a corrupt record, a tier in trouble: the run ends there

Every read gives nothing, or exactly what was stored under that key. A tier's trouble is a miss, never an exception.
"""

import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvpage.own_process import OwnProcess
from kvpage.sequence_args import as_integer, check_flag, check_namespace
from kvpage.store.block_io import BlockChunk, BlockChunks, ChunkPlans
from kvpage.store.chunk_io import Codec, RecordKind, Source, read_head, read_record
from kvpage.store.config import KVStoreConfig
from kvpage.store.keys import ChunkKeys, KVStoreMetadata
from kvpage.store.kv_tensors import (
    KVTensors,
    TensorChunk,
    as_parts,
    as_tuple,
    empty_chunks,
    owned,
    token_dim,
    tokens_of,
)
from kvpage.store.layer_load import LayerLoad, OpenChunk
from kvpage.store.record import CorruptRecord, Shape, UnreadableRecord
from kvpage.store.tier import Key, Reader, Tier, TierStats
from kvpage.store.tier_stack import TierStack, num_leading
from kvpage.store.tiers import Placed, place_tiers
from kvpage.tensors import check_plain
from kvpage.tokens import Tokens, as_array, as_tokens

if TYPE_CHECKING:
    from kvpage.cache_engine import CacheEngine

COUNTERS = ("query_tokens", "hit_tokens", "stored_chunks", "corrupt_records", "tier_errors", "promoted_chunks")


@dataclass(frozen=True, slots=True)
class KVStoreStats:
    """Counters since the store was made. Tokens that were asked for with `retrieve` or `load_blocks`, and found.

    corrupt_records: that were dropped. tier_errors: calls of a tier that failed or ran out of time.
    """

    query_tokens: int
    hit_tokens: int
    stored_chunks: int
    corrupt_records: int
    tier_errors: int
    promoted_chunks: int
    tiers: tuple[TierStats | None, ...]

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0


class Pin:
    """Chunks that stay while it is held. num_tokens: how many leading tokens these are."""

    def __init__(self, num_tokens: int, readers: list[Reader]) -> None:
        self.num_tokens = num_tokens
        self._readers = readers

    def release(self) -> None:
        """Twice is fine."""
        for reader in self._readers:
            reader.close()
        self._readers = []

    def __enter__(self) -> "Pin":
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class ShapedSource(Source, Protocol):
    """A chunk to be written. shape: of its payload."""

    shape: Shape


class KVStore:
    """Thread-safe. `close` it, or use it in `with`. A forked process needs one of its own: in it, all but `close`
    raises RuntimeError.

    tiers: made already, instead of those that the configuration names.
    """

    def __init__(
        self, config: KVStoreConfig, metadata: KVStoreMetadata, tiers: Sequence[Tier | Placed] | None = None
    ) -> None:
        self.config, self.metadata = config, metadata
        self._codecs = _codecs(config.codec, metadata)
        codec = next(iter(self._codecs.values()))
        lossy = codec.name if codec and not codec.is_lossless else ""
        self._keys = ChunkKeys(metadata, config.chunk_size, lossy)
        placed = [_placed(one, config) for one in tiers] if tiers is not None else place_tiers(config)
        if not placed:
            raise ValueError("tiers must be at least one, got none")
        self._tiers = TierStack(placed, config.num_threads or torch.get_num_threads())
        self._plans = ChunkPlans()
        self._is_closed = False
        self._process = OwnProcess("the store")

    # --- K and V as tensors ------------------------------------------------------------------------------------------

    def store(
        self,
        tokens: Tokens,
        kv_tensors: KVTensors,
        kv_tensors_mask: npt.ArrayLike | torch.Tensor | None = None,
        skip_existing: bool = True,
        blocking: bool = True,
        namespace: bytes = b"",
    ) -> "Future[int]":
        """Keeps K and V of the tokens. The result of what it returns: how many chunks were written.

        kv_tensors: for each layer (K, V), or one tensor; see kvpage.store.kv_tensors. On any device.
        kv_tensors_mask: bool [num_tokens]: False for leading tokens that kv_tensors does not hold, whole chunks.
        skip_existing: leave chunks alone that every tier has. blocking: return when it is done; otherwise what is
            needed is copied first, and errors come out of the result.

        ValueError or TypeError for what does not fit together, before anything is written.
        """
        array, fmt = self._checked(tokens, namespace), self.metadata.fmt
        check_flag("skip_existing", skip_existing)
        check_flag("blocking", blocking)
        num_skipped = _num_leading_false("kv_tensors_mask", kv_tensors_mask, len(array))
        if num_skipped % self.config.chunk_size:
            raise ValueError(
                f"kv_tensors_mask must be False for whole chunks of {self.config.chunk_size}, got {num_skipped} tokens"
            )
        parts = as_parts(kv_tensors, fmt, self.metadata.kv_dtype)
        num_given = parts[0][0].shape[token_dim(fmt)]
        if num_given != len(array) - num_skipped:
            raise ValueError(f"kv_tensors must be of {len(array) - num_skipped} tokens, got {num_given}")
        if not blocking:
            parts = owned(parts, fmt, 0)

        def chunk(begin: int, end: int) -> TensorChunk:
            return TensorChunk(tokens_of(parts, fmt, begin - num_skipped, end - num_skipped), fmt, end - begin)

        def run() -> int:
            return self._put(array, num_skipped, chunk, skip_existing, namespace)

        return _done(run()) if blocking else self._tiers.later(run)

    def retrieve(
        self,
        tokens: Tokens,
        mask: npt.ArrayLike | torch.Tensor | None = None,
        return_tuple: bool = True,
        device: torch.device | str = "cpu",
        namespace: bytes = b"",
    ) -> tuple[Any, torch.Tensor]:
        """(kv, ret_mask): K and V of the longest leading run of tokens that the store has, but for those that the mask
        leaves out.

        mask: bool [num_tokens]: False for leading tokens that are not wanted, as many as you like.
        kv: for each layer (K, V), or with return_tuple False one tensor; () if nothing was found. ret_mask: bool
            [num_tokens] on the CPU, True for the tokens that kv holds.
        """
        array = self._checked(tokens, namespace)
        num_skipped = _num_leading_false("mask", mask, len(array))
        ret_mask = torch.zeros(len(array), dtype=torch.bool)
        chunks = self._fetch(array, num_skipped, namespace)
        self._tiers.count(query_tokens=len(array) - num_skipped)
        if chunks is None:
            return (), ret_mask
        num_found = chunks.shape[2 + token_dim(self.metadata.fmt)]
        ret_mask[num_skipped : num_skipped + num_found] = True
        self._tiers.count(hit_tokens=num_found)
        chunks = chunks.to(device)
        return (as_tuple(chunks) if return_tuple else chunks), ret_mask

    # --- K and V in an engine's blocks -------------------------------------------------------------------------------

    def store_blocks(
        self,
        tokens: Tokens,
        engine: "CacheEngine",
        block_table: npt.ArrayLike | torch.Tensor,
        namespace: bytes = b"",
        skip_existing: bool = True,
    ) -> int:
        """Keeps K and V of the tokens, which lie in the blocks; returns how many tokens the store has now.

        Straight from the blocks into records. On a GPU in the order of the current stream; done on return. ValueError
        if the blocks are not those that the metadata tells of, or too few.
        """
        array = self._checked(tokens, namespace)
        check_flag("skip_existing", skip_existing)
        blocks = BlockChunks(engine, block_table, self.metadata, self._plans)
        blocks.check_room(len(array))
        self._put(array, 0, blocks.chunk, skip_existing, namespace)
        return self.lookup(array, namespace)

    def load_blocks(
        self,
        tokens: Tokens,
        engine: "CacheEngine",
        block_table: npt.ArrayLike | torch.Tensor,
        start: int = 0,
        namespace: bytes = b"",
    ) -> int:
        """K and V of tokens[start:] come into the blocks, as far as the store has them and the blocks reach; returns up
        to which token they are there (`start` if there is nothing).

        Blocks behind that may have been written, and mean nothing. Done on return, on a GPU, too.
        """
        blocks, keys, chunk = self._wanted(tokens, engine, block_table, start, namespace)

        def read(index: int, reader: Reader, num_threads: int) -> None:
            made, _ = chunk(index)
            read_record(reader, self._kind(keys[index], made.shape, namespace), made, num_threads)

        num_chunks = self._tiers.read(keys, read)
        blocks.finish()
        loaded = chunk(num_chunks - 1)[1] if num_chunks else start
        self._tiers.count(hit_tokens=loaded - start)
        return loaded

    def load_layers(
        self,
        tokens: Tokens,
        engine: "CacheEngine",
        block_table: npt.ArrayLike | torch.Tensor,
        start: int = 0,
        namespace: bytes = b"",
    ) -> LayerLoad:
        """As load_blocks, layer by layer and in a thread: see LayerLoad, which is to be closed before others get the
        blocks. The records stay open for as long; nothing is promoted. ValueError as load_blocks.
        """
        blocks, keys, chunk = self._wanted(tokens, engine, block_table, start, namespace)
        blocks.finish()  # what the blocks were before
        opened: list[tuple[Placed, Key, OpenChunk]] = []
        readers = self._tiers.open_leading(keys)
        for index, (placed, reader) in enumerate(readers):
            made, end = chunk(index)
            kind = self._kind(keys[index], made.shape, namespace)
            found = self._tiers.verified(placed, keys[index], functools.partial(OpenChunk, reader, kind, made, end))
            reader.rest()
            if found is None:
                break
            opened.append((placed, keys[index], found))
        for _, reader in readers[len(opened) :]:
            reader.close()

        def take_one(layer: int, index: int) -> bool:
            placed, key, one = opened[index]
            is_right: bool = self._tiers.verified(placed, key, functools.partial(one.take, layer)) or False
            blocks.finish()
            return is_right

        def take(layer: int, num_chunks: int) -> int:
            return self._tiers.shared(functools.partial(take_one, layer), num_chunks)

        return LayerLoad(
            [one for _, _, one in opened],
            start,
            len(engine.gpu_cache),
            take,
            lambda count: self._tiers.count(hit_tokens=count),
        )

    # --- what is there -----------------------------------------------------------------------------------------------

    def lookup(self, tokens: Tokens, namespace: bytes = b"") -> int:
        """How many leading tokens the store has, or had a moment ago."""
        array = self._checked(tokens, namespace)
        num_chunks = num_leading(tier is not None for tier in self._tiers.locate(self._keys.of(array, namespace)))
        return min(num_chunks * self.config.chunk_size, len(array))

    def pin(self, tokens: Tokens, namespace: bytes = b"") -> Pin:
        """Keeps what `lookup` would find until the pin is released; in remote tiers by fetching it."""
        array = self._checked(tokens, namespace)
        keys = self._keys.of(array, namespace)
        readers = self._tiers.open(keys, self._tiers.locate(keys))
        count = num_leading(reader is not None for reader in readers)
        for reader in readers[count:]:
            if reader:
                reader.close()
        kept = [reader for reader in readers[:count] if reader]
        return Pin(min(count * self.config.chunk_size, len(array)), kept)

    def unpin(self, pin: Pin) -> None:
        """Twice is fine."""
        pin.release()

    def remove(self, tokens: Tokens, namespace: bytes = b"") -> int:
        """Forgets the tokens' chunks in every tier; how many there were in the one that had most."""
        return self._tiers.remove(self._keys.of(self._checked(tokens, namespace), namespace))

    def clear(self) -> None:
        """Forgets everything, of every model, in every tier."""
        self._checked((), b"")
        self._tiers.clear()

    def flush(self, sync: bool = False) -> None:
        """Waits for what is written in the background; with `sync`, until it would survive a loss of power."""
        self._checked((), b"")
        self._tiers.flush(sync)

    def stats(self) -> KVStoreStats:
        self._process.check()
        counts = self._tiers.counts
        return KVStoreStats(**{name: counts[name] for name in COUNTERS}, tiers=self._tiers.stats())

    def close(self) -> None:
        """Flushes, and closes the tiers. Twice is fine; anything else afterwards raises ValueError. In a forked process
        nothing happens: the tiers are the parent's.
        """
        if not self._is_closed and self._process.is_here:
            self._is_closed = True
            self._tiers.close()

    def __enter__(self) -> "KVStore":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _put(
        self,
        tokens: npt.NDArray[np.int32],
        num_skipped: int,
        chunk: Callable[[int, int], "ShapedSource"],
        skip_existing: bool,
        namespace: bytes,
    ) -> int:
        """Writes the chunks behind the skipped tokens; how many were new to a tier. chunk(begin, end): of tokens."""
        size = self.config.chunk_size
        keys = self._keys.of(tokens, namespace)[num_skipped // size :]

        def record(index: int) -> tuple[RecordKind, Source]:
            begin = num_skipped + index * size
            made = chunk(begin, min(begin + size, len(tokens)))
            return self._kind(keys[index], made.shape, namespace), made

        return self._tiers.put(keys, record, skip_existing)

    def _wanted(
        self,
        tokens: Tokens,
        engine: "CacheEngine",
        block_table: npt.ArrayLike | torch.Tensor,
        start: int,
        namespace: bytes,
    ) -> tuple[BlockChunks, list[Key], Callable[[int], tuple[BlockChunk, int]]]:
        """What a load is about: the blocks, the keys of its chunks, and for each of these the chunk and up to which
        token it brings them.
        """
        array, size = self._checked(tokens, namespace), self.config.chunk_size
        blocks, start = BlockChunks(engine, block_table, self.metadata, self._plans), as_integer("start", start)
        end = min(len(array), blocks.num_tokens)
        if not 0 <= start <= end:
            raise ValueError(f"start must be in [0, {end}], got {start}")
        blocks.check_writable(start, end)
        first = start // size
        keys = self._keys.of(array, namespace)[first : -(-end // size)]
        self._tiers.count(query_tokens=end - start)

        def chunk(index: int) -> tuple[BlockChunk, int]:
            begin = (first + index) * size
            last = min(begin + size, len(array))
            return blocks.chunk(begin, last, max(begin, start), min(last, end)), max(min(last, end), start)

        return blocks, keys, chunk

    def _fetch(self, tokens: npt.NDArray[np.int32], num_skipped: int, namespace: bytes) -> torch.Tensor | None:
        """K and V of the tokens from num_skipped on, as far as there are some: one tensor; None for nothing."""
        size, fmt, dim = self.config.chunk_size, self.metadata.fmt, 2 + token_dim(self.metadata.fmt)
        first = num_skipped // size
        keys = self._keys.of(tokens, namespace)[first:]
        shape = self._tiers.first(keys[0], lambda reader: self._shape(reader, namespace)) if keys else None
        if shape is None:
            return None
        out = empty_chunks(shape, fmt, len(tokens) - num_skipped, self.metadata.kv_dtype)

        def read(index: int, reader: Reader, num_threads: int) -> None:
            begin = (first + index) * size
            end = min(begin + size, len(tokens))
            room = out.narrow(dim, max(begin, num_skipped) - num_skipped, end - max(begin, num_skipped))
            chunk = TensorChunk([list(layer) for layer in room], fmt, end - begin)
            read_record(reader, self._kind(keys[index], chunk.shape, namespace), chunk, num_threads)

        num_chunks = self._tiers.read(keys, read)
        num_found = min((first + num_chunks) * size, len(tokens)) - num_skipped
        return out.narrow(dim, 0, num_found) if num_chunks and num_found > 0 else None

    def _shape(self, reader: Reader, namespace: bytes) -> Shape:
        """What a record says of its payload. CorruptRecord if that cannot be; UnreadableRecord."""
        head, _ = read_head(reader, self._keys.meta(namespace))
        if head.codec not in self._codecs:
            raise UnreadableRecord(f"the codec must be one of {', '.join(self._codecs)}, got {head.codec}")
        num_bytes = math.prod(head.shape) * self.metadata.kv_dtype.itemsize
        is_raw = self._codecs[head.codec] is None
        if num_bytes != head.raw_bytes or num_bytes == 0 or (is_raw and num_bytes != head.payload_bytes):
            raise CorruptRecord(f"a payload of {head.payload_bytes} bytes cannot be of shape {head.shape}")
        return head.shape

    def _kind(self, key: Key, shape: Shape, namespace: bytes) -> RecordKind:
        num_bytes = math.prod(shape) * self.metadata.kv_dtype.itemsize
        return RecordKind(key, self._keys.meta(namespace), shape, num_bytes, self._codecs)

    def _checked(self, tokens: Tokens, namespace: bytes) -> npt.NDArray[np.int32]:
        self._process.check()
        if self._is_closed:
            raise ValueError("the store is closed")
        check_namespace(namespace)
        return as_tokens(tokens)


def _placed(tier: Tier | Placed, config: KVStoreConfig) -> Placed:
    return tier if isinstance(tier, Placed) else Placed(tier, deadline=config.deadline)


def _done(result: int) -> "Future[int]":
    future: Future[int] = Future()
    future.set_result(result)
    return future


def _codecs(name: str, metadata: KVStoreMetadata) -> dict[str, Codec | None]:
    """By the name in records: what is written first, and what else can be read: all that gives back the same bytes."""
    from kvpage.store.codec import LOSSLESS, get_codec

    fmt: Literal["vllm", "huggingface"] = "vllm" if metadata.fmt == "vllm" else "huggingface"
    raw = str(metadata.kv_dtype).removeprefix("torch.")
    written = None if name == "raw" else get_codec(name, metadata.kv_dtype, fmt)
    if written is not None and not written.is_lossless:
        return {written.name: written}
    codecs: dict[str, Codec | None] = {raw if written is None else written.name: written, raw: None}
    for other in LOSSLESS:
        try:
            codec = get_codec(other, metadata.kv_dtype, fmt)
        except (ImportError, ValueError):  # not for this dtype, or what it wrote elsewhere cannot be read here
            continue
        codecs.setdefault(codec.name, codec)
    return codecs


def _num_leading_false(name: str, mask: npt.ArrayLike | torch.Tensor | None, num_tokens: int) -> int:
    """Of a mask that is False, then True to its end. ValueError for any other."""
    if mask is None:
        return 0
    if isinstance(mask, torch.Tensor):
        check_plain(name, mask)
        mask = mask.cpu() if mask.is_cuda else mask
    array = as_array(mask, name)
    if array.shape != (num_tokens,) or array.dtype.kind not in "biu":
        raise ValueError(f"{name} must be {num_tokens} bools, got {array.dtype} {list(array.shape)}")
    flags = array.astype(bool)
    count = num_tokens - int(flags.sum())
    if not flags[count:].all():
        raise ValueError(f"{name} must be False for leading tokens only")
    return count
