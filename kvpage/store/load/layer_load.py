"""LayerLoad: loads a prompt into blocks layer by layer, so that one layer computes while the next arrives.

    layer 0 of all chunks ─► layer 1 of all chunks ─► ...        in a thread; each verified before it counts
          wait(0)                  wait(1)                       in the caller's

Each layer of a record has a digest of its own, so `wait` reports only bytes exactly as stored. If a chunk turns out to
be corrupt in a later layer, fewer tokens are there from that layer on. The caller throws away computations with more of
them, and commits only the tokens that `result` reports.
"""

import threading
from collections.abc import Callable, Sequence

from kvpage.checks.values import as_integer
from kvpage.store.load.block_chunks import BlockChunk
from kvpage.store.records.codec import Codec
from kvpage.store.records.kinds import RecordKind
from kvpage.store.records.record import CorruptRecord
from kvpage.store.records.record_io import check_kind, check_raw, decode, read_head, read_into_runs, read_piece
from kvpage.store.stack.call_gate import CallGate
from kvpage.store.stack.placed import Placed
from kvpage.store.tiers.stretches import Runs, digests_of
from kvpage.store.tiers.tier import Reader


class OpenChunk:
    """A record whose head is right, with its tier and key, to be loaded bit by bit. chunk: where it goes to. end: the
    token after its last wanted one.

    Raises CorruptRecord or TierError.
    """

    def __init__(self, placed: Placed, reader: Reader, chunk: BlockChunk, kind: RecordKind, end: int) -> None:
        self.placed, self.reader, self.key, self.chunk, self.end = placed, reader, kind.key, chunk, end
        self._head, self._digests = read_head(reader, kind.meta)
        self._codec: Codec | None = check_kind(self._head, kind)
        self._decoded: memoryview | None = None
        self._runs: Runs | None = None  # of all layers, for a reader that reads straight into them
        if self._codec is None:
            check_raw(self._head, chunk)
            self._runs = chunk.runs() if reader.takes_runs else None

    def payload(self) -> memoryview | None:
        """Return the payload of a record in memory; None for an encoded one."""
        return None if self._codec else self.reader.piece(self._head.payload_begin, self._head.payload_end)

    def verify(self, payload: memoryview, num_threads: int) -> bool:
        """Return True. Raises CorruptRecord for a wrong payload."""
        if digests_of(payload, self.chunk.stretch_bytes, num_threads) != self._digests:
            raise CorruptRecord("a digest is wrong")
        return True

    def take(self, layer: int) -> bool:
        """Load a layer and return True. After CorruptRecord or TierError no layer of this chunk counts."""
        begin, end = self.chunk.layer_span(layer)
        if self._runs is not None:
            num_runs = len(self._runs) // self.chunk.num_layers
            runs = self._runs[layer * num_runs : (layer + 1) * num_runs]
            read_into_runs(self.reader, self._head, self._digests, begin, end, runs)
            self.reader.release_piece()
            return True
        if self._codec is None:
            read_piece(self.reader, self._head, self._digests, begin, end, self.chunk)
            self.reader.release_piece()
            return True
        if self._decoded is None:  # a codec's output is one piece
            self._decoded = decode(self.reader, self._head, self._digests, self._codec)
            self.reader.release_piece()
        piece = self._decoded[begin:end]
        if self.chunk.take(begin, piece, 1) != digests_of(piece, self.chunk.stretch_bytes):
            raise CorruptRecord("a digest is wrong")  # the memory changed meanwhile
        return True


class LayerLoad:
    """A load that KVStore.load_layers has begun. `close` it, or use it in `with`.

    One thread calls `wait`, `result` and `close`.

    Args:
        chunks: open records of the leading chunks.
        start: the first wanted token.
        num_layers: layers of a chunk.
        take: take(layer, num_chunks) loads a layer of the leading chunks and returns the number of right ones.
        loaded: called with the number of tokens when all layers have come.
        gate: of the store, which closes after the thread has ended.

    Attributes:
        start: the first wanted token.
        num_layers: layers to load.
        num_tokens: the token after the last one that is expected in all layers.

    Raises:
        RuntimeError: no thread can be started; the chunks are closed.
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
        """Wait until a layer and all before it are in the blocks.

        Args:
            layer: its number, from 0.
            timeout: seconds to wait; None for no limit.

        Returns:
            The token after the last one in the blocks: num_tokens, or fewer after a corrupt record; `start` for none.

        Raises:
            TimeoutError: the layer has not come in time.
            ValueError: there is no such layer, or the load is closed.
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
        """Wait until all layers are in the blocks.

        Args:
            timeout: seconds to wait; None for no limit.

        Returns:
            The token after the last one in the blocks, as from `wait`.

        Raises:
            TimeoutError: they have not come in time.
            ValueError: the load is closed.
        """
        return self.wait(self.num_layers - 1, timeout)

    def close(self) -> None:
        """Stop after the layer that is coming. The blocks are not written any more. A second call does nothing."""
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
        except BaseException as error:  # `wait` raises it
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
