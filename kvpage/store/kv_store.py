"""KVStore: K and V of token sequences, in chunks, over tiers; each chunk found by its tokens and all before them.

    store(tokens, kv)   ─► chunks ─► keys ─► which are missing? ─► records ─► every tier
    retrieve(tokens)    ─► keys ─► the longest run of leading chunks that tiers have ─► verified, copied out
                                          ▲                                  │
                                          └── a corrupt record, a tier in trouble: the run ends there

Every read gives nothing, or exactly what was stored under that key. A tier's trouble is a miss, never an exception.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from kvpage.checks.interrupts import made_or_undone, uninterrupted
from kvpage.checks.tokens import Tokens, as_tokens
from kvpage.checks.values import as_integer, check_flag, check_namespace
from kvpage.store.config import KVStoreConfig
from kvpage.store.load.block_chunks import BlockChunks, ChunkPlans
from kvpage.store.load.block_load import BlockLoad
from kvpage.store.load.call_gate import CallGate, gated
from kvpage.store.load.known_dtype import KnownDtype
from kvpage.store.load.layer_load import LayerLoad
from kvpage.store.load.tensor_load import TensorLoad
from kvpage.store.placement import Placed, place_tiers
from kvpage.store.records.keys import KVStoreMetadata
from kvpage.store.records.kinds import RecordKind, RecordKinds
from kvpage.store.records.kv_tensors import (
    KVTensors,
    TensorChunk,
    as_parts,
    as_tuple,
    num_leading_false,
    owned,
    token_dim,
    tokens_of,
)
from kvpage.store.records.payload import ShapedSource, Source
from kvpage.store.records.summary import RecordSummary, summaries
from kvpage.store.stack.chunk_threads import num_leading
from kvpage.store.stack.pin import Pin
from kvpage.store.stack.tier_stack import TierStack
from kvpage.store.stats import KVStoreStats
from kvpage.store.tiers.tier import Key, Tier

if TYPE_CHECKING:
    from kvpage.cache.cache_engine import CacheEngine


class KVStore:
    """Thread-safe. `close` it, or use it in `with`. A forked process needs one of its own: in it, all but `close`
    raises RuntimeError.

    metadata: with kv_dtype None the dtype is that of the first K and V that are stored, of the first engine whose
        blocks are, or of the first record that is found; from then on only that. Until then a look for tokens is one
        for each dtype.
    tiers: made already, instead of those that the configuration names.
    """

    def __init__(
        self, config: KVStoreConfig, metadata: KVStoreMetadata, tiers: Sequence[Tier | Placed] | None = None
    ) -> None:
        self.config, self.given_metadata = config, metadata
        self._dtype = KnownDtype(metadata, config.chunk_size, config.codec)
        placed = [_placed(one, config) for one in tiers] if tiers is not None else place_tiers(config)
        if not placed:
            raise ValueError("tiers must be at least one, got none")
        self._tiers = TierStack(placed, config.num_threads or torch.get_num_threads())
        self._plans = ChunkPlans()
        self.gate = CallGate("the store")
        self._closing, self._is_closed = threading.RLock(), False

    @property
    def metadata(self) -> KVStoreMetadata:
        """As given, with the dtype as soon as it is known."""
        return self._dtype.metadata

    # --- K and V as tensors ------------------------------------------------------------------------------------------

    @gated
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

        kv_tensors: for each layer (K, V), or one tensor; see kvpage.store.records.kv_tensors. On any device.
        kv_tensors_mask: bool [num_tokens]: False for leading tokens that kv_tensors does not hold, whole chunks.
        skip_existing: leave chunks alone that every tier has. Otherwise they are replaced in all: a tier that does not
            take the new one has none, but for one that is out of reach, which keeps what it has.
        blocking: return when it is done; otherwise what is needed is copied first, and errors come out of the result.

        ValueError or TypeError for what does not fit together, before anything is written.
        """
        array, fmt = self._checked(tokens, namespace), self.metadata.fmt
        check_flag("skip_existing", skip_existing)
        check_flag("blocking", blocking)
        num_skipped = num_leading_false("kv_tensors_mask", kv_tensors_mask, len(array))
        if num_skipped % self.config.chunk_size:
            raise ValueError(
                f"kv_tensors_mask must be False for whole chunks of {self.config.chunk_size}, got {num_skipped} tokens"
            )
        parts = as_parts(kv_tensors, fmt, self.metadata.kv_dtype)
        num_given = parts[0][0].shape[token_dim(fmt)]
        if num_given != len(array) - num_skipped:
            raise ValueError(f"kv_tensors must be of {len(array) - num_skipped} tokens, got {num_given}")
        kinds = self._dtype.settle(parts[0][0].dtype)
        if not blocking:
            parts = owned(parts, fmt, 0)

        def chunk(begin: int, end: int) -> TensorChunk:
            return TensorChunk(tokens_of(parts, fmt, begin - num_skipped, end - num_skipped), fmt, end - begin)

        def run() -> int:
            return self._put(kinds, array, num_skipped, chunk, skip_existing, namespace)

        return _done(run()) if blocking else self._tiers.later(run)

    @gated
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
        check_flag("return_tuple", return_tuple)
        num_skipped = num_leading_false("mask", mask, len(array))
        ret_mask = torch.zeros(len(array), dtype=torch.bool)
        kinds = self._dtype.find(self._tiers, array, namespace)
        self._tiers.count(query_tokens=len(array) - num_skipped)
        if kinds is None:
            return (), ret_mask
        keys = kinds.keys.of(array, namespace)
        chunks = TensorLoad(kinds, self.metadata.fmt, keys, len(array), num_skipped, namespace).run(self._tiers)
        if chunks is None:
            return (), ret_mask
        num_found = chunks.shape[2 + token_dim(self.metadata.fmt)]
        ret_mask[num_skipped : num_skipped + num_found] = True
        self._tiers.count(hit_tokens=num_found)
        kv = chunks.to(device)
        return (as_tuple(kv) if return_tuple else kv), ret_mask

    # --- K and V in an engine's blocks -------------------------------------------------------------------------------

    @gated
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
        self._put(self._dtype.settle(engine.layout.dtype), array, 0, blocks.chunk, skip_existing, namespace)
        return self._lookup(array, namespace)

    @gated
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
        load = self._load(tokens, engine, block_table, start, namespace)
        num_chunks = self._tiers.read(load.keys, load.read)
        load.finish()
        loaded = load.end_of(num_chunks)
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
        load = tokens, engine, block_table, start, namespace
        return made_or_undone(lambda: self._begin_layers(*load), LayerLoad.close)

    # --- what is there -----------------------------------------------------------------------------------------------

    @gated
    def lookup(self, tokens: Tokens, namespace: bytes = b"") -> int:
        """How many leading tokens the store has, or had a moment ago."""
        return self._lookup(self._checked(tokens, namespace), namespace)

    def pin(self, tokens: Tokens, namespace: bytes = b"") -> Pin:
        """Keeps what `lookup` would find until the pin is released; in remote tiers by fetching it."""
        return made_or_undone(lambda: self._pin(tokens, namespace), Pin.release)

    def unpin(self, pin: Pin) -> None:
        """Twice is fine."""
        pin.release()

    def keys_of(self, tokens: Tokens, namespace: bytes = b"") -> list[Key]:
        """Under which the tokens' chunks lie, or would: 32 bytes for each. ValueError where no dtype is known yet."""
        array, kinds = self._checked(tokens, namespace), self._dtype.kinds
        if kinds is None:
            raise ValueError("kv_dtype must be known before there are keys, got None, and nothing stored or found")
        return kinds.keys.of(array, namespace)

    @gated
    def keys(self) -> list[Key]:
        """Of all records in any tier, of every model and namespace, each once; those of the fastest tier come first. A
        tier that cannot list its records, or is in trouble, adds none and is counted in `stats().tier_errors`.
        """
        return list(dict.fromkeys(info.key for found in self._tiers.infos() for info in found))

    @gated
    def records(self) -> list[RecordSummary]:
        """What lies in each tier, as the records tell of themselves. A look into each, which counts as a use, and for
        which a remote tier fetches it whole. A tier in trouble adds none and is counted.
        """
        found = [self._tiers.ask(one, lambda one=one: list(summaries(one.tier))) for one in self._tiers.tiers]
        return [one for each in found if each is not None for one in each]

    @gated
    def remove(self, tokens: Tokens, namespace: bytes = b"") -> int:
        """Forgets the tokens' chunks in every tier; how many there were in the one that had most."""
        return self._tiers.remove(self._dtype.keys(self._checked(tokens, namespace), namespace))

    @gated
    def clear(self) -> None:
        """Forgets everything, of every model, in every tier."""
        self._tiers.clear()

    @gated
    def flush(self, sync: bool = False) -> None:
        """Waits for what is written in the background; with `sync`, until it would survive a loss of power."""
        check_flag("sync", sync)
        self._tiers.flush(sync)

    def stats(self) -> KVStoreStats:
        self.gate.check()
        return KVStoreStats.of(self._tiers.counts, self._tiers.stats())

    @uninterrupted
    def close(self) -> None:
        """Waits for the calls and the loads of layers that are under way, flushes, and closes the tiers. Twice is fine;
        anything but `stats` and `unpin` afterwards, and meanwhile, raises ValueError. In a forked process nothing
        happens: the tiers are the parent's.
        """
        if self.gate.close():
            with self._closing:
                self._tiers.drain()
                if not self._is_closed:  # by another thread, or by a signal's handler meanwhile
                    self._is_closed = True
                    self._tiers.close()

    def __enter__(self) -> "KVStore":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _put(
        self,
        kinds: RecordKinds,
        tokens: npt.NDArray[np.int32],
        num_skipped: int,
        chunk: Callable[[int, int], ShapedSource],
        skip_existing: bool,
        namespace: bytes,
    ) -> int:
        """Writes the chunks behind the skipped tokens; how many were new to a tier. chunk(begin, end): of tokens."""
        size = self.config.chunk_size
        keys = kinds.keys.of(tokens, namespace)[num_skipped // size :]

        def record(index: int) -> tuple[RecordKind, Source]:
            begin = num_skipped + index * size
            made = chunk(begin, min(begin + size, len(tokens)))
            return kinds.of(keys[index], made.shape, namespace), made

        return self._tiers.put(keys, record, skip_existing)

    @gated
    def _pin(self, tokens: Tokens, namespace: bytes) -> Pin:
        array = self._checked(tokens, namespace)
        readers = [reader for _, reader in self._tiers.open_leading(self._found_keys(array, namespace))]
        return Pin(min(len(readers) * self.config.chunk_size, len(array)), readers)

    @gated
    def _begin_layers(self, *load: Any) -> LayerLoad:
        return self._load(*load).by_layers(self._tiers, self.gate)

    def _load(
        self,
        tokens: Tokens,
        engine: "CacheEngine",
        block_table: npt.ArrayLike | torch.Tensor,
        start: int,
        namespace: bytes,
    ) -> BlockLoad:
        array, start = self._checked(tokens, namespace), as_integer("start", start)
        blocks = BlockChunks(engine, block_table, self.metadata, self._plans)
        kinds = self._dtype.of(engine.layout.dtype)
        load = BlockLoad(blocks, kinds, kinds.keys.of(array, namespace), len(array), start, namespace)
        self._dtype.settle(engine.layout.dtype)
        self._tiers.count(query_tokens=load.end - start)
        return load

    def _found_keys(self, tokens: npt.NDArray[np.int32], namespace: bytes) -> list[Key]:
        """None at all where no dtype is known and nothing found."""
        kinds = self._dtype.find(self._tiers, tokens, namespace)
        return [] if kinds is None else kinds.keys.of(tokens, namespace)

    def _lookup(self, tokens: npt.NDArray[np.int32], namespace: bytes) -> int:
        num_chunks = num_leading(tier is not None for tier in self._tiers.locate(self._found_keys(tokens, namespace)))
        return min(num_chunks * self.config.chunk_size, len(tokens))

    def _checked(self, tokens: Tokens, namespace: bytes) -> npt.NDArray[np.int32]:
        check_namespace(namespace)
        return as_tokens(tokens)


def _placed(tier: Tier | Placed, config: KVStoreConfig) -> Placed:
    return tier if isinstance(tier, Placed) else Placed(tier, deadline=config.deadline)


def _done(result: int) -> "Future[int]":
    future: Future[int] = Future()
    future.set_result(result)
    return future
