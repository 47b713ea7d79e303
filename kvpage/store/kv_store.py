"""KVStore: K and V of token sequences, in chunks, over tiers. A chunk is found by its tokens and all before them.

    store(tokens, kv)   ─► chunks ─► keys ─► which are missing? ─► records ─► every tier
    retrieve(tokens)    ─► keys ─► the longest run of leading chunks that tiers have ─► verified, copied out
                                          ▲                                  │
                                          └── a corrupt record, a tier in trouble: the run ends there

Every read gives nothing, or exactly the bytes that were stored under that key. A tier's trouble is a miss, never an
exception.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch

from kvpage.blocks.explain import Explanation
from kvpage.checks.interrupts import made_or_undone
from kvpage.checks.tokens import Tokens
from kvpage.checks.values import as_integer, check_at_least, check_flag
from kvpage.layout.groups import StateLayout
from kvpage.store.block_store import BlockStore
from kvpage.store.bytes.byte_records import ByteRecords, records_beside
from kvpage.store.bytes.header import Header
from kvpage.store.config import KVStoreConfig
from kvpage.store.inspection import RecordSummary, summaries
from kvpage.store.load.block_chunks import metadata_of
from kvpage.store.load.block_load import OnVerified
from kvpage.store.load.layer_chunks import LayerChunks, Pin
from kvpage.store.load.layer_load import LayerLoad
from kvpage.store.load.tensor_calls import TensorCalls
from kvpage.store.placement import placed_tiers
from kvpage.store.records.keys import KVStoreMetadata, checked_tokens
from kvpage.store.records.kinds import KnownDtype
from kvpage.store.records.kv_tensors import KVTensors
from kvpage.store.stack.call_gate import gated
from kvpage.store.stack.placed import Placed
from kvpage.store.states.state_index import StateKeys
from kvpage.store.states.state_records import StateRecords
from kvpage.store.stats import KVStoreStats
from kvpage.store.tiered_store import TieredStore
from kvpage.store.tiers.tier import Key, Tier

if TYPE_CHECKING:
    from kvpage.cache.cache_engine import CacheEngine
    from kvpage.cache.layer_slice import LayerCaches


class KVStore(TieredStore, BlockStore):
    """Keys and values of token sequences, beyond the process. Thread-safe.

    `close` it, or use it in `with`. A forked process needs a store of its own: in it, every call but `close` raises
    RuntimeError.

    Calls take `tokens`, int [num_tokens]. Tokens of different namespaces never meet. `block_table`, int [num_blocks],
    names the tokens' blocks in their order. Wrong arguments raise ValueError or TypeError, and nothing is written.

    Args:
        config: chunk size, tiers and codec.
        metadata: the model and layout of K and V. With kv_dtype None, the first K and V that are stored set the dtype,
            or the first engine whose blocks are, or the first record that is found. Until then, a look for tokens is
            one for each dtype.
        tiers: tiers that are made already, in place of the configuration's.

    Raises:
        ValueError, ImportError, OSError: a tier or the codec cannot be made.
    """

    has_layers: bool = True

    def __init__(
        self, config: KVStoreConfig, metadata: KVStoreMetadata, tiers: Sequence[Tier | Placed] | None = None
    ) -> None:
        self.config: KVStoreConfig = config
        self.given_metadata = metadata
        self._dtype = KnownDtype(metadata, config.chunk_size, config.codec)
        super().__init__(placed_tiers(config, tiers), config.num_threads, are_given=tiers is not None)
        self._chunks = LayerChunks(self._tiers, self.gate, self._dtype)
        self._index_lock = threading.Lock()
        self._tensors = TensorCalls(self._dtype, self._tiers, self._chunks, config.kept_result_bytes)

    @property
    def metadata(self) -> KVStoreMetadata:
        """Return the metadata, with the dtype as soon as it is known."""
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
        """Store K and V of `tokens` in a `namespace`.

        Args:
            kv_tensors: for each layer (K, V), or one tensor, on any device. Format "vllm": [num_tokens, heads, size] a
                part; "huggingface": [heads, num_tokens, size].
            kv_tensors_mask: bool [num_tokens]; False for leading tokens that kv_tensors lacks, whole chunks.
            skip_existing: leave chunks alone that every tier has. Otherwise they are replaced in all tiers: one that
                does not take the new chunk forgets the old one, unless it is out of reach.
            blocking: return when all is written. Otherwise K and V are copied, and written in the background.

        Returns:
            A future of the number of chunks that were new to a tier. With `blocking` False it also has the errors.
        """
        array = checked_tokens(tokens, namespace)
        return self._tensors.store(array, kv_tensors, kv_tensors_mask, skip_existing, blocking, namespace)

    @gated
    def retrieve(
        self,
        tokens: Tokens,
        mask: npt.ArrayLike | torch.Tensor | None = None,
        return_tuple: bool = True,
        device: torch.device | str | None = None,
        namespace: bytes = b"",
        out: KVTensors | None = None,
    ) -> tuple[Any, torch.Tensor]:
        """Return K and V of the longest leading run of the `tokens` that the store has in a `namespace`.

        Without `out` the result is new to the caller. Its memory is used again after the last view of it is gone.

        Args:
            mask: bool [num_tokens]; False for leading tokens that are not wanted, any number of them.
            return_tuple: return (K, V) for each layer rather than one tensor.
            device: device of the result; None for that of `out`, or the CPU.
            out: memory for K and V of the wanted tokens, as in `store`, with any strides. No two elements may share
                memory. Found tokens are written to its beginning. The others stay as they are, but for up to 8 chunks
                after a record that turns out to be damaged or gone while it is read: their tokens mean nothing then.

        Returns:
            (kv, ret_mask). kv: for each layer (K, V), or one tensor [layers, parts, ...]; () if nothing was found. With
            `out`, views of it. ret_mask: bool [num_tokens] on the CPU, True for the tokens in kv.

        Raises:
            ValueError, TypeError: an argument is wrong, or the records are of another shape than `out`, which stays.
        """
        return self._tensors.retrieve(checked_tokens(tokens, namespace), mask, return_tuple, device, namespace, out)

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
        """Store K and V of `tokens` in a `namespace` straight from the blocks of an `engine`.

        It is done on return; on a GPU it follows the work of the current stream.

        Args:
            block_table: int [num_blocks], the tokens' blocks in their order.
            skip_existing: as in `store`.

        Returns:
            The number of leading tokens that the store has now.

        Raises:
            ValueError: the engine does not match the metadata, or the blocks are too few or missing.
        """
        array = checked_tokens(tokens, namespace)
        check_flag("skip_existing", skip_existing)
        keys = self._chunks.put_blocks(array, engine, block_table, 0, namespace, skip_existing)
        return self._chunks.count_of(keys, array)

    @gated
    def load_blocks(
        self,
        tokens: Tokens,
        engine: "CacheEngine",
        block_table: npt.ArrayLike | torch.Tensor,
        start: int = 0,
        namespace: bytes = b"",
    ) -> int:
        """Load K and V of tokens[start:] in a `namespace` into blocks of an `engine`, as far as chunks and blocks
        reach.

        It is done on return, on a GPU, too. Blocks after the returned token may have been written, and mean nothing.

        Args:
            block_table: int [num_blocks], the tokens' blocks in their order.

        Returns:
            The token after the last one that is in the blocks; `start` if none was found.

        Raises:
            ValueError: the engine does not match the metadata, a block is missing or named twice, or `start` is not
                one of the tokens.
        """
        return self._chunks.load_blocks(checked_tokens(tokens, namespace), engine, block_table, start, namespace)

    @gated
    def load_early(
        self,
        tokens: Tokens,
        engine: "CacheEngine",
        block_table: npt.ArrayLike | torch.Tensor,
        verified: OnVerified,
        start: int = 0,
        namespace: bytes = b"",
    ) -> int:
        array = checked_tokens(tokens, namespace)
        return self._chunks.load_blocks(array, engine, block_table, start, namespace, verified)

    @gated
    def check_engine(self, engine: "CacheEngine") -> None:
        self._chunks.blocks(engine, ())

    def load_layers(
        self,
        tokens: Tokens,
        engine: "CacheEngine",
        block_table: npt.ArrayLike | torch.Tensor,
        start: int = 0,
        namespace: bytes = b"",
    ) -> LayerLoad:
        """Begin to load K and V of tokens[start:] into an engine's blocks, layer by layer, in a thread.

        Close the load before the blocks are given to others. The records stay open until then, and are not promoted.

        Args:
            tokens: as in `load_blocks`. So are engine, block_table, start and namespace.

        Returns:
            The load, whose `wait` blocks until a layer is there.
        """
        load = tokens, engine, block_table, start, namespace
        return made_or_undone(lambda: self._begin_layers(*load), LayerLoad.close)

    @gated
    def lookup(self, tokens: Tokens, namespace: bytes = b"") -> int:
        return self._chunks.count(checked_tokens(tokens, namespace), namespace)

    def prefetch(self, tokens: Tokens, namespace: bytes = b"") -> int:
        """Copy the chunks of `tokens` that `lookup` finds in a `namespace` into the faster tiers.

        A tier with `promote=no`, or without room, takes nothing. Engines call this for requests that wait.

        Returns:
            The number of leading tokens that are in the fastest tier that can have them.
        """
        return self._chunks.prefetch(tokens, namespace)

    def pin(self, tokens: Tokens, namespace: bytes = b"") -> Pin:
        """Return a pin of the chunks of `tokens` that `lookup` finds in a `namespace`.

        In remote tiers that fetches them.
        """
        return made_or_undone(lambda: self._pin(tokens, namespace), Pin.release)

    def unpin(self, pin: Pin) -> None:
        """Release a pin. A second call does nothing."""
        pin.release()

    def keys_of(self, tokens: Tokens, namespace: bytes = b"") -> list[Key]:
        """Return the keys of the chunks of `tokens` in a `namespace`, 32 bytes each, whether they are stored or not.

        Raises:
            ValueError: no dtype is known yet.
        """
        array, kinds = checked_tokens(tokens, namespace), self._dtype.kinds
        if kinds is None:
            raise ValueError("kv_dtype must be known before there are keys, got None, and nothing stored or found")
        return kinds.keys.of(array, namespace)

    @gated
    def keys(self) -> list[Key]:
        """Return the keys of all records in any tier, of every model and namespace.

        Each key comes once. A tier that cannot list them, or is in trouble, adds none: see `stats().tier_errors`.
        """
        return list(dict.fromkeys(info.key for infos in self._tiers.infos() for info in infos))

    @gated
    def records(self) -> list[RecordSummary]:
        """Return a summary of each record, tier by tier.

        That uses each record: a remote tier fetches it whole. A tier in trouble adds none and is counted.
        """
        tiers = self._tiers
        listed = [tiers.ask(placed, lambda tier=placed.tier: list(summaries(tier))) for placed in tiers.tiers]
        return [summary for of_tier in listed for summary in of_tier or ()]

    def remove(self, tokens: Tokens, namespace: bytes = b"") -> int:
        """Remove the chunks of `tokens` in a `namespace` from every tier.

        Returns:
            The number of chunks removed from the tier that had most of them.
        """
        return self._chunks.remove(tokens, namespace)

    @gated
    def remove_namespaces(self, is_wanted: Callable[[bytes], bool]) -> int:
        """Remove all records of this store's model whose namespace is wanted gone, states included.

        That reads the head of each record: a remote tier fetches it whole. A tier in trouble is counted.

        Args:
            is_wanted: Tells of a namespace.

        Returns:
            The number of records removed from the tier that had most of them.
        """
        name = self.metadata.model_name
        records = [record for record in self.records() if record.model == name and record.namespace is not None]
        keys = [bytes.fromhex(record.key) for record in records if is_wanted(record.namespace or b"")]
        return self._tiers.remove(list(dict.fromkeys(keys)))

    @gated
    def states(self, layout: StateLayout, kv_dtype: torch.dtype | None = None) -> StateRecords:
        if kv_dtype is not None and not isinstance(kv_dtype, torch.dtype):
            raise TypeError(f"kv_dtype must be a torch.dtype or None, got {type(kv_dtype).__name__}")
        kinds = None if kv_dtype is None else self._dtype.of(kv_dtype)
        keys = StateKeys(self.metadata, layout, kinds, self.config.chunk_size)
        if kv_dtype is not None:
            self._dtype.settle(kv_dtype)
        chunks = None if kv_dtype is None else self._chunks
        return StateRecords(self._tiers, self.gate, self._index_lock, keys, chunks)

    @gated
    def layers(self, engine: "LayerCaches", chunk_size: int | None = None) -> LayerChunks:
        size = self.config.chunk_size if chunk_size is None else as_integer("chunk_size", chunk_size)
        check_at_least("chunk_size", size, 1)
        metadata = self.metadata
        rows = metadata_of(engine, metadata.model_name, metadata.world_size, metadata.worker_id, metadata.fmt)
        if rows.kv_dtype is None:
            raise ValueError("engine must have layers, got none")
        if metadata.kv_dtype not in (None, rows.kv_dtype):
            raise ValueError(f"kv_dtype of the store must be the engine's, {rows.kv_dtype}, got {metadata.kv_dtype}")
        rows = replace(rows, extra=(*metadata.extra, ("layers", ",".join(map(str, engine.layer_ids)))))
        return LayerChunks(self._tiers, self.gate, KnownDtype(rows, size, self.config.codec), engine)

    def byte_records(self, header: Header) -> ByteRecords:
        """Return records of bytes beside the chunks, in the same tiers, which `clear` and evictions remove, too.

        Args:
            header: as of a ByteStore.

        Raises:
            ValueError, TypeError: the header is wrong.
        """
        return records_beside(self._tiers, self.gate, header)

    @gated
    def explain(self, tokens: Tokens, namespace: bytes = b"") -> Explanation:
        array = checked_tokens(tokens, namespace)
        if not len(array):
            raise ValueError("tokens must be at least one, got none")
        reach = self._chunks.reach(array, namespace)
        return Explanation(len(array), min(reach.num_tokens, len(array) - 1), (reach,))

    def stats(self) -> KVStoreStats:
        """Return counters and the state of each tier, also of a closed store."""
        self.gate.check()
        read_chunks = tuple(use.hits for use in self._tiers.uses())
        return KVStoreStats.of(self._tiers.counts, self._tiers.stats(), read_chunks, self._tiers.refused)

    def _close_parts(self) -> None:
        self._tensors.close()

    @gated
    def _pin(self, tokens: Tokens, namespace: bytes) -> Pin:
        return self._chunks.pin(checked_tokens(tokens, namespace), namespace)

    @gated
    def _begin_layers(self, tokens: Tokens, engine: "CacheEngine", table: Any, start: int, name: bytes) -> LayerLoad:
        load = self._chunks.begin_load(checked_tokens(tokens, name), engine, table, start, name)
        return LayerLoad(load, self.gate)
