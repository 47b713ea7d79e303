"""LayerLoad: a prompt on its way into blocks, layer by layer, so that one computes while the next arrives.

    layer 0 of all chunks ─► layer 1 of all chunks ─► ...        in a thread; each verified before it counts
          wait(0)                  wait(1)                       in the caller's

A record's layers have digests of their own (kvpage.store.records.record), so what `wait` tells of is exactly what was stored.
Where a chunk turns out to be corrupt in a later layer, fewer tokens are there from that layer on: what was computed
with more is the caller's to throw away, and only what `result` tells of may be committed.
"""

import threading
from collections.abc import Callable, Sequence

from kvpage.checks.values import as_integer
from kvpage.store.load.block_chunks import BlockChunk
from kvpage.store.load.call_gate import CallGate
from kvpage.store.records.codec import Codec
from kvpage.store.records.kinds import RecordKind
from kvpage.store.records.record import CorruptRecord
from kvpage.store.records.record_io import check_kind, check_raw, decode, read_head, read_piece
from kvpage.store.tiers.stretches import digests_of
from kvpage.store.tiers.tier import Reader


class OpenChunk:
    """A record whose head is right, to be taken layer by layer. CorruptRecord, TierError. end: the token behind its
    last one that is wanted.
    """

    def __init__(self, reader: Reader, kind: RecordKind, chunk: BlockChunk, end: int) -> None:
        self.reader, self.end = reader, end
        self._chunk = chunk
        self._head, self._digests = read_head(reader, kind.meta)
        self._codec: Codec | None = check_kind(self._head, kind)
        self._decoded: memoryview | None = None
        if self._codec is None:
            check_raw(self._head, chunk)

    def take(self, layer: int) -> bool:
        """True. CorruptRecord, TierError: then nothing of this chunk counts, in this layer and any other."""
        size = self._chunk.stretch_bytes
        begin, end = layer * size, (layer + 1) * size
        if self._codec is None:
            read_piece(self.reader, self._head, self._digests, begin, end, self._chunk)
            self.reader.release_piece()
            return True
        if self._decoded is None:  # a codec's output is one piece
            self._decoded = decode(self.reader, self._head, self._digests, self._codec)
            self.reader.release_piece()
        piece = self._decoded[begin:end]
        if self._chunk.take(begin, piece, 1) != digests_of(piece, size):
            raise CorruptRecord("a digest is wrong")  # of memory that changed under our hands
        return True


class LayerLoad:
    """Made by KVStore.load_layers; `close` it, or use it in `with`. wait, result and close are for one thread.

    start: the first token asked for. num_tokens: up to which token all layers are expected to come. num_layers.
    take(layer, number of chunks): takes a layer of the leading chunks; how many of them were right. calls: of the
    store, which is closed after the thread has ended. RuntimeError if there cannot be one: then the chunks are closed.
    """

    def __init__(
        self,
        chunks: Sequence[OpenChunk],
        start: int,
        num_layers: int,
        take: Callable[[int, int], int],
        loaded: Callable[[int], None],
        gate: CallGate,
    ) -> None:
        self.start, self.num_layers = start, num_layers
        self._chunks, self._take, self._loaded = list(chunks), take, loaded
        self.num_tokens = self._end(len(chunks))
        self._ends: list[int] = []  # of the layers that have come
        self._error: BaseException | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._gate = gate
        self._thread = threading.Thread(target=self._run, name="kvpage-layers", daemon=True)
        self._gate.enter()
        try:
            self._thread.start()
        except BaseException:
            self._end_call()
            raise

    def wait(self, layer: int, timeout: float | None = None) -> int:
        """Up to which token the layer and all before it are in the blocks: num_tokens, or fewer after a corrupt record;
        `start` for none. TimeoutError after so many seconds; ValueError for a layer that is none.
        """
        if not 0 <= as_integer("layer", layer) < self.num_layers:
            raise ValueError(f"layer must be in [0, {self.num_layers}), got {layer}")
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._ends) > layer or self._is_over, timeout):
                raise TimeoutError(f"layer {layer} has not come within {timeout} s")
            if len(self._ends) > layer:
                return self._ends[layer]
            if self._error is not None:
                raise self._error
            raise ValueError("the load is closed")

    def result(self, timeout: float | None = None) -> int:
        """Up to which token all layers are in the blocks."""
        return self.wait(self.num_layers - 1, timeout)

    def close(self) -> None:
        """Stops after the layer that is coming; the blocks are not written any more. Twice is fine."""
        with self._changed:
            self._is_closed = True
        self._thread.join()

    def __enter__(self) -> "LayerLoad":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- inside, in the thread ---

    @property
    def _is_over(self) -> bool:
        return self._error is not None or self._is_closed

    def _run(self) -> None:
        try:
            num_chunks = len(self._chunks)
            for layer in range(self.num_layers):
                with self._changed:
                    if self._is_closed:
                        return
                num_chunks = self._take(layer, num_chunks)
                with self._changed:
                    self._ends.append(self._end(num_chunks))
                    self._changed.notify_all()
            self._loaded(self._ends[-1] - self.start)
        except BaseException as error:  # the caller's, who gets it from `wait`
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            self._end_call()

    def _end_call(self) -> None:
        for chunk in self._chunks:
            chunk.reader.close()
        self._gate.leave()

    def _end(self, num_chunks: int) -> int:
        return self._chunks[num_chunks - 1].end if num_chunks else self.start
